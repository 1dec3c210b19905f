# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps of random models at the first, second and third start of a job, without a command between them.

    torchrun --standalone --nproc_per_node=2 benchmarks/closed_loop.py --models 12 --json loop.json

Each start is ``DreamShardPlanner(topology, batch_size)`` in a home of the model's own, which is empty at first. It
trains until its steps are observed and learned from. TorchRec's planner knows the lookups per sample of all features.
All models then train in shuffled turns. A round's ratio is of its blocks, and a model's is the median over the rounds.

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
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from common.output import interval, provenance, quiet, table_of, wide_console, write_result
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
        _learned()
        dist.barrier()
    return {
        **row_of(task, planners, trainees, node),
        "notes": {name: _notes(planners[name], node) for name in STARTS},
    }


def _trainee(task: Tables, planner: EmbeddingShardingPlanner, batches: list[Any], node: Node, observe: bool) -> Trainee:
    model = DistributedModelParallel(RandomModel(task), device=node.device, planner=planner, observe=observe)
    return Trainee(model, batches, node, pipelined=False)


def _learned() -> None:
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


def summary_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return geometric means with their intervals, and the extremes of the models, by start."""
    ratio_M = {name: np.array([ratio(row, name) for row in rows]) for name in STARTS}
    return {
        name: {
            "mean": interval(lambda some, of_M=of_M: np.exp(np.log(of_M)[some].mean(1)), len(of_M)),
            "least": float(of_M.min()),
            "most": float(of_M.max()),
            "above_1.02": int((of_M > 1.02).sum()),
        }
        for name, of_M in ratio_M.items()
    }


def tell(summary: dict[str, dict[str, Any]], models: int) -> None:
    """Print the summary as a table."""
    title = f"{models} models, step over that of TorchRec's plan by known lookups"
    table = table_of(title, "", "mean", "interval", "from", "to", "over 1.02")
    for name, one in summary.items():
        low, mean, high = one["mean"]
        extremes = (f"{one[which]:.3f}" for which in ("least", "most"))
        table.add_row(name, f"{mean:.3f}", f"{low:.3f}-{high:.3f}", *extremes, str(one["above_1.02"]))
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--first-model", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps to observe at each start ({STEPS})")
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    quiet()
    os.environ["DREAMSHARD_OBSERVE"] = str(given.steps)
    with cpu_rank() as node, tempfile.TemporaryDirectory() as own:
        rows = []
        for seed in range(given.first_model, given.first_model + given.models):
            os.environ["DREAMSHARD_HOME"] = str(Path(node.gather(own)[0]) / str(seed))
            rows.append(measured(Tables.draw(seed, MOST_ROWS), node, given.steps))
            if node.rank == 0:
                print(seed, *(f"{name} {ratio(rows[-1], name):.3f}" for name in STARTS), flush=True)
        dist.barrier()  # before rank 0 removes the homes
    if node.rank == 0:
        tell(summary_of(rows), len(rows))
        result = {"ranks": node.world_size, "observed_steps": given.steps, "summary": summary_of(rows), "models": rows}
        write_result(given.json, provenance(torch.device("cpu")), result)
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
