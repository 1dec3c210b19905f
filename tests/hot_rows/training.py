# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sequence tables, whole or with hot rows, on several ranks.

Shape letters: B batch (a rank's share), L lookups, D dim.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.dedup_on_cpu import dedup_on_cpu
from dreamshard_planner.hot_rows.hot_set import replicate_hot_rows
from dreamshard_planner.hot_rows.sharded import HotRowsSharder
from tests.distributed.ranks import Rank
from tests.ways import Batch, TopLayer, Training

DIM, STEPS, SAMPLES = 8, 6, 13
TABLES = {"goods": (97, ("seen", "bought")), "shops": (41, ("visited",)), "whole": (30, ("place",))}
"""Rows and features; the last table is table_wise and has no hot rows."""
HOT = {"ec.goods": torch.tensor([96, 0, 5, 63, 64, 65]), "ec.shops": torch.tensor([1, 2, 40])}
FEATURES = ("place", "bought", "extra", "visited", "seen")
"""In the order of batches, which is not that of the tables; no table reads ``extra``."""


class Model(TopLayer):
    def __init__(self, training: Training) -> None:
        super().__init__(DIM * 4)
        kind = DataType.FP16 if training.half else DataType.FP32
        configs = [
            EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=list(features), data_type=kind
            )
            for name, (rows, features) in TABLES.items()
        ]
        self.ec = EmbeddingCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(training.optimizer, self.ec.parameters(), dict(training.arguments))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sequences = self.ec(batch.sparse)
        order = [name for _, features in TABLES.values() for name in features]
        pooled = [sequences[name].to_padded_dense(12).tanh().sum(1) for name in order]
        return self.loss_and_logits(pooled, batch.label_B)


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


def evaluate(model: DistributedModelParallel, rank: Rank) -> list[float]:
    with torch.no_grad():
        return [logit for batch in batches(rank, 50, 2) for logit in model(batch)[1].tolist()]
