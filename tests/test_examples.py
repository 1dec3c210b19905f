# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every example runs as its first lines say, stays short, and tells what it is to show."""

import json
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dreamshard_planner.search.effort import EFFORTS
from dreamshard_planner.training import QUICK, calibration
from tests.torchrun import forked

FOLDER = Path(__file__).parent.parent / "examples"
ON_RANKS = ("hot_rows", "replan", "reuse_plan", "train_dlrm")
TORCHREC_WARNS = "TopologyFactory|HeuristicalStorageReservation|dense tensor size"
"""Words of TorchRec's warnings about topologies and reservations."""


def test_each_is_short_says_how_it_is_run_and_is_run_here() -> None:
    examples = {path.stem: path.read_text() for path in FOLDER.glob("*.py")}
    assert set(examples) == {*ON_RANKS, *ALONE}
    for name, text in examples.items():
        assert len(text.splitlines()) <= 60, name
        start = "torchrun --nproc_per_node=2" if name in ON_RANKS else "python"
        assert re.search(rf': {start} examples/{name}\.py( \d+)?("""$|$)', text.splitlines()[1]), name


@pytest.mark.parametrize("name", ON_RANKS)
def test_example_runs_on_two_ranks(name: str) -> None:
    example = FOLDER / f"{name}.py"
    done = forked(example)
    assert done.returncode == 0, done.stderr
    assert not re.search(TORCHREC_WARNS, done.stderr), done.stderr
    # The report names its source: examples use GPUs where there is one for each rank.
    gpus = torch.cuda.device_count() >= 2 and "cuda" in example.read_text()
    source = "roofline (" if gpus else "network (cpu.safetensors"
    assert f"Compute: {source}" in done.stdout
    assert "trained 10 steps on 2 rank(s)" in done.stdout
    assert ("hot rows on every rank" in done.stdout) == (name == "hot_rows")
    losses = re.findall(r"unmoved ([\d.]+), moved ([\d.]+)", done.stdout)
    assert len(losses) == (10 if name == "replan" else 0)
    assert all(float(unmoved) == pytest.approx(float(moved), abs=2e-6) for unmoved, moved in losses)
    steps_ms = re.findall(r"([\d.]+) ms per step instead of ([\d.]+)", done.stdout)
    assert len(steps_ms) == (name == "replan") and all(float(new) < 0.95 * float(now) for new, now in steps_ms)


@pytest.mark.parametrize("name", ON_RANKS)
def test_example_says_what_has_to_start_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit, match=f"torchrun --nproc_per_node=2 examples/{name}.py"):
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def _calibrated(told: str) -> None:
    assert len(re.findall(r"^(?:forward|backward) of .* % .*: .*$", told, re.MULTILINE)) == 6
    assert "Compute: network (my.safetensors" in told and ", calibrated on " in told
    assert Path("my.safetensors").stat().st_size


def _counted(told: str) -> None:
    pooling = {name: float(factor) for name, factor in re.findall(r"^(\w+): ([\d.]+) lookups", told, re.MULTILINE)}
    assert pooling == {"user": 1.0, "clicks": pytest.approx(20, rel=0.02), "brand": pytest.approx(3, rel=0.05)}
    assert "0 of 3 features drifted" in told and "dreamshard " in told


def _planned(told: str) -> None:
    assert "Compute: network (nvidia-h100" in told and " of 16 ranks" in told and "Rank " in told
    saved = json.loads(Path("plan.json").read_text())
    assert len(saved["inputs"]["tables"]) == 30 and saved["inputs"]["topology"]["world_size"] == 16


def _compared(told: str) -> None:
    costs = {line[:30].strip(): float(line[30:].split()[0]) for line in told.splitlines() if "predicted" in line}
    assert list(costs) == ["TorchRec", "TorchRec with our partitioner", "DreamShardPlanner"]
    assert costs["DreamShardPlanner"] <= costs["TorchRec with our partitioner"] <= costs["TorchRec"]


def _learned(told: str) -> None:
    assert re.match(r"cost network: \d+% forward and \d+% backward off", told)
    best, one = (
        [float(ms) for ms in re.findall(rf"^  policy, {what} +([\d.]+)$", told, re.MULTILINE)]
        for what in ("best start", "one roll-out")
    )
    assert len(best) == len(one) > 0
    assert all(ms <= other for ms, other in zip(best, one, strict=True))


def _dry_run(told: str) -> None:
    has_api = find_spec("torchrec.distributed.planner.dry_run") is not None
    fits = re.findall(r"^(a100-80|h100|b200): [\d.]+ GiB on the fullest rank$", told, re.MULTILINE)
    assert len(fits) == (3 if has_api else 0)
    assert has_api or told == "This TorchRec has no planning API. Install torchrec 1.9 or later.\n"


ALONE = {
    "calibrate": (_calibrated, "1", "my.safetensors"),
    "parquet_statistics": (_counted,),
    "plan_offline": (_planned, "plan.json"),
    "planning_api": (_dry_run,),
    "torchrec_planner": (_compared,),
    "train_policy": (_learned,),
}
"""Checks of what those tell that one process runs, and their arguments."""


@pytest.mark.filterwarnings("error:HeuristicalStorageReservation:FutureWarning")
@pytest.mark.parametrize("name", ALONE)
def test_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if name == "parquet_statistics":
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EFFORTS, "default", EFFORTS["quick"])
    check, *arguments = ALONE[name]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.setattr(calibration, "_ARENA_BYTES", {"cpu": QUICK.arena_bytes})  # else filled for longer than measured
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    check(capsys.readouterr().out)
