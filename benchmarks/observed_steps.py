# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What observing training steps teaches the costs, what plans by them are worth, and what it takes of a step.

    dreamshard train --out trained.safetensors             # five minutes of measuring, on one core
    torchrun --standalone --nproc_per_node=2 benchmarks/observed_steps.py --network trained.safetensors \\
        --record observed.jsonl --json observed.json
    torchrun --standalone --nproc_per_node=2 benchmarks/observed_steps.py --models 0 --pairs 400 --json overhead.json

CPU ranks over gloo, one thread each. Each model has --count tables of the collection, drawn by its seed, all read
--lookups times as often and the hottest --hot times more, so that kernels are a good part of a step; and one of three
optimizers. It trains --steps steps under each of two plans, arbitrary placements of whole tables, while it is observed,
without a pipeline; with ``--learned-from planners`` under TorchRec's plan and ours by bandwidths, which may split
tables; with ``mixed`` under one of those placements and TorchRec's plan. ``learn`` corrects bandwidths (``roofline``),
and the checkpoint that ships, by these; then errors are told on kernels and exchanges of five other arbitrary
placements, observed likewise. Those of a --network are told as it is.

Then --plans are made for the model: by the costs of these names, the networks' included, and by TorchRec's planner with
true pooling factors; all may use the same --sharding-types, of which those are left out that would train the model
otherwise (slices of columns with row-wise Adagrad). Steps of --copies models of each are measured in turns.

Networks that were made before ``train`` measured Adagrad cost it as row-wise Adagrad. So errors are told without
Adagrad as well. A network that is calibrated may be given beside, of five minutes in all:

    dreamshard train --seconds 240 --out four.safetensors
    dreamshard calibrate --checkpoint four.safetensors --seconds 60 --out calibrated.safetensors

Overhead: blocks of the demo's model, planned as there, in turn with and without observing (``observed/overhead.py``),
by the wall clock of the slower rank and by the processor time of all.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
import torch.distributed as dist

from common.output import named, quiet, wide_console, write_result
from common.provenance import provenance
from dlrm.node import Node, cpu_rank
from dreamshard_planner import Checkpoint
from observed.learned import LEARNED, PLANS, PRIORS, Observed
from observed.overhead import overhead
from observed.plans import measure_plans
from observed.record import Record
from observed.setting import Setting
from observed.summary import OTHERS, summary_of, tell


def run_model(seed: int, setting: Setting, networks: Mapping[str, Path], node: Node) -> dict[str, Any]:
    """Learn from two plans, check with five, and plan."""
    start = time.monotonic()
    job = setting.job(seed, node)
    seen = Observed.of(job, setting.steps, setting.learned_from)
    costs = seen.costs(networks)
    told = {
        "model": seed,
        "optimizer": job.config.optimizer,
        "kernels": seen.kernels,
        "errors": {name: seen.errors(checkpoint, job) for name, checkpoint in costs.items()},
        "exchanges": {name: seen.exchange_errors(checkpoint) for name, checkpoint in costs.items()},
        "learned": {name: learned_of(costs[name + LEARNED]) for name in PRIORS},
        "plans": measure_plans(job, {name: costs[name] for name in setting.plans}) if setting.plans else {},
        "seconds": round(time.monotonic() - start),
    }
    gc.collect()  # models are cyclic
    return told


def learned_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was learned: corrections of kernels, and fits of exchanges."""
    metadata = checkpoint.metadata
    return {"corrections": metadata.get("corrections"), "collectives": (metadata.get("collectives") or {}).get("fits")}


def main() -> None:
    """The command."""
    parser = argument_parser()
    given = parser.parse_args()
    networks = {path.stem: path for path in given.network}
    unknown = set(given.plans) - {*PRIORS, *(name + LEARNED for name in PRIORS), *networks}
    if unknown or set(networks) & {*PRIORS, *OTHERS}:
        parser.error(
            f"plans of unknown costs, or networks of other costs' names: {sorted(unknown) or sorted(networks)}"
        )
    quiet()
    setting = Setting(**{field.name: getattr(given, field.name) for field in fields(Setting)})
    with cpu_rank() as node:
        record = Record(given.record, asdict(setting) | {"ranks": node.world_size, "networks": sorted(networks)})
        rows = node.gather(record.rows())[0]
        done = {row["model"] for row in rows}
        for seed in range(given.first_model, given.first_model + given.models):
            if seed not in done:
                rows.append(run_model(seed, setting, networks, node))
                if node.rank == 0:
                    record.add(rows[-1])
        gc.collect()
        taken = overhead(node, given.pairs, given.overhead_block) if given.pairs else None
    if node.rank == 0:
        summary = summary_of(rows)
        tell(rows, summary, taken, wide_console(160))
        write_result(
            given.json, provenance(torch.device("cpu")), {"settings": record.settings, "models": rows},
            summary, {"overhead": taken},
        )  # fmt: skip
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


def argument_parser() -> argparse.ArgumentParser:
    """Of the command; see :class:`Setting`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", default="mlperf_dlrm_dcnv2", help="collection that models draw from")
    parser.add_argument("--models", type=int, default=12, help="0: overhead alone")
    parser.add_argument("--first-model", type=int, default=0, help="its seed")
    parser.add_argument("--count", type=int, default=16, help="tables of a model")
    parser.add_argument("--max-rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--lookups", type=float, default=4.0, help="multiply those of all tables")
    parser.add_argument("--hot", type=float, default=2.0, help="multiply those of the hottest table once more")
    parser.add_argument("--batch-size", type=int, default=512, help="of a rank")
    parser.add_argument("--steps", type=int, default=100, help="observed under each plan")
    parser.add_argument("--learned-from", choices=tuple(PLANS), default="arbitrary", help="which two plans")
    parser.add_argument(
        "--network", type=Path, action="append", default=[], metavar="CHECKPOINT", help="may be repeated"
    )
    parser.add_argument("--plans", type=named, default=("roofline-learned", "shipped"), help="by these costs; '': none")
    parser.add_argument("--sharding-types", type=named, default=("table_wise", "column_wise"), help="of all plans")
    parser.add_argument("--min-partition", type=int, default=32, help="narrowest column slice; 0: TorchRec's default")
    parser.add_argument("--steps-measured", type=int, default=240, help="of each plan, over its copies")
    parser.add_argument("--copies", type=int, default=2, help="models of each plan")
    parser.add_argument("--block", type=int, default=2, help="steps of one model before it is another's turn")
    parser.add_argument("--pairs", type=int, default=0, help="of blocks for the overhead; 0: none")
    parser.add_argument("--overhead-block", type=int, default=7, help="steps of each, behind the first one")
    parser.add_argument("--record", type=Path, help="a line of each model; models that are there are not run again")
    parser.add_argument("--json", type=Path, help="everything")
    return parser


if __name__ == "__main__":
    main()
