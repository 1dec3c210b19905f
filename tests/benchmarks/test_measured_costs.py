# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets of one problem, timed as fused kernels, and placements rated by them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from common.measured_costs import MeasuredCosts, SetClock
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import workloads_of
from tests.placement_tasks import make_cost

WORKLOADS = workloads_of(named_pool("merlin_tiny")[:6], 64)


def test_sets_too_large_for_memory_are_timed_in_parts() -> None:
    sets = [(0, 1), (2,), (3, 4), (5,)]
    for most_bytes, parts in ((1 << 30, [sets]), (1, [[group] for group in sets])):
        clock = SetClock(WORKLOADS, "cpu", Arena("cpu", 1 << 26), bytes_at_once=most_bytes)
        assert list(clock._at_once(sets)) == parts
        assert [samples.samples_ms.shape for samples in clock.samples(sets, 2)] == [(2, 2)] * 4


def test_real_kernels_are_timed() -> None:
    times_X2 = SetClock(WORKLOADS, "cpu", Arena("cpu", 1 << 26))([(0, 1, 2), (3,), (4, 5)], 3)
    assert times_X2.shape == (3, 2) and (times_X2 > 0).all()


def test_placements_cost_what_was_measured() -> None:
    cost = make_cost(4, 2, groups=2)
    asked: list[tuple[int, ...]] = []

    def measure(sets: Sequence[tuple[int, ...]], repeats: int) -> torch.Tensor:
        asked.extend(sets)
        return torch.tensor([[len(asked), 10.0 * len(group)] for group in sets], dtype=torch.float64)

    measured, plan_S = MeasuredCosts(cost, measure), torch.tensor([0, 1, 0, 1])
    measured.time([plan_S], 1)
    devices = measured.sets_of(plan_S)
    assert sorted(shard for device in devices for group in device for shard in group) == [0, 1, 2, 3]
    assert measured.rate(plan_S).backward_ms_BD[0].tolist() == pytest.approx([20.0, 20.0])
    before = len(asked)
    measured.time([plan_S], 1)
    assert len(asked) == before  # known already
