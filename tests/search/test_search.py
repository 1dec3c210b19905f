# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Starts, packing by memory, re-shards and local search over placements, with the sums that they keep, and the search;
plans of small random problems against the best sharding, by trying all.

Shapes: X shardings, K ways to shard a table (an option and positions of its units), D ranks, G fused groups, H latent
channels.
"""

import random
import re
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pytest
import torch
from small_models import collection, planner, table
from small_problems import HOST, MEMORY, RANKS, choices, make_cost, sharding_cost, storage_problem
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.problem import Cost, Preload, Problem, Sharding, SharedCores, has_room
from dreamshard_planner.devices import Machine
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.search import moves
from dreamshard_planner.search.moves import PlacementState
from dreamshard_planner.search.reshards import DIGITS, ShardingState
from dreamshard_planner.search.search import search
from dreamshard_planner.search.starts import (
    OptionTotals,
    greedy_by_score,
    level_starts,
    packed_start,
    place_by_heuristic,
)
from dreamshard_planner.search_space.sharding_types import CW, DP, GRID, RW, TW, TWRW


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


@pytest.mark.parametrize("sizes, capacity", [([6, 5, 5, 4], 10), ([7, 6, 5, 5, 4, 3], 15)])
def test_packing_where_greedy_dead_ends(sizes: list[int], capacity: int) -> None:
    """The largest first fails: 6 leaves room for 4 alone, and 7 and 5 for 3."""
    problem = storage_problem(sizes, [capacity] * 2)
    packed = packed_start(problem)
    assert packed is not None and bool(problem.fits(packed))
    assert packed_start(storage_problem([capacity // 2 + 1] * 3, [capacity] * 2)) is None


def test_shortage_names_table_and_bytes() -> None:
    for sizes, capacities, told in (
        ([3, 12, 3], [10, 9], "'t1' needs 12 B of HBM, .* 2 B are missing"),
        ([6, 6, 6], [8, 8], "need 18 B .* 2 B are missing"),
        ([6, 6, 6], [10, 10], "No placement of their shards was found, although 2 B of HBM would be left"),
    ):
        assert re.search(told, str(infeasible(in_hbm(sizes, capacities), lambda table: {})))


def in_hbm(sizes: list[int], capacities: list[int]) -> Problem:
    """A problem with all kinds of memory, of which only the first is asked for."""
    problem = storage_problem(sizes, capacities)
    needs_PM, limits_DM = (torch.nn.functional.pad(b, (0, 2)) for b in (problem.needs_PM, problem.limits_DM))
    return replace(problem, needs_PM=needs_PM, limits_DM=limits_DM)


def test_rules_place_as_by_hand() -> None:
    problem = storage_problem([1] * 5, [5, 5])
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    # 5 -> 0; 4 -> 1; 3 -> 1 (4 < 5); 2 -> 0 (5 < 7); 1 -> 0 (tie of 7 and 7 goes to the lowest rank)
    assert greedy_by_score(problem, scores).tolist() == [0, 1, 1, 0, 0]
    tight = storage_problem([1] * 5, [2, 5])
    assert greedy_by_score(tight, scores).tolist() == [0, 1, 1, 0, 1]
    assert greedy_by_score(storage_problem([1] * 5, [2, 2]), scores) is None
    with pytest.raises(ValueError, match="size_greedy"):
        place_by_heuristic(problem, "sizegreedy")


def preloaded(cost: Cost, collectives: int) -> Cost:
    """Return the cost of the shards if each sends in two of several collectives, on ranks with a preload.

    The preload alone sends in one more collective.
    """
    link, slower = CollectiveModel(4, 1e6), CollectiveModel(4, 5e5)
    kinds = [
        Collective("all-to-all", "world", link, link),
        Collective("reduce-scatter", "world", slower, link),
        Collective("gradients", "world", None, slower),
        Collective("lookups", "world", slower, None, of_lookups=True),
    ]
    part_P, sent_P = torch.arange(cost.problem.num_parts), cost.problem.bytes_PC[:, 0]
    bytes_PC = torch.zeros(len(part_P), collectives + 1, dtype=torch.float64)
    bytes_PC[part_P, part_P % collectives] = sent_P
    bytes_PC[part_P, (part_P + 1) % collectives] += sent_P / 2
    joined = Collectives([*kinds[:collectives], kinds[0]], 2, link)
    problem = replace(cost.problem, bytes_PC=bytes_PC, collectives=joined)
    rank_D = torch.arange(4)
    bytes_CD = torch.cat([torch.zeros(collectives, 4), 1e4 * rank_D[None]]).double()
    return Cost(problem, cost.compute, preload=Preload(cost.group_latents(part_P % 3) / 2, bytes_CD))


@pytest.mark.parametrize(
    "groups, collectives, cores",
    [(1, 0, None), (3, 0, SharedCores(2, 4)), (1, 1, SharedCores(1.5, 2)), (2, 2, None), (3, 4, SharedCores(1, 4))],
)
def test_search_keeps_its_sums(groups: int, collectives: int, cores: SharedCores | None) -> None:
    """The incremental costs of candidates are those of a rating from scratch, in each of several placements."""
    cost = make_cost(12, 4, groups=groups)
    cost = preloaded(cost, collectives) if collectives else cost
    cost = Cost(replace(cost.problem, shared_cores=cores), cost.compute, preload=cost.preload)
    assignment_BS = torch.stack([torch.arange(12) % 4, torch.arange(12) // 3, torch.arange(12) % 2])
    states = PlacementState(cost, assignment_BS)
    row_B, bottleneck_B = torch.tensor([0, 2]), torch.tensor([1, 0])
    every = [
        [
            (leaving, home if arrival >= 0 else device, arrival)
            for leaving in (assignment_S == bottleneck).nonzero()[:, 0].tolist()
            for arrival, home in [(-1, -1), *enumerate(assignment_S.tolist())]
            for device in range(4)
            if home != bottleneck and bottleneck != device and (arrival < 0 or device == home)
        ]
        for assignment_S, bottleneck in zip(assignment_BS[row_B], bottleneck_B.tolist(), strict=True)
    ]
    count = min(map(len, every))
    assert count >= 3 * 3 + 3 * 9  # moves and swaps
    leaving_BC, device_BC, arrival_BC = torch.tensor([change[:count] for change in every]).unbind(-1)
    step, candidates = moves.Step(states, row_B, bottleneck_B, 1.0), (leaving_BC, device_BC, arrival_BC)
    overall_BC, _ = step.scores(*candidates, step.rate(*candidates))
    for index, row in enumerate(row_B.tolist()):
        for candidate in range(count):
            changed_S = assignment_BS[row].clone()
            changed_S[leaving_BC[index, candidate]] = device_BC[index, candidate]
            if arrival_BC[index, candidate] >= 0:
                changed_S[arrival_BC[index, candidate]] = bottleneck_B[index]
            expected = float(cost.rate(changed_S[None]).overall_ms_B)
            assert float(overall_BC[index, candidate]) / 10**DIGITS == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("collectives", [0, 2, 4])
def test_a_step_improves_every_placement_and_keeps_its_sums(collectives: int) -> None:
    cost = make_cost(24, 4, groups=2)
    cost = preloaded(cost, collectives) if collectives else cost
    states = PlacementState(cost, torch.stack([torch.zeros(24, dtype=torch.int64), torch.arange(24) % 4 // 2]))
    before_B, row_B = states.overall_ms(), torch.arange(2)
    rated = [moves.improve(states, row_B, states.device_ms_D.argmax(-1), 1.0)[1] for _ in range(5)]
    afresh = PlacementState(cost, states.assignment_BP)
    assert (states.overall_ms() < 0.9 * before_B).all() and all(rated)
    for name in ("latent_DGH", "group_ms_DG", "approximate_ms_DG", "bytes_CD", "free_DM"):
        kept, anew = (getattr(one, name).double() for one in (states, afresh))
        assert torch.allclose(kept, anew, rtol=1e-9, atol=1e-9), name


def test_shards_of_one_rank_exchange_with_all_ranks() -> None:
    cost = make_cost(4, 4)
    host = CollectiveModel(2, 2e6)
    inside = Collectives([Collective("inside", "host", host, host)], 2, host)
    inside_hosts = Cost(replace(cost.problem, collectives=inside), cost.compute)
    with pytest.raises(ValueError, match="must exchange with all ranks, but inside does not"):
        _ = PlacementState(inside_hosts, torch.arange(4)[None]).exchanges


Shape: TypeAlias = tuple[int, int, int, tuple[str, ...]]
"""Ranks, ranks of a host, tables and their types."""
ALL = (TW, CW, RW, DP, TWRW, GRID)
SHAPES: tuple[Shape, ...] = ((2, 1, 4, ALL), (4, 2, 3, ALL), (4, 2, 6, (TW, DP)))


def small_problem(seed: int, cost_source: str) -> tuple[DreamShardPlanner, nn.Module]:
    """A random model of a few tables, and a planner that may shard each in every way."""
    rng = random.Random(seed)
    ranks, ranks_per_host, count, kinds = SHAPES[seed % len(SHAPES)]
    tables = [table(f"t{i}", int(10 ** rng.uniform(1, 6.5)), rng.choice([32, 64])) for i in range(count)]
    constraints = {
        config.name: ParameterConstraints(
            sharding_types=list(kinds), min_partition=32, pooling_factors=[10 ** rng.uniform(0, 1.5)]
        )
        for config in tables
    }
    topology = Machine(ranks_per_host=ranks_per_host, hosts=ranks // ranks_per_host, gpu="h100").topology()
    given = {"constraints": constraints, "batch_size": rng.choice([256, 1024, 4096]), "effort": "default"}
    return planner(topology=topology, cost_source=cost_source, **given), collection(*tables)


@torch.inference_mode()
def optimum_ms(cost: Cost) -> float:
    """Return the cost of the best sharding within memory, of all that there are."""
    problem, sums = cost.problem, _choices(cost, 0)
    for index in range(1, problem.num_tables):
        pairs = zip(sums, _choices(cost, index), strict=True)
        sums = tuple((sum_X[:, None] + own_K).flatten(0, 1) for sum_X, own_K in pairs)
    latent_XDGH, bytes_XCD, used_XDM = sums
    device_ms_XD = cost.compute.group_cost_ms(latent_XDGH).sum((-1, -2))
    fits_X = has_room(used_XDM, problem.limits_DM).all(-1)
    return float((device_ms_XD.amax(-1) + problem.collectives.ms(bytes_XCD))[fits_X].min())


def _choices(cost: Cost, table: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latents [K, D, G, H], bytes sent [K, C, D] and memory [K, D, M] of every way to shard a table."""
    laid = []
    for index, positions in choices(cost.problem, table):
        option = cost.problem.tables[table][index]
        rank_X, part_X = torch.tensor(option.ranks(positions)), torch.tensor(option.parts)
        laid.append([sums(rank_X, part_X) for sums in (cost.group_latents, cost.bytes_sent, cost.problem.taken)])
    return tuple(torch.stack(sums) for sums in zip(*laid, strict=True))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cost_source", ["roofline", "torchrec"])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_plans_of_small_problems_are_within_a_hundredth_of_the_best(cost_source: str, seed: int) -> None:
    made, model = small_problem(seed, cost_source)
    made.plan(model, [EmbeddingBagCollectionSharder()])
    session = made._loop.model
    options = session.rater.certain_options(session.search_space)
    best_ms = optimum_ms(session.rater.cost(session.rater.read(options, session.room)))
    assert best_ms * (1 - 1e-6) <= made.report().chosen.total_ms <= best_ms * 1.01


def test_a_table_leaves_slower_memory_however_little_that_gains() -> None:
    cost = sharding_cost(2)
    problem, whole = cost.problem, [cost.problem.tables[0][0].parts[0]]
    names = ("features_PF", "group_P", "needs_PM", "bytes_PC")
    grown = {name: torch.cat([getattr(problem, name), getattr(problem, name)[whole]]) for name in names}
    slower = replace(problem.tables[0][0], part_UL=np.array([[problem.num_parts]]), kernel="fused_uvm")
    problem = replace(problem, tables=((*problem.tables[0], slower), problem.tables[1]), **grown)
    latent_PH = torch.cat([cost.latent_PH, cost.latent_PH[whole] + torch.tensor([0.0, 1e-7, 0.0])])
    state = ShardingState(Cost(problem, cost.compute, latent_PH), Sharding((5, 0), ((0,), (1,))), unit=1e3)
    state.prefer_cheaper_kernels()
    assert state.sharding == Sharding((0, 0), ((0,), (1,)))
