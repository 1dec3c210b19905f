# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding that fits, where memory alone is hard: bytes decide, and no costs.

Shapes: D ranks, N positions, L span, M limits, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Option, Problem, Sharding
from dreamshard_planner.search.laying import best_position, pinned_to


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
        tried = enumerate(_lay(problem, option, used_DM, roomiest_M) for option in problem.tables[table])
        laid = {index: one for index, one in tried if one is not None}
        if not laid:
            return None
        options[table] = min(laid, key=lambda index: (float((laid[index][0] / roomiest_M).square().sum()), index))
        used_DM, positions[table] = laid[options[table]]
    return Sharding(tuple(options), tuple(positions))


def _lay(
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
        position, found = best_position(added_N, need_LM, free_NLM, pinned_to(option, index, problem.num_ranks))
        if not found:
            return None
        positions.append(int(position))
        used_NLM[position] += need_LM
    return used_DM, tuple(positions)
