# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fitting shards into memory where policy and rules dead-end: best fit, then an exact packing.

Shapes: S shards, D devices, M kinds of memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.model import PlacementProblem, has_room
from dreamshard_planner.cost.sharding import ShardingProblem
from dreamshard_planner.placement.exact import solve

PACKING_SECONDS = 5.0
"""Limit of the exact solver."""


@dataclass(frozen=True)
class Packing:
    """A feasible placement, or why there is none."""

    assignment_S: Tensor | None
    proven: bool
    """Whether infeasibility was proven; False where the solver ran out of time."""


def pack(problem: PlacementProblem, seconds: float = PACKING_SECONDS) -> Packing:
    """Any placement within memory: best fit decreasing first, scipy's MILP for so many seconds where that fails."""
    assignment_S = best_fit(problem)
    if assignment_S is not None:
        return Packing(assignment_S, True)
    if not seconds > 0:
        return Packing(None, False)
    exact = solve(problem, seconds)
    return Packing(exact.assignment_S, exact.assignment_S is not None or math.isinf(exact.bound_ms))


def largest_first(problem: PlacementProblem) -> Tensor:
    """Shards in descending order of the share that they need of what all need, of the kind of memory where it is
    largest, int64 [S]."""
    unit_M = problem.storage_SM.sum(0).clamp_min(1).double()
    return torch.argsort(-(problem.storage_SM / unit_M).amax(-1), stable=True)


def best_fit(problem: PlacementProblem) -> Tensor | None:
    """Largest shards first, each where the least is left over."""
    free_DM = problem.capacity_DM.clone()
    need_SM = problem.storage_SM
    unit_M = need_SM.sum(0).clamp_min(1).double()
    assignment_S = torch.zeros(problem.num_shards, dtype=torch.int64)
    for shard in largest_first(problem).tolist():
        left_DM = free_DM - need_SM[shard]
        fits_D = has_room(need_SM[shard], free_DM)
        if not fits_D.any():
            return None
        slack_D = (left_DM.clamp_min(0) / unit_M).sum(-1).masked_fill(~fits_D, torch.inf)
        assignment_S[shard] = int(slack_D.argmin())
        free_DM[assignment_S[shard]] = left_DM[assignment_S[shard]]
    return assignment_S


def shortage(problem: PlacementProblem, memory_names: tuple[str, ...]) -> str:
    """Which table does not fit and how many bytes are missing, for the error that a user reads."""
    need_SM, capacity_DM = problem.storage_SM, problem.capacity_DM
    fits_SD = has_room(need_SM[:, None], capacity_DM)
    # Of the slices of one table, the first.
    homeless = {problem.names[s]: s for s in reversed((~fits_SD.any(-1)).nonzero()[:, 0].tolist())}
    homeless_S = sorted(homeless.values())
    lines = []
    for shard in homeless_S[:5]:
        missing_DM = (need_SM[shard] - capacity_DM).clamp_min(0) * (need_SM[shard] > 0)
        device = int(missing_DM.sum(-1).argmin())
        for kind, name in enumerate(memory_names):
            if missing_DM[device, kind] > 0:
                lines.append(
                    f"table {problem.names[shard]!r} needs {int(need_SM[shard, kind]):,} bytes of {name}, the roomiest "
                    f"rank ({device}) has {max(0, int(capacity_DM[device, kind])):,}: "
                    f"{int(missing_DM[device, kind]):,} bytes are missing"
                )
    if len(homeless_S) > 5:
        lines.append(f"and {len(homeless_S) - 5} more tables fit on no rank")
    if lines:
        return "; ".join(lines)
    total_M, room_M = need_SM.sum(0).tolist(), total_room(problem)
    largest = int(need_SM.double().sum(-1).argmax())
    for kind, name in enumerate(memory_names):
        if total_M[kind] > room_M[kind]:
            lines.append(
                f"all tables together need {total_M[kind]:,} bytes of {name}, the {problem.num_devices} ranks "
                f"have {room_M[kind]:,}: {total_M[kind] - room_M[kind]:,} bytes are missing"
            )
    return "; ".join(lines) + (f" (largest table: {problem.names[largest]!r})" if lines else "")


def total_room(problem: PlacementProblem | ShardingProblem) -> list[int]:
    """Bytes that all devices have together, by kind of memory; sums that int64 need not hold."""
    return [sum(max(0, capacity) for capacity in device_D) for device_D in problem.capacity_DM.T.tolist()]
