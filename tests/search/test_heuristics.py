# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Greedy heuristics on tiny tasks."""

from __future__ import annotations

import pytest
import torch
from placement_tasks import storage_problem

from dreamshard_planner.search.heuristics import greedy_by_score, place_by_heuristic


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
