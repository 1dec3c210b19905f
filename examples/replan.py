# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A DLRM goes on under another plan, from its checkpoint: torchrun --nproc_per_node=2 examples/replan.py"""

import gc
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dreamshard_planner as ds

ROWS, SPLIT = [50_000, 20_000, 5_000], {"t0": ParameterConstraints(sharding_types=["row_wise"])}


class Sharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise"]  # on CPUs TorchRec's own splits no rows


def job(planner: ds.DreamShardPlanner) -> tuple[torch.nn.Module, dict]:
    tables = [EmbeddingBagConfig(rows, 32, name=f"t{i}", feature_names=[f"f{i}"]) for i, rows in enumerate(ROWS)]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, embeddings.parameters(), {"lr": 0.02})
    model = DLRMTrain(DLRM(embeddings, 13, [64, 32], [64, 1], dense_device=torch.device("cpu")))
    model = ds.DistributedModelParallel(model, device=torch.device("cpu"), planner=planner, sharders=[Sharder()])
    return model, {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


if __name__ == "__main__":
    if not dist.is_torchelastic_launched():
        raise SystemExit("torchrun has to start this: torchrun --nproc_per_node=2 examples/replan.py")
    dist.init_process_group("gloo")
    data = iter(RandomRecDataset(["f0", "f1", "f2"], 128, hash_sizes=ROWS, ids_per_features=[20, 5, 50], num_dense=13))
    dist.broadcast_object_list(folder := [mkdtemp()])
    before, state = job(ds.DreamShardPlanner(batch_size=128, sharding_types=["table_wise"]))
    for _ in range(5):
        before(next(data))[0].backward()  # and with it the tables' optimizer; no other weights learn here
    ds.save_across_plans(state, f"{folder[0]}/state")
    job(planner := ds.DreamShardPlanner(batch_size=128, constraints=SPLIT))
    if dist.get_rank() == 0:
        print(found := planner.replan(before.plan, steps=1_000_000), planner.report())
        found.plan.save(f"{folder[0]}/new.json")
    new = ds.JsonPlanLoader(f"{folder[0]}/new.json")  # which rank 0 alone reads
    after, state = job(ds.DreamShardPlanner(batch_size=128, constraints=SPLIT, plan_loader=new))
    ds.load_across_plans(state, f"{folder[0]}/state")
    for step, batch in zip(range(6, 11), data, strict=False):
        (unmoved, _), (moved, _) = before(batch), after(batch)
        (unmoved + moved).backward()
        print(f"trained {step} steps on {dist.get_world_size()} rank(s); unmoved {unmoved:.6f}, moved {moved:.6f}")
    dist.destroy_process_group()
    gc.collect()  # models are cyclic and hold the process group, whose threads must not outlive Python
