# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Random tables of any dims, a model over them, its batches, and its training under plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import SGD, Adagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.output import interval
from dlrm.options import Node
from dlrm.steps import training_step
from dreamshard_planner import DistributedModelParallel, compare_steps
from dreamshard_planner.observing.step_comparison import ratio_interval

BATCHES = 6
SHARDERS = [EmbeddingBagCollectionSharder()]
MOST_ROWS = (5_000, 50_000, 200_000)
MOST_ELEMENTS = 60e6
"""Elements that a rank's batch may look up; larger batches are halved."""


@dataclass(frozen=True)
class Tables:
    """Random tables, and how batches read them."""

    seed: int
    tables: tuple[tuple[int, int, int], ...]
    """Rows, dim, lookups per sample."""
    batch_size: int
    optimizer: type[torch.optim.Optimizer]
    is_skewed: bool

    @classmethod
    def draw(cls, seed: int, most_rows: tuple[int, ...] = MOST_ROWS) -> Tables:
        """Draw 4 to 60 tables; half of the models have a table with eight times the lookups.

        Args:
            seed: of the model and its batches.
            most_rows: one of them is the most rows that a table of the model has.
        """
        rng = random.Random(seed)
        count, most = rng.choice([4, 8, 16, 32, 60]), rng.choice(most_rows)
        dims = rng.choice([[16], [64], [128], [8, 16, 32, 64, 128]])
        tables = [
            (int(min(most, 10 ** rng.uniform(2, 6))), rng.choice(dims), rng.choice([1, 1, 2, 5, 20, 50]))
            for _ in range(count)
        ]
        if rng.random() < 0.5:
            rows, dim, lookups = tables[0]
            tables[0] = rows, dim, 8 * lookups
        batch_size = rng.choice([128, 512, 2048])
        while batch_size * sum(dim * lookups for _, dim, lookups in tables) > MOST_ELEMENTS:
            batch_size //= 2
        return cls(seed, tuple(tables), batch_size, rng.choice([SGD, Adagrad, RowWiseAdagrad]), rng.random() < 0.5)

    @property
    def features(self) -> list[str]:
        """One for each table."""
        return [f"f{index}" for index in range(len(self.tables))]

    def batch(self, index: int, rank: int) -> KeyedJaggedTensor:
        """Return one batch of a rank: uniform ids, or cubes of uniform shares of the rows."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 101 * index + rank)
        ids, lengths = [], []
        for rows, _, lookups in self.tables:
            least, most = (0, 2 * lookups) if lookups > 1 else (1, 1)
            lengths.append(torch.randint(least, most + 1, (self.batch_size,), generator=generator))
            share = torch.rand(int(lengths[-1].sum()), generator=generator) ** (3 if self.is_skewed else 1)
            ids.append((share * rows).long().clamp_max(rows - 1))
        return KeyedJaggedTensor(self.features, torch.cat(ids), lengths=torch.cat(lengths))


class RandomModel(nn.Module):
    """All tables, on no device, into a small dense net; returns the loss, as TorchRec's pipelines expect it."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{index}", num_embeddings=rows, embedding_dim=dim, feature_names=[feature])
            for index, ((rows, dim, _), feature) in enumerate(zip(tables.tables, tables.features, strict=True))
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(tables.optimizer, self.bags.parameters(), {"lr": 0.02})
        self.top = nn.Sequential(nn.Linear(sum(dim for _, dim, _ in tables.tables), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, tuple[Tensor]]:
        """Return the loss, twice."""
        loss = self.top(self.bags(features).values()).sigmoid().mean()
        return loss, (loss.detach(),)


class RandomJob:
    """A random model on this CPU rank."""

    def __init__(self, tables: Tables, node: Node) -> None:
        self.tables, self.node = tables, node
        self.batches = [tables.batch(index, node.rank) for index in range(BATCHES)]
        world = Topology(node.world_size, "cpu", local_world_size=node.world_size, ddr_cap=64 << 30)
        self.given: dict[str, Any] = {"topology": world, "batch_size": tables.batch_size, "stats": [], "debug": False}
        """Arguments of all planners."""

    def informed(self, sharding_types: list[str] | None = None) -> dict[str, ParameterConstraints]:
        """Return constraints with the true lookups per sample."""
        return {
            f"t{index}": ParameterConstraints(sharding_types, pooling_factors=[float(lookups)])
            for index, (*_, lookups) in enumerate(self.tables.tables)
        }

    def plan(self, planner: EmbeddingShardingPlanner) -> ShardingPlan:
        """Plan on all ranks."""
        return planner.collective_plan(RandomModel(self.tables), SHARDERS, dist.group.WORLD)

    def build(self, plan: ShardingPlan) -> tuple[nn.Module, Callable[[Iterator[Any]], Any]]:
        """Return a model under a plan, and its training step."""
        model = DistributedModelParallel(
            RandomModel(self.tables), plan=plan, sharders=SHARDERS, device=self.node.device
        )
        return model, training_step(model, self.node.device, pipelined=False)

    def measured(self, plans: Mapping[str, ShardingPlan], **counts: Any) -> dict[str, Any]:
        """Return a line of a record: milliseconds of a step under each plan; of equal plans, under the first.

        Args:
            plans: by name.
            counts: further arguments of ``compare_steps``.
        """
        first = {repr(plan): name for name, plan in reversed(plans.items())}
        same_as = {name: first[repr(plan)] for name, plan in plans.items()}
        different = {name: plans[name] for name in dict.fromkeys(same_as.values())}
        compared = compare_steps(self.build, different, self.batches, **counts, observed_steps=0, seed=self.tables.seed)
        return {
            "model": self.tables.seed,
            "tables": len(self.tables.tables),
            "batch_size": self.tables.batch_size,
            "optimizer": self.tables.optimizer.__name__,
            "ranks": self.node.world_size,
            "step_ms": {name: np.round(ms, 3).tolist() for name, ms in compared.step_ms.items()},
            "same_as": same_as,
        }


def ratio(row: Mapping[str, Any], name: str, other: str) -> tuple[float, float, float]:
    """Return the ratio of the steps of two plans between the bounds of its interval."""
    same_as = row.get("same_as", {})  # records of 2026-11-28 measured equal plans twice
    own_CN, other_CN = (np.atleast_2d(row["step_ms"][same_as.get(which, which)]) for which in (name, other))
    return ratio_interval(own_CN, other_CN)


def mean_ratio(ratios: Sequence[float]) -> list[str]:
    """Return the geometric mean over models, its 95 % interval, and the number of models above 1.02, as cells."""
    logs_M = np.log(ratios)
    low, mean, high = np.exp(interval(lambda some: logs_M[some].mean(1), len(logs_M)))
    return [f"{mean:.3f}", f"{low:.3f}-{high:.3f}", str(int((np.array(ratios) > 1.02).sum()))]
