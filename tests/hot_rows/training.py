# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sequence tables, whole or with hot rows, trained in every way that scripts train, on several ranks.

Shape letters: B batch (a rank's share), L lookups, D dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from common.dedup_on_cpu import dedup_on_cpu
from dreamshard_planner.hot_rows.hot_set import replicate_hot_rows
from dreamshard_planner.hot_rows.sharded import HotRowsSharder
from tests.distributed.ranks import Rank

DIM, STEPS, SAMPLES = 8, 10, 13
TABLES = {"goods": (97, ("seen", "bought")), "shops": (41, ("visited",)), "whole": (30, ("place",))}
"""Rows and features; the last table is table_wise and has no hot rows."""
HOT = {"ec.goods": torch.tensor([96, 0, 5, 63, 64, 65]), "ec.shops": torch.tensor([1, 2, 40])}
FEATURES = ("place", "bought", "extra", "visited", "seen")
"""In the order of batches, which is not that of the tables; no table reads ``extra``."""


@dataclass(frozen=True)
class Training:
    """A way to train."""

    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    arguments: dict[str, Any] = field(default_factory=lambda: {"lr": 0.5})
    way: str = "plain"
    dedup: bool = False
    divides: bool = True
    """True if gradients are averaged over ranks, not summed."""
    half: bool = False
    """With float16 weights."""


@dataclass
class Batch(Pipelineable):
    """A rank's share."""

    sparse: KeyedJaggedTensor
    label_B: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.sparse.to(device), self.label_B.to(device))

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


class Model(nn.Module):
    """Mean of each sequence into one linear layer; loss and logits."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        kind = DataType.FP16 if training.half else DataType.FP32
        configs = [
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=list(features), data_type=kind
            )
            for name, (rows, features) in TABLES.items()
        ]
        self.ec = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(training.optimizer, self.ec.parameters(), dict(training.arguments))
        self.top = nn.Linear(DIM * 4, 1)
        with torch.no_grad():
            self.top.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(5))
            self.top.bias.zero_()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sequences = self.ec(batch.sparse)
        order = [name for _, features in TABLES.values() for name in features]
        pooled = [sequences[name].to_padded_dense(12).tanh().sum(1) for name in order]
        logit_B = self.top(torch.cat(pooled, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logit_B, batch.label_B), logit_B.detach()


def batches(rank: Rank, first: int = 0, steps: int = STEPS) -> Iterator[Batch]:
    """Shares of unequal size with sequences of unequal length, some empty; ids repeat, half of them are hot."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        start = SAMPLES * rank.rank // rank.world_size
        mine = slice(start, SAMPLES * (rank.rank + 1) // rank.world_size)
        ids, lengths = [], []
        for feature in FEATURES:
            name = next((name for name, (_, features) in TABLES.items() if feature in features), None)
            rows = TABLES[name][0] if name else 10
            hot = HOT.get(f"ec.{name}", torch.arange(rows))
            length_B = torch.randint(0, 10, (SAMPLES,), generator=generator)
            cold_L = torch.randint(rows, (int(length_B.sum()),), generator=generator)
            hot_L = hot[torch.randint(len(hot), cold_L.shape, generator=generator)]
            id_L = torch.where(torch.rand(cold_L.shape, generator=generator) < 0.5, hot_L, cold_L)
            ids.append(torch.cat(id_L.split(length_B.tolist())[mine]))
            lengths.append(length_B[mine])
        label_B = torch.randint(2, (SAMPLES,), generator=generator).float()[mine]
        sparse = KeyedJaggedTensor(list(FEATURES), torch.cat(ids), lengths=torch.cat(lengths))
        yield Batch(sparse, label_B).to(rank.device)


def sharded(training: Training, rank: Rank, hot: dict[str, Tensor] | None) -> DistributedModelParallel:
    """TorchRec's own class on a plan with these hot rows, or without any; weights that do not depend on the plan."""
    dedup_on_cpu()
    model = Model(training)
    sharder = HotRowsSharder if hot else EmbeddingCollectionSharder
    sharders = [sharder(use_index_dedup=training.dedup)]
    ways = {name: table_wise(rank=0) if name == "whole" else row_wise() for name in TABLES}
    module_plan = construct_module_sharding_plan(
        model.ec,
        ways,
        sharders[0],
        local_size=rank.world_size,
        world_size=rank.world_size,
        device_type=rank.device.type,
    )
    plan = ShardingPlan({"ec": module_plan})
    if hot:
        plan = replicate_hot_rows(plan, hot)
    made = DistributedModelParallel(model, device=rank.device, plan=plan, sharders=sharders)
    with torch.no_grad():
        for name, value in made.state_dict().items():
            if isinstance(value, ShardedTensor):
                whole = torch.rand(value.size(), generator=torch.Generator().manual_seed(len(name))) - 0.5
                for shard in value.local_shards():
                    (row, _), (rows, _) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                    shard.tensor.copy_(whole[row : row + rows])
    return made


def train(training: Training, model: DistributedModelParallel, given: Iterable[Batch]) -> list[float]:
    """Losses of this rank's shares."""
    set_gradient_division(training.divides)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    # Nothing may change the dense layer between a forward and its backward.
    both = CombinedOptimizer([model.fused_optimizer] if training.way == "ahead" else [model.fused_optimizer, dense])
    losses: list[float] = []
    if training.way == "pipeline":
        pipeline, left = TrainPipelineSparseDist(model, both, next(model.parameters()).device), iter(given)
        hook = model.register_forward_hook(lambda _module, _inputs, output: losses.append(output[0].item()))
        try:
            while True:
                pipeline.progress(left)
        except StopIteration:
            pipeline.detach()
            hook.remove()
            return losses
    waiting: list[Tensor] = []
    for step, batch in enumerate(given):
        if training.way == "schedule":
            for group in both.param_groups:
                group["lr"] = 0.5 / (1 + step)
        if training.way != "accumulation" or step % 2 == 0:
            both.zero_grad()
        loss, _ = model(batch)
        losses.append(loss.item())
        waiting.append(loss)
        if training.way == "ahead" and step == 0:
            continue
        waiting.pop(0).backward()
        if training.way != "accumulation" or step % 2:
            both.step()
    set_gradient_division(True)
    return losses


def local(model: DistributedModelParallel) -> dict[str, Tensor]:
    """This rank's shards of weights and of states of the fused optimizer."""
    states = model.fused_optimizer.state_dict()["state"]
    named = {**model.state_dict(), **{f"{key} {name}": v for key, of in states.items() for name, v in of.items()}}
    found = {}
    for name, value in named.items():
        parts = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        if parts:
            found[name] = parts[0].detach().cpu().clone()
    return found


def evaluate(model: DistributedModelParallel, rank: Rank) -> list[float]:
    """Logits without gradients."""
    with torch.no_grad():
        return [logit for batch in batches(rank, 50, 2) for logit in model(batch)[1].tolist()]
