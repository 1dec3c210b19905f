# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A model whose tables are whole or replicated, trained in every way that scripts train, on several ranks.

Shape letters: B batch (a rank's share), E all embedding dims.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import local_shards, untrained
from ranks import Rank
from torch import Tensor, nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecsDistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from dreamshard_planner import DistributedModelParallel, attach_optimizers

TW, DP = "table_wise", "data_parallel"
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TABLES = {"sum": (40, 8, SUM, 1), "twice": (33, 16, SUM, 2), "mean": (7, 4, MEAN, 1)}
"""Rows, dim, pooling and features of those that are replicated; one beside them is always whole."""
WHOLE = "whole"
SHAPES = TABLES | {WHOLE: (50, 8, SUM, 1)}
LOOKUPS = 3
STEPS, SAMPLES = 6, 12


@dataclass(frozen=True)
class Training:
    """A training."""

    optimizer: type[torch.optim.Optimizer]
    arguments: dict[str, Any] = field(default_factory=lambda: {"lr": 0.2})
    way: str = "combined"
    divides: bool = True
    """Gradients are averaged over ranks, not summed."""
    torchrecs_class: bool = False
    """With TorchRec's ``DistributedModelParallel`` and ``attach_optimizers``."""


@dataclass(frozen=True)
class Trained:
    """Results of a training."""

    losses: list[float]
    """This rank's."""
    weights: dict[str, Tensor]
    """Weights of the tables on this rank."""
    states: dict[str, dict[str, Tensor]]
    """States of the fused optimizer on this rank, by parameter and name."""
    dense: set[str]
    """Names of the parameters that are the script's to train."""


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


def names_of(table: str) -> list[str]:
    return [f"{table}_{index}" for index in range(SHAPES[table][3])]


FEATURES = [name for table in SHAPES for name in names_of(table)]


class Model(nn.Module):
    """All tables into one linear layer; loss and logits."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, pooling=pooling, feature_names=names_of(name)
            )
            for name, (rows, dim, pooling, _) in SHAPES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(training.optimizer, self.bags.parameters(), dict(training.arguments))
        self.top = nn.Linear(sum(dim * features for _, dim, _, features in SHAPES.values()), 1)
        with torch.no_grad():
            self.top.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(5))
            self.top.bias.zero_()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.sparse)
        logit_B = self.top(torch.cat([pooled[name] for name in FEATURES], dim=1).tanh()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logit_B, batch.label_B), logit_B.detach()


def batches(rank: Rank, first: int = 0, steps: int = STEPS) -> Iterator[Batch]:
    """Shares of unequal size, of four global batches that come round."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step % 4)
        bound = [0, *(SAMPLES * (index + 1) // rank.world_size + 1 for index in range(rank.world_size - 1)), SAMPLES]
        mine = slice(bound[rank.rank], bound[rank.rank + 1])
        indices, lengths = [], []
        for table, (rows, *_) in SHAPES.items():
            for _ in names_of(table):
                index_BL = torch.randint(rows, (SAMPLES, LOOKUPS), generator=generator)[mine]
                indices.append(index_BL.flatten())
                lengths.append(torch.full((len(index_BL),), LOOKUPS))
        label_B = torch.randint(2, (SAMPLES,), generator=generator).float()[mine]
        sparse = KeyedJaggedTensor(FEATURES, torch.cat(indices), lengths=torch.cat(lengths))
        yield Batch(sparse, label_B).to(rank.device)


def sharded(training: Training, kind: str, rank: Rank) -> TorchRecsDistributedModelParallel:
    """On a plan with the tables of this kind."""
    constraints = {
        name: ParameterConstraints(sharding_types=[kind if name in TABLES else TW], compute_kernels=["fused", "dense"])
        for name in SHAPES
    }
    topology = Topology(rank.world_size, rank.device.type, hbm_cap=8 << 30, ddr_cap=8 << 30)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, stats=[], debug=False)
    plan = planner.collective_plan(model := Model(training), None, dist.group.WORLD)
    if training.torchrecs_class:
        made = TorchRecsDistributedModelParallel(model, device=rank.device, plan=plan)
        attach_optimizers(made)
    else:
        made = DistributedModelParallel(model, device=rank.device, plan=plan)
    for name, shape, shards in local_shards(made):
        for _, part in shards:
            part.copy_(untrained(name, shape))
    return made


def dense_of(model: nn.Module) -> KeyedOptimizerWrapper:
    """The script's own optimizer."""
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(parameters, lambda params: torch.optim.SGD(params, lr=0.1))


def train_steps(way: str, model: TorchRecsDistributedModelParallel, given: Iterable[Batch]) -> list[float]:
    """As a script might; ``way`` is what it steps."""
    fused, dense = model.fused_optimizer, dense_of(model)
    both = CombinedOptimizer([fused, dense])
    if way == "pipeline":
        pipeline, left, losses = TrainPipelineSparseDist(model, both, next(model.parameters()).device), iter(given), []
        model.register_forward_hook(lambda _module, _inputs, output: losses.append(output[0].item()))
        try:
            while True:
                pipeline.progress(left)
        except StopIteration:
            return losses
    if way in ("ahead", "twice"):
        return train_out_of_turn(way, model, given, fused if way == "ahead" else both)
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)
    optimizers: dict[str, list[torch.optim.Optimizer]] = {
        "fused": [fused, dense],
        "dense": [dense],
        "warm-up": [WarmupOptimizer(both, [stage], lr=0.1)],
        "clipping": [fused, GradientClippingOptimizer(dense, 0.05, GradientClipping.NORM)],
        # Fused kernels leave no gradients, so that it finds nothing to decay in tables.
        "everything": [torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.5)],
    }
    losses = []
    for step, batch in enumerate(given):
        used = optimizers.get(way, [both])
        if way == "schedule" and step >= 2:
            for group in both.param_groups:
                group["lr"] = 0.1 / step
        if way != "accumulation" or step % 2 == 0:
            for optimizer in used:
                optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        losses.append(loss.item())
        if way != "accumulation" or step % 2:
            for optimizer in used:
                optimizer.step()
    return losses


def train_out_of_turn(
    way: str, model: TorchRecsDistributedModelParallel, given: Iterable[Batch], optimizer: KeyedOptimizer
) -> list[float]:
    """Forwards of two batches before their backwards; or, ``ahead``, each forward before the backward of the one before
    it, as of embeddings in TorchRec's TrainPipelineSemiSync."""
    losses, waiting = [], deque[Tensor]()
    for step, batch in enumerate(given):
        loss, _ = model(batch)
        losses.append(loss.item())
        waiting.append(loss)
        if step % 2 if way == "twice" else step:
            optimizer.zero_grad()
            for _ in range(len(waiting) if way == "twice" else 1):
                waiting.popleft().backward()
            optimizer.step()
    return losses


def without_rows(batch: Batch) -> Batch:
    """Some ids are none of any table."""
    ids = batch.sparse.values().clone()
    ids[::5] = 10**6
    ids[1::7] = -3
    sparse = KeyedJaggedTensor(FEATURES, ids, lengths=batch.sparse.lengths())
    return Batch(sparse, batch.label_B)


def seen(model: TorchRecsDistributedModelParallel, losses: list[float]) -> Trained:
    """Return a rank's part of a model."""
    weights = {name: part.cpu().clone() for name, _, shards in local_shards(model) for _, part in shards}
    states: dict[str, dict[str, Tensor]] = {}
    for parameter, state in model.fused_optimizer.state_dict()["state"].items():
        for name, value in state.items():
            local = [s.tensor for s in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
            if local:
                states.setdefault(parameter, {})[name] = local[0].detach().cpu().clone()
    dense = {name for name, _ in in_backward_optimizer_filter(model.named_parameters())}
    return Trained(losses, weights, states, dense)


def train_each(rank: Rank, trainings: dict[str, Training]) -> dict[str, dict[str, Trained]]:
    """Every training under whole and replicated tables."""
    results: dict[str, dict[str, Trained]] = {}
    for name, training in trainings.items():
        for kind in (TW, DP):
            model = sharded(training, kind, rank)
            given = map(without_rows, batches(rank)) if training.way == "ids without rows" else batches(rank)
            set_gradient_division(training.divides)
            results.setdefault(name, {})[kind] = seen(model, train_steps(training.way, model, given))
    return results


def resume(rank: Rank, training: Training, first: str, folder: str) -> tuple[Trained, Trained]:
    """Replicated throughout; and saved under ``first`` half way, loaded into replicas that knew nothing of it."""
    through = sharded(training, DP, rank)
    losses = train_steps(training.way, through, batches(rank))
    before, after = sharded(training, first, rank), sharded(training, DP, rank)
    half = train_steps(training.way, before, batches(rank, 0, STEPS // 2))

    def state(model: TorchRecsDistributedModelParallel) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}

    dcp.save(state(before), checkpoint_id=folder)
    loaded = state(after)
    dcp.load(loaded, checkpoint_id=folder)
    after.load_state_dict(loaded["model"])
    after.fused_optimizer.load_state_dict(loaded["optimizer"])
    half += train_steps(training.way, after, batches(rank, STEPS // 2, STEPS // 2))
    return seen(through, losses), seen(after, half)


def all_reduces(rank: Rank, training: Training) -> int:
    """Return how many a step takes with replicas, after DDP's first steps."""
    model = sharded(training, DP, rank)
    train_steps(training.way, model, batches(rank, 0, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train_steps(training.way, model, batches(rank, 2, 1))
    return sum(event.name == "gloo:all_reduce" for event in profiler.events())
