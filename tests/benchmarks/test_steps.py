# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Benchmarks of training steps: the DLRM, and how often the plan that is picked is the fastest."""

import json
from pathlib import Path

import pytest

from fastest_plan import verdict
from tests.torchrun import forked

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "run_dlrm.py"


def test_two_ranks_under_several_planners(tmp_path: Path) -> None:
    planners = ["dreamshard", "lookup_greedy"]
    file = tmp_path / "result.json"
    options = ["--max-rows=500", "--dim=8", "--batch-size=8", "--rounds=2", "--block-seconds=0.001", "--copies=2"]
    options += ["--batches=2"]
    options += [f"--planners={','.join(planners)}", f"--json={file}", f"--report={tmp_path / 'report.html'}"]
    done = forked(SCRIPT, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["loss_difference"] < 1e-5
    assert list(result["plans"]) == planners
    for name, entry in result["plans"].items():
        assert len(entry["ranks"]) == 26 and {rank for (rank,) in entry["ranks"].values()} == {0, 1}
        assert set(entry["types"].values()) == {"table_wise"}
        assert [len(block_ms) for block_ms in entry["step_ms"]] == [2, 2]  # two models of two blocks
        assert entry["ratio"] == sorted(entry["ratio"])
        assert len(entry["kernels_ms"]) == len(entry["predicted_rank_ms"]) == 2
        assert min(entry["kernels_ms"] + entry["predicted_rank_ms"]) > 0
        assert name in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "under the plan of lookup_greedy" in page
    assert done.stdout.replace("\n", "").rstrip().endswith("report.html")
    assert "cost source" in done.stdout and "cut to 500 rows" in done.stdout


COMMAND = Path(__file__).parents[2] / "benchmarks" / "fastest_plan.py"
STEADY = {"torchrec_default": 100.0, "dreamshard": 80.0, "size_greedy": 120.0}
ROW = {
    "same_as": {name: name for name in STEADY} | {"torchrec": "torchrec_default"},
    "step_ms": {name: [[ms] * 4] * 2 for name, ms in STEADY.items()},
    "predicted_ms": {
        "shipped": {"torchrec_default": 50.0, "torchrec": 50.0, "dreamshard": 46.0, "size_greedy": 70.0},
        "learned": {"torchrec_default": 50.0, "torchrec": 50.0, "dreamshard": 55.0, "size_greedy": 70.0},
    },
}


def test_the_plan_predicted_fastest_is_picked_and_steps_are_predicted_from_the_base() -> None:
    told = verdict(ROW, "shipped")
    assert (told["picked"], told["is_fastest"], told["over_fastest"]) == ("dreamshard", True, pytest.approx(1.0))
    assert told["by_chance"] == pytest.approx(1 / 3)
    assert told["step_error"] == pytest.approx((16 / 80 + 0 / 120) / 2)  # 96 for 80, 120 for 120


def test_a_wrong_pick_is_behind_the_fastest_unless_they_tie() -> None:
    told = verdict(ROW, "learned")
    assert (told["picked"], told["is_fastest"]) == ("torchrec_default", False)
    assert told["over_fastest"] == pytest.approx(1.25)
    noisy = {"torchrec_default": [[80.0, 90.0, 70.0, 82.0]] * 2, "dreamshard": [[81.0, 79.0, 80.0, 78.0]] * 2}
    assert verdict(ROW | {"step_ms": noisy}, "learned")["is_fastest"]


def test_two_ranks_plan_learn_and_continue_a_record(tmp_path: Path) -> None:
    options = ["--models=1", "--first-model=28", "--observed-steps=8", "--rounds=1", "--block-seconds=0.001"]
    options += [f"--record={tmp_path / 'rows.jsonl'}"]
    for _ in range(2):  # the second run only reads
        done = forked(COMMAND, *options)
        assert done.returncode == 0, done.stderr
        assert "picked the fastest" in done.stdout
    _, row = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (row["model"], row["ranks"], len(row["same_as"])) == (28, 2, 7)
    assert set(row["step_ms"]) == set(row["same_as"].values())
    assert row["predicted_ms"]["shipped"].keys() == row["predicted_ms"]["learned"].keys() == row["same_as"].keys()
