# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What observing training steps teaches the costs, and what it takes of a step.

    torchrun --standalone --nproc_per_node=2 benchmarks/observed_steps.py --json observed-steps.json

CPU ranks over gloo, one thread each. Each model has --count tables of the collection, drawn by its seed, and one of the
three optimizers. It trains --steps steps under each of two plans, arbitrary placements of whole tables, while it is
observed; ``learn`` corrects bandwidths (``roofline``), and the checkpoint that ships, by these; then errors are told on
the kernels of five other placements, observed likewise. Overhead: blocks of --block steps of one model in turn with and
without observing, by the wall clock of the slower rank and by the processor time of both.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dlrm.model import fill_tables, make_batches, make_model, scale_tables
from dlrm.node import Node
from dlrm.options import OPTIMIZERS
from dlrm.planners import SkewedPartitioner
from dlrm.steps import Trainee
from dreamshard_planner import Checkpoint, DistributedModelParallel
from dreamshard_planner.checkpoints.checkpoint import SHIPPED, resolve, shipped
from dreamshard_planner.cost.fit import mape_2, predict_ms
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.measure.ranks import local_ranks
from dreamshard_planner.measure.timing import pinned, rank_cores
from dreamshard_planner.observing.learning import ObservedSets, learn
from dreamshard_planner.observing.observation import Observation
from dreamshard_planner.observing.observer import observe
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import Table

DIM, BATCHES = 32, 8
LEARNED_FROM, HELD_OUT = 2, 5
"""Plans."""


def trainee(tables: Sequence[Table], optimizer: str, plan: int, node: Node, given: argparse.Namespace) -> Trainee:
    """A model under an arbitrary placement."""
    constraints = {table.name: ParameterConstraints(["table_wise"], ["fused"]) for table in tables}
    bare = make_model(tables, "small", 0, node.device)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], bare.model.sparse_arch.parameters(), {"lr": 0.01})
    planner = EmbeddingShardingPlanner(
        topology=node.topology(),
        batch_size=given.batch_size,
        constraints=constraints,
        partitioner=SkewedPartitioner(tables, plan),
    )
    sharders = [EmbeddingBagCollectionSharder()]
    sharding = planner.collective_plan(bare, sharders, dist.group.WORLD)
    model = DistributedModelParallel(bare, plan=sharding, sharders=sharders, device=node.device)
    fill_tables(model, tables, 0)
    batches = make_batches(tables, BATCHES, given.batch_size, node.rank, node.world_size, 0)
    made = Trainee(model, batches, node)
    made.train(3, timed=False)
    return made


def observed(one: Trainee, steps: int, node: Node) -> Observation:
    """Of all ranks."""
    return Observation.merge({str(rank): part for rank, part in enumerate(node.gather(one.observed(steps)))})


def errors(checkpoint: Checkpoint, observation: Observation, node: Node) -> list[float]:
    """Mean errors on its kernels, forward and backward."""
    sets = ObservedSets.of(observation).sets
    return mape_2(predict_ms(checkpoint.compute_cost(node.topology()), sets), sets.labels_ms_X2).tolist()


def learned(start: Checkpoint, observation: Observation) -> Checkpoint:
    """What was learned; what was there, where that is refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return learn(start, observation, Path(folder) / "learned.safetensors")
        except CalibrationRefused:
            return start


def run_model(seed: int, node: Node, given: argparse.Namespace) -> dict[str, Any]:
    """Learn from two plans, and check with five."""
    optimizer = tuple(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    pool = random.Random(seed).sample(named_pool(given.tables), given.count)
    tables, _ = scale_tables(pool, given.max_rows, DIM)
    seen = []
    for plan in range(LEARNED_FROM + HELD_OUT):
        seen.append(observed(trainee(tables, optimizer, 100 * seed + plan, node, given), given.steps, node))
        gc.collect()  # models are cyclic
    parts = seen[:LEARNED_FROM], seen[LEARNED_FROM:]
    train, test = (Observation.merge({str(index): one for index, one in enumerate(part)}) for part in parts)
    told: dict[str, Any] = {"seed": seed, "optimizer": optimizer, "kernels": len(ObservedSets.of(train).sets)}
    for name, start in (("roofline", resolve("roofline", "cpu")), ("shipped", shipped(SHIPPED, "cpu", "default"))):
        told[name] = errors(start, test, node)
        told[f"{name}, learned"] = errors(learned(start, train), test, node)
    return told


def overhead(node: Node, given: argparse.Namespace) -> dict[str, Any]:
    """Ratios of a block that is observed to the block beside it that is not, and their 95 % interval."""
    tables, _ = scale_tables(named_pool("mlperf_dlrm_dcnv2"), 100_000)
    one = trainee(tables, "adagrad", 0, node, given)
    rows = []
    for turn in range(given.blocks):
        times = {}
        for on in (turn % 2 == 0, turn % 2 == 1):
            with observe(one.model) if on else nullcontext():
                computed = time.process_time()
                start = time.perf_counter()
                one.train(given.block, timed=False)
                times[on] = time.perf_counter() - start, time.process_time() - computed
        rows.append([times[True], times[False]])
    blocks = np.array(node.gather(rows))  # ranks, turns, on or off, wall and computed
    ratio = {"wall": blocks[..., 0].max(0), "computed": blocks[..., 1].sum(0)}
    told: dict[str, Any] = {"step_ms": float(1e3 * np.median(ratio["wall"][:, 1]) / given.block)}
    for name, of_turns in ratio.items():
        of_turns = of_turns[:, 0] / of_turns[:, 1]
        spread = 1.96 * of_turns.std(ddof=1) / len(of_turns) ** 0.5
        told[name] = [float(of_turns.mean() + side * spread) for side in (-1, 0, 1)]
    return told


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="mlperf_dlrm_dcnv2", help="collection that models draw from")
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--count", type=int, default=14, help="tables of a model")
    parser.add_argument("--max-rows", type=int, default=100_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=50, help="observed under each plan")
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks for the overhead; 0: none")
    parser.add_argument("--block", type=int, default=100, help="steps of each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    local_rank, local_world_size = local_ranks()
    with pinned(1, rank_cores(local_rank, local_world_size)):
        node = Node.join()
        models = []
        for seed in range(given.models):
            models.append(run_model(seed, node, given))
            if node.rank == 0:
                print(models[-1], file=sys.stderr)
        taken = overhead(node, given) if given.blocks else None
    if node.rank == 0:
        tell(models, taken, given)
    dist.destroy_process_group()


def tell(models: Sequence[dict[str, Any]], taken: dict[str, Any] | None, given: argparse.Namespace) -> None:
    """Print, and write where wanted."""
    console = wide_console()
    columns = ("kernels", "prior", "learned", "shipped", "learned")
    table = table_of(f"Error on kernels of {HELD_OUT} other plans", "model", *columns)
    names = ("roofline", "roofline, learned", "shipped", "shipped, learned")
    for one in models:
        cells = [" ".join(f"{error:.0%}" for error in one[name]) for name in names]
        table.add_row(f"{one['seed']} {one['optimizer']}", str(one["kernels"]), *cells)
    console.print(table)
    mean = {name: float(np.mean([one[name] for one in models])) for name in names} if models else {}
    console.print(f"mean of both directions and all models: {mean}; observing takes {taken}")
    told = {**provenance(torch.device("cpu")), "settings": {k: str(v) for k, v in vars(given).items()}}
    write_result(given.json, told, {"models": models, "mean": mean, "overhead": taken})


if __name__ == "__main__":
    main()
