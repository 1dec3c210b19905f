# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learn the costs of kernels on one rank from the default observation of DLRMs, and check them on other DLRMs.

    torchrun --standalone --nproc_per_node=1 benchmarks/observed_card.py --record observed-card.jsonl

Each DLRM has tables of the collection, a dim and a batch of its own. The first ones are planned by
``DreamShardPlanner(topology, batch_size)`` in a home that is empty at first. Nothing is called but their steps: the
default observation records them, and a background process learns from the newest runs. The other DLRMs are held out.
Errors on their kernels are those of the bandwidths (``roofline``), of the checkpoint in use before, and of the learned
costs. At last one DLRM is trained in turns with and without an observer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology

from closed_loop import wait_for_learning
from common.output import append, provenance, quiet
from dlrm.job import Job, scale_tables
from dlrm.options import Config, Node
from dlrm.steps import training_step
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, compare_steps, observe
from dreamshard_planner.checkpoints.choice import resolve, resolve_for
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.observing.learning import observed_sets
from dreamshard_planner.observing.observation import Observation
from dreamshard_planner.observing.observer import DEFAULT_EVERY, STEPS, WARM_UP_STEPS
from dreamshard_planner.observing.step_comparison import Step
from dreamshard_planner.planning.ranks import RankHardware, read_topology
from dreamshard_planner.workload.pools import named_pool


def drawn(seed: int, node: Node, args: argparse.Namespace) -> Job:
    """Return a DLRM with tables, dim and batch drawn by its seed."""
    chosen = random.Random(seed)
    count = chosen.randint(4, 26)
    config = Config(
        planners="dreamshard",
        dim=chosen.choice((32, 64, 128, 256)),
        batch_size=args.batch_size >> chosen.randint(0, 2),
        max_rows=args.max_rows,
        size="small",
        batches=2,
        seed=seed,
    ).on(node.device.type)
    tables, _ = scale_tables(chosen.sample(named_pool(config.tables), count), config.max_rows, config.dim)
    return Job.of(tables, config, node)


def topology_of(node: Node) -> Topology:
    """Return the topology that planners read from this hardware."""
    return read_topology(node.device.type, [RankHardware.here(node.device.type)] * node.world_size)


def started(job: Job, observed: bool) -> tuple[nn.Module, Step, DreamShardPlanner]:
    """Start a training as a user does, with or without the default observation."""
    planner = DreamShardPlanner(topology_of(job.node), batch_size=job.config.batch_size, debug=False)
    model = DistributedModelParallel(job.fresh_model(), device=job.node.device, planner=planner, observe=observed)
    return model, training_step(model, job.node.device, pipelined=False), planner


def described(job: Job, planner: DreamShardPlanner) -> dict[str, Any]:
    """Return what was trained, and the first line of the plan's report."""
    told = {"tables": len(job.tables), "dim": job.tables[0].dim, "batch_size": job.config.batch_size}
    return {"seed": job.config.seed, **told, "report": str(planner.report()).splitlines()[0]}


def overhead(model: nn.Module, step: Step, job: Job, pairs: int) -> dict[str, Any]:
    """Return the steps of one model with an observer over those without, between the bounds of the interval."""

    def build(on: bool) -> tuple[nn.Module, Step]:
        def steps(batches: Iterator[Any]) -> None:  # as many as there are from one counted batch to the next
            with observe(model, every=DEFAULT_EVERY) if on else nullcontext():
                for _ in range(DEFAULT_EVERY):
                    step(batches)

        return model, steps

    plans = {"without": False, "with": True}
    counts = {"copies": 1, "rounds": pairs, "block_seconds": 0.0, "observed_steps": 0}
    compared = compare_steps(build, plans, job.batches, **counts)
    return {"with_over_without": compared.ratio("with"), f"ms_of_{DEFAULT_EVERY}_steps": compared.step_ms}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8, help="that teach")
    parser.add_argument("--held-out", type=int, default=8, help="models that check")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"to observe of a model that teaches ({STEPS})")
    parser.add_argument("--pairs", type=int, default=20, help="blocks with an observer, and as many without")
    parser.add_argument("--batch-size", type=int, default=32768, help="of the largest models")
    parser.add_argument("--max-rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=90.0, help="half for teaching, half for checks")
    parser.add_argument("--record", type=Path, default=Path("observed-card.jsonl"), help="add lines to this file")
    args = parser.parse_args()
    quiet()
    os.environ["DREAMSHARD_OBSERVE"] = str(args.steps)
    node, begun = Node.join(), time.monotonic()
    topology = topology_of(node)
    append(args.record, provenance(node.device))

    def tell(**line: Any) -> None:
        append(args.record, line | {"seconds": round(time.monotonic() - begun, 1)})
        print(line, flush=True)

    with tempfile.TemporaryDirectory() as home:
        os.environ["DREAMSHARD_HOME"] = home
        costs = {"roofline": resolve("roofline", node.device.type), "before": resolve_for(topology, "auto")}
        for seed in range(args.models):
            if time.monotonic() - begun < args.seconds / 2:
                job = drawn(seed, node, args)
                model, step, planner = started(job, observed=True)
                batches = itertools.cycle(job.batches)
                for _ in range(WARM_UP_STEPS + args.steps + 3):
                    step(batches)
                tell(teaches=described(job, planner))
                del model, step, planner
                gc.collect()  # models are cyclic
        wait_for_learning()
        costs["learned"] = resolve_for(topology, "auto")
        tell(costs={name: one.name for name, one in costs.items()}, learned=costs["learned"].metadata.get("learned"))
        seen: list[Observation] = []
        checked = time.monotonic()
        for seed in range(args.models, args.models + args.held_out):
            if time.monotonic() - checked < args.seconds / 2 or not seen:
                job = drawn(seed, node, args)
                model, step, planner = started(job, observed=False)
                once = {"copies": 1, "rounds": 1, "block_seconds": 0.0, "observed_steps": DEFAULT_EVERY}
                compared = compare_steps(lambda both: both, {"": (model, step)}, job.batches, **once)
                seen.append(compared.observed[""])
                tell(checks=described(job, planner))
                gc.collect()
        checks = observed_sets(Observation.merge({str(index): part for index, part in enumerate(seen)}))[0]
        for name, checkpoint in costs.items():
            predicted_ms = predict_ms(checkpoint.compute_cost(topology), checks)
            tell(which=name, errors=mape_2(predicted_ms, checks.labels_ms_X2).tolist(), ms=predicted_ms.tolist())
        tell(measured_ms=checks.labels_ms_X2.tolist())
        tell(**overhead(model, step, job, args.pairs))
    del model, step
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
