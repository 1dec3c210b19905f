# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where a result comes from: when, from which commit, by which command, on what."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dreamshard_planner.measure.hardware import describe_hardware

ROOT = Path(__file__).parents[2]


def provenance(device: torch.device) -> dict[str, Any]:
    """For the first lines of a result file."""
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe_hardware(device, torch.get_num_threads()),
    }


def command() -> str:
    """What to type in the project's folder to run this again."""
    script = os.path.relpath(sys.argv[0], ROOT)
    ranks = os.environ.get("WORLD_SIZE")
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks else "python"
    return f"{launcher} {shlex.join([script, *sys.argv[1:]])}"


def commit() -> str:
    """Of the working tree, ``-dirty`` where it differs from it; ``unknown`` outside of git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
