# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learn the costs of kernels from observed steps of some models on one rank, and check them on other models.

    torchrun --standalone --nproc_per_node=1 benchmarks/observed_card.py --json observed-card.json

One rank has no exchanges and one way to lie, so models differ instead: each has tables of the collection drawn by its
seed, of its own dim, batch and optimizer. ``learn`` corrects the bandwidths (``roofline``) and the network in use by
the first models; errors are those on kernels of the others.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch.distributed as dist

from common.output import provenance, quiet, wide_console, write_result
from dlrm.job import Job, scale_tables
from dlrm.options import Config, Node
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve, resolve_for
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.observing.learning import ObservedSets, learn
from dreamshard_planner.observing.observation import Observation
from dreamshard_planner.workload.pools import named_pool
from observed.learned import LEARNED, arbitrary_plan

WARMUP_STEPS = 3


def observed(seed: int, node: Node, args: argparse.Namespace) -> Observation:
    """Train a model, and observe its steps."""
    drawn = random.Random(seed)
    config = Config(
        planners="dreamshard",
        count=drawn.randint(4, 26),
        dim=drawn.choice((32, 64, 128, 256)),
        batch_size=args.batch_size >> drawn.randint(0, 2),
        optimizer=drawn.choice(("rowwise_adagrad", "sgd")),
        max_rows=args.max_rows,
        size="small",
        steps=4,
        seed=seed,
    ).on(node.device.type)
    pool = drawn.sample(named_pool(config.tables), config.count)
    tables, _ = scale_tables(pool, config.max_rows, config.dim)
    job = Job.of(tables, config, node)
    one = job.trainee(arbitrary_plan(job, 0), pipelined=False)
    one.train(WARMUP_STEPS, timed=False)
    seen = one.observed(args.steps)
    del one
    gc.collect()  # models are cyclic
    return seen


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=24, help="two of three teach, the others check")
    parser.add_argument("--steps", type=int, default=40, help="observed of each model")
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--max-rows", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=45.0, help="begin no model later than this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet()
    node, started, seen = Node.join(), time.monotonic(), []
    for seed in range(args.models):
        if time.monotonic() - started < args.seconds:
            seen.append(observed(seed, node, args))
    teach = merged([one for index, one in enumerate(seen) if index % 3 != 2])
    checks = ObservedSets.of(merged(seen[2::3])).sets
    kernels = [len(ObservedSets.of(teach).sets), len(checks)]
    told: dict[str, Any] = {"models": len(seen), "kernels": kernels, "errors": {}}
    priors = {"roofline": resolve("roofline", node.device.type), "auto": resolve_for(node.topology(), "auto")}
    for name, prior in priors.items():
        for which, checkpoint in ((name, prior), (name + LEARNED, learned(prior, teach))):
            predicted_ms = predict_ms(checkpoint.compute_cost(node.topology()), checks)
            told["errors"][which] = mape_2(predicted_ms, checks.labels_ms_X2).tolist()
            wide_console().print(which, checkpoint.name, *(f"{error:.1%}" for error in told["errors"][which]))
    told["measured_ms"] = checks.labels_ms_X2.tolist()
    write_result(args.json, provenance(node.device), told)
    gc.collect()
    dist.destroy_process_group()


def learned(prior: Checkpoint, seen: Observation) -> Checkpoint:
    """Return what observations make of costs; the prior, where learning is refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return learn(prior, seen, Path(folder) / "learned.safetensors")
        except CalibrationRefused:
            return prior


def merged(parts: list[Observation]) -> Observation:
    """Return observations of several models as one."""
    return Observation.merge({str(index): part for index, part in enumerate(parts)})


if __name__ == "__main__":
    main()
