# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Moving a model of 1.5 GiB to another plan: memory beside a rank's own shards, losses, and steps before and after.

    python benchmarks/moving.py --record benchmarks/results/2026-11-24-moving.json

Two gloo ranks. A model with row-wise Adagrad is trained under TorchRec's plan and saved; then loaded under this
planner's plan, told pooling factors and to split one table by rows, by ``load_across_plans``. Both go on side by side,
step by step in turn. Peaks are of resident memory (VmHWM, reset before), over what was resident then: a rank's shards
are, and are filled in place.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scipy.stats import bootstrap
from torch import nn
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import dreamshard_planner as ds
from common.output import write_result
from common.provenance import provenance

ROWS, DIM = (2_400_000, 400_000, 150_000, 50_000), 128
RANKS, TRAINED, TIMED = 2, 5, 124
MIB = 2**20


class Sharder(EmbeddingBagCollectionSharder):
    """On CPUs TorchRec's own splits no rows."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["table_wise", "row_wise"]


def resident_mib(peak: bool = False) -> float:
    """Of this process, now or at most since the last :func:`reset_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def job(planner: EmbeddingShardingPlanner) -> tuple[nn.Module, dict[str, Any]]:
    """A sharded model and its state."""
    tables = [EmbeddingBagConfig(rows, DIM, name=f"t{i}", feature_names=[f"f{i}"]) for i, rows in enumerate(ROWS)]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    apply_optimizer_in_backward(RowWiseAdagrad, embeddings.parameters(), {"lr": 0.02})
    torch.manual_seed(0)
    model = DLRMTrain(DLRM(embeddings, 13, [64, DIM], [64, 1], dense_device=torch.device("cpu")))
    model = ds.DistributedModelParallel(model, device=torch.device("cpu"), planner=planner, sharders=[Sharder()])
    return model, {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def shard_mib(state: dict[str, Any]) -> float:
    """Of this rank's shards and their optimizer states."""
    found = 0
    for value in (*state["model"].values(), *(v for of in state["optimizer"]["state"].values() for v in of.values())):
        shards = value.local_shards() if hasattr(value, "local_shards") else ()
        found += sum(shard.tensor.nbytes for shard in shards)
    return found / MIB


def loaded_over_mib(state: dict[str, Any], folder: str) -> float:
    """What loading takes beside what is there, at most."""
    reset_peak()
    before = resident_mib()
    ds.load_across_plans(state, folder)
    return resident_mib(peak=True) - before


def step(model: nn.Module, batch: Any) -> tuple[float, float]:
    """Its loss and wall milliseconds."""
    dist.barrier()
    start = time.perf_counter()
    loss, _ = model(batch)
    loss.backward()
    dist.barrier()
    return loss.item(), 1e3 * (time.perf_counter() - start)


def rank_main(rank: int, folder: str, batch_size: int, pooling: list[int], split: str, told: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    data = RandomRecDataset([f"f{i}" for i in range(len(ROWS))], batch_size, hash_sizes=list(ROWS),
                            ids_per_features=pooling, num_dense=13, manual_seed=rank,
                            num_generated_batches=10)  # fmt: skip
    batches = iter(data)
    torchrecs = EmbeddingShardingPlanner(Topology(RANKS, "cpu"), batch_size=batch_size)
    before, state = job(torchrecs)
    for _ in range(TRAINED):
        step(before, next(batches))
    ds.save_across_plans(state, f"{folder}/saved")
    features = {f"f{i}": ds.FeatureStatistics(float(factor)) for i, factor in enumerate(pooling)}
    rows = {split: ParameterConstraints(sharding_types=["row_wise"])}
    planner = ds.DreamShardPlanner(batch_size=batch_size, statistics=ds.TableStatistics(features), constraints=rows)
    after, state = job(planner)
    found: dict[str, Any] = {"shards_mib": shard_mib(state), "load_over_mib": loaded_over_mib(state, f"{folder}/saved")}
    steps = []
    for number, batch in zip(range(TIMED), batches, strict=False):
        pair = [step(model, batch) for model in ((before, after) if number % 2 else (after, before))]
        steps.append(pair if number % 2 else pair[::-1])
    found["largest_loss_difference"] = max(abs(one[0] - other[0]) for one, other in steps)
    for index, name in enumerate(("torchrec", "ours")):
        found[f"step_ms_{name}"] = [round(pair[index][1], 3) for pair in steps[4:]]
    found["plans"] = {name: {table: (sharding.sharding_type, sharding.ranks) for module in model.plan.plan.values()
                             for table, sharding in module.items()}
                      for name, model in (("torchrec", before), ("ours", after))}  # fmt: skip
    told.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=2048, help="samples of a rank (2048)")
    parser.add_argument("--record", type=Path, help="file to write")
    parser.add_argument("--pooling", default="60,4,60,4", help="ids per sample of the four tables (60,4,60,4)")
    parser.add_argument("--split", default="t1", help="table to split by rows (t1)")
    arguments = parser.parse_args()
    pooling = [int(factor) for factor in arguments.pooling.split(",")]
    told = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(rank_main, (folder, arguments.batch_size, pooling, arguments.split, told), RANKS, join=False)
        of_ranks = [found for _, found in sorted([told.get() for _ in range(RANKS)], key=lambda pair: pair[0])]
        while not ranks.join():
            pass
    ours, theirs = (of_ranks[0].pop(f"step_ms_{name}") for name in ("ours", "torchrec"))
    for found in of_ranks[1:]:
        for shown_once in ("step_ms_ours", "step_ms_torchrec", "plans"):
            del found[shown_once]
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    result = {
        "model_mib": sum(ROWS) * DIM * 4 / MIB,
        "ranks": of_ranks,
        "step_ms": {"torchrec": statistics.quantiles(theirs), "ours": statistics.quantiles(ours)},
        "ratio": statistics.quantiles(ratios),
        "median_ratio_95": [float(end) for end in bootstrap((ratios,), np.median, rng=0).confidence_interval],
    }
    print(result)
    write_result(arguments.record, provenance(torch.device("cpu")), result)


if __name__ == "__main__":
    main()
