# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps of random models under the plans that both planners make unasked.

    torchrun --standalone --nproc_per_node=2 benchmarks/default_steps.py --models 30 --json steps.json

``DreamShardPlanner()`` and TorchRec's ``EmbeddingShardingPlanner()`` are told topology and batch size, and ours once
more statistics of the batches; all in this package's ``DistributedModelParallel``. A model has 4 to 60 tables into a
small dense net; half of them have a hot table, half have skewed ids. Blocks of steps come in shuffled turns; a round's
ratio is of its blocks, and a model's is the median over the rounds.

Shapes: R ranks, P planners, N rounds, M models.
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import Counter
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from common.output import interval, provenance, quiet, table_of, wide_console, write_result
from dlrm.options import Config, Node, cpu_rank
from dlrm.random_models import RandomModel, Tables
from dlrm.steps import Trainee, take_turns
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics

BATCHES, WARMUP_STEPS, ROUNDS, BLOCK_SECONDS = 6, 4, 12, 0.35
MOST_ROWS = (5_000, 100_000, 1_000_000)
BASE, OURS, TOLD = "torchrec", "dreamshard", "dreamshard, statistics"


def measured(task: Tables, node: Node) -> dict[str, Any]:
    """Milliseconds of a step under each planner, by rounds; of a block as long as on its slowest rank."""
    batches = [task.batch(index, node.rank) for index in range(BATCHES)]
    statistics = TableStatistics.from_batches(batches).all_gather()
    world = Topology(node.world_size, "cpu", local_world_size=node.world_size, ddr_cap=64 << 30)
    given = {"topology": world, "batch_size": task.batch_size, "stats": [], "debug": False}
    planners: dict[str, EmbeddingShardingPlanner] = {
        BASE: EmbeddingShardingPlanner(**given),
        OURS: DreamShardPlanner(**given),
        TOLD: DreamShardPlanner(**given, statistics=statistics),
    }
    trainees: dict[str, Trainee] = {}
    for name, planner in planners.items():
        model = DistributedModelParallel(RandomModel(task), device=node.device, planner=planner)
        trainees[name] = Trainee(model, batches, node, pipelined=False)
    return row_of(task, planners, trainees, node)


def row_of(
    task: Tables, planners: dict[str, EmbeddingShardingPlanner], trainees: dict[str, Trainee], node: Node
) -> dict[str, Any]:
    """Return milliseconds of a step under each plan, by rounds, with the plans; a block is as long as on its slowest
    rank."""
    trainees[BASE].train(WARMUP_STEPS, timed=False)
    one_ms = max(node.gather(trainees[BASE].train(WARMUP_STEPS, timed=False)[0]))
    block = max(3, int(1e3 * BLOCK_SECONDS / one_ms))
    take_turns(trainees, Config(copies=1, block=block, steps=block * ROUNDS), node, random.Random(task.seed))
    blocks_RPN = np.array(node.gather([[ms for ms, *_ in trainee.blocks] for trainee in trainees.values()]))
    return {
        "seed": task.seed,
        "tables": len(task.tables),
        "batch_size": task.batch_size,
        "optimizer": task.optimizer.__name__,
        "step_ms": dict(zip(trainees, blocks_RPN.max(0).round(3).tolist(), strict=True)),
        "plans": {name: told(planner, trainees[name], node) for name, planner in planners.items()},
    }


def told(planner: EmbeddingShardingPlanner, trainee: Trainee, node: Node) -> dict[str, Any]:
    """Sharding types, and on rank 0 what was predicted, of the plan and of TorchRec's."""
    kinds = Counter(sharding.sharding_type for sharding in trainee.model.plan.plan["bags"].values())
    predicted: dict[str, float] = {}
    if isinstance(planner, DreamShardPlanner) and node.rank == 0:
        report = planner.report()
        predicted = {
            one.name: round(one.total_ms, 3) for one in (report.chosen, *report.rivals) if one.name in (BASE, OURS)
        }
    return {"types": dict(kinds), "predicted_ms": predicted}


def ratio(row: dict[str, Any], name: str) -> float:
    """Return a model's step time under a planner over that under TorchRec's."""
    mine_N, base_N = (np.array(row["step_ms"][which]) for which in (name, BASE))
    return float(np.median(mine_N / base_N))


def summary_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Geometric means between the bounds of their intervals, and the quartiles and extremes of the models."""
    ratio_M = {name: np.array([ratio(row, name) for row in rows]) for name in (OURS, TOLD)}
    return {
        name: {
            "mean": interval(lambda some, of_M=of_M: np.exp(np.log(of_M)[some].mean(1)), len(of_M)),
            "quartiles": np.percentile(of_M, (0, 25, 50, 75, 100)).tolist(),
            "above_1.02": int((of_M > 1.02).sum()),
        }
        for name, of_M in ratio_M.items()
    }


def tell(summary: dict[str, dict[str, Any]], models: int) -> None:
    """As a table."""
    table = table_of(f"{models} models, step over TorchRec's", "planner", "mean", "interval", "from", "to", "over 1.02")
    for name, one in summary.items():
        low, mean, high = one["mean"]
        extremes = (f"{one['quartiles'][at]:.3f}" for at in (0, 4))
        table.add_row(name, f"{mean:.3f}", f"{low:.3f}-{high:.3f}", *extremes, str(one["above_1.02"]))
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=30)
    parser.add_argument("--first-model", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    given = parser.parse_args()
    quiet()
    with cpu_rank() as node:
        rows = []
        for seed in range(given.first_model, given.first_model + given.models):
            rows.append(measured(Tables.draw(seed, MOST_ROWS), node))
            if node.rank == 0:
                print(seed, *(f"{name} {ratio(rows[-1], name):.3f}" for name in (OURS, TOLD)), flush=True)
    if node.rank == 0:
        tell(summary_of(rows), len(rows))
        result = {"ranks": node.world_size, "summary": summary_of(rows), "models": rows}
        write_result(given.json, provenance(torch.device("cpu")), result)
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
