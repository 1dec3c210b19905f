# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Alarms of ``DriftWatch``: on data that does not drift, and on data that does, and what a call takes.

    python benchmarks/drift_watch.py --record benchmarks/results/2026-11-24-drift-watch.json
    python benchmarks/drift_watch.py --training 400 --record benchmarks/results/2026-11-24-watched-training.json

20 jobs of each kind: 16 tables with power-law ids on 4 CPU ranks, planned by 32 batches of 256 samples, watched for
three windows of 32 sampled batches each. Where data drifts, the pooling factors of a quarter of the features trade
places at the start of the first, second or third window; an alarm counts where it comes by the second window from
there. ``--training`` trains the model of ``moving.py`` so many steps on two gloo ranks, watched as by default, every
100th batch sampled, and tells which share of the processor time of a step the calls take.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.planner import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import moving
from common.meta_model import feature_names, meta_collection
from common.output import write_result
from common.provenance import provenance
from default_plans import drawn
from dreamshard_planner import DreamShardPlanner, DriftWatch, TableStatistics
from dreamshard_planner.workload.tables import Table
from full_search import SHARDERS

TABLES, BATCH, WINDOW, WINDOWS, RUNS = 16, 256, 32, 3, 20
STEPS = 1_000_000


def batches(tables: list[Table], pooling: list[float], count: int, seed: int) -> list[KeyedJaggedTensor]:
    """Lengths by Poisson; low ids are read most."""
    generator = torch.Generator().manual_seed(seed)
    mean_FB = torch.tensor(pooling)[:, None].expand(-1, BATCH)
    names = [feature_names(table)[0] for table in tables]
    made = []
    for _ in range(count):
        lengths_FB = torch.poisson(mean_FB, generator=generator).long()
        ids = [
            (torch.rand(int(lengths.sum()), generator=generator) ** 3 * table.rows).long()
            for table, lengths in zip(tables, lengths_FB, strict=True)
        ]
        made.append(KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths_FB.flatten()))
    return made


def run(seed: int, drifts: bool) -> dict[str, Any]:
    """One job."""
    rng = random.Random(seed)
    tables = drawn(TABLES, (3, 6.5), (32, 64, 128), (0, 1.7), seed)
    before = [table.features[0].pooling_factor for table in tables]
    after, moved = list(before), rng.sample(range(TABLES), TABLES // 4)
    for to, origin in zip(moved, moved[1:] + moved[:1], strict=True):
        after[to] = before[origin]
    model = nn.Module()
    model.sparse = meta_collection(tables)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
    planner = DreamShardPlanner(
        topology=Topology(4, "cpu"),
        batch_size=BATCH,
        statistics=TableStatistics.from_batches(batches(tables, before, 32, 1000 + seed)),
        stats=[],
        debug=False,
        optimizers_attached=True,
    )
    planner.plan(model, SHARDERS)
    watch = DriftWatch(planner, STEPS, every=WINDOW, sample_every=1)
    since = seed % WINDOWS if drifts else WINDOWS
    seconds = 0.0
    for window in range(WINDOWS + drifts * (since > 1)):
        for batch in batches(tables, after if window >= since else before, WINDOW, 10_000 + 100 * seed + window):
            start = time.process_time()
            watch(batch)
            seconds += time.process_time() - start
    alarms = [index for index, judgement in enumerate(watch.judgements) if judgement.pays]
    truth = planner.replan(
        planner.saved_plan(), steps=STEPS, statistics=TableStatistics.from_batches(batches(tables, after, 32, 5 * seed))
    )
    return {
        "seed": seed,
        "drifts_at": since if drifts else None,
        "alarms_at": alarms,
        "gain": 1 - truth.chosen.step_ms / truth.now.step_ms if drifts else None,
        "judged": sum(judgement.found is not None for judgement in watch.judgements),
        "drifted_features": [len(judgement.drifted) for judgement in watch.judgements],
        "seconds": round(seconds, 2),
    }


def call_us() -> float:
    """Microseconds of a call whose batch is not sampled."""
    tables = drawn(2, (3, 4), (32,), (0, 1), 0)
    planner = DreamShardPlanner(topology=Topology(2, "cpu"), stats=[], debug=False)
    planner.plan(meta_collection(tables), SHARDERS)
    watch = DriftWatch(planner, 10**9, every=10**8, sample_every=10**7)
    (batch,) = batches(tables, [1.0, 1.0], 1, 0)
    watch(batch)  # sampled
    start = time.process_time()
    for _ in range(100_000):
        watch(batch)
    return (time.process_time() - start) * 10


def train_watched(rank: int, folder: str, steps: int, told: Any) -> None:
    """Seconds of processor time in steps and in calls of the watch, and of each sampled batch; by rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=moving.RANKS)
    names = [f"f{index}" for index in range(len(moving.ROWS))]
    made = RandomRecDataset(names, 512, hash_sizes=list(moving.ROWS), ids_per_features=[60, 4, 60, 4], num_dense=13,
                            manual_seed=rank, num_generated_batches=10)  # fmt: skip
    planner = DreamShardPlanner(batch_size=512)
    model, _ = moving.job(planner)
    watch, of_steps, of_calls = DriftWatch(planner, STEPS), 0.0, list[float]()
    for _, batch in zip(range(steps), made, strict=False):
        start = time.process_time()
        watch(batch.sparse_features)
        called = time.process_time()
        model(batch)[0].backward()
        of_steps += time.process_time() - called
        of_calls.append(called - start)
    sampled = of_calls[:: watch.sample_every]
    found = {"steps": of_steps, "calls": sum(of_calls), "sampled": sampled, "share": sum(of_calls) / of_steps}
    told.put((rank, found))
    dist.barrier()
    dist.destroy_process_group()


def watched_training(steps: int) -> dict[str, Any]:
    """Of both ranks; the one that planned comes first, and is the one that samples."""
    told = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(train_watched, (folder, steps, told), moving.RANKS, join=False)
        found = dict(told.get() for _ in range(moving.RANKS))
        while not ranks.join():
            pass
    return {"training_steps": steps, "processor_seconds": [found[rank] for rank in range(moving.RANKS)]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--training", type=int, help="so many steps in place of the jobs")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if args.training:
        print(result := watched_training(args.training))
        write_result(args.record, provenance(torch.device("cpu")), result)
        return
    runs = [run(seed, drifts) for drifts in (False, True) for seed in range(args.runs)]
    calm, drifting = runs[: args.runs], runs[args.runs :]
    in_time = [any(0 <= alarm - one["drifts_at"] < 2 for alarm in one["alarms_at"]) for one in drifting]
    worth = [one["gain"] >= 0.05 for one in drifting]
    early = sum(alarm < one["drifts_at"] for one in drifting for alarm in one["alarms_at"])
    result = {
        "false_alarms": sum(len(one["alarms_at"]) for one in calm) + early,
        "runs_without_drift": len(calm),
        "drifting_runs": len(drifting),
        "worth_5_percent": sum(worth),
        "alarms_within_two_windows": sum(in_time),
        "of_those_worth": sum(alarm for alarm, counts in zip(in_time, worth, strict=True) if counts),
        "call_us": round(call_us(), 3),
    }
    print(result)
    write_result(args.record, provenance(torch.device("cpu")), result, {"runs": runs})


if __name__ == "__main__":
    main()
