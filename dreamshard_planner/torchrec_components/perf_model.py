# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``PerfModel``: rates whole plans by the predicted overall cost of fused groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torchrec.distributed.planner.types import ParameterConstraints, PerfModel, ShardingOption, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics

TIE_WEIGHT = 1e-6
"""Of two proposals with equally slow bottlenecks TorchRec keeps the first, even if it moves tables to slower memory on
the other ranks for nothing; this decides such ties."""


class DreamShardPerfModel(PerfModel):
    """Rates plans by ``max over ranks of (forward + backward) + collectives``, in milliseconds.

    Args:
        topology: the ranks.
        constraints: per table, as in
            :class:`~dreamshard_planner.torchrec_components.partitioner.DreamShardPartitioner`.
        statistics: workload statistics per feature.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoints.checkpoint.Checkpoint`.
        context: shared by the components of one planner; made from the other arguments by default.
    """

    @neutral()
    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        context: PlanningContext | None = None,
    ) -> None:
        self._context = context or PlanningContext.of(topology, constraints, statistics, checkpoint)

    @neutral()
    @torch.no_grad()
    def costs(self, plan: Sequence[ShardingOption]) -> PlacementCosts:
        """Costs of one plan (B = 1) whose shards have ranks.

        Raises:
            PlannerError: where it can't be rated: an unknown kernel, tables that depend on others, impossible ranks.
        """
        with single_thread():
            read = self._context.read(plan, with_storage=False)
            return self._context.cost(read).rate(read.sharding(plan))

    @neutral()
    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted overall cost in milliseconds, and a millionth of what all ranks compute; lower is better."""
        costs = self.costs(plan)
        return float(costs.overall_ms_B[0] + TIE_WEIGHT * costs.device_ms_BD.sum())
