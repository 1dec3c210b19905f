# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placement of units: greedy heuristics, packing by memory, and positions for chosen options.

A greedy heuristic sorts shards by a score and gives each to the rank with the lowest sum of scores. If every heuristic
dead-ends, shards are packed by best fit.

Shapes: S shards or units of span 1, D ranks, M limits, F features, X units, N positions, L span, T tables, P parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Cost, Option, Problem, Sharding, counted_up, has_room
from dreamshard_planner.workload.features import FEATURE_INDEX

PACKING_ATTEMPTS = 200
"""Orders of shards in which packing tries best fit, and"""
SHARDS_PACKED = 20_000
"""these times shards. Of 60 random problems that need 98 % of the memory, this solves 55, and a MILP solver 56."""


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


def pack(problem: Problem) -> Tensor | None:
    """Find any placement [S] within memory, by as many attempts of :func:`best_fit` as a second allows."""
    return best_fit(problem, min(PACKING_ATTEMPTS, 1 + SHARDS_PACKED // max(1, problem.num_parts)))


def best_fit(problem: Problem, attempts: int = 1) -> Tensor | None:
    """Place the largest shards first, each where the least memory is left over; return the rank of each, int64 [S].

    A shard that fits nowhere goes first in the next attempt. None if all attempts fail.
    """
    unit_M = problem.needs_PM.sum(0).clamp_min(1).double().numpy()
    order = largest_first(problem).tolist()
    for _ in range(attempts):
        assignment, misfit = _best_fit_in(order, problem.needs_PM.numpy(), problem.limits_DM.numpy(), unit_M)
        if misfit is None:
            return torch.tensor(assignment, dtype=torch.int64)
        order.remove(misfit)
        order.insert(0, misfit)
    return None


def _best_fit_in(
    order: Sequence[int], need_SM: np.ndarray, limits_DM: np.ndarray, unit_M: np.ndarray
) -> tuple[list[int], int | None]:
    """Place shards in this order; return their ranks and the first shard that fits nowhere, if there is one."""
    free_DM, assignment = limits_DM.copy(), [0] * len(order)
    for shard in order:
        fits_D = has_room(need_SM[shard], free_DM)
        if not fits_D.any():
            return assignment, shard
        slack_D = ((free_DM - need_SM[shard]).clip(0) / unit_M).sum(-1)
        assignment[shard] = int(np.where(fits_D, slack_D, np.inf).argmin())
        free_DM[assignment[shard]] -= need_SM[shard]
    return assignment, None


def best_position(key_XN: Tensor, need_XLM: Tensor, free_XNLM: Tensor) -> tuple[Tensor, Tensor]:
    """Return for equally wide units the position with the lowest key among those with room; ties go to the first.

    Args:
        key_XN: for example the peak that a unit would leave there.
        need_XLM: bytes that a unit needs on each rank of its span.
        free_XNLM: free bytes on each rank of a position.

    Returns:
        Position of each unit, int64 [X], and whether any has room, bool [X]. Leading dimensions X are free.
    """
    fits_XN = has_room(need_XLM[..., None, :, :], free_XNLM).all(-1)
    return key_XN.masked_fill(~fits_XN, torch.inf).argmin(-1), fits_XN.any(-1)


def place_wide_units(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Place units wider than a rank, the widest and heaviest first, each where the peak stays lowest.

    Other units are on rank 0. None if memory does not allow it.
    """
    problem, every = cost.problem, cost.problem.option_rows
    # In numpy, whose calls cost a third of torch's: there is one unit after the other.
    single_P, needs_PM = cost.single_ms_P.numpy(), problem.needs_PM.numpy()
    row_T = every.rows(range(problem.num_tables), options)
    span_T = every.span_O[row_T]
    units_T = every.units_O[row_T]
    positions = [[0] * units for units in units_T.tolist()]
    load_D, free_DM = np.zeros(problem.num_ranks), problem.limits_DM.numpy().copy()

    def asked(tables: np.ndarray, span: int) -> tuple[np.ndarray, np.ndarray]:
        """Milliseconds [U, L] and bytes [U, L, M] of all units of some tables."""
        part_UL = every.parts(row_T[tables]).reshape(-1, span)
        return single_P[part_UL], needs_PM[part_UL]

    everywhere_T = (span_T == problem.num_ranks) & (span_T > 1)
    single_UD, storage_UDM = asked(everywhere_T.nonzero()[0], problem.num_ranks)
    load_D += single_UD.sum(0)
    free_DM -= storage_UDM.sum(0)
    if not has_room(problem.limits_DM.numpy() - free_DM, problem.limits_DM.numpy()).all():
        return None
    for span in sorted({*span_T[(span_T > 1) & ~everywhere_T].tolist()}, reverse=True):
        tables = (span_T == span).nonzero()[0]
        single_UL, storage_ULM = asked(tables, span)
        table_U, unit_U = tables.repeat(units_T[tables]), counted_up(np.zeros_like(tables), units_T[tables])
        free_NLM, load_NL = free_DM.reshape(-1, *storage_ULM.shape[1:]), load_D.reshape(-1, span)  # views
        for unit in np.lexsort((unit_U, table_U, -single_UL.sum(1))).tolist():
            single_L, need_LM, table, index = single_UL[unit], storage_ULM[unit], table_U[unit], unit_U[unit]
            peak_N = (load_NL + single_L).max(1)
            position = int(peak_N.argmin())
            # The quicker question first.
            if not (need_LM <= free_NLM[position]).all() and not has_room(need_LM, free_NLM[position]).all():
                fits_N = has_room(need_LM, free_NLM).all(-1)
                position = int(np.where(fits_N, peak_N, np.inf).argmin())
                if not fits_N[position]:
                    return None
            positions[table][index] = position
            load_NL[position] += single_L
            free_NLM[position] -= need_LM
    return Sharding(tuple(options), tuple(map(tuple, positions)))


def place_units(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Place the units of chosen options: wide ones first, then those of span 1 from heavy to light.

    Heavy is by compute, or by compute and exchanges, whichever ends cheaper. If that dead-ends, units go from large to
    small, or are packed by size alone. None if memory allows none of that.
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
    if assignment_S is None:
        assignment_S = best_fit(problem)
    return None if assignment_S is None else chosen.placed(assignment_S)


def packed_start(problem: Problem) -> Sharding | None:
    """Find a sharding within memory, table by table; None if one table finds no room.

    Tables whose smallest possible part is largest come first. Each takes the option and positions that leave memory
    least and most evenly used.
    """
    # Bytes as shares of the roomiest rank.
    roomiest_M = problem.limits_DM.amax(0).double().clamp_min(1e-3)
    share_PM = problem.needs_PM / roomiest_M
    largest_P = share_PM.amax(-1)

    def least_largest(table: int) -> float:
        return min(float(largest_P[option.parts].max()) for option in problem.tables[table])

    used_DM = torch.zeros_like(problem.limits_DM)
    options = [0] * problem.num_tables
    positions: list[tuple[int, ...]] = [()] * problem.num_tables
    for table in sorted(range(problem.num_tables), key=lambda table: (-least_largest(table), table)):
        tried = enumerate(_packed(problem, option, used_DM, roomiest_M) for option in problem.tables[table])
        laid = {index: one for index, one in tried if one is not None}
        if not laid:
            return None
        options[table] = min(laid, key=lambda index: (float((laid[index][0] / roomiest_M).square().sum()), index))
        used_DM, positions[table] = laid[options[table]]
    return Sharding(tuple(options), tuple(positions))


def _packed(
    problem: Problem, option: Option, used_DM: Tensor, roomiest_M: Tensor
) -> tuple[Tensor, tuple[int, ...]] | None:
    """Place each unit where it adds least to the sum of squares of used shares: bytes used [D, M] and positions."""
    used_DM, positions = used_DM.clone(), []
    for need_LM in problem.needs_PM[option.part_UL]:
        used_NLM = used_DM.view(-1, option.span, used_DM.shape[1])
        share_NLM = used_NLM / roomiest_M
        added_N = ((share_NLM + need_LM / roomiest_M).square() - share_NLM.square()).sum((-1, -2))
        free_NLM = (problem.limits_DM - used_DM).view_as(used_NLM)
        position, found = best_position(added_N, need_LM, free_NLM)
        if not found:
            return None
        positions.append(int(position))
        used_NLM[position] += need_LM
    return used_DM, tuple(positions)
