# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A model whose tables are whole or replicated, trained in every way that scripts train, on several ranks.

Shape letters: B batch (a rank's share), E all embedding dims.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mixed import local_shards, untrained
from ranks import Rank
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecsDistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DistributedModelParallel, attach_optimizers
from tests.ways import Batch, TopLayer, Training, local, states_of, train

TW, DP = "table_wise", "data_parallel"
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TABLES = {"sum": (40, 8, SUM, 1), "twice": (33, 16, SUM, 2), "mean": (7, 4, MEAN, 1)}
"""Rows, dim, pooling and features of those that are replicated; one beside them is always whole."""
WHOLE = "whole"
SHAPES = TABLES | {WHOLE: (50, 8, SUM, 1)}
LOOKUPS = 3
STEPS, SAMPLES = 6, 12


@dataclass(frozen=True)
class Trained:
    """Results of a training."""

    losses: list[float]
    """This rank's."""
    weights: dict[str, Tensor]
    """Weights of the tables on this rank."""
    states: dict[str, Tensor]
    """States of the fused optimizer on this rank."""
    dense: set[str]
    """Names of the parameters that are the script's to train."""


def names_of(table: str) -> list[str]:
    return [f"{table}_{index}" for index in range(SHAPES[table][3])]


FEATURES = [name for table in SHAPES for name in names_of(table)]


class Model(TopLayer):
    """All tables into one linear layer."""

    def __init__(self, training: Training) -> None:
        super().__init__(sum(dim * features for _, dim, _, features in SHAPES.values()))
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, pooling=pooling, feature_names=names_of(name)
            )
            for name, (rows, dim, pooling, _) in SHAPES.items()
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(training.optimizer, self.bags.parameters(), dict(training.arguments))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.bags(batch.sparse)
        return self.loss_and_logits([pooled[name] for name in FEATURES], batch.label_B)


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
    dense = {name for name, _ in in_backward_optimizer_filter(model.named_parameters())}
    return Trained(losses, weights, local(states_of(model)), dense)


def train_each(rank: Rank, trainings: dict[str, Training]) -> dict[str, dict[str, Trained]]:
    """Every training under whole and replicated tables."""
    results: dict[str, dict[str, Trained]] = {}
    for name, training in trainings.items():
        for kind in (TW, DP):
            model = sharded(training, kind, rank)
            given = map(without_rows, batches(rank)) if training.way == "ids without rows" else batches(rank)
            results.setdefault(name, {})[kind] = seen(model, train(training, model, given))
    return results


def resume(rank: Rank, training: Training, first: str, folder: str) -> tuple[Trained, Trained]:
    """Replicated throughout; and saved under ``first`` half way, loaded into replicas that knew nothing of it."""
    through = sharded(training, DP, rank)
    losses = train(training, through, batches(rank))
    before, after = sharded(training, first, rank), sharded(training, DP, rank)
    half = train(training, before, batches(rank, 0, STEPS // 2))

    def state(model: TorchRecsDistributedModelParallel) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}

    dcp.save(state(before), checkpoint_id=folder)
    loaded = state(after)
    dcp.load(loaded, checkpoint_id=folder)
    after.load_state_dict(loaded["model"])
    after.fused_optimizer.load_state_dict(loaded["optimizer"])
    half += train(training, after, batches(rank, STEPS // 2, STEPS // 2))
    return seen(through, losses), seen(after, half)


def all_reduces(rank: Rank, training: Training) -> int:
    """Return how many a step takes with replicas, after DDP's first steps."""
    model = sharded(training, DP, rank)
    train(training, model, batches(rank, 0, 2))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(training, model, batches(rank, 2, 1))
    return sum(event.name == "gloo:all_reduce" for event in profiler.events())
