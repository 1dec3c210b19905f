# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One contract for all methods of placement, those that split tables too, and the referee that measures them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch

import compare_placements
from dreamshard_planner.cost.dataset import CostDataset
from placements.contests import Contest, draw_contests
from placements.placers import DATA, Field
from placements.split_contests import SplitContest, SplitTask, draw_split_contests
from placements.split_referee import SplitField

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class QuickField(Field):
    """Simple costs are fitted on one file of the training sets alone."""

    @cached_property
    def _measured(self) -> CostDataset:
        return CostDataset.load(min(DATA.glob("cpu-train*.npz"), key=lambda path: path.stat().st_size))


FIELD = QuickField()
SPLIT_FIELD = SplitField(FIELD)
TYPES = ("table_wise", "column_wise")
CONTESTS = draw_contests(3, seed=4, batch_size=128)  # one of each pool, the second with tight memory


@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.pool)
@pytest.mark.parametrize("name", list(FIELD.placers))
def test_contract(name: str, contest: Contest) -> None:
    problem = contest.task.problem
    plan = FIELD.placers[name](contest)
    if plan is None:
        assert contest.tight  # with loose memory everyone finds something
        return
    assert plan.shape == (problem.num_parts,) and plan.dtype == torch.int64
    assert 0 <= plan.min() and plan.max() < problem.num_ranks
    assert bool(problem.fits(plan[None])[0])
    assert contest is not CONTESTS[0] or torch.equal(plan, FIELD.placers[name](contest))


def test_contests_are_of_held_out_tables_and_repeatable() -> None:
    from dreamshard_planner.training import TrainingConfig, pool_tables

    trained = {table.name for table in pool_tables(TrainingConfig().pools)[0]}
    contests = draw_contests(9, seed=1, batch_size=64)
    assert not trained & {table.name for contest in contests for table in contest.tables}
    assert [c.tables for c in contests] == [c.tables for c in draw_contests(9, seed=1, batch_size=64)]
    assert [c.tables for c in contests[:3]] != [c.tables for c in draw_contests(3, seed=2, batch_size=64)]


def test_referee_measures_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = tmp_path / "record.jsonl"
    command = [
        str(BENCHMARKS / "compare_placements.py"), "--record", str(record), "--batch-size", "32",
        "--placers", "torchrec,size_greedy,dreamshard", "--rounds", "2",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, *command, "--tasks", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "2"])
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


def contests(count: int, types: tuple[str, ...] = TYPES) -> list[SplitContest]:
    return draw_split_contests(count, 4, 256, types, FIELD.linear, FIELD.network)


def small(contest: SplitContest) -> SplitContest:
    """Return a contest of its hot tables and a few others."""
    tables = sorted(contest.tables, key=lambda table: table.name not in contest.hot)[:8]
    return replace(contest, tables=tuple(tables))


@pytest.fixture(scope="module")
def tasks() -> list[SplitTask]:
    """An ordinary one, and a hot one in tight memory, of a few tables each."""
    return [SplitTask(small(contest), FIELD.learned) for contest in contests(2)]


@pytest.mark.parametrize("name", list(SPLIT_FIELD.placers))
def test_contract_of_planners_that_split(name: str, tasks: list[SplitTask]) -> None:
    for task in tasks:
        sharding = SPLIT_FIELD.placers[name](task)
        if sharding is None:
            assert task.contest.tight
            continue
        assert task.cost.problem.fits(sharding)
        assert task is not tasks[0] or sharding == SPLIT_FIELD.placers[name](task)
        if name != "dreamshard":
            allowed = task.allowed.problem.tables
            assert all(option < len(allowed[table]) for table, option in enumerate(sharding.options))


def test_referee_measures_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    record = tmp_path / "record.jsonl"
    command = [
        str(BENCHMARKS / "compare_placements.py"), "--record", str(record), "--batch-size", "256",
        "--sharding-types", ",".join(TYPES), "--placers", "torchrec,torchrec_whole,dreamshard", "--rounds", "2",
        "--processor-time",
    ]  # fmt: skip
    monkeypatch.setattr(compare_placements, "Field", lambda checkpoint, device: FIELD)  # fitted already
    monkeypatch.setattr(sys, "argv", [*command, "--tasks", "2"])
    compare_placements.main()
    head, first, second = (json.loads(line) for line in record.read_text().splitlines())
    assert head["settings"]["sharding_types"] == ",".join(TYPES)
    assert (first["task"], second["task"]) == ("1.0", "1.1") and not first["hot"] and second["hot"]
    assert {"torchrec", "dreamshard"} <= set(first["compute_ms"])
    assert all(ms > 0 for ms in first["compute_ms"].values())
    assert first["split_tables"]["torchrec_whole"] == 0
    said = capsys.readouterr().out
    assert "all pools: 2 tasks" in said and "over that of the best plan of whole tables" in said
    monkeypatch.setattr(sys, "argv", [*command, "--sharding-types", "row_wise"])
    with pytest.raises(SystemExit, match="2"):
        compare_placements.main()
    assert "table_wise" in capsys.readouterr().err
