# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A TorchRec job that knows nothing of this package: trains on 2 gloo ranks, and saves into a folder with plain DCP:
``python plain_job.py FOLDER``."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, DIM = 10, 16


def unsharded() -> torch.nn.Module:
    tables = [EmbeddingBagConfig(ROWS, DIM, name=name, feature_names=[name]) for name in ("cut", "whole")]
    model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables, device=torch.device("meta"))})
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    return model


def main(rank: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}.store", 2), rank=rank, world_size=2)
    model, sharder = unsharded(), EmbeddingBagCollectionSharder()
    shardings = {"cut": column_wise(ranks=[1, 0]), "whole": table_wise(rank=1)}
    plan = construct_module_sharding_plan(
        model["ebc"], shardings, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"ebc": plan}), sharders=[sharder]
    )
    lookups = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(rank))
    batch = KeyedJaggedTensor(["cut", "whole"], lookups, lengths=torch.ones(8, dtype=torch.int32))
    (sharded.module["ebc"](batch).values() * torch.arange(2.0 * DIM)).sum().backward()
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    dist.barrier()


if __name__ == "__main__":
    mp.start_processes(main, (sys.argv[1],), nprocs=2, start_method="fork")  # each else imports all again
    assert not any(name.startswith("dreamshard") for name in sys.modules)
