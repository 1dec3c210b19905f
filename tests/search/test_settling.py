# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What does not burden the bottleneck is in device memory, too, as far as that goes."""

from __future__ import annotations

import pytest
import torch

from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.compute import CostSource, GivenCost
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Option, Problem, Sharding, Unit
from dreamshard_planner.search.settling import settled

DEVICE_MS = (5.0, 1.0, 2.0, 0.5)
"""Of each table in device memory; over the link to the host it takes twice as long."""


def problem_of(device_memory: int) -> Cost:
    """Tables of ten bytes, each whole, in device (option 0) or host memory (option 1), on two ranks."""
    world = CollectiveModel(2, 1e3, 0.0)
    ms_P = [ms for one in DEVICE_MS for ms in (one, 2 * one)]
    problem = Problem(
        num_ranks=2,
        tables=tuple(
            (Option((Unit((2 * t,)),), "table_wise"), Option((Unit((2 * t + 1,)),), "table_wise", "fused_uvm"))
            for t in range(len(DEVICE_MS))
        ),
        names=tuple(f"t{t}" for t in range(len(DEVICE_MS))),
        features_PF=torch.zeros(len(ms_P), 1),
        group_P=torch.zeros(len(ms_P), dtype=torch.int64),
        num_groups=1,
        needs_PM=torch.tensor([[10, 0], [0, 10]] * len(DEVICE_MS)),
        limits_DM=torch.tensor([[device_memory, 100]] * 2),
        bytes_PC=torch.zeros(len(ms_P), 1, dtype=torch.float64),
        collectives=Collectives([Collective("none", "world", world, world)], 2, world),
    )
    latent_PH = torch.tensor([[1.0, ms / 3, 2 * ms / 3] for ms in ms_P], dtype=torch.float64)
    return Cost(problem, GivenCost(CostSource("given", "by hand")), latent_PH)


@pytest.mark.parametrize(
    ("device_memory", "options"),
    [(100, (0, 0, 0, 0)), (20, (0, 0, 0, 1)), (10, (0, 1, 0, 1)), (0, (0, 1, 1, 1))],
    ids=["room for all", "for two", "for one", "for none"],
)
def test_tables_move_into_device_memory_those_that_gain_most_first(
    device_memory: int, options: tuple[int, ...]
) -> None:
    cost = problem_of(device_memory)
    # The first table alone is the bottleneck: all else is on the other rank, in host memory.
    before = Sharding((0, 1, 1, 1), ((0,), (1,), (1,), (1,)))
    after = settled(cost, before)
    assert after.options == options and after.positions == before.positions
    assert cost.overall_ms(after) <= cost.overall_ms(before)


def test_what_is_settled_stays_as_it_is() -> None:
    cost = problem_of(100)
    best = Sharding((0, 0, 0, 0), ((0,), (1,), (1,), (1,)))
    assert settled(cost, best) is best
