# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placements of one problem side by side, with the sums that make a change of one cheap.

Shapes: S shards, D devices, G fused groups, C all-to-alls, H latent channels, M kinds of memory, B placements.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from dreamshard_planner.cost.model import PlacementCost

DIGITS = 5
"""Costs are compared after rounding to this many digits relative to the starting cost."""

Costs = TypeVar("Costs", Tensor, float)


def in_steps(cost_ms: Costs, unit: float) -> Costs:
    """Costs as they are compared: in whole steps, of which the unit has 10 to the power of :data:`DIGITS`."""
    steps = cost_ms / unit * 10**DIGITS
    return steps.round() if isinstance(steps, Tensor) else float(round(steps))


def rounded(cost_ms: Tensor, unit: float) -> Tensor:
    """The same in units."""
    return in_steps(cost_ms, unit) / 10**DIGITS


def ordered(overall_X: Tensor, square_X: Tensor) -> Tensor:
    """What orders changes: the cost after them in whole steps, and among equals the sum of squares of the ranks'."""
    return overall_X + square_X / (square_X.max() * 2).clamp_min(1e-30)


class PlacementStates:
    """Placements of one problem, and their sums per device."""

    def __init__(self, cost: PlacementCost, assignment_BS: Tensor) -> None:
        self.cost, self.problem = cost, cost.problem
        self.assignment_BS = assignment_BS.clone()
        self.latent_BDGH = cost.group_latents(assignment_BS)
        self.group_ms_BDG = cost.compute.group_cost_ms(self.latent_BDGH).sum(-1)
        self.glance_ms_BDG = self.glance(self.latent_BDGH)
        self.bytes_BCD = cost.output_bytes(assignment_BS)
        self.free_BDM = self.problem.capacity_DM - self.problem.used_bytes(assignment_BS)
        self._member_GS = self.problem.group_S == torch.arange(self.problem.num_groups)[:, None]
        bytes_S, collective_S = self.problem.output_bytes_S, self.problem.collective_S
        if collective_S is None:
            self._bytes_SC = bytes_S[:, None]
        else:
            self._bytes_SC = bytes_S[:, None] * (collective_S[:, None] == torch.arange(self.problem.num_collectives))

    def glance(self, latent_XH: Tensor) -> Tensor:
        """Forward + backward at a glance, [...]."""
        return self.cost.compute.glance_ms(latent_XH).sum(-1)

    @property
    def device_ms_BD(self) -> Tensor:
        return self.group_ms_BDG.sum(-1)

    def overall_ms_B(self) -> Tensor:
        collective_B, backward_B = self.cost.collectives_ms(self.bytes_BCD)
        return self.device_ms_BD.amax(-1) + collective_B + backward_B

    def replace(self, row_X: Tensor, assignment_XS: Tensor) -> None:
        """Let other placements take the place of some."""
        others = PlacementStates(self.cost, assignment_XS)
        for name in ("assignment_BS", "latent_BDGH", "group_ms_BDG", "glance_ms_BDG", "bytes_BCD", "free_BDM"):
            getattr(self, name)[row_X] = getattr(others, name)

    def refresh(self, row_X: Tensor, device_X: Tensor) -> None:
        """Take the sums of some devices afresh: differences would add up rounding errors."""
        problem = self.problem
        here_XS = self.assignment_BS[row_X] == device_X[:, None]
        here_XGS = here_XS[:, None] & self._member_GS
        self.latent_BDGH[row_X, device_X] = here_XGS.to(self.cost.latent_SH.dtype) @ self.cost.latent_SH
        if self.cost.preload is not None:
            self.latent_BDGH[row_X, device_X] += self.cost.preload.latent_DGH[device_X]
        self.bytes_BCD[row_X, :, device_X] = here_XS.to(problem.output_bytes_S.dtype) @ self._bytes_SC
        used_XM = torch.where(here_XS[..., None], problem.storage_SM, 0).sum(1)
        self.free_BDM[row_X, device_X] = problem.capacity_DM[device_X] - used_XM
        latent_XGH = self.latent_BDGH[row_X, device_X]
        self.group_ms_BDG[row_X, device_X] = self.cost.compute.group_cost_ms(latent_XGH).sum(-1)
        self.glance_ms_BDG[row_X, device_X] = self.glance(latent_XGH)
