# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One DLRM that is to be trained: its tables, batches and dense weights, whatever the plan."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dlrm.model import EveryTypeSharder, fill_tables, make_batches, make_model
from dlrm.node import Node
from dlrm.options import OPTIMIZERS, Config
from dlrm.steps import Trainee
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.workload.tables import Table

BATCHES_KEPT = 16
"""Distinct batches; training goes round them, so that drawing data costs no time."""


@dataclass(frozen=True)
class Job:
    """The same weights and batches under every plan."""

    tables: Sequence[Table]
    batches: Sequence[Batch]
    """This rank's."""
    bare_model: nn.Module
    """Its dense layers are on a device, its tables on none."""
    sharders: list[EmbeddingBagCollectionSharder]
    config: Config
    node: Node

    @classmethod
    def of(cls, tables: Sequence[Table], config: Config, node: Node) -> Job:
        """From the config's seed."""
        sharder = EveryTypeSharder() if needs_every_type(config, node) else EmbeddingBagCollectionSharder()
        bare_model = make_model(tables, config.size, config.seed, node.device)
        return cls(tables, draw_batches(tables, config, node), bare_model, [sharder], config, node)

    def fresh_model(self) -> nn.Module:
        """Not sharded yet, with the tables' optimizer in the backward pass."""
        model = copy.deepcopy(self.bare_model)
        tables_of = model.model.sparse_arch.parameters()
        apply_optimizer_in_backward(OPTIMIZERS[self.config.optimizer], tables_of, {"lr": 0.01})
        return model

    def trainee(self, plan: ShardingPlan, judge: DreamShardPlanner | None = None, *, pipelined: bool = True) -> Trainee:
        """A model under a plan; ``judge`` predicts what is observed; see :class:`Trainee`."""
        model = DistributedModelParallel(self.fresh_model(), plan=plan, sharders=self.sharders, device=self.node.device)
        fill_tables(model, self.tables, self.config.seed)
        return Trainee(model, self.batches, self.node, self.config.processor_time, judge, pipelined)


def draw_batches(tables: Sequence[Table], config: Config, node: Node) -> list[Batch]:
    """This rank's."""
    count = min(config.steps, BATCHES_KEPT)
    batches = make_batches(tables, count, config.batch_size, node.rank, node.world_size, config.seed)
    # Else each copy waits for the device.
    return [batch.pin_memory() for batch in batches] if node.device.type == "cuda" else batches


def needs_every_type(config: Config, node: Node) -> bool:
    """Whether planners may use a type that TorchRec's own sharder does not offer on this device."""
    return not set(config.kinds) <= set(EmbeddingBagCollectionSharder().sharding_types(node.device.type))
