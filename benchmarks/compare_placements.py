# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Let all placers place tasks of held-out tables, and measure what they chose on this machine's fused kernels.

    python benchmarks/compare_placements.py --tasks 60 --seed 1 --record benchmarks/results/2026-11-21-placements.jsonl

Devices are virtual: the set of tables of each is one fused kernel, and all sets of all placements of a task are timed
on the device at hand in shuffled rounds, each beside a reference set. The *oracle* is local search on measured costs
from the best of all placers. Each task appends one line to the record; the same command continues where it ends, and
summarizes.

Compute is ``max over devices of (forward + backward)`` as measured; overall adds modelled collectives. Ratios are
geometric means over tasks that both sides place; what a placer could not place is counted.

On a machine with cores to spare, ``--part 0/2`` and ``--part 1/2``, each with a record of its own and started with
``taskset`` on a core of its own, play half of the tasks each: the lines of one record, without its first, appended to
the other make the whole.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable
from torch import Tensor

from bootstrap import mean_interval
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.model import PlacementProblem
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import SetClock
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.placement.exact import solve
from dreamshard_planner.placement.refine import MeasuredCosts, RefineConfig, refine
from dreamshard_planner.placement.rules import RULES
from dreamshard_planner.placement.search import DEFAULT_SEARCH
from dreamshard_planner.placement.tasks import Task, problem_of
from dreamshard_planner.training import TrainingConfig, pool_tables
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import workloads_of
from placers import EXACT_SECONDS, Contest, Field
from provenance import commit, provenance

POOLS = ("meta_like_2021", "merlin_medium", "mlperf_dlrm_dcnv2")
ANCHOR = "torchrec"
"""What ratios refer to: TorchRec's table-wise plan with true pooling factors."""
FILLED = 0.95
"""Share of all memory that is taken in a tight task."""
STARTS = ("dreamshard", "policy", "torchrec", *RULES)
"""What the planner itself refines by measurement: rivals' plans are none of its business."""
BYTES_PER_MS = 12.5e9 / 1e3  # 100 Gbit/s Ethernet; only the overall cost depends on it


class Part:
    """Every ``count``-th six tasks in a row (of all pools, with loose and with tight memory), from the ``index``-th
    six on; written ``index/count``."""

    def __init__(self, text: str) -> None:
        index, _, count = text.partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise argparse.ArgumentTypeError(f"a part is I/N with I below N, got {text!r}")
        self.index, self.count = int(index), int(count)

    def of(self, contests: Sequence[Contest]) -> Sequence[Contest]:
        """The tasks of this part."""
        return [contest for i, contest in enumerate(contests) if i // 6 % self.count == self.index]


def draw_contests(count: int, seed: int, batch_size: int) -> list[Contest]:
    """Tasks of 20 to 100 held-out tables on 2, 4 or 8 devices; in half of them they fill 95 % of the memory.

    Pools that never train anything are held out as a whole; of the 26 MLPerf tables a task takes 20 to 26.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    trained = TrainingConfig().pools
    held_out = {name: pool_tables([name])[1] if name in trained else named_pool(name) for name in POOLS}
    contests = []
    for index in range(count):
        pool = POOLS[index % len(POOLS)]
        tables = held_out[pool]
        order = torch.randperm(len(tables), generator=generator)[: pick(20, min(100, len(tables)))].tolist()
        optimizer = ("sgd", "rowwise_adagrad")[pick(0, 1)]
        chosen = tuple(replace(tables[i], optimizer=optimizer) for i in order)
        devices = (2, 4, 8)[pick(0, 2)]
        tight = index % 2 == 1
        workloads = tuple(workloads_of(chosen, batch_size))
        problem = problem_of(workloads, devices)
        capacity_bytes = int(least_capacity_bytes(problem) * (1.0 if tight else 4.0))
        problem = replace(problem, capacity_DM=torch.full_like(problem.capacity_DM, capacity_bytes))
        name = f"{seed}.{index}"
        model = CollectiveModel(devices, BYTES_PER_MS)
        contests.append(Contest(name, pool, chosen, Task(workloads, problem), batch_size, tight, model))
    return contests


def least_capacity_bytes(problem: PlacementProblem) -> float:
    """Of a device so that the tables fill 95 % of all memory, or more where whole tables do not pack that well."""
    sizes_S = problem.storage_SM[:, 0].double()
    roomy = replace(problem, capacity_DM=torch.full_like(problem.capacity_DM, int(sizes_S.sum())))
    packed = solve(roomy, EXACT_SECONDS, sizes_S)  # its "milliseconds" are bytes here
    return max(packed.cost_ms * 1.001, float(sizes_S.sum()) / problem.num_devices / FILLED)


def search_measured(
    measured: MeasuredCosts, start_S: Tensor, seconds: float, generator: torch.Generator, repeats: int = 3
) -> Tensor:
    """Local search whose only judge is measurement: moves and swaps off the slowest device, in random order.

    What looks better is measured again, beside what it would replace, and has to be better twice. Luck may still pass
    a hundred such tests: at the end the result is measured beside the start, and has to be better once more.
    """
    deadline = time.monotonic() + seconds
    problem, best_S = measured.cost.problem, start_S

    def slowest_ms(plan_S: Tensor) -> float:
        return float(measured.rate(plan_S).device_ms_BD.max())

    measured.time([best_S], repeats)
    best_ms = slowest_ms(best_S)
    while time.monotonic() < deadline:
        slowest = int(measured.rate(best_S).device_ms_BD[0].argmax())
        changed_S = best_S.clone()
        here = (best_S == slowest).nonzero()[:, 0]
        there = (best_S != slowest).nonzero()[:, 0]
        leaving = int(here[torch.randint(len(here), (1,), generator=generator)])
        if len(there) and float(torch.rand(1, generator=generator)) < 0.6:
            returning = int(there[torch.randint(len(there), (1,), generator=generator)])
            changed_S[leaving], changed_S[returning] = best_S[returning], slowest
        else:
            changed_S[leaving] = int(torch.randint(problem.num_devices, (1,), generator=generator))
        if not bool(problem.fits(changed_S[None])[0]):
            continue
        measured.time([changed_S], repeats)
        if slowest_ms(changed_S) < best_ms:
            measured.time([best_S, changed_S], repeats, again=True)
            best_S = min((best_S, changed_S), key=slowest_ms)
            best_ms = slowest_ms(best_S)
    measured.time([start_S, best_S], 3 * repeats, again=True)
    return min((start_S, best_S), key=slowest_ms)


def play(contest: Contest, field: Field, names: Sequence[str], arena: Arena, args: argparse.Namespace) -> dict:
    """One task: place, refine, look for the oracle, then measure everything together."""
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
    feasible = [plan for plan in plans.values() if plan is not None]
    starts = [plans[name] for name in STARTS if plans.get(name) is not None]
    if starts and args.refine_seconds:
        order = cost.rate(torch.stack(starts)).overall_ms_B.argsort(stable=True).tolist()
        starts = [starts[index] for index in order]
        refined = refine(cost, starts, clock, args.refine_seconds, search=DEFAULT_SEARCH, seed=args.seed)
        plans[f"refined_{args.refine_seconds:g}s"] = refined.assignment_S
    if feasible and args.oracle_seconds:
        measured = MeasuredCosts(cost, clock, RefineConfig())
        known = [plan for plan in plans.values() if plan is not None]
        measured.time(known, 5)
        best = min(known, key=lambda plan: float(measured.rate(plan).device_ms_BD.max()))
        generator = torch.Generator().manual_seed(args.seed)
        plans["oracle"] = search_measured(measured, best, args.oracle_seconds, generator)

    final = MeasuredCosts(cost, clock, RefineConfig())
    known = {name: plan for name, plan in plans.items() if plan is not None}
    final.time(list(known.values()), args.rounds)
    rated = {name: final.rate(plan) for name, plan in known.items()}
    predicted = {name: cost.rate(plan[None]) for name, plan in known.items()}
    heaviest_ms = float(clock([(int(cost.single_ms_S.argmax()),)], args.rounds)[0].sum())
    best_ms = min((float(costs.device_ms_BD.max()) for costs in rated.values()), default=math.nan)
    return {
        "task": contest.name,
        "commit": commit(),
        "pool": contest.pool,
        "tables": len(contest.tables),
        "devices": contest.task.problem.num_devices,
        "tight": contest.tight,
        "compute_ms": {name: float(costs.device_ms_BD.max()) for name, costs in rated.items()},
        "overall_ms": {name: float(costs.overall_ms_B[0]) for name, costs in rated.items()},
        "predicted_compute_ms": {name: float(costs.device_ms_BD.max()) for name, costs in predicted.items()},
        "infeasible": [name for name, plan in plans.items() if plan is None],
        "seconds": seconds,
        "one_table_is_the_bottleneck": heaviest_ms > 0.95 * best_ms,
    }


def summarize(records: Sequence[dict], pool: str | None = None) -> list[dict[str, Any]]:
    """One row per placer: ratio to the anchor with its 95 % bootstrap interval, wins, share of the room, infeasible."""
    chosen = [record for record in records if pool in (None, record["pool"])]
    names = list(dict.fromkeys(name for record in chosen for name in [*record["compute_ms"], *record["infeasible"]]))
    rng = np.random.default_rng(0)
    rows = []
    for name in names:
        both = [r for r in chosen if name in r["compute_ms"] and ANCHOR in r["compute_ms"]]
        logs = np.array([math.log(r["compute_ms"][name] / r["compute_ms"][ANCHOR]) for r in both])
        overall = np.array([math.log(r["overall_ms"][name] / r["overall_ms"][ANCHOR]) for r in both])
        room = np.array([math.log(r["compute_ms"].get("oracle", math.nan) / r["compute_ms"][ANCHOR]) for r in both])
        rows.append(
            {
                "placer": name,
                "tasks": len(both),
                "infeasible": sum(name in r["infeasible"] for r in chosen),
                "compute": math.exp(logs.mean()) if len(logs) else math.nan,
                "interval": np.exp(mean_interval(logs, rng)).tolist(),
                "overall": math.exp(overall.mean()) if len(logs) else math.nan,
                "wins": float((logs < 0).mean()) if len(logs) else math.nan,
                "room_won": float(logs.sum() / room.sum()) if len(logs) and room.sum() < 0 else math.nan,
            }
        )
    return sorted(rows, key=lambda row: row["compute"])


def print_summary(records: Sequence[dict], console: Console) -> None:
    """A table per pool, and one of all tasks."""
    for pool in [*dict.fromkeys(record["pool"] for record in records), None]:
        count = sum(pool in (None, record["pool"]) for record in records)
        table = RichTable(title=f"{pool or 'all pools'}: {count} tasks, measured cost over that of {ANCHOR}")
        for heading in ("placer", "compute", "95 %", "overall", "wins", "room won", "infeasible"):
            table.add_column(heading, justify="left" if heading == "placer" else "right")
        for row in summarize(records, pool):
            low, high = row["interval"]
            table.add_row(
                row["placer"], f"{row['compute']:.3f}", f"{low:.3f}-{high:.3f}", f"{row['overall']:.3f}",
                f"{row['wins']:.0%}", f"{row['room_won']:.0%}", str(row["infeasible"]),
            )  # fmt: skip
        console.print(table)
    alone = sum(record["one_table_is_the_bottleneck"] for record in records)
    console.print(f"In {alone} of {len(records)} tasks one table alone is the bottleneck: no table-wise room there.")


def draw_figure(records: Sequence[dict], path: Path) -> None:
    """Ratios to the anchor with their intervals, PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in summarize(records) if not math.isnan(row["compute"])][::-1]
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(rows) + 1.2))
    for position, row in enumerate(rows):
        axes.plot(row["interval"], [position] * 2, color="0.6", linewidth=2)
        axes.plot(row["compute"], position, "o", color="tab:red" if row["placer"] == "dreamshard" else "tab:blue")
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["placer"] for row in rows])
    axes.set_xlabel(f"measured compute over that of {ANCHOR}, {len(records)} tasks, 95 % intervals")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", type=Part, default=Part("0/1"), help="I/N: every N-th six tasks, from the I-th on")
    parser.add_argument("--placers", default="", help="names, separated by commas; default: all")
    parser.add_argument("--record", type=Path, required=True, help="a JSON line per task; continued")
    parser.add_argument("--rounds", type=int, default=9, help="times that each placement is measured")
    parser.add_argument("--refine-seconds", type=float, default=60.0, help="of search by measurement; 0: none")
    parser.add_argument("--oracle-seconds", type=float, default=120.0, help="0: no oracle, no room")
    parser.add_argument("--batch-size", type=int, default=512, help="samples that a kernel sees")
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torchrec")
    field = Field(args.checkpoint, args.device)
    names = [name for name in args.placers.split(",") if name] or list(field.placers)
    unknown = [name for name in names if name not in field.placers]
    if unknown or ANCHOR not in names:
        parser.error(f"--placers must be some of {', '.join(field.placers)}, {ANCHOR} among them; got {args.placers}")
    records = [json.loads(line) for line in args.record.read_text().splitlines()] if args.record.exists() else []
    head = {"settings": {k: str(v) for k, v in vars(args).items() if k not in ("tasks", "record", "part")}}
    if records and records[0]["settings"] != head["settings"]:
        parser.error(f"{args.record}: recorded with other settings: {records[0]['settings']}")
    console = Console(stderr=True)
    with pinned(1), args.record.open("a") as file:
        if not records:
            records = [head | provenance(torch.device(args.device))]
            file.write(json.dumps(records[0]) + "\n")
        played = {record["task"] for record in records[1:]}
        contests = args.part.of(draw_contests(args.tasks, args.seed, args.batch_size))
        contests = [contest for contest in contests if contest.name not in played]
        arena = Arena(args.device, seed=args.seed)
        for contest in track(contests, "tasks", console=console):
            records.append(play(contest, field, names, arena, args))
            file.write(json.dumps(records[-1]) + "\n")
            file.flush()
    output = Console()
    print_summary(records[1:], output if output.is_terminal else Console(width=120))
    draw_figure(records[1:], args.record.with_suffix(".png"))


if __name__ == "__main__":
    main()
