# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure what costs learn from observed steps, what plans by them gain, and what observing takes of a step.

    torchrun --standalone --nproc_per_node=2 benchmarks/observed_steps.py --record observed.jsonl --json observed.json
    torchrun --standalone --nproc_per_node=2 benchmarks/observed_steps.py --models 0 --pairs 400 --json overhead.json

CPU ranks over gloo, one thread each. Each model has --count tables of the collection, drawn by its seed, all read
--lookups times as often and the hottest --hot times more, so that kernels are a good part of a step; and one of three
optimizers. It trains --steps steps under an arbitrary placement of whole tables and as many under TorchRec's plan,
while it is observed, without a pipeline. ``learn`` corrects bandwidths (``roofline``), and the checkpoint that ships,
by these; then errors are told on kernels and exchanges of five other arbitrary placements, observed likewise.

Then --plans are made for the model: by the costs of these names, and by TorchRec's planner with true pooling factors;
all may use the same --sharding-types, of which those are left out that would train the model otherwise (slices of
columns with row-wise Adagrad). Steps of --copies models of each are measured in turns.

Overhead: blocks of the demo's model, planned as there, in turn with and without observing (``observed/overhead.py``),
by the wall clock of the slower rank and by the processor time of all.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
import torch.distributed as dist

from common.output import append, named, provenance, quiet, wide_console, write_result
from dlrm.job import Job, heated, scale_tables
from dlrm.options import OPTIMIZERS, Config, Node, argument_parser, cpu_rank, option
from dreamshard_planner import Checkpoint
from dreamshard_planner.workload.pools import named_pool
from observed.learned import LEARNED, PRIORS, Observed
from observed.overhead import overhead
from observed.plans import measure_plans, summary_of, tell


@dataclass(frozen=True)
class Setting:
    """Options of all models."""

    tables: str = option("mlperf_dlrm_dcnv2", "collection that models draw from")
    count: int = option(16, "tables of a model")
    max_rows: int = option(50_000, "scale larger tables down to this many rows")
    dim: int = option(128, "of all tables")
    lookups: float = option(4.0, "multiply those of all tables")
    hot: float = option(2.0, "multiply those of the hottest table once more")
    batch_size: int = option(512, "of a rank")
    steps: int = option(100, "observed under each plan")
    plans: str = option("roofline-learned,shipped", "by these costs, separated by commas; '': none")
    sharding_types: str = option("table_wise,column_wise", "of all plans")
    min_partition: int = option(32, "narrowest column slice; 0: TorchRec's default")
    steps_measured: int = option(240, "of each plan, over its copies")
    copies: int = option(2, "models of each plan")
    block: int = option(2, "steps of one model before it is another's turn")

    def job(self, seed: int, node: Node) -> Job:
        """Return one of the models."""
        pool = named_pool(self.tables)
        drawn = random.Random(seed).sample(pool, min(self.count, len(pool)))
        tables, _ = scale_tables([heated(table, self.lookups) for table in drawn], self.max_rows, self.dim, self.hot)
        return Job.of(tables, self.config(seed), node)

    def config(self, seed: int) -> Config:
        """Return how its plans are made and measured."""
        optimizer = tuple(OPTIMIZERS)[seed % len(OPTIMIZERS)]
        return Config(
            planners="dreamshard,torchrec",
            copies=self.copies,
            steps=self.steps_measured,
            block=self.block,
            batch_size=self.batch_size,
            sharding_types=",".join(kind for kind in named(self.sharding_types) if trains_exactly(kind, optimizer)),
            min_partition=self.min_partition,
            optimizer=optimizer,
            processor_time=True,
            seed=seed,
        ).on("cpu")


def trains_exactly(kind: str, optimizer: str) -> bool:
    """Return whether tables of this sharding type are trained as whole ones: column slices would have row-wise states
    of their own."""
    return not ("column" in kind and optimizer == "rowwise_adagrad")


def run_model(seed: int, setting: Setting, node: Node) -> dict[str, Any]:
    """Learn from two plans, check with five, and plan."""
    start = time.monotonic()
    job = setting.job(seed, node)
    seen = Observed.of(job, setting.steps)
    costs = seen.costs()
    told = {
        "model": seed,
        "optimizer": job.config.optimizer,
        "kernels": seen.kernels,
        "errors": {name: seen.errors(checkpoint, job) for name, checkpoint in costs.items()},
        "exchanges": {name: seen.exchange_errors(checkpoint) for name, checkpoint in costs.items()},
        "learned": {name: learned_of(costs[name + LEARNED]) for name in PRIORS},
        "plans": measure_plans(job, {name: costs[name] for name in named(setting.plans)}) if setting.plans else {},
        "seconds": round(time.monotonic() - start),
    }
    gc.collect()  # models are cyclic
    return told


def learned_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what was learned: corrections of kernels, and fits of exchanges."""
    metadata = checkpoint.metadata
    return {"corrections": metadata.get("corrections"), "collectives": (metadata.get("collectives") or {}).get("fits")}


def recorded(path: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the models of a record, so that what was interrupted goes on.

    Raises:
        ValueError: they are of other settings.
    """
    if path is None or not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if any(row["settings"] != settings for row in rows):
        raise ValueError(f"{path} has rows of other settings: give another file")
    return rows


def main() -> None:
    """The command."""
    parser = argument_parser(__doc__, Setting)
    parser.add_argument("--models", type=int, default=12, help="0: overhead alone")
    parser.add_argument("--first-model", type=int, default=0, help="its seed")
    parser.add_argument("--pairs", type=int, default=0, help="of blocks for the overhead; 0: none")
    parser.add_argument("--overhead-block", type=int, default=7, help="steps of each, behind the first one")
    parser.add_argument("--record", type=Path, help="a line of each model; models that are there are not run again")
    parser.add_argument("--json", type=Path, help="everything")
    given = parser.parse_args()
    if unknown := set(named(given.plans)) - {*PRIORS, *(name + LEARNED for name in PRIORS)}:
        parser.error(f"plans of unknown costs: {sorted(unknown)}")
    quiet()
    setting = Setting(**{field.name: getattr(given, field.name) for field in fields(Setting)})
    with cpu_rank() as node:
        settings = asdict(setting) | {"ranks": node.world_size}
        rows = node.gather(recorded(given.record, settings))[0]
        done = {row["model"] for row in rows}
        for seed in range(given.first_model, given.first_model + given.models):
            if seed not in done:
                rows.append(run_model(seed, setting, node) | {"settings": settings})
                if node.rank == 0:
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    if given.record is not None:
                        append(given.record, rows[-1])
        gc.collect()
        taken = overhead(node, given.pairs, given.overhead_block) if given.pairs else None
    if node.rank == 0:
        summary = summary_of(rows)
        tell(rows, summary, taken, wide_console(160))
        write_result(given.json, provenance(torch.device("cpu")), {"models": rows}, summary, {"overhead": taken})
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
