# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``ShardEstimator`` and ``PerfModel`` by our costs: of single shards, and of whole plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    PerfModel,
    ShardEstimator,
    ShardingOption,
    Topology,
)

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.problem import PlacementCosts
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.search_space.kernels import is_known
from dreamshard_planner.search_space.options import set_perf
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics

TIE_WEIGHT = 1e-6
"""Weight of the compute of all ranks, which decides between plans with equally slow bottlenecks. TorchRec keeps the
first of them, even if it moves tables to slower memory for nothing."""


class _Rating:
    """Arguments of a component that rates options, alone or as part of a planner.

    Args:
        topology: the ranks.
        constraints: per table, as TorchRec's estimators take them.
        statistics: per feature; they take precedence over the constraints' pooling factors.
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
        context: PlanRater | None = None,
    ) -> None:
        self._context = context or PlanRater.of(topology, constraints, statistics, checkpoint)


class DreamShardEstimator(_Rating, ShardEstimator):
    """Sets ``shard.perf`` to the milliseconds of each shard alone on its rank."""

    @neutral()
    @torch.no_grad()
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_map: Mapping[str, object] | None = None,  # TorchRec 1.6
        sharder_data_map: Mapping[str, object] | None = None,  # TorchRec 1.7 and later
    ) -> None:
        """Set the perf of every shard, except of unknown kernels, which keep their price.

        Raises:
            PlannerError: an option cannot be rated.
        """
        if not sharding_options:
            return
        read = self._context.read(sharding_options, with_storage=False)
        cost, collectives = self._context.cost(read), read.problem.collectives
        forward_C, backward_C = collectives.alone_ms_per_byte()
        compute_P2 = cost.compute.group_cost_ms(cost.latent_PH)
        comms_P2 = torch.stack([read.problem.bytes_PC @ forward_C, read.problem.bytes_PC @ backward_C], dim=-1)
        perf_P = [
            Perf(fwd_compute=forward, fwd_comms=forward_comms, bwd_compute=backward, bwd_comms=backward_comms)
            for (forward, backward), (forward_comms, backward_comms) in zip(
                compute_P2.tolist(), comms_P2.tolist(), strict=True
            )
        ]
        for options, choices in zip(read.options, read.problem.tables, strict=True):
            for option, choice in zip(options, choices, strict=True):
                if is_known(option.compute_kernel):
                    set_perf(option, [perf_P[part] for part in choice.parts])


class DreamShardPerfModel(_Rating, PerfModel):
    """Rates plans by ``max over ranks of (forward + backward) + collectives``, in milliseconds."""

    @neutral()
    @torch.no_grad()
    def costs(self, plan: Sequence[ShardingOption]) -> PlacementCosts:
        """Return the costs of one plan (B = 1) whose shards have ranks.

        Raises:
            PlannerError: an unpriced kernel, tables that depend on others, or impossible ranks.
        """
        with single_thread():
            return self._context.rated(plan).costs

    @neutral()
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the overall cost in milliseconds, plus :data:`TIE_WEIGHT` of the compute of all ranks."""
        costs = self.costs(plan)
        return float(costs.overall_ms_B[0] + TIE_WEIGHT * costs.device_ms_BD.sum())
