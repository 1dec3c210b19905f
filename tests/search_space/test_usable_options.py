# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which of TorchRec's options are searched."""

from __future__ import annotations

import pytest
from small_models import SHARDERS, collection, table, topology
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.search_space.sharding_types import CW, TW
from dreamshard_planner.search_space.usable_options import usable_options

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def enumerated(*modules: nn.Module, device: str = "cpu") -> list[ShardingOption]:
    return EmbeddingEnumerator(topology(device=device), batch_size=64).enumerate(nn.ModuleList(modules), SHARDERS)


def test_whole_tables_may_join_others_of_their_module_in_slices() -> None:
    """One slice is the whole table; beside slices it shares their kernel and their exchange."""
    alone = collection(table("narrow", dim=64), table("also_narrow", dim=128))
    beside = collection(table("narrow", dim=64), table("wide", dim=512))
    slices: dict[str, list[int]] = {}
    for option in usable_options(enumerated(alone, beside), "cpu"):
        if option.sharding_type == CW:
            slices.setdefault(f"{option.path}.{option.name}", []).append(option.num_shards)
    assert slices == {"1.narrow": [1], "1.wide": [4]}


def test_what_costs_the_same_stays_whole() -> None:
    """Tables that gain nothing by joining slices are not called column_wise."""
    model = collection(table("wide", rows=500_000, dim=512), *(table(f"narrow{i}", dim=64) for i in range(3)))
    planner = DreamShardPlanner(
        topology=topology(4),
        batch_size=512,
        constraints={"wide": ParameterConstraints(pooling_factors=[50.0])},
        cost_source="torchrec",
        stats=[],
        debug=False,
    )
    planner.plan(model, SHARDERS)
    types = {option.name: option.sharding_type for option in planner.options}
    assert types.pop("wide") == CW and set(types.values()) == {TW}


@pytest.mark.parametrize(("cost_source", "are_guesses"), [("auto", True), ("torchrec", False)])
def test_only_costs_of_ours_rest_on_a_popularity_of_rows(cost_source: str, are_guesses: bool) -> None:
    options = enumerated(collection(table("t", 10**6, 64)), device="cuda")
    context = PlanningContext.of(topology(device="cuda"), cost_source=cost_source)
    kernels = {option.compute_kernel for option in context.certain_options(options)}
    assert ("fused_uvm_caching" not in kernels) is are_guesses and "fused" in kernels
    # A table that has nothing else keeps what it has.
    cached = [option for option in options if option.compute_kernel == "fused_uvm_caching"]
    assert context.certain_options(cached) == cached
