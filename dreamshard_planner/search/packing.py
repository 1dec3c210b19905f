# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fitting shards into memory where heuristics dead-end: best fit, then a zero-one program for scipy's MILP solver.

Shapes: S shards, D ranks, V = S x D variables, M limits.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import identity, kron
from torch import Tensor

from dreamshard_planner.cost.problem import Problem, has_room
from dreamshard_planner.search.effort import portion

MARGINS = (0.0, 1e-5)
"""Shares of the memory kept free. The solver works in floating point to a tolerance, bytes are exact: where a first
plan is a few bytes too large, a second one is made with that margin."""
INFEASIBLE_STATUS = 2
PACKED_VARIABLES = 100_000
"""Shards x ranks above which packing does without the solver: its first node alone would take minutes."""
NODES_X_VARIABLES = 1_000_000
"""Limit of the solver: a few seconds, up to 5,000 variables. It is a count, so that the same placement is found at any
speed."""
CAPPED_SECONDS = 5.0
"""Seconds that packing may take at least, however short the user's cap: without a placement there is no plan."""


def pack(problem: Problem, effort: float = 1.0, seconds: float | None = None) -> tuple[Tensor | None, bool]:
    """Any placement within memory, by best fit decreasing, or by the solver; or None, and whether it is proven that
    there is none.

    Args:
        problem: the task.
        effort: multiple of the default's nodes of the solver; best fit alone with 0.
        seconds: the user's cap; None for none.
    """
    assignment_S = best_fit(problem)
    if assignment_S is not None:
        return assignment_S, True
    variables = problem.num_parts * problem.num_ranks
    if variables > min(1.0, effort) * PACKED_VARIABLES:
        return None, False
    options: dict[str, float] = {"node_limit": portion(max(1, NODES_X_VARIABLES // variables), effort)}
    if seconds is not None:
        options["time_limit"] = max(seconds, CAPPED_SECONDS)
    return _solved(problem, options)


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


def _solved(problem: Problem, options: dict[str, float]) -> tuple[Tensor | None, bool]:
    """:func:`pack` by the solver within some of its limits. Variable s * D + d says that shard s is on rank d."""
    shards, ranks = problem.num_parts, problem.num_ranks
    need_SM, limits_DM = problem.needs_PM.numpy(), problem.limits_DM.numpy()
    allowed_SD = has_room(need_SM[:, None], limits_DM)
    one_rank_SV = kron(identity(shards), np.ones((1, ranks)))
    for margin in MARGINS:
        constraints = [LinearConstraint(one_rank_SV, 1, 1)]
        for need_S, capacity_D in zip(need_SM.T, limits_DM.T, strict=True):
            unit = max(1, int(need_S.max()))
            room_D = np.maximum(capacity_D, 0) / unit * (1 - margin)
            constraints.append(LinearConstraint(kron(need_S[None] / unit, identity(ranks)), -np.inf, room_D))
        solution = milp(
            np.zeros(shards * ranks),
            integrality=np.ones(shards * ranks),
            bounds=Bounds(0, allowed_SD.astype(float).ravel()),
            constraints=constraints,
            options=options,
        )
        if solution.x is None:
            return None, margin == 0 and solution.status == INFEASIBLE_STATUS
        assignment_S = torch.from_numpy(solution.x.reshape(shards, ranks).argmax(-1))
        if bool(problem.fits(assignment_S[None])):
            return assignment_S, True
    return None, False
