# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``PerfModel``: rates whole plans by the predicted overall cost of fused groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torchrec.distributed.planner.types import ParameterConstraints, PerfModel, ShardingOption, Topology

from dreamshard_planner.ambient import neutral
from dreamshard_planner.checkpoint import Checkpoint, resolve
from dreamshard_planner.cost.model import PlacementCost, PlacementCosts
from dreamshard_planner.plugin.options import OptionReader, collective_model
from dreamshard_planner.plugin.partitioner import single_thread
from dreamshard_planner.workload.statistics import TableStatistics

TIE_WEIGHT = 1e-6
"""Of two proposals with equally slow bottlenecks TorchRec keeps the first, even if it moves tables to slower memory on
the other ranks for nothing; this decides such ties."""


class DreamShardPerfModel(PerfModel):
    """Rates plans by ``max over ranks of (forward + backward) + collectives``, in milliseconds.

    Args:
        topology: the devices.
        constraints: per table, as in :class:`~dreamshard_planner.plugin.partitioner.DreamShardPartitioner`.
        statistics: workload statistics per feature.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoint.Checkpoint`.
        reader: shared by the seams of one planner; made from the other arguments by default.
    """

    @neutral()
    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        reader: OptionReader | None = None,
    ) -> None:
        self._topology = topology
        resolved = checkpoint if isinstance(checkpoint, Checkpoint) else resolve(checkpoint, topology.compute_device)
        self._compute = resolved.compute_cost(topology)
        self._collectives = collective_model(topology, resolved)
        self._reader = reader or OptionReader(constraints, statistics)

    @neutral()
    @torch.no_grad()
    def costs(self, plan: Sequence[ShardingOption]) -> PlacementCosts:
        """Costs of one plan (B = 1) whose shards have ranks; ``PlannerError`` unless all are table-wise."""
        with single_thread():
            problem = self._reader.problem(plan, self._topology, with_storage=False)
            ranks_BS = torch.tensor([[option.shards[0].rank for option in plan]], dtype=torch.int64)
            return PlacementCost(problem, self._compute, self._collectives).rate(ranks_BS)

    @neutral()
    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted overall cost in milliseconds, and a millionth of what all ranks compute; lower is better."""
        costs = self.costs(plan)
        return float(costs.overall_ms_B[0] + TIE_WEIGHT * costs.device_ms_BD.sum())
