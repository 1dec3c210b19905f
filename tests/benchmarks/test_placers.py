# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Methods of placement: one contract for all, the referee that measures them, and the paper's experiment."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import compare_placements
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.training import TrainingConfig
from dreamshard_planner.workload.pools import pool_tables
from paper.results import by_kind, compared, pooled, strongest_rule
from paper.training import Setting, halves
from paper_experiment import main
from placements.contests import POOLS, Contest, draw_contests
from placements.placers import Field

FIELD = Field()


@pytest.fixture(scope="module")
def contests() -> list[Contest]:
    """One of each pool, the second with tight memory."""
    return draw_contests(3, seed=4, batch_size=128)


@pytest.mark.parametrize("pool", POOLS[1:])
@pytest.mark.parametrize("name", list(FIELD.placers))
def test_contract(name: str, pool: str, contests: list[Contest]) -> None:
    contest = contests[POOLS.index(pool)]
    problem = contest.task.problem
    plan = FIELD.placers[name](contest)
    if plan is None:
        assert contest.tight  # with loose memory everyone finds something
        return
    assert plan.shape == (problem.num_parts,) and plan.dtype == torch.int64
    assert 0 <= plan.min() and plan.max() < problem.num_ranks
    assert bool(problem.fits(plan[None])[0])
    assert contest is not contests[2] or torch.equal(plan, FIELD.placers[name](contest))


def test_referee_measures_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = tmp_path / "record.jsonl"
    command = ["compare_placements.py", "--record", str(record), "--batch-size", "32"]
    command += ["--placers", "torchrec,size_greedy,dreamshard", "--rounds", "1"]
    for tasks in "12":
        monkeypatch.setattr(sys, "argv", [*command, "--tasks", tasks])
        compare_placements.main()
    head, first, second = (json.loads(line) for line in record.read_text().splitlines())
    assert head["hardware"]["torch"] and (first["task"], second["task"]) == ("1.0", "1.1")
    assert {"torchrec", "dreamshard"} <= set(first["compute_ms"])
    assert all(ms > 0 for ms in first["compute_ms"].values())
    assert record.with_suffix(".png").stat().st_size > 10_000 and "all pools: 2 tasks" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "3", "--seed", "9"])
    with pytest.raises(SystemExit, match="2"):
        compare_placements.main()
    assert "recorded with other settings" in capsys.readouterr().err


def test_halves_share_no_table_and_are_those_of_the_shipped_training() -> None:
    train, test = halves(batch_size=64)
    assert len(train.tables) == len(test.tables) == 428
    assert {t.dim for t in train.tables + test.tables} == {16}
    shipped = {table.name for table in pool_tables(TrainingConfig().pools)[0]}
    for setting in (Setting(20, 4), Setting(80, 8)):
        trained, tested = (
            {table.name for task in half.tasks(setting, 5) for table in task.tables} for half in (train, test)
        )
        assert trained <= shipped and not tested & shipped
        assert all(len(task.tables) == setting.tables for task in test.tasks(setting, 5))
    assert [t.tables for t in test.tasks(setting, 3)] == [t.tables for t in test.tasks(setting, 5)][:3]
    with pytest.raises(ValueError, match="TABLESxDEVICES, e.g. 40x4, got '40x'"):
        Setting.parse("40x")


def test_figures_by_hand() -> None:
    rules = {"size_greedy": 8.0, "dim_greedy": 5.0, "lookup_greedy": 4.0, "size_lookup_greedy": 6.0}
    tasks = [
        {"pool": "4x2", "overall_ms": {**rules, "a#0": 2.0, "a#1": 8.0, "b#0": 1.0}, "infeasible": []},
        {"pool": "4x2", "overall_ms": {**rules, "a#0": 1.0, "a#1": 1.0}, "infeasible": ["b#0"]},
        {"pool": "6x2", "overall_ms": rules, "infeasible": []},
    ]
    for task in tasks:
        task["compute_ms"] = task["overall_ms"]
    kinds = by_kind(tasks, "4x2")
    assert kinds["a"].tolist() == [[2, 1], [8, 1]] and np.isnan(kinds["b"][0, 1])
    assert strongest_rule(kinds) == "lookup_greedy"
    assert strongest_rule({rule: kinds[rule] for rule in ("size_greedy", "dim_greedy")}) == "dim_greedy"  # old records
    assert compared(kinds, "a", "lookup_greedy")[0] == pytest.approx(0.5)  # tasks 1 and 1/4
    assert compared(kinds, "b", "lookup_greedy")[0] == pytest.approx(0.25)  # of the one that it places
    away = {**rules, "a<4x2#0": 32.0}
    tables = {"4x2": kinds, "6x2": by_kind([{**tasks[2], "overall_ms": away, "compute_ms": away}], "6x2")}
    assert pooled(tables, "a<4x2")[0] == pytest.approx((1 * 1 / 4 * 8) ** (1 / 3))  # tasks 1, 1/4 and, away, 8


def test_quick_run_in_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    record, work = tmp_path / "record.jsonl", tmp_path / "work"

    def run(*options: str) -> str:
        command = ["paper_experiment.py", "--quick", "--work", str(work), "--record", str(record)]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        main()
        return "".join(capsys.readouterr())

    assert "goes on from here" in run("--minutes", "0.0001")
    assert not record.exists() and list(work.rglob("measured.blocks")) and not list(work.rglob("placements.json"))
    text = run()

    measured = {shard.name for path in work.rglob("dataset.npz") for shard in CostDataset.load(path).shards}
    train, test = halves(batch_size=32)
    assert measured and measured <= {table.name for table in train.tables}
    head, *tasks = (json.loads(line) for line in record.read_text().splitlines())
    assert head["hardware"]["torch"] and [task["task"] for task in tasks] == ["6x2.0", "8x2.0"]
    kinds = {"random", "torchrec", "published#0", "autoshard#0", "default#0", "default_shipped"}
    assert kinds | {"converged#0", "without_costs#0", "measured_rewards@2#0", "published@10#0"} <= set(
        tasks[0]["overall_ms"]
    )
    assert kinds | {"converged#0", "published<6x2#0", "converged<6x2#0"} <= set(tasks[1]["overall_ms"])
    summary = json.loads(record.with_suffix(".json").read_text())
    assert {"published", "default", "linear"} <= {row["cost"] for row in summary["errors"]}
    assert record.with_suffix(".png").stat().st_size > 10_000 and "published<6x2" in text
