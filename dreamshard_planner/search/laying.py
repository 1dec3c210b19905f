# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where units go: each to the position that is best of those with room.

Shapes: X units, D ranks, N positions, L span, M limits, T tables, P parts, S units of span 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Option, Problem, Sharding, counted_up, has_room
from dreamshard_planner.search.heuristics import greedy_by_score
from dreamshard_planner.search.packing import best_fit, largest_first


def best_position(
    key_XN: Tensor, need_XLM: Tensor, free_XNLM: Tensor, allowed_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """For units that are equally wide, the position with the lowest key of those with room, the first among equals.

    Args:
        key_XN: what is to be low, e.g. the peak that a unit would leave there.
        need_XLM: bytes that a unit needs on each rank of its span.
        free_XNLM: bytes that there are on each rank of a position.
        allowed_N: positions that it may take, bool; all by default.

    Returns:
        Position of each unit, int64 [X], and whether any has room, bool [X]. Leading dimensions X are free.
    """
    fits_XN = has_room(need_XLM[..., None, :, :], free_XNLM).all(-1)
    if allowed_N is not None:
        fits_XN &= allowed_N
    return key_XN.masked_fill(~fits_XN, torch.inf).argmin(-1), fits_XN.any(-1)


def lay_wide(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Positions for the units of chosen options that are pinned, or wider than a rank, the widest and heaviest first,
    each where the peak stays lowest; the others are on rank 0. None where memory does not allow it."""
    problem, every = cost.problem, cost.problem.option_rows
    # In numpy, whose calls cost a third of torch's: there is one unit after the other.
    single_P, needs_PM = cost.single_ms_P.numpy(), problem.needs_PM.numpy()
    row_T = every.rows(range(problem.num_tables), options)
    span_T, is_free_T = every.span_O[row_T], every.is_free_O[row_T]
    units_T = every.parts_O[row_T] // span_T
    positions = [[0] * units for units in units_T.tolist()]
    load_D, free_DM = np.zeros(problem.num_ranks), problem.limits_DM.numpy().copy()

    def asked(tables: np.ndarray, span: int) -> tuple[np.ndarray, np.ndarray]:
        """Milliseconds [U, L] and bytes [U, L, M] of all units of some tables."""
        part_UL = every.all_parts(row_T[tables]).reshape(-1, span)
        return single_P[part_UL], needs_PM[part_UL]

    everywhere_T = is_free_T & (span_T == problem.num_ranks) & (span_T > 1)
    single_UD, storage_UDM = asked(everywhere_T.nonzero()[0], problem.num_ranks)
    load_D += single_UD.sum(0)
    free_DM -= storage_UDM.sum(0)
    if not has_room(problem.limits_DM.numpy() - free_DM, problem.limits_DM.numpy()).all():
        return None
    wide_T = ~everywhere_T & ~(is_free_T & (span_T == 1))
    for is_free, minus_span in sorted(set(zip(is_free_T[wide_T].tolist(), (-span_T[wide_T]).tolist(), strict=True))):
        tables = (wide_T & (is_free_T == is_free) & (span_T == -minus_span)).nonzero()[0]
        single_UL, storage_ULM = asked(tables, -minus_span)
        table_U, unit_U = tables.repeat(units_T[tables]), counted_up(np.zeros_like(tables), units_T[tables])
        free_NLM, load_NL = free_DM.reshape(-1, *storage_ULM.shape[1:]), load_D.reshape(-1, -minus_span)  # views
        for unit in np.lexsort((unit_U, table_U, -single_UL.sum(1))).tolist():
            single_L, need_LM, table, index = single_UL[unit], storage_ULM[unit], table_U[unit], unit_U[unit]
            pinned = problem.tables[table][options[table]].pinned
            peak_N = (load_NL + single_L).max(1)
            position = int(peak_N.argmin()) if pinned is None else pinned[index]
            # The quicker question first: there is enough even of what is not needed.
            if not (need_LM <= free_NLM[position]).all() and not has_room(need_LM, free_NLM[position]).all():
                fits_N = has_room(need_LM, free_NLM).all(-1)
                position = int(np.where(fits_N, peak_N, np.inf).argmin())
                if pinned is not None or not fits_N[position]:
                    return None
            positions[table][index] = position
            load_NL[position] += single_L
            free_NLM[position] -= need_LM
    return Sharding(tuple(options), tuple(map(tuple, positions)))


def lay(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Positions for chosen options: wide units first, then those of span 1 from heavy to light, by what they compute or
    by what they compute and exchange, whichever is cheaper; from large to small where that dead-ends, or packed by size
    alone. None where memory allows none of that."""
    sharding = lay_wide(cost, options)
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
    """A sharding within memory, found table by table; None where one table finds no room.

    A table's largest part depends on its option; tables that even at their best have the largest come first. Each takes
    the option, and lies where memory is then used least and most evenly.
    """
    # Bytes as shares of what the roomiest rank has. A memory that no rank has is too small for anything.
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
    """Bytes used on every rank [D, M], and positions, once every unit of an option lies where it adds least to the sum
    of the squares of used shares; None where one finds no room."""
    used_DM, positions = used_DM.clone(), []
    for index, unit in enumerate(option.units):
        need_LM = problem.needs_PM[list(unit.parts)]
        used_NLM = used_DM.view(-1, unit.span, used_DM.shape[1])
        share_NLM = used_NLM / roomiest_M
        added_N = ((share_NLM + need_LM / roomiest_M).square() - share_NLM.square()).sum((-1, -2))
        free_NLM = (problem.limits_DM - used_DM).view_as(used_NLM)
        allowed_N = None if option.pinned is None else torch.arange(len(added_N)) == option.pinned[index]
        position, found = best_position(added_N, need_LM, free_NLM, allowed_N)
        if not found:
            return None
        positions.append(int(position))
        used_NLM[position] += need_LM
    return used_DM, tuple(positions)
