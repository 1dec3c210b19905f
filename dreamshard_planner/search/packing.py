# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fitting shards into memory where policy and heuristics dead-end: best fit, then an exact packing.

Shapes: S shards, D ranks, M limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Problem, has_room
from dreamshard_planner.search.exact import solve

PACKING_SECONDS = 5.0
"""Limit of the exact solver."""


@dataclass(frozen=True)
class Packing:
    """A feasible placement, or why there is none."""

    assignment_S: Tensor | None
    proven: bool
    """Whether infeasibility was proven; False where the solver ran out of time."""


def pack(problem: Problem, seconds: float = PACKING_SECONDS) -> Packing:
    """Any placement within memory: best fit decreasing first, scipy's MILP for so many seconds where that fails."""
    assignment_S = best_fit(problem)
    if assignment_S is not None:
        return Packing(assignment_S, True)
    if not seconds > 0:
        return Packing(None, False)
    exact = solve(problem, seconds)
    return Packing(exact.assignment_S, exact.assignment_S is not None or math.isinf(exact.bound_ms))


def largest_first(problem: Problem) -> Tensor:
    """Shards in descending order of the share that they need of what all need, of the limit where it is
    largest, int64 [S]."""
    unit_M = problem.needs_PM.sum(0).clamp_min(1).double()
    return torch.argsort(-(problem.needs_PM / unit_M).amax(-1), stable=True)


def best_fit(problem: Problem) -> Tensor | None:
    """Largest shards first, each where the least is left over."""
    free_DM, need_SM = problem.limits_DM.clone(), problem.needs_PM
    unit_M = need_SM.sum(0).clamp_min(1).double()
    assignment_S = torch.zeros(problem.num_parts, dtype=torch.int64)
    for shard in largest_first(problem).tolist():
        left_DM = free_DM - need_SM[shard]
        fits_D = has_room(need_SM[shard], free_DM)
        if not fits_D.any():
            return None
        slack_D = (left_DM.clamp_min(0) / unit_M).sum(-1).masked_fill(~fits_D, torch.inf)
        assignment_S[shard] = int(slack_D.argmin())
        free_DM[assignment_S[shard]] = left_DM[assignment_S[shard]]
    return assignment_S
