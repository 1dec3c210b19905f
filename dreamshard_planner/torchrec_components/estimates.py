# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``ShardEstimator`` and ``PerfModel`` by our costs: of single shards, and of whole plans with their fused
groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torchrec.distributed.planner.types import Perf, PerfModel, ShardEstimator, ShardingOption

from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.planning.context import WithContext
from dreamshard_planner.search_space.kernels import is_known
from dreamshard_planner.search_space.options import set_perf
from dreamshard_planner.support.torch_state import neutral, single_thread

TIE_WEIGHT = 1e-6
"""Of two proposals with equally slow bottlenecks TorchRec keeps the first, even if it moves tables to slower memory on
the other ranks for nothing; this decides such ties."""


class DreamShardEstimator(WithContext, ShardEstimator):
    """Fills ``shard.perf`` with what each shard would cost alone on its rank, in milliseconds. Arguments are those of
    :class:`~dreamshard_planner.planning.context.WithContext`."""

    @neutral()
    @torch.no_grad()
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_map: Mapping[str, object] | None = None,  # TorchRec 1.6
        sharder_data_map: Mapping[str, object] | None = None,  # TorchRec 1.7 and later
    ) -> None:
        """Set the perf of every shard, except of unknown kernels, which keep what prices them. Raises ``PlannerError``
        for options that can't be rated."""
        if not sharding_options:
            return
        read = self._context.read(sharding_options, with_storage=False)
        cost, collectives = self._context.cost(read), read.problem.collectives
        cost_P2 = cost.compute.group_cost_ms(cost.latent_PH)
        forward_C, backward_C = collectives.alone_ms_per_byte()
        comms_P2 = torch.stack([read.problem.bytes_PC @ forward_C, read.problem.bytes_PC @ backward_C], dim=-1)
        perf_P = [
            Perf(fwd_compute=forward, fwd_comms=forward_comms, bwd_compute=backward, bwd_comms=backward_comms)
            for (forward, backward), (forward_comms, backward_comms) in zip(
                cost_P2.tolist(), comms_P2.tolist(), strict=True
            )
        ]
        for options, choices in zip(read.options, read.problem.tables, strict=True):
            for option, choice in zip(options, choices, strict=True):
                if is_known(option.compute_kernel):
                    set_perf(option, [perf_P[part] for part in choice.parts])


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
