# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The greedy heuristics that practice uses: sort by a score, give each shard to the rank with the lowest sum of scores.

Shapes: S shards, D ranks, M limits, F features.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import torch
from torch import Tensor

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Problem
from dreamshard_planner.workload.features import FEATURE_INDEX


def _column(features_SF: Tensor, name: str) -> Tensor:
    return features_SF[:, FEATURE_INDEX[name]].double()


def _size_lookup(features_SF: Tensor) -> Tensor:
    lookup = _column(features_SF, "dim") * _column(features_SF, "pooling_factor")
    return lookup * _column(features_SF, "rows").clamp_min(1).log10()


HEURISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "size_greedy": lambda features_SF: _column(features_SF, "size"),
    "dim_greedy": lambda features_SF: _column(features_SF, "dim"),
    "lookup_greedy": lambda features_SF: _column(features_SF, "dim") * _column(features_SF, "pooling_factor"),
    "size_lookup_greedy": _size_lookup,
}
"""Scores [S] from features [S, F]. The first four are the baselines of DreamShard's appendix: bytes of the weights,
dim, dim x pooling factor, and that times the logarithm of the rows. Each is a start and a baseline of every plan;
heuristics that need
more than features are in :func:`heuristic_placements`."""


def greedy_by_score(
    problem: Problem, score_S: Tensor, load_D: Tensor | None = None, order_S: Tensor | None = None
) -> Tensor | None:
    """Shards in descending order of score, each to the rank with the lowest sum that can store it.

    Args:
        problem: the task.
        score_S: of the shards; what each adds to the sum of its rank, and, without ``order_S``, their order.
        load_D: sums to start from, in the unit of the scores; nothing by default.
        order_S: shards in another order, int64; e.g. the largest first, where memory is tight.

    Returns:
        Rank of each shard, int64 [S]; None where a shard fits on no rank (a dead end). Ties go to the lowest index.
    """
    free_DM, scores = problem.limits_DM.tolist(), score_S.tolist()
    # What is not needed has room even where a reservation left less than nothing.
    needs_S = [[(kind, need) for kind, need in enumerate(need_M) if need] for need_M in problem.needs_PM.tolist()]
    loads = [0.0] * problem.num_ranks if load_D is None else load_D.tolist()
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    assignment = [0] * problem.num_parts
    for shard in (torch.argsort(-score_S, stable=True) if order_S is None else order_S).tolist():
        full, needs = [], needs_S[shard]
        while heap:
            load, rank = heapq.heappop(heap)
            free_M = free_DM[rank]
            if not [kind for kind, need in needs if need > free_M[kind]]:
                break
            full.append((load, rank))
        else:
            return None
        assignment[shard] = rank
        for kind, need in needs:
            free_M[kind] -= need
        for entry in (*full, (load + scores[shard], rank)):
            heapq.heappush(heap, entry)
    return torch.tensor(assignment, dtype=torch.int64)


def place_by_heuristic(problem: Problem, name: str) -> Tensor | None:
    """Placement [S] by one of :data:`HEURISTICS`, None where it dead-ends."""
    if name not in HEURISTICS:
        raise ValueError(f"unknown heuristic {name!r}; known are {', '.join(HEURISTICS)}")
    return greedy_by_score(problem, HEURISTICS[name](problem.features_PF))


def heuristic_placements(cost: Cost) -> dict[str, Tensor | None]:
    """Return the placements [S] of a placement problem by :data:`HEURISTICS`, and ``cost_greedy`` by predicted cost, on
    top of what lies on the ranks; None where one dead-ends."""
    plans = {name: place_by_heuristic(cost.problem, name) for name in HEURISTICS}
    return plans | {"cost_greedy": greedy_by_score(cost.problem, cost.single_ms_P, cost.preload_ms_D)}
