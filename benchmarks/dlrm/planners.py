# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Planners of the DLRM benchmark, and what they plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import Partitioner, ShardingOption
from torchrec.distributed.types import ShardingPlan

from dlrm.node import Node
from dlrm.options import ONLY, OURS, WITHOUT, Config
from dreamshard_planner import Checkpoint, DreamShardPlanner, TableStatistics
from dreamshard_planner.search_space.sharding_types import DP
from dreamshard_planner.torchrec_components.partitioner import RulePartitioner
from dreamshard_planner.workload.tables import Table


@dataclass(frozen=True)
class Planned:
    """Plans by planner."""

    plans: dict[str, ShardingPlan]
    options: dict[str, list[ShardingOption]]
    """Of each plan, on the first rank."""
    told: dict[str, dict[str, Any]]
    """Of each plan, on the first rank: how long it took, ranks and splits of tables, and its predicted cost."""
    judge: DreamShardPlanner
    """Whose cost model predicts all of them."""


def plan_all(
    planners: dict[str, tuple[EmbeddingShardingPlanner, list[ShardingOption]]],
    fresh_model: Callable[[], nn.Module],
    sharders: Sequence[EmbeddingBagCollectionSharder],
    config: Config,
    node: Node,
) -> Planned:
    """Ask all planners, on all ranks."""
    judge = planners["dreamshard"][0]
    plans: dict[str, ShardingPlan] = {}
    told: dict[str, dict[str, Any]] = {}
    for name, (planner, options) in planners.items():
        start = time.perf_counter()
        plans[name] = planner.collective_plan(fresh_model(), sharders, dist.group.WORLD)
        if node.rank == 0:
            told[name] = {
                "plan_seconds": time.perf_counter() - start,
                "ranks": {option.name: [shard.rank for shard in option.shards] for option in options},
                "split": {o.name: o.sharding_type for o in options if o.sharding_type != "table_wise"},
                "predicted": judge.predict(options, name),
            }
    return Planned(plans, {name: options for name, (_, options) in planners.items()}, told, judge)


def make_planners(
    tables: Sequence[Table],
    batches: Sequence[Batch],
    config: Config,
    node: Node,
    more: Mapping[str, Checkpoint] = MappingProxyType({}),
) -> dict[str, tuple[EmbeddingShardingPlanner, list[ShardingOption]]]:
    """By name: the planner, and a list that holds its plan's options once it has planned.

    ``dreamshard`` is always there, and first; the others are TorchRec's planner with other parts or less knowledge. Of
    ``more``, ours with other checkpoints, by name.
    """

    def constraints(kinds: Sequence[str], informed: bool) -> dict[str, ParameterConstraints]:
        return {
            table.name: ParameterConstraints(
                list(kinds),
                ["fused", "dense"] if DP in kinds else ["fused"],
                min_partition=config.min_partition or None,
                **({"pooling_factors": [f.pooling_factor for f in table.features]} if informed else {}),
            )
            for table in tables
        }

    whole = constraints(["table_wise"], informed=True)
    statistics = TableStatistics.from_batches(batch.sparse_features for batch in batches)
    planners = {}
    for name in dict.fromkeys(("dreamshard", *config.names, *more)):
        options: list[ShardingOption] = []
        common = {
            "topology": node.topology(),
            "batch_size": config.batch_size,
            "constraints": constraints(config.kinds_of(name), informed=name != "torchrec_default"),
            "callbacks": [lambda plan, options=options: options.extend(plan) or plan],
        }
        if name in more or name in OURS or name.startswith((ONLY, WITHOUT)):
            ours = OURS.get(name, {}) | {"statistics": statistics, "seed": config.seed}
            ours |= {"checkpoint": more.get(name, config.checkpoint), "optimizers_attached": True}
            planner = DreamShardPlanner(**common, **ours)
        elif name.startswith("torchrec"):
            planner = EmbeddingShardingPlanner(**common)
        else:
            rule = RulePartitioner(name, whole)
            planner = EmbeddingShardingPlanner(**common | {"constraints": whole}, partitioner=rule)
        planners[name] = planner, options
    return planners


class SkewedPartitioner(Partitioner):
    """A placement that nobody would choose: tables in an arbitrary order, by rows or by lookups or by neither; the
    first of them on the first rank, the others spread over all ranks.

    The share of the first rank and the order's preference come from the seed: some placements are nearly balanced,
    others nearly all on one rank, some heavy there in forward and others in backward.
    """

    def __init__(self, tables: Sequence[Table], seed: int) -> None:
        generator = np.random.default_rng(seed)
        lookups = [sum(feature.pooling_factor for feature in table.features) for table in tables]
        traits = np.log1p([[table.rows for table in tables], lookups])
        traits = (traits - traits.mean(1, keepdims=True)) / (traits.std(1, keepdims=True) + 1e-9)
        preference = generator.normal(size=2) @ traits + generator.normal(size=len(tables))
        self._order = [tables[index].name for index in np.argsort(preference)]
        self._head = round(len(tables) * generator.uniform(0.0, 0.9))

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank``, whatever the memory."""
        place = {name: index for index, name in enumerate(self._order)}
        for option in proposal:
            option.shards[0].rank = max(place[option.name] - self._head, 0) % storage_constraint.world_size
        return proposal
