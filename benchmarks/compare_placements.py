# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Let all placers place tasks of held-out tables, and measure what they chose on this machine's fused kernels.

    python benchmarks/compare_placements.py --tasks 60 --seed 1 --record benchmarks/results/2026-11-21-placements.jsonl

Devices are virtual: the set of tables of each is one fused kernel, and all sets of all placements of a task are timed
on the device at hand in shuffled rounds, each beside a reference set. Each task appends one line to the record; the
same command continues where it ends, and summarizes.

Compute is ``max over devices of (forward + backward)`` as measured; overall adds modelled collectives. Ratios are
geometric means over tasks that both sides place; what a placer could not place is counted.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from common.measured_costs import MeasuredCosts, SetClock
from common.output import append, commit, lines_of, named, provenance, quiet, wide_console
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.support.reproducible import single_thread
from placements.contests import Contest, draw_contests
from placements.placers import Field
from placements.summary import ANCHOR, draw_figure, print_summary


def play(contest: Contest, field: Field, names: Sequence[str], arena: Arena, args: argparse.Namespace) -> dict:
    """One task: place, then measure everything together."""
    plans: dict[str, Tensor | None] = {}
    seconds: dict[str, float] = {}
    for name in names:
        start = time.perf_counter()
        plans[name] = field.placers[name](contest)
        seconds[name] = time.perf_counter() - start
    for name, plan in plans.items():
        if plan is not None and not bool(contest.task.problem.fits(plan[None])[0]):
            raise RuntimeError(f"task {contest.name}: {name} does not fit into memory")
    clock = SetClock(contest.task.workloads, arena, seed=args.seed)
    cost = field.cost(contest)
    final = MeasuredCosts(cost, clock)
    known = {name: plan for name, plan in plans.items() if plan is not None}
    final.time(list(known.values()), args.rounds)
    rated = {name: final.rate(plan) for name, plan in known.items()}
    predicted = {name: cost.rate(plan[None]) for name, plan in known.items()}
    heaviest_ms = float(clock([(int(cost.single_ms_P.argmax()),)], args.rounds)[0].sum())
    best_ms = min((float(costs.device_ms_BD.max()) for costs in rated.values()), default=math.nan)
    return {
        "task": contest.name,
        "commit": commit(),
        "pool": contest.pool,
        "tables": len(contest.tables),
        "devices": contest.task.problem.num_ranks,
        "tight": contest.tight,
        "compute_ms": {name: float(costs.device_ms_BD.max()) for name, costs in rated.items()},
        "overall_ms": {name: float(costs.overall_ms_B[0]) for name, costs in rated.items()},
        "predicted_compute_ms": {name: float(costs.device_ms_BD.max()) for name, costs in predicted.items()},
        "infeasible": [name for name, plan in plans.items() if plan is None],
        "seconds": seconds,
        "one_table_is_the_bottleneck": heaviest_ms > 0.95 * best_ms,
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--placers", default="", help="names, separated by commas; default: all")
    parser.add_argument("--record", type=Path, required=True, help="a JSON line per task; continued")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task later than this")
    parser.add_argument("--rounds", type=int, default=9, help="times that each placement is measured")
    parser.add_argument("--batch-size", type=int, default=512, help="samples that a kernel sees")
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    quiet()
    field = Field(args.checkpoint, args.device)
    names = named(args.placers) or tuple(field.placers)
    if ANCHOR not in names or not set(names) <= field.placers.keys():
        parser.error(f"--placers must be some of {', '.join(field.placers)}, {ANCHOR} among them; got {args.placers}")
    # All lines of a record have the other settings in common.
    left_out = ("tasks", "record", "seconds")
    settings = {name: str(value) for name, value in vars(args).items() if name not in left_out}
    if not (records := lines_of(args.record)):
        records = [{"settings": settings} | provenance(torch.device(args.device))]
        append(args.record, records[0])
    if records[0]["settings"] != settings:
        parser.error(f"{args.record}: recorded with other settings: {records[0]['settings']}")
    played = {record["task"] for record in records[1:]}
    contests = [
        contest for contest in draw_contests(args.tasks, args.seed, args.batch_size) if contest.name not in played
    ]
    deadline = time.monotonic() + args.seconds
    with single_thread():
        arena = Arena(args.device, seed=args.seed)
        for contest in track(contests, "tasks", console=Console(stderr=True)):
            if time.monotonic() > deadline:
                break
            records.append(play(contest, field, names, arena, args))
            append(args.record, records[-1])
    print_summary(records[1:], wide_console())
    draw_figure(records[1:], args.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
