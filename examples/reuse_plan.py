# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A job that starts again from its checkpoint and its plan: torchrun --nproc_per_node=2 examples/reuse_plan.py"""

from __future__ import annotations

import gc
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.datasets.random import RandomRecDataset
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, JsonPlanLoader

ROWS, LOOKUPS, DIM, BATCH_SIZE, STEPS = [50_000, 20_000, 5_000, 1_000], [20, 5, 50, 10], 32, 128, 5
FEATURES = [f"f{index}" for index in range(len(ROWS))]


def job(folder: Path, data: RandomRecDataset) -> float:
    """Train some steps, from the folder's checkpoint if there is one; the last loss."""
    tables = [EmbeddingBagConfig(ROWS[i], DIM, name=f"t_{f}", feature_names=[f]) for i, f in enumerate(FEATURES)]
    model = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.02})
    restarted = (plan := folder / "plan.json").exists()
    planner = DreamShardPlanner(batch_size=BATCH_SIZE, plan_loader=JsonPlanLoader(plan) if restarted else None)
    model = DistributedModelParallel(model, device=torch.device("cpu"), planner=planner)
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    if restarted:
        dcp.load(state, checkpoint_id=folder / "state")  # in place; with the same plan each rank reads its own shards
    for _, batch in zip(range(STEPS), data, strict=False):
        loss = (model(batch.sparse_features).values() - 1).square().mean()
        loss.backward()  # and with it the optimizer
    dcp.save(state, checkpoint_id=folder / "state")
    if dist.get_rank() == 0:
        planner.save_plan(plan)
        print(planner.report() if restarted else "planned anew")
    dist.barrier()
    return loss.item()


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        raise SystemExit("torchrun has to start this: torchrun --nproc_per_node=2 examples/reuse_plan.py")
    dist.init_process_group("gloo")
    where = [mkdtemp()]  # a real job gives its own folder each time it starts
    dist.broadcast_object_list(where)
    data = RandomRecDataset(FEATURES, BATCH_SIZE, hash_sizes=ROWS, ids_per_features=LOOKUPS, manual_seed=0)
    before, after = [job(Path(where[0]), data) for _ in ("first", "restarted")]
    if dist.get_rank() == 0:
        print(f"trained {2 * STEPS} steps on {dist.get_world_size()} rank(s); loss {before:.6f} -> {after:.6f}")
    dist.destroy_process_group()
    gc.collect()  # models are cyclic and hold the process group, whose threads must not outlive Python
