# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding that fits, where memory alone is hard: bytes decide, and no costs.

Shapes: D ranks, N positions, L span, M kinds of memory, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Option, Problem, Sharding


@dataclass(frozen=True)
class _Laid:
    """An option laid down."""

    fullness: float
    """Sum of the squares of all ranks' used shares of all memories: low where little is used, and evenly."""
    used_DM: Tensor
    """Shares, once it lies there."""
    positions: tuple[int, ...]


def packed_start(problem: Problem) -> Sharding | None:
    """Tables one after the other, those whose smallest possible largest part is largest first, each as the option and
    where it leaves memory least and most evenly used. None where one finds no room."""
    capacity_DM = problem.capacity_DM.double()
    # Shares of the roomiest rank: a memory that no rank has is too small for anything.
    share_PM = problem.storage_PM.double() / capacity_DM.amax(0).clamp_min(1e-3)
    room_DM = capacity_DM / capacity_DM.amax(0).clamp_min(1e-3)
    largest_P = share_PM.amax(-1)

    def largest(option: Option) -> float:
        return float(largest_P[option.parts].max())

    order = sorted(range(problem.num_tables), key=lambda table: (-min(map(largest, problem.tables[table])), table))
    used_DM = torch.zeros_like(room_DM)
    options = [0] * problem.num_tables
    positions: list[tuple[int, ...]] = [()] * problem.num_tables
    for table in order:
        laid = [_lay(option, share_PM, used_DM, room_DM) for option in problem.tables[table]]
        fitting = [index for index, one in enumerate(laid) if one is not None]
        if not fitting:
            return None
        index = min(fitting, key=lambda index: (laid[index].fullness, index))
        options[table], positions[table], used_DM = index, laid[index].positions, laid[index].used_DM
    return Sharding(tuple(options), tuple(positions))


def _lay(option: Option, share_PM: Tensor, used_DM: Tensor, room_DM: Tensor) -> _Laid | None:
    """Every unit where it adds least to the sum of squares; None where one finds no room."""
    used_DM, positions = used_DM.clone(), []
    for index, unit in enumerate(option.units):
        need_LM = share_PM[list(unit.parts)]
        before_NLM = used_DM.view(-1, unit.span, used_DM.shape[1])
        after_NLM = before_NLM + need_LM
        fits_N = ((after_NLM <= room_DM.view_as(after_NLM) + 1e-12) | (need_LM == 0)).all(-1).all(-1)
        if option.pinned is not None:
            fits_N &= torch.arange(len(fits_N)) == option.pinned[index]
        if not bool(fits_N.any()):
            return None
        added_N = (after_NLM.square() - before_NLM.square()).sum((-1, -2)).masked_fill(~fits_N, torch.inf)
        position = int(added_N.argmin())
        positions.append(position)
        used_DM[position * unit.span : (position + 1) * unit.span] += need_LM
    return _Laid(float(used_DM.square().sum()), used_DM, tuple(positions))
