# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Test and measure a machine with GPUs, one command after the other: ``make gpu MINUTES=25``.

After a failure the next command runs; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from common.output import ROOT, provenance
from dreamshard_planner.checkpoints.choice import measured_name

BENCHMARKS = Path(__file__).parent
SHARES = {"kernels": 0.06, "collectives": 0.05, "checkpoint": 0.22, "accuracy": 0.08, "placements": 0.18, "steps": 0.05}


def commands(device: str, ranks: int, out: Path, name: str, minutes: float, quick: bool = False) -> dict[str, str]:
    """Return the shell commands by name, in order; each measures for its share of the minutes."""
    cpu, few, python = device == "cpu", "--tasks=1 --rounds=1", shlex.quote(sys.executable)
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc_per_node={ranks}"
    folder, scripts, made = (shlex.quote(str(path)) for path in (out, BENCHMARKS, out / f"{name}.safetensors"))
    seconds = {key: max(1, round(60 * minutes * share)) for key, share in SHARES.items()}
    tests = "-m 'not gpu' tests/measure/test_kernels.py" if cpu else "-m gpu"
    collectives = f"--collectives={folder}/collectives.json" if ranks > 1 else ""
    updates = "--quick" if quick else f"--updates={max(20, min(300, round(12 * minutes)))}"
    referee = f"{python} {scripts}/compare_placements.py --device={device} --checkpoint={made}"
    referee += f" --batch-size={512 if cpu else 16384}"
    listed = {
        "tests": f"{python} -m pytest -q -p no:cacheprovider {tests}",
        "kernels": f"{python} {scripts}/fused_kernels.py --device={device} --json={folder}/fused-kernels.json",
        "collectives": f"{torchrun} -m dreamshard_planner.measure.collectives --out={folder}/collectives.json",
        "checkpoint": f"{python} -m dreamshard_planner train --device={device} --out={made} {collectives} {updates}",
        "accuracy": f"{python} {scripts}/cost_accuracy.py --device={device} --checkpoint={made} --data={folder} "
        f"--measure --no-singles --json={folder}/cost-accuracy.json --train={folder}/{name}.dataset.npz"
        f"{' --sets=12 --rounds=1' * quick}",
        "placements": f"{referee} --record={folder}/placements.jsonl --placers=dreamshard,policy,"
        f"search_alone,torchrec,torchrec_default,size_greedy,size_lookup_greedy {few if quick else '--rounds=5'}",
        "steps": f"{torchrun} {scripts}/run_dlrm.py --checkpoint={made} --max-rows={100_000 if cpu else 1_000_000} "
        f"--planners=dreamshard,torchrec,torchrec_default --copies={1 if quick else 2} --json={folder}/steps.json "
        f"--block-seconds={seconds.pop('steps') / 72}",  # of twelve rounds of six models
    }
    limits = {key: f" --seconds={of_key}" for key, of_key in seconds.items()}
    return {key: line + limits.get(key, "") for key, line in listed.items() if key != "collectives" or ranks > 1}


def main() -> int:
    """Run all commands; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="folder of the results; default: by device")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU that this torch can use; --device cpu tries the same on CPU ranks")
    described, failed = provenance(torch.device(args.device)), []
    name = measured_name(args.device, described["hardware"]["name"])
    out = (args.out or BENCHMARKS / "results" / name).resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.json").write_text(json.dumps(described, indent=1) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(BENCHMARKS)])}
    ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    for key, line in commands(args.device, ranks, out, name, args.minutes).items():
        print(f"{key}: {line}", flush=True)
        with (out / f"{key}.log").open("w") as log:
            if subprocess.call(line, shell=True, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT):
                failed.append(key)
    print(f"{out}: {', '.join(failed) or 'nothing'} failed")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
