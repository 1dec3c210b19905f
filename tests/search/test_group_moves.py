# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Moves of many tables together: small problems against all shardings, and a middle one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_models import SHARDERS, collection, table
from torchrec.distributed.planner.types import ParameterConstraints

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.devices import Machine
from dreamshard_planner.search.placing import place_units
from dreamshard_planner.search.starts import OptionTotals, group_moves
from tests.exhaustive import planned_and_best_ms

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize("cost_source", ["roofline", "torchrec"])
@pytest.mark.parametrize("seed", [0, 4, 5, 10])
def test_plans_of_small_problems_are_within_a_hundredth_of_the_best(cost_source: str, seed: int) -> None:
    planned_ms, best_ms = planned_and_best_ms(seed, cost_source)
    assert best_ms * (1 - 1e-6) <= planned_ms <= best_ms * 1.01


@torch.no_grad()
def test_many_tables_change_their_type_together_where_one_alone_gains_nothing() -> None:
    """Twenty small tables on 2 x 8 GPUs: two on some rank cost an all-to-all twice that of one, and an all-reduce."""
    tables = [table(f"t{i}", 10 + i if i < 10 else 5_000_000, 128) for i in range(20)]
    constraints = {one.name: ParameterConstraints(sharding_types=["table_wise", "data_parallel"]) for one in tables}
    topology = Machine(hosts=2, ranks_per_host=8, gpu="h100").topology()
    planner = DreamShardPlanner(
        topology=topology,
        batch_size=2048,
        constraints=constraints,
        cost_source="roofline",
        stats=[],
        debug=False,
        least_gain=0.0,
    )
    planner.plan(collection(*tables), SHARDERS)
    model = planner._loop.model
    options = [option for option in model.search_space if option.compute_kernel in ("fused", "dense")]
    cost = model.context.cost(model.context.read(options, model.left))
    whole = [next(i for i, o in enumerate(kinds) if o.sharding_type == "table_wise") for kinds in cost.problem.tables]
    start = place_units(cost, whole)
    found = group_moves(cost, OptionTotals(cost), start)
    assert len({sharding.options for sharding in found}) == len(found) > 5
    changed = [int((np.array(sharding.options) != np.array(whole)).sum()) for sharding in found]
    best = min(range(len(found)), key=lambda index: cost.overall_ms(found[index]))
    assert changed[best] > 1 and cost.overall_ms(found[best]) < 0.95 * cost.overall_ms(start)
    assert planner.report().chosen.total_ms <= cost.overall_ms(found[best]) * (1 + 1e-6)
