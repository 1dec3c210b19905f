# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fitting shards into memory where policy and rules dead-end: best fit, then an exact packing.

Shapes: S shards, D devices, M kinds of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.model import PlacementProblem

PACKING_SECONDS = 5.0
"""Limit of the exact solver."""
MAX_VARIABLES = 200_000
"""Shards x devices above which the exact solver would not finish in its time."""


@dataclass(frozen=True)
class Packing:
    """A feasible placement, or why there is none."""

    assignment_S: Tensor | None
    proven: bool
    """Whether infeasibility was proven; False where the solver ran out of time."""


def pack(problem: PlacementProblem, seconds: float = PACKING_SECONDS) -> Packing:
    """Any placement within memory: best fit decreasing first, scipy's MILP where that fails."""
    assignment_S = _best_fit(problem)
    if assignment_S is not None:
        return Packing(assignment_S, True)
    if problem.num_shards * problem.num_devices > MAX_VARIABLES:
        return Packing(None, False)
    return _exact(problem, seconds)


def _best_fit(problem: PlacementProblem) -> Tensor | None:
    """Largest shards first, each where the least is left over."""
    free_DM = problem.capacity_DM.clone()
    need_SM = problem.storage_SM
    unit_M = need_SM.sum(0).clamp_min(1).double()
    assignment_S = torch.zeros(problem.num_shards, dtype=torch.int64)
    for shard in torch.argsort(-(need_SM / unit_M).amax(-1), stable=True).tolist():
        left_DM = free_DM - need_SM[shard]
        fits_D = ((left_DM >= 0) | (need_SM[shard] == 0)).all(-1)
        if not fits_D.any():
            return None
        slack_D = (left_DM.clamp_min(0) / unit_M).sum(-1).masked_fill(~fits_D, torch.inf)
        assignment_S[shard] = int(slack_D.argmin())
        free_DM[assignment_S[shard]] = left_DM[assignment_S[shard]]
    return assignment_S


def _exact(problem: PlacementProblem, seconds: float) -> Packing:
    """Zero-one program: each shard on one device, every kind of memory of every device within its capacity."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import identity, kron

    shards, devices = problem.num_shards, problem.num_devices
    need_SM, capacity_DM = problem.storage_SM.numpy(), problem.capacity_DM.numpy()
    allowed_SD = ((need_SM[:, None] <= capacity_DM[None]) | (need_SM[:, None] == 0)).all(-1)
    # Variable x[s, d] at s * devices + d.
    constraints = [LinearConstraint(kron(identity(shards), np.ones((1, devices))), 1, 1)]
    for need_S, capacity_D in zip(need_SM.T, capacity_DM.T, strict=True):
        unit = max(1, int(need_S.max()))
        usage = kron(need_S[None] / unit, identity(devices))
        constraints.append(LinearConstraint(usage.tocsr(), -np.inf, np.maximum(capacity_D, 0) / unit))
    solution = milp(
        np.zeros(shards * devices),
        integrality=np.ones(shards * devices),
        bounds=Bounds(0, allowed_SD.astype(float).ravel()),
        constraints=constraints,
        options={"time_limit": seconds},
    )
    if solution.x is None:
        return Packing(None, solution.status == 2)
    assignment_S = torch.from_numpy(solution.x.reshape(shards, devices).argmax(-1))
    # The solver works in floating point to a tolerance; bytes are exact.
    return Packing(assignment_S, True) if bool(problem.fits(assignment_S[None])) else Packing(None, False)


def shortage(problem: PlacementProblem, memory_names: tuple[str, ...]) -> str:
    """Which table does not fit and how many bytes are missing, for the error that a user reads."""
    need_SM, capacity_DM = problem.storage_SM, problem.capacity_DM
    fits_SD = ((need_SM[:, None] <= capacity_DM[None]) | (need_SM[:, None] == 0)).all(-1)
    homeless_S = (~fits_SD.any(-1)).nonzero()[:, 0].tolist()
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
    total_M, room_M = need_SM.sum(0), capacity_DM.clamp_min(0).sum(0)
    largest = int(need_SM.double().sum(-1).argmax())
    for kind, name in enumerate(memory_names):
        if total_M[kind] > room_M[kind]:
            lines.append(
                f"all tables together need {int(total_M[kind]):,} bytes of {name}, the {problem.num_devices} ranks "
                f"have {int(room_M[kind]):,}: {int(total_M[kind] - room_M[kind]):,} bytes are missing"
            )
    return "; ".join(lines) + (f" (largest table: {problem.names[largest]!r})" if lines else "")
