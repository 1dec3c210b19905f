# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``ShardEstimator`` and ``EmbeddingEnumerator`` with learned costs of single shards."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.ambient import neutral
from dreamshard_planner.checkpoint import Checkpoint, resolve
from dreamshard_planner.plugin.options import OptionReader, collective_model
from dreamshard_planner.workload.statistics import TableStatistics


class DreamShardEstimator(ShardEstimator):
    """Fills ``shard.perf`` with what each table-wise shard would cost alone, in milliseconds.

    Args:
        topology: the devices.
        constraints: per table, as TorchRec's estimators take them.
        statistics: per feature; precedence over the constraints' pooling factors.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoint.Checkpoint`.
        reader: shared by the seams of one planner; made from the other arguments by default.
    """

    @neutral()
    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
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
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_map: Mapping[str, object] | None = None,  # TorchRec 1.6
        sharder_data_map: Mapping[str, object] | None = None,  # TorchRec 1.7 and later
    ) -> None:
        """Set the perf of every shard; raises ``PlannerError`` for options that are not table-wise."""
        if not sharding_options:
            return
        problem = self._reader.problem(sharding_options, self._topology, with_storage=False)
        cost_S2 = self._compute.group_cost_ms(self._compute.encode(problem.features_SF).double())
        wire_S = problem.output_bytes_S * (self._topology.world_size - 1)
        comms_S = wire_S * self._collectives.ms_per_byte
        for option, (forward, backward), comms in zip(
            sharding_options, cost_S2.tolist(), comms_S.tolist(), strict=True
        ):
            option.shards[0].perf = Perf(fwd_compute=forward, fwd_comms=comms, bwd_compute=backward, bwd_comms=comms)


class TableWiseEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator for constraints made by
    :func:`~dreamshard_planner.plugin.options.table_wise_constraints`, with learned perf and TorchRec's storage.

    It gives every option one pooling factor per feature before anything is estimated.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        reader: OptionReader,
        checkpoint: Checkpoint,
    ) -> None:
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            estimator=[
                DreamShardEstimator(topology, constraints, checkpoint=checkpoint, reader=reader),
                EmbeddingStorageEstimator(topology=topology, constraints=constraints),
            ],
        )
        self._reader = reader

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """See ``torchrec.distributed.planner.types.Enumerator``."""
        for option in sharding_options:
            option.input_lengths = self._reader.pooling_factors(option)
        super().populate_estimates(sharding_options)


class TorchRecEstimate:
    """TorchRec's own perf estimates for options, whatever version is installed."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        sharders: Sequence[ModuleSharder[nn.Module]],
    ) -> None:
        self._estimator = EmbeddingPerfEstimator(topology=topology, constraints=constraints)
        live = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        if "sharder_data_map" in inspect.signature(EmbeddingPerfEstimator.estimate).parameters:
            self._arguments = {"sharder_data_map": build_sharder_data_map(live)}
        else:
            self._arguments = {"sharder_map": live}

    def __call__(self, sharding_options: list[ShardingOption]) -> None:
        """Set the perf of every shard, in place."""
        self._estimator.estimate(sharding_options, **self._arguments)
