# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Search that measures: what it learns from measured sets, and what it chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.model import PlacementCost
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import SetClock
from dreamshard_planner.placement.refine import MeasuredCosts, RefineConfig, ShardSet, refine
from dreamshard_planner.placement.rules import place_by_rule
from dreamshard_planner.placement.search import DEFAULT_SEARCH, local_search
from dreamshard_planner.placement.tasks import problem_of
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import workloads_of

ROOFLINE = RooflineCost(1e9, 1e8, 0.02, 0.06)


@pytest.fixture
def cost() -> PlacementCost:
    workloads = workloads_of(named_pool("meta_like_2021")[:30], 128)
    return PlacementCost(problem_of(workloads, 4), ROOFLINE, CollectiveModel(4, 1e7))


class TrueMachine:
    """Measures what the model does not know: each table costs its own factor more, exactly."""

    def __init__(self, cost: PlacementCost) -> None:
        generator = torch.Generator().manual_seed(3)
        self.factor_S = (0.4 * torch.randn(cost.problem.num_shards, generator=generator)).exp().double()
        self.single_ms_S = cost.single_ms_S.double()
        self.cost, self.timed = cost, 0

    def __call__(self, sets: Sequence[ShardSet], repeats: int) -> Tensor:
        self.timed += len(sets)
        rows = []
        for group in sets:
            weight_S = self.single_ms_S[list(group)]
            factor = (weight_S * self.factor_S[list(group)]).sum() / weight_S.sum()
            latent = self.cost.latent_SH[list(group)].sum(0)
            rows.append(self.cost.compute.group_cost_ms(latent[None])[0] * factor)
        return torch.stack(rows).double()


def test_sets_of_a_plan_by_hand(cost: PlacementCost) -> None:
    measured = MeasuredCosts(cost, TrueMachine(cost), RefineConfig())
    assignment_S = torch.zeros(30, dtype=torch.int64)
    assignment_S[[4, 7]] = 2
    rest = tuple(i for i in range(30) if i not in (4, 7))
    assert measured.sets_of(assignment_S) == [[rest], [], [(4, 7)], []]
    measured.time([assignment_S], 1)
    rated = measured.rate(assignment_S)
    assert rated.device_ms_BD[0, 1] == 0 and rated.device_ms_BD[0, 2] == measured.set_ms[(4, 7)].sum()


def test_factors_of_shards_are_learned(cost: PlacementCost) -> None:
    """Sets never measured are predicted better by what measured ones taught."""
    machine, generator = TrueMachine(cost), torch.Generator().manual_seed(0)
    measured = MeasuredCosts(cost, machine, RefineConfig(noise=0.005))
    plans = torch.randint(4, (40, 30), generator=generator)
    measured.time(list(plans[:30]), 1)
    corrected = measured.corrected(generator)
    measured.time(list(plans[30:]), 1)
    truth_B = torch.stack([measured.rate(plan).device_ms_BD[0] for plan in plans[30:]])
    before, after = (model.rate(plans[30:]).device_ms_BD / truth_B - 1 for model in (cost, corrected))
    assert after.abs().mean() < 0.5 * before.abs().mean()


def test_measuring_finds_a_better_plan_than_predicting(cost: PlacementCost) -> None:
    machine = TrueMachine(cost)
    cost = PlacementCost(
        replace(cost.problem, num_devices=2, capacity_DM=cost.problem.capacity_DM[:2]), ROOFLINE, cost.collectives
    )
    rule = place_by_rule(cost.problem, "size_lookup_greedy")
    predicted = local_search(cost, [rule], DEFAULT_SEARCH, torch.Generator().manual_seed(0)).assignment_S
    result = refine(cost, [predicted, rule], machine, 1e6, search=DEFAULT_SEARCH, config=RefineConfig(searches=20))
    measured = MeasuredCosts(cost, machine, RefineConfig())
    measured.time([predicted, result.assignment_S], 1)
    assert measured.overall_ms(result.assignment_S) < 0.97 * measured.overall_ms(predicted)
    assert 3 <= result.plans <= 22 and result.sets <= machine.timed
    assert float(result.measured.overall_ms_B[0]) == pytest.approx(measured.overall_ms(result.assignment_S))


def test_without_time_only_the_first_plan_is_measured(cost: PlacementCost) -> None:
    machine = TrueMachine(cost)
    starts = [place_by_rule(cost.problem, rule) for rule in ("size_lookup_greedy", "dim_greedy")]
    result = refine(cost, starts, machine, 1e-9, search=DEFAULT_SEARCH)
    assert result.plans == 1 and result.sets == machine.timed and torch.equal(result.assignment_S, starts[0])


def test_sets_too_large_for_memory_are_timed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = workloads_of(named_pool("merlin_tiny")[:6], 64)
    clock = SetClock(workloads, "cpu", Arena("cpu", 1 << 26))
    sets = [(0, 1), (2,), (3, 4), (5,)]
    assert list(clock._at_once(sets)) == [sets]
    monkeypatch.setattr("dreamshard_planner.measure.sets.MAX_BYTES_AT_ONCE", 1)
    assert list(clock._at_once(sets)) == [[group] for group in sets]
    assert [samples.samples_ms.shape for samples in clock.samples(sets, 2)] == [(2, 2)] * 4


def test_real_kernels_are_timed() -> None:
    workloads = workloads_of(named_pool("merlin_tiny")[:6], 64)
    clock = SetClock(workloads, "cpu", Arena("cpu", 1 << 26))
    times = clock([(0, 1, 2), (3,), (4, 5)], 3)
    assert times.shape == (3, 2) and (times > 0).all()
