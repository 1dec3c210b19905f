# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The additive baseline: a fused group costs a constant plus rates times its summed work.

Shapes: X sets, S shards, F features, P kinds of work, 2 = forward and backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamshard_planner.cost.problem import ComputeCost, CostSource
from dreamshard_planner.workload.tables import WORK, columns

if TYPE_CHECKING:
    from dreamshard_planner.cost.dataset import LabelledSets

MIN_MS = 1e-3


class LinearCost(ComputeCost):
    """Relative least squares on summed work."""

    def __init__(self, rates_P2: Tensor, constant_2: Tensor, detail: str) -> None:
        self.source = CostSource("linear", detail)
        self._rates_P2, self._constant_2 = rates_P2, constant_2

    @classmethod
    def fit(cls, train: LabelledSets) -> LinearCost:
        """Fit both outputs to measured sets, each set weighing the same relative error."""
        work_XP = train.sum(train.features_SF[:, columns(WORK)].double())
        design_XP = torch.cat([work_XP, torch.ones(len(train), 1, dtype=torch.float64)], dim=-1)
        unit_P = design_XP.mean(0).clamp_min(1e-9)
        solutions = []
        for output in range(2):
            label_X1 = train.labels_ms_X2[:, output, None].double()
            scaled = torch.linalg.lstsq(design_XP / unit_P / label_X1, torch.ones_like(label_X1), driver="gelsd")
            solutions.append(scaled.solution[:, 0] / unit_P)
        rates_P2 = torch.stack(solutions, dim=-1)
        return cls(rates_P2[:-1], rates_P2[-1], f"additive, fitted to {len(train)} sets")

    def encode(self, features_SF: Tensor) -> Tensor:
        """The work itself."""
        return features_SF[:, columns(WORK)].double()

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2]; nothing for an empty group."""
        cost_X2 = (latent_XH.double() @ self._rates_P2 + self._constant_2).clamp_min(MIN_MS)
        return torch.where(latent_XH[..., :1] > 0.5, cost_X2, 0.0)

    def shard_ms(self, features_SF: Tensor) -> Tensor:
        """Return what each shard adds to its group, forward + backward, [S]."""
        return (self.encode(features_SF) @ self._rates_P2).sum(-1).clamp_min(0.0)
