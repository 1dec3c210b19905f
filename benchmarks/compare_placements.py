# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Let all placers place tasks of held-out tables, and measure what they chose on this machine's fused kernels.

    python benchmarks/compare_placements.py --tasks 60 --seed 1 --record benchmarks/results/2026-11-21-placements.jsonl

Devices are virtual: the set of tables of each is one fused kernel, and all sets of all placements of a task are timed
on the device at hand in shuffled rounds, each beside a reference set. Each task appends one line to the record; the
same command continues where it ends, and summarizes.

Compute is ``max over devices of (forward + backward)`` as measured; overall adds modelled collectives. Ratios are
geometric means over tasks that both sides place; what a placer could not place is counted.

With ``--sharding-types table_wise,column_wise``, planners choose splits and ranks (``placements/split_contests.py``,
``split_placers.py``, ``split_referee.py``):

    python benchmarks/compare_placements.py --sharding-types table_wise,column_wise --tasks 60 --seed 1 \\
        --record benchmarks/results/2026-11-22-placements-splits.jsonl
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from common.measured_costs import MeasuredCosts, SetClock
from common.output import commit, named, provenance, wide_console
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.timing import pinned, processor_time
from dreamshard_planner.search_space.sharding_types import CW, DP, TW
from placements.contests import Contest, draw_contests
from placements.placers import Field
from placements.split_contests import SplitContest, draw_split_contests
from placements.split_referee import SplitField, play_splits, print_split_summary
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
    clock = SetClock(contest.task.workloads, args.device, arena, seed=args.seed)
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


@dataclass(frozen=True)
class Game:
    """A kind of contest: placements of whole tables, or splits and placements."""

    placers: Mapping[str, Any]
    draw: Callable[[], Sequence[Contest] | Sequence[SplitContest]]
    play: Callable[[Any, Sequence[str], Arena], dict]
    """A contest, by placers of these names, to its line of the record."""
    summarize: Callable[[Sequence[dict], Console], None]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Game:
        """That which the arguments ask for."""
        field, drawn = Field(args.checkpoint, args.device), (args.tasks, args.seed, args.batch_size)
        if not args.sharding_types:
            return cls(
                field.placers,
                lambda: draw_contests(*drawn),
                lambda contest, names, arena: play(contest, field, names, arena, args),
                print_summary,
            )
        splits, types = SplitField(field, args.device), named(args.sharding_types)
        return cls(
            splits.placers,
            lambda: draw_split_contests(*drawn, types, field.linear, field.network),
            lambda contest, names, arena: play_splits(contest, splits, names, arena, args),
            print_split_summary,
        )


def argument_parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sharding-types",
        default="",
        help="of table_wise, column_wise, data_parallel: tables may be split, half of the tasks have hot ones; "
        "default: whole tables only",
    )
    parser.add_argument("--placers", default="", help="names, separated by commas; default: all")
    parser.add_argument("--record", type=Path, required=True, help="a JSON line per task; continued")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task later than this")
    parser.add_argument("--rounds", type=int, default=9, help="times that each placement is measured")
    parser.add_argument("--batch-size", type=int, default=512, help="samples that a kernel sees")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="time kernels by what their thread computes, not by the wall clock: on a machine that others use as well",
    )
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--device", default="cpu")
    return parser


def main() -> None:
    """The command."""
    parser = argument_parser()
    args = parser.parse_args()
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torchrec")
    types = named(args.sharding_types)
    if types and (TW not in types or not set(types) <= {TW, CW, DP}):
        parser.error(f"--sharding-types must be {TW} and some of {CW}, {DP}; got {args.sharding_types}")
    game = Game.of(args)
    names = named(args.placers) or tuple(game.placers)
    if ANCHOR not in names or not set(names) <= game.placers.keys():
        parser.error(f"--placers must be some of {', '.join(game.placers)}, {ANCHOR} among them; got {args.placers}")
    records = [json.loads(line) for line in args.record.read_text().splitlines()] if args.record.exists() else []
    head = {"settings": settings_of(args)}
    if records and records[0]["settings"] != head["settings"]:
        parser.error(f"{args.record}: recorded with other settings: {records[0]['settings']}")
    clock = processor_time() if args.processor_time else nullcontext()
    with pinned(1), clock, args.record.open("a") as file:
        if not records:
            records = [head | provenance(torch.device(args.device))]
            file.write(json.dumps(records[0]) + "\n")
        played = {record["task"] for record in records[1:]}
        contests = [contest for contest in game.draw() if contest.name not in played]
        arena = Arena(args.device, seed=args.seed)
        deadline = time.monotonic() + args.seconds
        for contest in track(contests, "tasks", console=Console(stderr=True)):
            if time.monotonic() > deadline:
                break
            records.append(game.play(contest, names, arena))
            file.write(json.dumps(records[-1]) + "\n")
            file.flush()
    game.summarize(records[1:], wide_console())
    draw_figure(records[1:], args.record.with_suffix(".png"))


def settings_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings that all lines of a record have in common."""
    # Records of before these options go on as they are.
    new = [name for name in ("sharding_types", "processor_time") if not getattr(args, name)]
    left_out = ("tasks", "record", "seconds", *new)
    return {name: str(value) for name, value in vars(args).items() if name not in left_out}


if __name__ == "__main__":
    main()
