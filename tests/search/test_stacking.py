# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Starts below a target height."""

from collections.abc import Sequence

import pytest
import torch
from sharding_tasks import MEMORY, sharding_cost

from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.compute import CostSource, GivenCost
from dreamshard_planner.cost.problem import Cost, Option, Problem, Unit
from dreamshard_planner.search.stacking import stacked_starts
from dreamshard_planner.search.starts import OptionTotals, level_starts


def on_two_hosts(ms: list[list[float]], needs: Sequence[int] = (1,) * 6) -> Cost:
    """Two hosts of two ranks, and tables with one unit each: its milliseconds by rank, and bytes of each part."""
    world = CollectiveModel(4, 1e3, 0.0)
    ms_P = [one for unit in ms for one in unit]
    tables, parts = [], iter(range(len(ms_P)))
    for unit in ms:
        kind = "table_wise" if len(unit) == 1 else "table_row_wise"
        tables.append((Option((Unit(tuple(next(parts) for _ in unit)),), kind),))
    problem = Problem(
        num_ranks=4,
        tables=tuple(tables),
        names=tuple(f"t{table}" for table in range(len(ms))),
        features_PF=torch.zeros(len(ms_P), 1),
        group_P=torch.tensor([int(len(unit) > 1) for unit in ms for _ in unit]),
        num_groups=2,
        needs_PM=torch.tensor(needs[: len(ms_P)])[:, None],
        limits_DM=torch.full((4, 1), 10),
        bytes_PC=torch.zeros(len(ms_P), 1, dtype=torch.float64),
        collectives=Collectives([Collective("none", "world", world, world)], 4, world),
    )
    latent_PH = torch.tensor([[1.0, one / 2, one / 2] for one in ms_P], dtype=torch.float64)
    return Cost(problem, GivenCost(CostSource("given", "by hand")), latent_PH)


def test_tables_over_a_host_share_one_and_leave_ranks_to_whole_tables() -> None:
    cost = on_two_hosts([[1.5, 1.5], [1.5, 1.5], [3.0], [3.0]])
    asked = OptionTotals(cost)
    assert min(map(cost.overall_ms, level_starts(cost, asked))) == pytest.approx(4.5)
    assert min(map(cost.overall_ms, stacked_starts(cost, asked))) == pytest.approx(3.0)


def test_a_table_that_fits_nowhere_goes_first_in_the_next_attempt() -> None:
    """Largest first on the emptiest rank, four tables leave no rank to the last one, which needs all of its memory."""
    cost = on_two_hosts([[4.0], [4.0], [4.0], [1.5], [1.0]], needs=[5, 5, 5, 5, 10])
    starts = stacked_starts(cost, OptionTotals(cost))
    assert [cost.overall_ms(start) for start in starts] == pytest.approx([5.5, 5.5])


@pytest.mark.parametrize("memory", [MEMORY, 300, 40])
def test_stacked_starts_keep_within_memory(memory: int) -> None:
    cost = sharding_cost(9, 5, memory)
    found = stacked_starts(cost, OptionTotals(cost))
    assert all(cost.problem.fits(start) for start in found) and bool(found) == (memory > 40)
    assert stacked_starts(cost, OptionTotals(cost), effort=0.02) == []
