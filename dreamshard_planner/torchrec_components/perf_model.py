# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``PerfModel``: rates whole plans by the predicted overall cost of fused groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.distributed.planner.types import PerfModel, ShardingOption

from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.planning.context import WithContext
from dreamshard_planner.support.torch_state import neutral, single_thread

TIE_WEIGHT = 1e-6
"""Of two proposals with equally slow bottlenecks TorchRec keeps the first, even if it moves tables to slower memory on
the other ranks for nothing; this decides such ties."""


class DreamShardPerfModel(WithContext, PerfModel):
    """Rates plans by ``max over ranks of (forward + backward) + collectives``, in milliseconds. Arguments are those of
    :class:`~dreamshard_planner.planning.context.WithContext`."""

    @neutral()
    @torch.no_grad()
    def costs(self, plan: Sequence[ShardingOption]) -> PlacementCosts:
        """Costs of one plan (B = 1) whose shards have ranks.

        Raises:
            PlannerError: where it can't be rated: an unpriced kernel, tables that depend on others, impossible ranks.
        """
        with single_thread():
            return self._context.rated(plan)

    @neutral()
    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted overall cost in milliseconds, and a millionth of what all ranks compute; lower is better."""
        costs = self.costs(plan)
        return float(costs.overall_ms_B[0] + TIE_WEIGHT * costs.device_ms_BD.sum())
