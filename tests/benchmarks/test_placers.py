# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One contract for all methods of placement, and the referee that measures them."""

import json
import sys
from pathlib import Path

import pytest
import torch

import compare_placements
from dreamshard_planner.training import TrainingConfig, pool_tables
from placements.contests import Contest, draw_contests
from placements.placers import Field

FIELD = Field()
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
    trained = {table.name for table in pool_tables(TrainingConfig().pools)[0]}
    contests = draw_contests(6, seed=1, batch_size=64)
    assert not trained & {table.name for contest in contests for table in contest.tables}
    first = [contest.tables for contest in contests[:3]]
    assert first == [contest.tables for contest in draw_contests(3, seed=1, batch_size=64)]
    assert first != [contest.tables for contest in draw_contests(3, seed=2, batch_size=64)]


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
