# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where starting kernels is what counts, fused groups share few ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dreamshard_planner.cost.compute import CostSource, GivenCost
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.search.gathering import gathered
from tests.placement_tasks import storage_problem

START_MS = 1.0
"""What each kernel takes, beside its shards."""


class StartingKernels(GivenCost):
    """Each shard takes as long as it comes with, and each kernel a start more."""

    def __init__(self) -> None:
        super().__init__(CostSource("given", "by hand"))

    def group_cost_ms(self, latent_XH: torch.Tensor) -> torch.Tensor:
        start_ms = torch.where(latent_XH[..., :1] > 0.5, START_MS / 2, 0.0)
        return super().group_cost_ms(latent_XH) + start_ms


def cost_of(groups: list[int], each_ms: float, capacities: list[int]) -> Cost:
    """Shards of ten bytes and so many milliseconds each, in these groups, on ranks of these capacities."""
    problem = storage_problem([10] * len(groups), capacities)
    latent_PH = torch.tensor([[1.0, each_ms / 2, each_ms / 2]] * len(groups), dtype=torch.float64)
    number = max(groups) + 1
    return Cost(replace(problem, group_P=torch.tensor(groups), num_groups=number), StartingKernels(), latent_PH)


def test_each_group_has_a_rank_of_its_own() -> None:
    # Level shard by shard, each rank holds two shards of each group, and starts two kernels.
    assignment_S = gathered(cost_of([0, 1] * 4, 0.5, [100, 100]))
    assert assignment_S is not None
    assert sorted(assignment_S.tolist()) == [0] * 4 + [1] * 4
    assert assignment_S[::2].unique().numel() == assignment_S[1::2].unique().numel() == 1


def test_a_group_that_does_not_divide_goes_on_with_the_next() -> None:
    cost = cost_of([0] * 6 + [1] * 3, 1.0, [100] * 3)
    assignment_S = gathered(cost)
    assert assignment_S is not None
    # Three shards and a start on each rank.
    assert cost.rate(assignment_S[None]).device_ms_BD[0].tolist() == pytest.approx([4.0] * 3)


@pytest.mark.parametrize("capacities", [[40, 40], [20, 60], [10, 70]])
def test_memory_is_kept(capacities: list[int]) -> None:
    cost = cost_of([0, 1] * 4, 0.5, capacities)
    assignment_S = gathered(cost)
    assert assignment_S is not None and bool(cost.problem.fits(assignment_S[None]))


def test_no_placement_where_memory_or_groups_allow_none() -> None:
    assert gathered(cost_of([0, 1] * 4, 0.5, [30, 30])) is None
    assert gathered(cost_of([0] * 8, 0.5, [100, 100])) is None
