# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Install a wheel into an environment that has torch, FBGEMM and TorchRec, use it there, and add that to a record.

    python -m pip wheel --no-deps --wheel-dir dist .
    /their/environment/bin/python requirements/try_install.py dist/*.whl --record benchmarks/results/DATE-installs.jsonl

Exit status 1, and no record, where one of the three changed or a command failed. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_dlrm.py"
GIVEN = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec")
TABLES = "--tables mlperf_dlrm_dcnv2 --gpus-per-node 8 --gpu h100 --batch-size 8192 --search-seconds 5 --out"
COMMANDS = (
    "python -W error::UserWarning:dreamshard_planner -c 'import dreamshard_planner'",
    "dreamshard --version",
    "dreamshard doctor",
    f"dreamshard plan {TABLES} plan.json",
    f"dreamshard plan {TABLES} other.json --seed 1",
    "dreamshard report plan.json",
    "dreamshard compare plan.json other.json",
    "torchrun --standalone --nproc_per_node=2 train_dlrm.py",
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines to append to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        entry = try_install(options.wheel.resolve(), Path(folder))
    with options.record.open("a") as record:
        record.write(json.dumps(entry) + "\n")


def try_install(wheel: Path, folder: Path) -> dict:
    """What there was, what pip did, and which commands then worked."""
    before = packages()
    pip_install(wheel, "--dry-run", "--report", str(folder / "pip.json"))
    plan = [entry["metadata"] for entry in json.loads((folder / "pip.json").read_text())["install"]]
    pip_install(wheel)
    changed = {
        name: (before[name], release) for name, release in packages().items() if before.get(name, release) != release
    }
    if changed:
        raise SystemExit(f"installing changed {changed}")
    (folder / EXAMPLE.name).symlink_to(EXAMPLE)
    for command in COMMANDS:
        work(command, folder)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "wheel": wheel.name,
        "given": {name: before[name] for name in GIVEN if name in before},
        "pip_installed": {metadata["name"]: metadata["version"] for metadata in plan},
        "commands": list(COMMANDS),
    }


def packages() -> dict[str, str]:
    """Version by name of all that is installed."""
    listed = subprocess.run([sys.executable, "-m", "pip", "list", "--format", "json"], capture_output=True, check=True)
    return {entry["name"].lower().replace("_", "-"): entry["version"] for entry in json.loads(listed.stdout)}


def pip_install(wheel: Path, *options: str) -> None:
    """As a user would."""
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *options, str(wheel)], check=True)


def work(command: str, folder: Path) -> None:
    """Run with the environment's own programs, away from any checkout."""
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    surroundings["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{surroundings['PATH']}"
    print(f"$ {command}", flush=True)
    if subprocess.run(command, shell=True, cwd=folder, env=surroundings).returncode:
        raise SystemExit(f"failed: {command}")


if __name__ == "__main__":
    main()
