# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every rank holds the hot rows of a sequence table: torchrun --nproc_per_node=2 examples/hot_rows.py"""

import gc
from collections.abc import Iterator
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import dreamshard_planner as ds

ROWS, SAMPLES, LENGTH = 100_000, 128, 100


def batches(number: int) -> Iterator[KeyedJaggedTensor]:
    """Sequences of items; few items are in most of them."""
    below = (torch.arange(1, ROWS + 1) ** -1.2).cumsum(0)
    for _ in range(number):
        ids = torch.searchsorted(below, torch.rand(SAMPLES * LENGTH) * below[-1]).clamp_max(ROWS - 1)
        yield KeyedJaggedTensor(["clicks"], ids * 7919 % ROWS, lengths=torch.full((SAMPLES,), LENGTH))


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        raise SystemExit("torchrun has to start this: torchrun --nproc_per_node=2 examples/hot_rows.py")
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = torch.nn.ModuleDict()
    item = EmbeddingConfig(ROWS, 64, name="item", feature_names=["clicks"])
    model["ec"] = EmbeddingCollection([item], device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1, "eps": 1e-3})
    statistics = ds.TableStatistics.from_batches(batches(10)).all_gather()
    planner = ds.DreamShardPlanner(
        batch_size=SAMPLES, statistics=statistics, hot_rows_bytes=2**20, vocabulary="2026-11"
    )
    sharded = ds.DistributedModelParallel(model, device=torch.device("cpu"), planner=planner)
    dist.broadcast_object_list(folder := [mkdtemp()])
    if dist.get_rank() == 0:
        print(planner.report())
        planner.save_plan(f"{folder[0]}/plan.json")  # refused for another vocabulary
    for batch in batches(10):
        sharded.module["ec"](batch)["clicks"].values().square().mean().backward()  # trains the table as well
    state = {"model": sharded.state_dict(), "optimizer": sharded.fused_optimizer.state_dict()}
    ds.save_across_plans(state, f"{folder[0]}/state")  # a job with other hot rows, or without any, loads it
    print(f"trained 10 steps on {dist.get_world_size()} rank(s)")
    dist.destroy_process_group()
    del sharded
    gc.collect()  # models are cyclic and hold the process group, whose threads must not outlive Python
