# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Greedy heuristics, packing by memory, and local search over placements with the sums that it keeps."""

import re
from dataclasses import replace

import pytest
import torch
from placement_tasks import make_cost, storage_problem

from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.problem import Cost, Preload, Problem, SharedCores
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.search import moves
from dreamshard_planner.search.moves import PlacementState
from dreamshard_planner.search.reshards import DIGITS
from dreamshard_planner.search.starts import greedy_by_score, packed_start, place_by_heuristic


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
    [
        (1, 0, None),
        (3, 0, SharedCores(2, 4)),
        (1, 1, SharedCores(1.5, 2)),
        (2, 2, None),
        (3, 4, SharedCores(1, 4)),
    ],
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
        assert torch.allclose(getattr(states, name).double(), getattr(afresh, name).double(), rtol=1e-9, atol=1e-9), (
            name
        )


def test_shards_of_one_rank_exchange_with_all_ranks() -> None:
    cost = make_cost(4, 4)
    host = CollectiveModel(2, 2e6)
    inside = Collectives([Collective("inside", "host", host, host)], 2, host)
    with pytest.raises(ValueError, match="must exchange with all ranks, but inside does not"):
        _ = PlacementState(
            Cost(replace(cost.problem, collectives=inside), cost.compute), torch.arange(4)[None]
        ).exchanges
