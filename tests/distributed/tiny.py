# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A small model with embedding tables of several sizes, its data, and its training, for tests on several ranks.

Shape letters: B batch (a rank's share), L lookups.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from ranks import Rank
from small_models import collection, table
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics
from tests import ways
from tests.ways import Batch, TopLayer, Training

SHARDERS = (EmbeddingBagCollectionSharder(),)
LOCAL_BATCH = 16
SHAPES = ((1000, 16), (50, 8), (400, 32), (1, 4), (2000, 8), (120, 64), (300, 16), (7, 12))
POOLING_FACTORS = (2, 1, 5, 3, 0, 1, 8, 4, 2)
"""Pooling factors of the features: the first table serves two, and one is always empty."""
FEATURES = ("t0_f0", "t0_f1", *(f"t{index}_f0" for index in range(1, len(SHAPES))))


@torch.no_grad()
def _fill(weight: Tensor, seed: int) -> None:
    weight.uniform_(-0.1, 0.1, generator=torch.Generator(weight.device).manual_seed(seed))


class TinyModel(TopLayer):
    """Embeddings of all features into one linear layer; ``mean``: a table whose lookups are averaged."""

    def __init__(
        self,
        optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad,
        arguments: Mapping[str, Any] = {"lr": 0.05},
        mean: int | None = None,
    ) -> None:
        configs = [
            table(
                f"t{index}",
                rows,
                dim,
                features=2 if index == 0 else 1,
                init_fn=partial(_fill, seed=index),
                pooling=PoolingType.MEAN if index == mean else PoolingType.SUM,
            )
            for index, (rows, dim) in enumerate(SHAPES)
        ]
        super().__init__(sum(config.embedding_dim * len(config.feature_names) for config in configs))
        self.embeddings = collection(*configs)
        apply_optimizer_in_backward(optimizer, self.embeddings.parameters(), dict(arguments))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        pooled = self.embeddings(batch.sparse)
        # The columns' order depends on the plan.
        return self.loss_and_logits([pooled[name] for name in FEATURES], batch.label_B)


def batch(step: int, samples: int, first: int, count: int, device: torch.device) -> Batch:
    """Samples ``first`` to ``first + count`` of the global batch of one step."""
    generator = torch.Generator().manual_seed(step)
    indices, lengths = [], []
    for feature, pooling_factor in enumerate(POOLING_FACTORS):
        rows = SHAPES[max(0, feature - 1)][0]
        indices_BL = torch.randint(rows, (samples, pooling_factor), generator=generator)
        indices.append(indices_BL[first : first + count].flatten())
        lengths.append(torch.full((count,), pooling_factor, dtype=torch.int32))
    labels_B = torch.randint(2, (samples,), generator=generator).float()[first : first + count]
    sparse = KeyedJaggedTensor(list(FEATURES), torch.cat(indices), lengths=torch.cat(lengths))
    return Batch(sparse, labels_B).to(device)


def batches(rank: Rank, steps: range, samples: int, shares: Sequence[int] = ()) -> Iterator[Batch]:
    """This rank's shares of global batches of ``samples`` samples; four batches go round. Shares are equal, or of so
    many samples by rank."""
    shares = shares or [samples // rank.world_size] * rank.world_size
    for step in steps:
        yield batch(step % 4, samples, sum(shares[: rank.rank]), shares[rank.rank], rank.device)


@cache
def _statistics() -> TableStatistics:
    batches = (batch(step, LOCAL_BATCH, 0, LOCAL_BATCH, torch.device("cpu")) for step in range(3))
    return TableStatistics.from_batches(one.sparse for one in batches)


def make_planner(name: str, rank: Rank, **arguments: Any) -> EmbeddingShardingPlanner:
    """``dreamshard`` or ``torchrec``, for table-wise placement of the tiny model."""
    memory = "hbm_cap" if rank.device.type == "cuda" else "ddr_cap"
    constraints = {
        f"t{index}": ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["fused"],
            pooling_factors=list(map(float, POOLING_FACTORS[index + (index > 0) : index + 2])),
        )
        for index in range(len(SHAPES))
    }
    common = {
        "topology": Topology(rank.world_size, rank.device.type, **{memory: 8 << 30}),
        "batch_size": LOCAL_BATCH,
        "constraints": constraints,
        **arguments,
    }
    if name == "dreamshard":
        return DreamShardPlanner(**common, statistics=_statistics(), effort="quick")
    return EmbeddingShardingPlanner(**common)


def shard(planner: EmbeddingShardingPlanner, rank: Rank, **arguments: Any) -> DistributedModelParallel:
    return DistributedModelParallel(
        TinyModel(), device=rank.device, sharders=copy.copy(list(SHARDERS)), planner=planner, **arguments
    )


def train(
    model: DistributedModelParallel, rank: Rank, steps: int, samples: int, shares: Sequence[int] = ()
) -> list[float]:
    return ways.train(Training(), model, batches(rank, range(steps), samples, shares))
