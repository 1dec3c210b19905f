# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps of random models at the first, second and third start of a job, without a command between them.

    torchrun --standalone --nproc_per_node=2 benchmarks/closed_loop.py --models 12 --record loop.jsonl
    python benchmarks/closed_loop.py --summarize loop.jsonl

Each start is ``DreamShardPlanner(topology, batch_size)`` in a home of the model's own, which is empty at first. It
trains until its steps are observed and learned from. TorchRec's planner knows the lookups per sample of all features.
All models then train in shuffled turns. A round's ratio is of its blocks, and a model's is the median over the rounds.
A record has one JSON line a model; the same command continues it.

Shapes: R ranks, P plans, N rounds, M models.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from common.output import append, interval, opened, quiet, table_of, wide_console
from default_steps import BASE, BATCHES, MOST_ROWS, ratio, row_of
from dlrm.options import Node, cpu_rank
from dlrm.random_models import RandomModel, Tables
from dlrm.steps import Trainee
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.observing.automatic import STEPS, WARM_UP_STEPS

STARTS = ("start 1", "start 2", "start 3")


def measured(task: Tables, node: Node, steps: int) -> dict[str, Any]:
    """Return milliseconds of a step under each plan, by rounds; of a block, those of its slowest rank."""
    batches = [task.batch(index, node.rank) for index in range(BATCHES)]
    world = Topology(node.world_size, "cpu", local_world_size=node.world_size, ddr_cap=64 << 30)
    given = {"topology": world, "batch_size": task.batch_size, "stats": [], "debug": False}
    known = {
        f"t{index}": ParameterConstraints(pooling_factors=[float(lookups)])
        for index, (_, _, lookups) in enumerate(task.tables)
    }
    planners: dict[str, EmbeddingShardingPlanner] = {BASE: EmbeddingShardingPlanner(**given, constraints=known)}
    trainees = {BASE: _trainee(task, planners[BASE], batches, node, observe=False)}
    for name in STARTS:
        planners[name] = DreamShardPlanner(**given)
        trainees[name] = _trainee(task, planners[name], batches, node, observe=True)
        trainees[name].train(WARM_UP_STEPS + steps + 3, timed=False)
        wait_for_learning()
        dist.barrier()
    return {
        **row_of(task, planners, trainees, node),
        "notes": {name: _notes(planners[name], node) for name in STARTS},
    }


def _trainee(task: Tables, planner: EmbeddingShardingPlanner, batches: list[Any], node: Node, observe: bool) -> Trainee:
    model = DistributedModelParallel(RandomModel(task), device=node.device, planner=planner, observe=observe)
    return Trainee(model, batches, node, pipelined=False)


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
    return [note.text for note in planner.report().notes if note.code in ("learned", "search")]


def tell(path: Path) -> None:
    """Print geometric means with their intervals, and the extremes of the models, by start."""
    rows = [line for line in opened(path) if "seed" in line]
    title = f"{path.name}: {len(rows)} models, step over that of TorchRec's plan by known lookups"
    table = table_of(title, "", "mean", "interval", "from", "to", "over 1.02")
    for name in STARTS if rows else ():
        ratio_M = np.array([ratio(row, name) for row in rows])
        low, mean, high = interval(lambda some, of_M=ratio_M: np.exp(np.log(of_M)[some].mean(1)), len(rows))
        extremes = (f"{one:.3f}" for one in (ratio_M.min(), ratio_M.max()))
        table.add_row(name, f"{mean:.3f}", f"{low:.3f}-{high:.3f}", *extremes, str(int((ratio_M > 1.02).sum())))
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
    with cpu_rank() as node, tempfile.TemporaryDirectory() as own:
        done = {line.get("seed") for line in node.gather(opened(given.record) if node.rank == 0 else [])[0]}
        for seed in range(given.first_model, given.first_model + given.models):
            if seed in done:
                continue
            os.environ["DREAMSHARD_HOME"] = str(Path(node.gather(own)[0]) / str(seed))
            row = measured(Tables.draw(seed, MOST_ROWS), node, given.steps)
            gc.collect()  # models are cyclic
            if node.rank == 0:
                append(given.record, {**row, "ranks": node.world_size, "observed_steps": given.steps})
                print(seed, *(f"{name} {ratio(row, name):.3f}" for name in STARTS), flush=True)
        dist.barrier()  # before rank 0 removes the homes
    if node.rank == 0:
        tell(given.record)
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
