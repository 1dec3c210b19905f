# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sharding problems of tables, options and units: starts, re-shards, and the search."""

from dataclasses import replace

import pytest
import torch
from sharding_tasks import HOST, MEMORY, RANKS, sharding_cost

from dreamshard_planner.cost.problem import Cost, Sharding, SharedCores
from dreamshard_planner.search.reshards import ShardingState
from dreamshard_planner.search.search import search
from dreamshard_planner.search.starts import OptionTotals, level_starts, packed_start
from tests.exhaustive import planned_and_best_ms


@pytest.mark.parametrize("memory", [MEMORY, 400, 300])
def test_search_keeps_memory_and_beats_every_start(memory: int) -> None:
    cost = sharding_cost(9, 5, memory)
    starts = level_starts(cost, OptionTotals(cost))
    assert starts and all(cost.problem.fits(start) for start in starts)
    result = search(cost, [])
    assert cost.problem.fits(result.sharding)
    assert result.overall_ms <= min(cost.overall_ms(start) for start in starts) * (1 + 1e-5)


def test_where_nothing_fits_there_is_no_sharding() -> None:
    assert search(sharding_cost(9, 5, 40), []) is None


def test_a_search_goes_on_without_roll_outs_that_take_too_long() -> None:
    def late(*_: object) -> list[Sharding]:
        raise TimeoutError

    late_result, result = (search(sharding_cost(9, 5), [], further=further) for further in (late, None))
    assert (late_result.sharding, late_result.reshards) == (result.sharding, result.reshards)
    assert late_result.cut_short and not result.cut_short


def with_cores(cost: Cost, cores: SharedCores | None) -> Cost:
    """Return the cost if ranks share cores."""
    return Cost(replace(cost.problem, shared_cores=cores), cost.compute, cost.latent_PH)


def test_ranks_that_share_a_core_get_the_least_work_together() -> None:
    cost = sharding_cost(4, 1)
    level, shared = (search(one, []).sharding for one in (cost, with_cores(cost, SharedCores(1, RANKS))))
    sums_ms = [float(cost.rate(sharding).device_ms_BD.sum()) for sharding in (shared, level)]
    assert sums_ms[0] < 0.9 * sums_ms[1]


@pytest.mark.parametrize("cores", [None, SharedCores(3.5, 4), SharedCores(1.5, 2)])
def test_reshards_keep_their_sums(cores: SharedCores | None) -> None:
    """Sums kept through many changes are those taken afresh, and what was tried is what was got."""
    cost = with_cores(sharding_cost(12, 2), cores)
    everything_on_one = Sharding((0,) * 12, ((0,),) * 12)
    state = ShardingState(cost, everything_on_one, 1.0)
    before_ms = state.overall_ms()
    tried = state.improve(10_000, lambda: True)
    assert tried > 200 and state.overall_ms() < 0.5 * before_ms
    assert cores or len(set(state.sharding.options)) > 1
    assert state.overall_ms() == pytest.approx(cost.overall_ms(state.sharding), rel=1e-9)
    afresh = ShardingState(cost, state.sharding, 1.0)
    for name in ("latent_DGH", "group_ms_DG", "bytes_CD", "free_DM"):
        assert torch.allclose(getattr(state, name).double(), getattr(afresh, name).double(), atol=1e-9), name


def over_hosts(cost: Cost) -> Cost:
    """Return the cost of the tables if each must lie over a host."""
    problem = replace(cost.problem, tables=tuple((options[2],) for options in cost.problem.tables))
    return Cost(problem, cost.compute, cost.latent_PH)


@pytest.mark.parametrize("tight", [False, True])
def test_swaps_of_wide_units_are_rated_as_what_they_make(tight: bool) -> None:
    cost = over_hosts(sharding_cost(8, 4, latency_ms=0.1))
    sharding = Sharding((0,) * 8, tuple((index // 4,) for index in range(8)))
    if tight:  # the fuller host may only get less
        cost.problem.limits_DM.fill_(int(cost.problem.taken(*cost.problem.laid(sharding)).max()))
    state = ShardingState(cost, sharding, 1.0)
    swaps = state.swaps(0, lambda span_T: span_T == HOST, most=100)
    device_QD, bytes_QCD, fits_Q = state.after(swaps)
    overall_Q = device_QD.amax(-1) + cost.problem.collectives.ms(bytes_QCD)
    assert len(swaps) == 16 and bool(fits_Q.any()) and bool(fits_Q.all()) != tight
    for (here, there), overall, fits in zip(swaps, overall_Q.tolist(), fits_Q.tolist(), strict=True):
        assert here[1:] == (0, (1,)) and there[1:] == (0, (0,))
        made = sharding.changed(*here).changed(*there)
        assert fits == bool(cost.problem.fits(made)) and overall == pytest.approx(cost.overall_ms(made))


@pytest.mark.parametrize("seed", range(5))
def test_bytes_alone_find_a_start(seed: int) -> None:
    """In memory that is nearly full when all ranks are level; and none where it cannot hold the tables."""
    total = int(sharding_cost(12, seed).problem.needs_PM[::10].sum())  # of whole tables: the first of ten parts each
    cost = sharding_cost(12, seed, memory=int(1.08 * total / RANKS))
    start = packed_start(cost.problem)
    assert start is not None and cost.problem.fits(start)
    assert packed_start(sharding_cost(12, seed, memory=int(0.9 * total / RANKS)).problem) is None


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("cost_source", ["roofline", "torchrec"])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_plans_of_small_problems_are_within_a_hundredth_of_the_best(cost_source: str, seed: int) -> None:
    planned_ms, best_ms = planned_and_best_ms(seed, cost_source)
    assert best_ms * (1 - 1e-6) <= planned_ms <= best_ms * 1.01
