# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Packing by memory, and exact placement."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from placement_tasks import storage_problem

from dreamshard_planner.cost.problem import Problem
from dreamshard_planner.planning.infeasible import shortage
from dreamshard_planner.search.exact import RELATIVE_GAP, pack, solve
from dreamshard_planner.search.heuristics import HEURISTICS, place_by_heuristic


def test_packing_where_greedy_dead_ends() -> None:
    # Best fit decreasing puts 6 beside nothing that fills 10; only {6,4} {5,5} works.
    problem = storage_problem([6, 5, 5, 4], [10, 10])
    assert problem.fits(pack(problem)[0][None]).all()
    # Three-partition: best fit fails, the exact solver does not.
    hard = storage_problem([7, 6, 5, 5, 4, 3], [15, 15])
    assert hard.fits(pack(hard)[0][None]).all()
    assert pack(storage_problem([6, 6, 6], [10, 10])) == (None, True)


def test_tight_memory_is_feasible_wherever_the_exact_solver_packs() -> None:
    """95 % of all memory filled by few large and many small tables: where greedy rules dead-end."""
    generator, dead_ends, packed, hopeless = torch.Generator().manual_seed(0), 0, 0, 0
    for _ in range(24):
        devices = int(torch.randint(2, 9, (1,), generator=generator))
        shards = int(torch.randint(2, 6, (1,), generator=generator)) * devices
        sizes = (torch.randn(shards, generator=generator).exp() * 1000).int() + 1
        capacity = max(int(sizes.sum() / devices / 0.95), int(sizes.max()))
        problem = storage_problem(sizes.tolist(), [capacity] * devices)
        dead_ends += all(place_by_heuristic(problem, rule) is None for rule in HEURISTICS)
        exact = solve(problem, 5.0)
        if math.isinf(exact.bound_ms):  # proven, not a matter of time
            hopeless += 1
            assert pack(problem) == (None, True)
            continue
        packed += exact.assignment_S is not None
        assert problem.fits(pack(problem)[0][None]).all()
    assert dead_ends > 5 and packed > 12 and hopeless > 0, (dead_ends, packed, hopeless)


def test_shortage_names_table_and_bytes() -> None:
    text = shortage(in_hbm([3, 12, 3], [10, 9]))
    assert "'t1' needs 12 B of HBM" in text and "2 B are missing" in text
    text = shortage(in_hbm([6, 6, 6], [8, 8]))
    assert "need 18 B" in text and "2 B are missing" in text
    assert shortage(in_hbm([6, 6, 6], [10, 10])) == ""


def in_hbm(sizes: list[int], capacities: list[int]) -> Problem:
    """A problem with all kinds of memory, of which only the first is asked for."""
    problem = storage_problem(sizes, capacities)
    needs_PM, limits_DM = (torch.nn.functional.pad(b, (0, 2)) for b in (problem.needs_PM, problem.limits_DM))
    return replace(problem, needs_PM=needs_PM, limits_DM=limits_DM)


@pytest.mark.parametrize("spare", [100, 2])
@pytest.mark.parametrize("seed", range(3))
def test_exact_plan_is_the_cheapest_and_its_bound_holds(seed: int, spare: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (8,), generator=generator).tolist()
    cost_S = torch.rand(8, generator=generator, dtype=torch.float64)
    problem = storage_problem(sizes, [(sum(sizes) + spare) // 2] * 2)
    plans = torch.tensor(list(itertools.product(range(2), repeat=8)))
    load_B = torch.stack([((plans == device) * cost_S).sum(-1) for device in range(2)]).amax(0)
    best = float(load_B[problem.fits(plans)].min())
    exact = solve(problem, 60.0, cost_S)
    assert bool(problem.fits(exact.assignment_S[None]))
    assert exact.bound_ms <= best * (1 + 1e-9) and exact.cost_ms <= best * (1 + 2 * RELATIVE_GAP)


def test_exact_plan_of_what_does_not_fit() -> None:
    exact = solve(storage_problem([6, 6, 6], [10, 10]), 60.0, torch.ones(3))
    assert exact.assignment_S is None and exact.cost_ms == exact.bound_ms == math.inf
    heavy = solve(storage_problem([1, 1, 1], [10, 10]), 60.0, torch.tensor([5.0, 1.0, 1.0]))
    assert heavy.cost_ms == heavy.bound_ms == 5.0
