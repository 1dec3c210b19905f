# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Trained modules around collections, saved on ranks: managed collisions stay where they were, or are refused by name;
feature processors move with all else.

Shape letters: N ids, D dim.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, run_on_ranks
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import CheckpointError, load_across_plans, save_across_plans

ROWS, DIM, IDS, STEPS = 48, 8, 1000, 6
TRAINED_IDS = torch.arange(7, IDS, 50)
SHARDERS = (ManagedCollisionEmbeddingBagCollectionSharder(), FeatureProcessedEmbeddingBagCollectionSharder())


class Model(nn.Module):
    """A table with managed collisions, and one with a weight for each position."""

    def __init__(self) -> None:
        super().__init__()
        managed, processed = (
            [EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"of_{name}"])]
            for name in ("managed", "processed")
        )
        cpu, meta = torch.device("cpu"), torch.device("meta")
        collisions = MCHManagedCollisionModule(
            ROWS, cpu, DistanceLFU_EvictionPolicy(), eviction_interval=2, input_hash_size=IDS, buckets=6
        )
        self.m = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=managed, device=meta),
            ManagedCollisionCollection({"managed": collisions}, managed),
            allow_in_place_embed_weight_update=True,
        )
        self.p = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=processed, is_weighted=True, device=meta),
            {"of_processed": PositionWeightedModule(max_feature_length=3)},
        )
        # On CPUs no kernel evicts rows of an optimizer that has states.
        for module, optimizer in ((self.m, torch.optim.SGD), (self.p, RowWiseAdagrad)):
            tables = [weight for name, weight in module.named_parameters() if "embedding_bags" in name]
            apply_optimizer_in_backward(optimizer, tables, {"lr": 0.1})

    def forward(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        managed = KeyedJaggedTensor(["of_managed"], ids_N, lengths=torch.ones_like(ids_N))
        lengths_N = 1 + ids_N % 3
        rows = ids_N.repeat_interleave(lengths_N) % ROWS
        processed = KeyedJaggedTensor(["of_processed"], rows, torch.ones(len(rows)), lengths_N)
        return self.m(managed)[0].wait()["of_managed"], self.p(processed).wait()["of_processed"]


def row_wise(ranks: int) -> ParameterSharding:
    rows = ROWS // ranks
    shards = [ShardMetadata([rows * rank, 0], [rows, DIM], f"rank:{rank}/cpu") for rank in range(ranks)]
    return ParameterSharding("row_wise", "fused", list(range(ranks)), EnumerableShardingSpec(shards))


def sharded(rank: Rank, whole: bool) -> DistributedModelParallel:
    """``whole``: the processed table, on the first rank; else by rows."""
    first = EnumerableShardingSpec([ShardMetadata([0, 0], [ROWS, DIM], "rank:0/cpu")])
    of_processed = ParameterSharding("table_wise", "fused", [0], first) if whole else row_wise(rank.world_size)
    plan = {
        "m": EmbeddingModuleShardingPlan({"managed": row_wise(rank.world_size)}),
        "p": EmbeddingModuleShardingPlan({"processed": of_processed}),
    }
    torch.manual_seed(rank.world_size)
    return DistributedModelParallel(
        Model(),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=rank.device,
        plan=ShardingPlan(plan),
        sharders=list(SHARDERS),
    )


def outputs_ND(model: DistributedModelParallel) -> list[Tensor]:
    """Return outputs of both tables for trained ids."""
    model.eval()
    return [output_ND.detach() for output_ND in model(TRAINED_IDS)]


def state_of(model: DistributedModelParallel) -> dict[str, dict]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def _train(rank: Rank, folder: Path) -> list[Tensor]:
    model = sharded(rank, whole=True)
    dense = [parameter for name, parameter in model.named_parameters() if "position_weight" in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        managed_ND, processed_ND = model(TRAINED_IDS)
        (managed_ND + 2 * processed_ND).square().sum().backward()
        optimizer.step()
    save_across_plans(state_of(model), folder)
    return outputs_ND(model)


def _load(rank: Rank, folder: Path, anew: tuple[str, ...] = ()) -> list[Tensor]:
    model = sharded(rank, whole=False)
    load_across_plans(state_of(model), folder, added=anew, dropped=anew)
    return outputs_ND(model)


def _refused(rank: Rank, folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        _load(rank, folder)
    return str(refused.value)


def test_managed_collisions_stay_and_feature_processors_move(tmp_path: Path) -> None:
    """On other ranks ids would be given wrong rows: managed tables start anew there, by consent."""
    trained = run_on_ranks(_train, tmp_path / "saved", world_size=2)[0]
    assert all(len(output_ND.unique(dim=0)) > 3 for output_ND in trained)
    torch.testing.assert_close(run_on_ranks(_load, tmp_path / "saved", world_size=2)[0], trained)

    told = run_on_ranks(_refused, tmp_path / "saved", world_size=3)[0]
    assert all(part in told for part in ("table m.managed", "_mch_sorted_raw_ids", "rows 0-23, 24-47", "0-15"))
    assert "dropped=['m.managed'] and added=['m.managed']" in told and "processed" not in told
    moved = run_on_ranks(_load, tmp_path / "saved", ("m.managed",), world_size=3)[0]
    torch.testing.assert_close(moved[1], trained[1])
