# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every example runs as its first lines say, and stays short."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_on_two_ranks(example: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The report names its source: examples use GPUs where there is one for each rank.
    gpus = torch.cuda.device_count() >= 2 and "cuda" in example.read_text()
    source = "roofline (" if gpus else "network (cpu.safetensors"
    assert f"Compute: {source}" in done.stdout
    assert "trained 10 steps on 2 rank(s)" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 60


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_says_what_has_to_start_it(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match=f"torchrun --nproc_per_node=2 examples/{example.name}"):
        runpy.run_path(str(example), run_name="__main__")
