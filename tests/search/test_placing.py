# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Greedy heuristics and packing by memory, on tiny tasks."""

from dataclasses import replace

import pytest
import torch
from placement_tasks import storage_problem

from dreamshard_planner.cost.problem import Problem
from dreamshard_planner.planning.infeasible import shortage
from dreamshard_planner.search.placing import HEURISTICS, best_fit, greedy_by_score, pack, place_by_heuristic


def test_packing_where_greedy_dead_ends() -> None:
    # Best fit decreasing puts 6 beside nothing that fills 10; only {6,4} {5,5} works.
    problem = storage_problem([6, 5, 5, 4], [10, 10])
    assert problem.fits(pack(problem)[None]).all()
    # Three-partition: the largest first fails, 3 first does not.
    hard = storage_problem([7, 6, 5, 5, 4, 3], [15, 15])
    assert best_fit(hard) is None and hard.fits(pack(hard)[None]).all()
    assert pack(storage_problem([6, 6, 6], [10, 10])) is None


def test_tight_memory_is_packed() -> None:
    """95 % of all memory filled by few large and many small tables: where greedy rules dead-end."""
    generator, dead_ends, packed = torch.Generator().manual_seed(0), 0, 0
    for _ in range(24):
        devices = int(torch.randint(2, 9, (1,), generator=generator))
        shards = int(torch.randint(2, 6, (1,), generator=generator)) * devices
        sizes = (torch.randn(shards, generator=generator).exp() * 1000).int() + 1
        capacity = max(int(sizes.sum() / devices / 0.95), int(sizes.max()))
        problem = storage_problem(sizes.tolist(), [capacity] * devices)
        dead_ends += all(place_by_heuristic(problem, rule) is None for rule in HEURISTICS)
        if (assignment_S := pack(problem)) is not None:
            packed += 1
            assert problem.fits(assignment_S[None]).all()
    assert dead_ends > 5 and packed > 12, (dead_ends, packed)


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
