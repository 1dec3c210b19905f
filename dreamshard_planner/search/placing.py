# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placement of units: greedy heuristics, and positions for chosen options.

A greedy heuristic sorts shards by a score and gives each to the rank with the lowest sum of scores.

Shapes: S shards or units of span 1, D ranks, M limits, F features, X units, N positions, L span, T tables, P parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Cost, Problem, Sharding, has_room
from dreamshard_planner.workload.tables import FEATURE_INDEX


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
"""Scores [S] from features [S, F]: the baselines of DreamShard's appendix. Each is a start and a baseline of every
plan. Heuristics that need more than features are in :func:`heuristic_placements`."""


def greedy_by_score(
    problem: Problem, score_S: Tensor, load_D: Tensor | None = None, order_S: Tensor | None = None
) -> Tensor | None:
    """Place shards in descending order of score, each on the rank with the lowest sum that can store it.

    Args:
        problem: the task.
        score_S: added by each shard to the sum of its rank.
        load_D: sums to start from, in the unit of the scores; nothing by default.
        order_S: shards in another order, int64; for example the largest first, if memory is tight.

    Returns:
        Rank of each shard, int64 [S], or None if a shard fits on no rank. Ties go to the lowest index.
    """
    free_DM, scores = problem.limits_DM.tolist(), score_S.tolist()
    # A shard that needs nothing has room even if a reservation left less than nothing.
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
    """Return a placement [S] by one of :data:`HEURISTICS`, or None if it dead-ends."""
    if name not in HEURISTICS:
        raise ValueError(f"unknown heuristic {name!r}; known are {', '.join(HEURISTICS)}")
    return greedy_by_score(problem, HEURISTICS[name](problem.features_PF))


def heuristic_placements(cost: Cost) -> dict[str, Tensor | None]:
    """Return placements [S] by :data:`HEURISTICS`, and ``cost_greedy`` by predicted cost on top of the preload; None if
    one dead-ends."""
    plans = {name: place_by_heuristic(cost.problem, name) for name in HEURISTICS}
    return plans | {"cost_greedy": greedy_by_score(cost.problem, cost.single_ms_P, cost.preload_ms_D)}


def largest_first(problem: Problem) -> Tensor:
    """Return shards in descending order of their largest share of any limit, int64 [S]."""
    unit_M = problem.needs_PM.sum(0).clamp_min(1).double()
    return torch.argsort(-(problem.needs_PM / unit_M).amax(-1), stable=True)


class Ranks:
    """Loads and free memory of all ranks, on which units are laid down one by one.

    In numpy, whose calls cost a third of torch's.

    Args:
        load_D: milliseconds to start from.
        free_DM: free memory to start from.
    """

    def __init__(self, load_D: np.ndarray, free_DM: np.ndarray) -> None:
        self.load_D, self.free_DM = load_D.copy(), free_DM.copy()

    def lay(
        self, load_UL: np.ndarray, need_ULM: np.ndarray, key: Callable[[np.ndarray], np.ndarray] = np.positive
    ) -> tuple[int, ...] | None:
        """Lay units of one span down in turn, each where it has room and the key of its highest rank's load is lowest
        and finite.

        Args:
            load_UL: load that each adds to each rank of its span.
            need_ULM: memory that it takes of each.
            key: of the highest rank's load at each position.

        Returns:
            Their positions, the first of equal ones; None, with nothing laid down, if a unit has none.
        """
        before, span = (self.load_D.copy(), self.free_DM.copy()), load_UL.shape[1]
        load_NL, free_NLM = self.load_D.reshape(-1, span), self.free_DM.reshape(-1, span, self.free_DM.shape[1])
        positions = []
        for load_L, need_LM in zip(load_UL, need_ULM, strict=True):
            key_N = key((load_NL + load_L).max(1))
            position = int(key_N.argmin())
            if not has_room(need_LM, free_NLM[position]).all():  # the quicker question first
                key_N = np.where(has_room(need_LM, free_NLM).all(-1), key_N, np.inf)
                position = int(key_N.argmin())
            if key_N[position] == np.inf:
                self.load_D[:], self.free_DM[:] = before
                return None
            load_NL[position] += load_L
            free_NLM[position] -= need_LM
            positions.append(position)
        return tuple(positions)


def place_wide_units(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Place units wider than a rank, the widest and heaviest first, each where the peak stays lowest.

    Other units are on rank 0. None if memory does not allow it.
    """
    problem, every = cost.problem, cost.problem.option_rows
    single_P, needs_PM, limits_DM = cost.single_ms_P.numpy(), problem.needs_PM.numpy(), problem.limits_DM.numpy()
    row_T = every.rows(range(problem.num_tables), options)
    span_T, positions = every.span_O[row_T], [(0,) * units for units in every.units_O[row_T].tolist()]
    everywhere_T = (span_T == problem.num_ranks) & (span_T > 1)
    part_UD = every.parts(row_T[everywhere_T]).reshape(-1, problem.num_ranks)
    taken_DM = needs_PM[part_UD].sum(0)
    if not has_room(taken_DM, limits_DM).all():
        return None
    ranks = Ranks(single_P[part_UD].sum(0), limits_DM - taken_DM)
    wide = ((span_T > 1) & ~everywhere_T).nonzero()[0].tolist()
    part_of = {table: problem.tables[table][options[table]].part_UL for table in wide}
    for table in sorted(wide, key=lambda table: (-span_T[table], -single_P[part_of[table]].sum(1).max())):
        laid = ranks.lay(single_P[part_of[table]], needs_PM[part_of[table]])
        if laid is None:
            return None
        positions[table] = laid
    return Sharding(tuple(options), tuple(positions))


def place_units(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Place the units of chosen options: wide ones first, then those of span 1 from heavy to light.

    Heavy is by compute, or by compute and exchanges, whichever ends cheaper. If that dead-ends, units go from large to
    small. None if memory does not allow that either.
    """
    sharding = place_wide_units(cost, options)
    if sharding is None:
        return None
    chosen = cost.chosen(sharding)
    problem, single_S, load_D = chosen.cost.problem, chosen.cost.single_ms_P, chosen.cost.preload_ms_D
    assignment_S = greedy_by_score(problem, single_S, load_D)
    exchange_S = problem.exchange_ms_P
    if assignment_S is not None and bool(exchange_S.any()):
        level_S = greedy_by_score(problem, single_S + exchange_S, load_D)
        if level_S is not None:
            both_BS = torch.stack([assignment_S, level_S])
            assignment_S = both_BS[int(chosen.cost.rate(both_BS).overall_ms_B.argmin())]
    if assignment_S is None:
        assignment_S = greedy_by_score(problem, single_S, load_D, largest_first(problem))
    return None if assignment_S is None else chosen.placed(assignment_S)
