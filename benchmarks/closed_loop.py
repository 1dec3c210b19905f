# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps of random models at the first, second and third start of a job, without a command between them.

    torchrun --standalone --nproc_per_node=2 benchmarks/closed_loop.py --models 12 --record loop.jsonl
    python benchmarks/closed_loop.py --summarize loop.jsonl

Each start is ``DreamShardPlanner(topology, batch_size)`` in a home of the model's own, which is empty at first. It
trains until its steps are observed and learned from. TorchRec's planner knows the lookups per sample of all features.
Two models of each plan then train in shuffled turns, since the place in memory alone changes steps by some percent;
equal plans count as one. A record has one JSON line a model; the same command continues it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner

from common.output import append, opened, quiet, table_of, wide_console
from dlrm.options import Node, cpu_rank
from dlrm.random_models import RandomJob, RandomModel, Tables, mean_ratio, ratio
from dlrm.steps import training_step
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.observing.observer import STEPS, WARM_UP_STEPS

BASE, STARTS = "torchrec", ("start 1", "start 2", "start 3")
MOST_ROWS = (5_000, 100_000, 1_000_000)
ROUNDS, BLOCK_SECONDS = 8, 0.35


def measured(seed: int, node: Node, steps: int) -> dict[str, Any]:
    """Return milliseconds of a step under each plan, and what the reports of all starts say."""
    job, notes = RandomJob(Tables.draw(seed, MOST_ROWS), node), {}
    plans = {BASE: job.plan(EmbeddingShardingPlanner(**job.given, constraints=job.informed()))}
    for name in STARTS:
        planner = DreamShardPlanner(**job.given)
        model = DistributedModelParallel(RandomModel(job.tables), device=node.device, planner=planner)
        step, batches = training_step(model, node.device, pipelined=False), itertools.cycle(job.batches)
        for _ in range(WARM_UP_STEPS + steps + 3):
            step(batches)
        plans[name], notes[name] = model.plan, _notes(planner, node)
        wait_for_learning()
        dist.barrier()
        del model, step
    row = job.measured(plans, rounds=ROUNDS, block_seconds=BLOCK_SECONDS)
    return {**row, "notes": notes, "observed_steps": steps}


def wait_for_learning() -> None:
    """Wait for the threads that write what was observed, and for what is learned from it."""
    for name in ("observation", "background"):
        for thread in threading.enumerate():
            if thread.name == f"dreamshard_planner {name}":
                thread.join()


def _notes(planner: DreamShardPlanner, node: Node) -> list[str]:
    """Return what a report says of learned costs and of replaced plans, on rank 0."""
    if node.rank:
        return []
    return [note.text for note in planner.report().notes if note.code in ("source", "search")]


def tell(path: Path) -> None:
    """Print geometric means with their intervals, and the extremes of the models, by start."""
    rows = [line for line in opened(path) if "step_ms" in line]
    title = f"{path.name}: {len(rows)} models, step over that of TorchRec's plan by known lookups"
    table = table_of(title, "", "mean", "interval", "over 1.02", "beyond noise", "from", "to")
    for name in STARTS if rows else ():
        lows, ratios, _ = zip(*(ratio(row, name, BASE) for row in rows), strict=True)
        beyond = sum(low > 1.02 for low in lows)
        table.add_row(name, *mean_ratio(ratios), str(beyond), f"{min(ratios):.3f}", f"{max(ratios):.3f}")
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--first-model", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps to observe at each start ({STEPS})")
    parser.add_argument("--record", type=Path, default=Path("loop.jsonl"), help="continue this file")
    parser.add_argument("--summarize", type=Path, nargs="+", help="print the means of these records, and end")
    given = parser.parse_args()
    quiet()
    if given.summarize:
        for path in given.summarize:
            tell(path)
        return
    os.environ["DREAMSHARD_OBSERVE"] = str(given.steps)
    node = cpu_rank()
    with tempfile.TemporaryDirectory() as own:
        done = {line.get("model") for line in node.gather(opened(given.record) if node.rank == 0 else [])[0]}
        for seed in range(given.first_model, given.first_model + given.models):
            if seed in done:
                continue
            os.environ["DREAMSHARD_HOME"] = str(Path(node.gather(own)[0]) / str(seed))
            row = measured(seed, node, given.steps)
            gc.collect()  # models are cyclic
            if node.rank == 0:
                append(given.record, row)
                print(seed, *(f"{name} {ratio(row, name, BASE)[1]:.3f}" for name in STARTS), flush=True)
        dist.barrier()  # before rank 0 removes the homes
    if node.rank == 0:
        tell(given.record)
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
