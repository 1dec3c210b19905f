# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fit the shipped checkpoint to this machine, and plan with it: python examples/calibrate.py 60"""

from __future__ import annotations

import sys
from pathlib import Path

from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline import Job, read_model
from dreamshard_planner.training import calibrate


def main(seconds: float, out: Path) -> None:
    shipped = resolve("auto", "cpu")
    # Times fused kernels; shows a bar. Without force, refuses to write what a busy machine has measured.
    calibrated = calibrate(shipped, out, seconds=seconds, force=True)
    for check in calibrated.metadata["calibration"]["checks"]:
        print(check["said"])

    machine = Machine(ranks_per_host=2, device="cpu", memory_bytes=64 * 10**9)
    job = Job(model=read_model("merlin_tiny"), machine=machine, batch_size=512, settings={"checkpoint": out})
    print(job.plan().report())


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "my.safetensors"))
