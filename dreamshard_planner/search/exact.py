# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fitting shards into memory where policy and heuristics dead-end: best fit, then placement as a zero-one program for
scipy's MILP solver, which also finds the least additive cost.

Shapes: S shards, D ranks, V = S x D variables, M limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_array, hstack, identity, kron
from torch import Tensor

from dreamshard_planner.cost.problem import Problem, has_room
from dreamshard_planner.search.effort import portion

MAX_VARIABLES = 200_000
"""Shards x ranks above which the solver would not finish in any time that a planner has."""
RELATIVE_GAP = 1e-3
"""The solver stops when its plan is proven to be this close to the optimum."""
MARGINS = (0.0, 1e-5)
"""Shares of the memory kept free. The solver works in floating point to a tolerance, bytes are exact: where a first
plan is a few bytes too large, a second one is made with that margin."""
INFEASIBLE_STATUS = 2
PACKED_VARIABLES = 100_000
"""Shards x ranks above which packing does without the solver: its first node alone would take minutes."""
NODES_X_VARIABLES = 1_000_000
"""Limit of the solver where any placement will do: a few seconds, up to 5,000 variables. It is a count, so that the
same placement is found at any speed."""
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
    nodes = portion(max(1, NODES_X_VARIABLES // variables), effort)
    exact = solve(problem, None if seconds is None else max(seconds, CAPPED_SECONDS), nodes=nodes)
    return exact.assignment_S, exact.assignment_S is not None or math.isinf(exact.bound_ms)


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


@dataclass(frozen=True)
class ExactPlan:
    """What the solver found in its time."""

    assignment_S: Tensor | None
    cost_ms: float
    """Summed cost of the busiest rank; infinite where no plan was found."""
    bound_ms: float
    """No plan costs less than this: proven. Infinite where there is no plan at all."""


def solve(
    problem: Problem, seconds: float | None, cost_ms_S: Tensor | None = None, nodes: int | None = None
) -> ExactPlan:
    """The placement within memory whose busiest rank has the least *summed* cost, and the proven bound.

    What kernels cost when fused is not additive; this is the best that a planner without that knowledge can do.

    Args:
        problem: the task.
        seconds: limit of the solver; None for none.
        cost_ms_S: milliseconds of each shard; without, any placement within memory will do.
        nodes: limit of the solver, in nodes of its search tree; None for none.
    """
    shards, ranks = problem.num_parts, problem.num_ranks
    if shards * ranks > MAX_VARIABLES:
        return ExactPlan(None, math.inf, 0.0)
    cost_S = (torch.zeros(shards) if cost_ms_S is None else cost_ms_S).double()
    bound_ms = 0.0
    for margin in MARGINS:
        solution = _milp(problem, cost_S.numpy(), {"time_limit": seconds, "node_limit": nodes}, margin)
        if margin == 0:  # a bound with less memory than there is would be none
            infeasible = solution.status == INFEASIBLE_STATUS
            bound_ms = math.inf if infeasible else float(solution.mip_dual_bound or 0.0)
        if solution.x is None:
            return ExactPlan(None, math.inf, bound_ms)
        assignment_S = torch.from_numpy(solution.x[:-1].reshape(shards, ranks).argmax(-1))
        if bool(problem.fits(assignment_S[None])):
            load_D = torch.zeros(ranks, dtype=torch.float64).index_add_(0, assignment_S, cost_S)
            return ExactPlan(assignment_S, float(load_D.max()), bound_ms)
    return ExactPlan(None, math.inf, bound_ms)


def _milp(problem: Problem, cost_S: np.ndarray, limits: Mapping[str, float | None], margin: float) -> OptimizeResult:
    """Variable s * D + d says that shard s is on rank d; the last one is the load of the busiest rank."""
    shards, ranks = problem.num_parts, problem.num_ranks
    need_SM, limits_DM = problem.needs_PM.numpy(), problem.limits_DM.numpy()
    allowed_SD = has_room(need_SM[:, None], limits_DM)
    one_rank_SV = kron(identity(shards), np.ones((1, ranks)))
    constraints = [LinearConstraint(_with_load(one_rank_SV, 0), 1, 1)]
    for need_S, capacity_D in zip(need_SM.T, limits_DM.T, strict=True):
        unit = max(1, int(need_S.max()))
        used_DV = kron(need_S[None] / unit, identity(ranks))
        room_D = np.maximum(capacity_D, 0) / unit * (1 - margin)
        constraints.append(LinearConstraint(_with_load(used_DV, 0), -np.inf, room_D))
    if cost_S.any():
        load_DV = kron(cost_S[None], identity(ranks))
        constraints.append(LinearConstraint(_with_load(load_DV, -1), -np.inf, 0))
    return milp(
        np.append(np.zeros(shards * ranks), 1.0),
        integrality=np.append(np.ones(shards * ranks), 0),
        # The busiest rank takes at least as long as the heaviest shard: a bound that the relaxed program lacks.
        bounds=Bounds(
            np.append(np.zeros(shards * ranks), cost_S.max(initial=0.0)),
            np.append(allowed_SD.astype(float).ravel(), np.inf),
        ),
        constraints=constraints,
        options={"mip_rel_gap": RELATIVE_GAP} | {name: limit for name, limit in limits.items() if limit is not None},
    )


def _with_load(matrix_XV: csr_array, weight: float) -> csr_array:
    return csr_array(hstack([matrix_XV, np.full((matrix_XV.shape[0], 1), float(weight))]))
