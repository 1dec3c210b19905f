# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Names of ranks by which most bytes of a plan stay where they are."""

from dataclasses import replace

import pytest
from small_models import SHARDERS, collection, planner, table
from torchrec.distributed.planner.types import ParameterConstraints, Topology

from dreamshard_planner import PlacementRules, SavedPlan
from dreamshard_planner.plans.plan_file import ShardPlace
from dreamshard_planner.plans.replan import names_that_keep_most, renamed

KINDS = ["row_wise", "table_row_wise", "column_wise", *["table_wise"] * 7]
NAMES = (3, 2, 0, 1)
"""Hosts change places, and so do the ranks of one of them."""
LOOKUPS = 50_000.0
"""Lookups per sample: so many that each rank has some table."""


def spanning(**given) -> SavedPlan:
    """Ten tables on two hosts of two GPUs, of all spans."""
    constraints = {
        f"t{index}": ParameterConstraints(sharding_types=[kind], min_partition=8, pooling_factors=[LOOKUPS])
        for index, kind in enumerate(KINDS)
    }
    made = planner(
        topology=Topology(4, "cuda", local_world_size=2), constraints=constraints, exact_training=False, **given
    )
    made.plan(collection(*(table(f"t{index}", 1000 * (index + 1), 32) for index in range(10))), SHARDERS)
    return made.saved_plan()


def held(plan: SavedPlan) -> dict[str, tuple[ShardPlace, ...]]:
    return {name: sharding.shards for name, sharding in plan.tables()}


@pytest.fixture(scope="module")
def plan() -> SavedPlan:
    return spanning(effort="quick")


def test_a_plan_under_other_names_gets_them_back(plan: SavedPlan) -> None:
    other = renamed(plan, NAMES)
    tables = dict(other.tables())
    assert [shard.rank for shard in tables["t0"].shards] == [0, 1, 2, 3]
    assert [shard.rank % 2 for shard in tables["t1"].shards] == [0, 1]
    assert other.sharding != plan.sharding and names_that_keep_most(held(other), plan) == NAMES
    assert names_that_keep_most(held(plan), plan) == (0, 1, 2, 3) and renamed(plan, (0, 1, 2, 3)) is plan


def test_ranks_that_rules_name_and_ranks_of_other_memory_keep_theirs(plan: SavedPlan) -> None:
    ruled = spanning(effort="quick", placement_rules=PlacementRules(on_ranks={"t5": [0, 1]}))
    assert names_that_keep_most(held(renamed(ruled, NAMES)), ruled) == (0, 1, 2, 3)
    topology = replace(plan.inputs.topology, memory_bytes={"HBM": (1, 2, 3, 3), "DDR": (1,) * 4, "SSD": (0,) * 4})
    uneven = replace(plan, inputs=replace(plan.inputs, topology=topology))
    assert names_that_keep_most(held(renamed(uneven, (0, 1, 3, 2))), uneven) == (0, 1, 3, 2)
    assert names_that_keep_most(held(renamed(uneven, NAMES)), uneven)[:2] == (0, 1)
