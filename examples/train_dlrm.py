# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Train a small DLRM with TorchRec on one or more ranks: torchrun --nproc_per_node=2 examples/train_dlrm.py"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics, observe

ROWS, LOOKUPS = [100_000, 50_000, 20_000, 5_000, 1_000, 100], [20, 1, 5, 50, 10, 1]
FEATURES, DIM, BATCH_SIZE, STEPS = [f"f{index}" for index in range(len(ROWS))], 32, 128, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--observe", metavar="FILE", help="what steps took, for dreamshard observed and learn")
    observation = parser.parse_args().observe
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("torchrun has to start this: torchrun --nproc_per_node=2 examples/train_dlrm.py")
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cuda = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    torch.cuda.set_device(local_rank if cuda else -1)  # negative: none
    dist.init_process_group("nccl" if cuda else "gloo")
    data = iter(RandomRecDataset(FEATURES, BATCH_SIZE, hash_sizes=ROWS, ids_per_features=LOOKUPS, num_dense=13))
    tables = [EmbeddingBagConfig(ROWS[i], DIM, name=f"t_{f}", feature_names=[f]) for i, f in enumerate(FEATURES)]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, embeddings.parameters(), {"lr": 0.02})
    model = DLRMTrain(DLRM(embeddings, 13, [64, DIM], [64, 1], dense_device=device))
    statistics = TableStatistics.from_batches(batch.sparse_features for _, batch in zip(range(3), data, strict=False))
    planner = DreamShardPlanner(batch_size=BATCH_SIZE, statistics=statistics)
    model = DistributedModelParallel(model, device=device, planner=planner)  # <- the one changed line
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.02))
    pipeline = TrainPipelineSparseDist(model, CombinedOptimizer([model.fused_optimizer, dense_optimizer]), device)
    with observe(model, planner, observation):
        losses = [pipeline.progress(data)[0].item() for _ in range(STEPS)]
    if dist.get_rank() == 0:
        print(planner.report())
        print(f"trained {STEPS} steps on {dist.get_world_size()} rank(s); loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # models are cyclic and hold the process group, whose threads must not outlive Python
