# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ranks are lost or added: a plan with least movement for those that there are, the checkpoint loaded under it, and
training goes on as by the rules of moving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mixed import MixedModel, TableSpec, sharders
from moves import SAMPLES, Moving, Sharding, check, load_and_train, plan_file, train_and_save
from ranks import run_on_ranks
from torchrec.distributed.planner import Topology

from dreamshard_planner import DreamShardPlanner, SavedPlan

TABLES = {"bags": {f"bag{number}": TableSpec(30 + 8 * number, 16) for number in range(6)}}


def as_moving(plan: SavedPlan, before: Moving) -> Moving:
    """A plan of whole tables and blocks of rows."""
    cut = {
        name: Sharding(own.sharding_type, () if own.sharding_type == "row_wise" else (own.shards[0].rank,))
        for name, own in plan.sharding["bags"].items()
    }
    return replace(before, plan=cut, ranks=plan.inputs.topology.world_size)


@pytest.mark.parametrize(("ranks", "lost"), [((2, 3), ()), ((4, 2), (1, 3))])
def test_training_goes_on_with_least_movement(ranks: tuple[int, int], lost: tuple[int, ...], tmp_path: Path) -> None:
    was, now = ranks
    plan = {f"bag{number}": Sharding("table_wise", (number % was,)) for number in range(5)} | {
        "bag5": Sharding("row_wise")
    }
    before = Moving(TABLES, plan, "row_wise_adagrad", ranks=was)
    plan_file(before, tmp_path / "plan.json")
    unmoved = run_on_ranks(train_and_save, before, tmp_path / "saved", world_size=was)[0]
    check(unmoved, before, before)

    planner = DreamShardPlanner(
        topology=Topology(now, "cpu"),
        batch_size=SAMPLES,
        stats=[],
        debug=False,
        sharding_types=["table_wise", "row_wise"],
    )
    planner.plan(MixedModel(before.case), sharders(before.case))
    found = planner.replan(tmp_path / "plan.json", steps=0, lost=lost)
    left = [rank for rank in range(was) if rank not in lost]
    for name, (rank,) in ((name, own.ranks) for name, own in plan.items() if own.kind == "table_wise"):
        if rank in left:
            assert [shard.rank for shard in found.plan.sharding["bags"][name].shards] == [left.index(rank)]
    assert found.chosen == found.now and not found.stays

    after = as_moving(found.plan, before)
    moved = run_on_ranks(load_and_train, after, tmp_path / "saved", world_size=now)[0]
    check(moved, before, after)
    if before.samples == after.samples:
        assert moved.losses == pytest.approx(unmoved.losses[-len(moved.losses) :], rel=1e-5)
