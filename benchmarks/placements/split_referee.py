# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One contest with splits: all placers plan, a search by measurement looks for better, and everything is measured
together.

What TorchRec runs as one fused kernel is measured as one: the whole tables of a rank, its column slices, and its
data-parallel tables each have kernels of their own, and a rank costs the sum. Of data-parallel tables, the kernel is
measured at the local batch as a fused one; what the table-sized gradient adds is modelled.

Shapes: D ranks, 2 = forward and backward.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import Tensor

from common.measured_costs import SetClock
from common.output import commit
from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.cost.roofline import dense_ms
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.search_space.sharding_types import TW
from placements.split_contests import SplitContest, SplitTask
from placements.split_placers import WHOLE, SplitField
from placements.summary import ANCHOR, print_table, summarize

BEST_WHOLE = "best_whole"
"""The better one of the plans that split nothing, in summaries."""

PartSet = tuple[int, ...]
"""Parts of one fused kernel, ascending; equal slices of a table are one part, and may come several times."""


class MeasuredShardings:
    """What measurement has said of the fused kernels of one task so far."""

    def __init__(self, task: SplitTask, clock: SetClock) -> None:
        self._task, self._clock = task, clock
        self._extra_ms_P = dense_ms(task.read.dense_elements_P, task.read.dense_passes_P, task.topology)
        self.set_ms: dict[PartSet, Tensor] = {}

    def sets_of(self, sharding: Sharding) -> list[list[PartSet]]:
        """Fused kernels of each rank."""
        problem = self._task.read.problem
        kernels: dict[tuple[int, int], list[int]] = {}
        for rank, part in zip(*(rows_X.tolist() for rows_X in self._task.cost.problem.laid(sharding)), strict=True):
            kernels.setdefault((rank, int(problem.group_P[part])), []).append(part)
        ranks: list[list[PartSet]] = [[] for _ in range(problem.num_ranks)]
        for (rank, _), parts in sorted(kernels.items()):
            ranks[rank].append(tuple(sorted(parts)))
        return ranks

    def time(self, shardings: Sequence[Sharding], repeats: int, again: bool = False) -> None:
        """Measure the kernels of some shardings together; those measured before only ``again``."""
        sets = {kernel for sharding in shardings for rank in self.sets_of(sharding) for kernel in rank}
        todo = sorted(sets if again else sets - self.set_ms.keys())
        if todo:
            self.set_ms.update(zip(todo, self._clock(todo, repeats), strict=True))

    def rate(self, sharding: Sharding) -> PlacementCosts:
        """Costs of one sharding all of whose kernels are measured; collectives are modelled."""
        cost_D2 = torch.zeros(self._task.read.problem.num_ranks, 2, dtype=torch.float64)
        for rank, kernels in enumerate(self.sets_of(sharding)):
            for kernel in kernels:
                cost_D2[rank] += self.set_ms[kernel]
                cost_D2[rank, 1] += self._extra_ms_P[list(kernel)].sum()
        bytes_CD = self._task.cost.bytes_sent(*self._task.cost.problem.laid(sharding))
        return PlacementCosts(
            cost_D2[None, :, 0], cost_D2[None, :, 1], *self._task.read.problem.collectives.ms(bytes_CD[None])
        )

    def compute_ms(self, sharding: Sharding) -> float:
        """Of the slowest rank."""
        return float(self.rate(sharding).device_ms_BD.max())


class SplitSearch:
    """Local search over splits and ranks whose only judge is measurement, among TorchRec's options of the task."""

    def __init__(self, task: SplitTask, measured: MeasuredShardings, generator: torch.Generator) -> None:
        self._task, self._measured, self._generator = task, measured, generator
        self._single_P = task.cost.single_ms_P

    def run(self, start: Sharding, seconds: float, repeats: int = 3) -> Sharding:
        """Change what burdens the slowest rank, in random order. What looks better is measured again beside what it
        would replace, and at the end once more beside the start: luck may pass a hundred tests."""
        deadline, measured, best = time.monotonic() + seconds, self._measured, start
        measured.time([best], repeats)
        while time.monotonic() < deadline:
            changed = self._changed(best)
            if changed is None or changed == best or not self._task.cost.problem.fits(changed):
                continue
            measured.time([changed], repeats)
            if measured.compute_ms(changed) < measured.compute_ms(best):
                measured.time([best, changed], repeats, again=True)
                best = min((best, changed), key=measured.compute_ms)
        measured.time([start, best], 3 * repeats, again=True)
        return min((start, best), key=measured.compute_ms)

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))

    def _changed(self, sharding: Sharding) -> Sharding | None:
        """A unit of the slowest rank moved or swapped, or one of its tables split otherwise."""
        problem = self._task.read.problem
        units = [
            (table, index, position)
            for table, (option, positions) in enumerate(zip(sharding.options, sharding.positions, strict=True))
            for index, (unit, position) in enumerate(zip(problem.tables[table][option].units, positions, strict=True))
            if unit.span == 1
        ]
        slowest = int(self._measured.rate(sharding).device_ms_BD[0].argmax())
        here = [unit for unit in units if unit[2] == slowest]
        there = [unit for unit in units if unit[2] != slowest]
        if not here or self._draw(3) == 0:
            return self._resharded(sharding, here)
        table, index, _ = here[self._draw(len(here))]
        if there and self._draw(5) < 3:
            other, other_index, rank = there[self._draw(len(there))]
            sharding = sharding.changed(*sharding.move(other, other_index, slowest))
        else:
            rank = self._draw(problem.num_ranks)
        return sharding.changed(*sharding.move(table, index, rank))

    def _resharded(self, sharding: Sharding, here: Sequence[tuple[int, int, int]]) -> Sharding | None:
        """A table with a unit on the slowest rank, else any, under another option: its units where the measured load
        and what they cost alone leave the lowest peak."""
        problem = self._task.read.problem
        allowed = problem.tables
        tables = [table for table in dict.fromkeys(table for table, *_ in here) if len(allowed[table]) > 1]
        tables = tables or [table for table, options in enumerate(allowed) if len(options) > 1]
        if not tables:
            return None
        table = tables[self._draw(len(tables))]
        others = [option for option in range(len(allowed[table])) if option != sharding.options[table]]
        option = others[self._draw(len(others))]
        load_D = self._measured.rate(sharding).device_ms_BD[0].clone()
        for unit, position in zip(
            problem.tables[table][sharding.options[table]].units, sharding.positions[table], strict=True
        ):
            load_D[list(unit.ranks(position))] -= self._single_P[list(unit.parts)]
        positions = []
        for unit in problem.tables[table][option].units:
            peak_N = load_D.view(-1, unit.span).amax(-1)
            positions.append(int(peak_N.argmin()))
            load_D[list(unit.ranks(positions[-1]))] += self._single_P[list(unit.parts)]
        return sharding.changed(table, option, tuple(positions))


def play_splits(
    contest: SplitContest, field: SplitField, names: Sequence[str], arena: Arena, args: argparse.Namespace
) -> dict:
    """One task: plan, look for the oracle, then measure everything together."""
    task = SplitTask(contest, field.field.learned, args.device)
    plans: dict[str, Sharding | None] = {}
    seconds: dict[str, float] = {}
    for name in names:
        start = time.perf_counter()
        plan = field.placers[name](task)
        seconds[name] = time.perf_counter() - start
        # TorchRec undercounts the row-wise optimizer state of column slices, and may plan more than there is room for.
        plans[name] = plan if plan is not None and task.cost.problem.fits(plan) else None
    known = {name: plan for name, plan in plans.items() if plan is not None}
    clock = SetClock(task.read.workload_P, args.device, arena, seed=args.seed)
    if known and args.oracle_seconds:
        measured = MeasuredShardings(task, clock)
        measured.time(list(known.values()), 5)
        best = min(known.values(), key=measured.compute_ms)
        search = SplitSearch(task, measured, torch.Generator().manual_seed(args.seed))
        known["oracle"] = search.run(best, args.oracle_seconds)
    final = MeasuredShardings(task, clock)
    final.time(list(known.values()), args.rounds)
    heaviest_ms = float(clock([(_heaviest_whole(task),)], args.rounds)[0].sum())
    rated = {name: final.rate(plan) for name, plan in known.items()}
    best_whole_ms = min((float(rated[name].device_ms_BD.max()) for name in WHOLE if name in rated), default=math.nan)
    problem = task.read.problem
    return {
        "task": contest.name,
        "commit": commit(),
        "pool": contest.pool,
        "tables": len(contest.tables),
        "devices": contest.ranks,
        "tight": contest.tight,
        "hot": list(contest.hot),
        "optimizer": contest.tables[0].optimizer,
        "min_partition": contest.min_partition,
        "compute_ms": {name: float(costs.device_ms_BD.max()) for name, costs in rated.items()},
        "mean_compute_ms": {name: float(costs.device_ms_BD.mean()) for name, costs in rated.items()},
        "overall_ms": {name: float(costs.overall_ms_B[0]) for name, costs in rated.items()},
        "predicted_compute_ms": {name: float(task.cost.rate(p).device_ms_BD.max()) for name, p in known.items()},
        "predicted_overall_ms": {name: task.cost.overall_ms(plan) for name, plan in known.items()},
        "split_tables": {
            name: sum(problem.tables[t][o].sharding_type != TW for t, o in enumerate(plan.options))
            for name, plan in known.items()
        },
        "infeasible": [name for name, plan in plans.items() if plan is None],
        "seconds": seconds,
        "heaviest_table_ms": heaviest_ms,
        "one_table_is_the_bottleneck": heaviest_ms > 0.95 * best_whole_ms,
    }


def _heaviest_whole(task: SplitTask) -> int:
    """The part that is the dearest whole table, by prediction."""
    whole = [o.units[0].parts[0] for options in task.read.problem.tables for o in options if o.sharding_type == TW]
    return max(whole, key=lambda part: float(task.cost.single_ms_P[part]))


def print_split_summary(records: Sequence[dict], console: Console) -> None:
    """All tasks, hot and ordinary ones apart, each pool; and over the best plan of whole tables, where it matters."""
    hot = [record for record in records if record["hot"]]
    ordinary = [record for record in records if not record["hot"]]
    alone = [record for record in records if record["one_table_is_the_bottleneck"]]
    for what, some in (("hot", hot), ("ordinary", ordinary)):
        if some:
            title = f"{what}: {len(some)} tasks, measured cost over that of {ANCHOR}"
            print_table(title, summarize(some), console)
    for pool in [*dict.fromkeys(record["pool"] for record in records), None]:
        count = sum(pool in (None, record["pool"]) for record in records)
        title = f"{pool or 'all pools'}: {count} tasks, measured cost over that of {ANCHOR}"
        print_table(title, summarize(records, pool), console)
    for what, some in (("hot", hot), ("one table is the bottleneck of every whole-table plan", alone)):
        if some:
            title = f"{what}: {len(some)} tasks, measured cost over that of the best plan of whole tables"
            print_table(title, summarize([_with_best_whole(record) for record in some], anchor=BEST_WHOLE), console)


def _with_best_whole(record: dict) -> dict:
    whole = {name: ms for name, ms in record["compute_ms"].items() if name in WHOLE}
    if not whole:
        return record
    best = min(whole, key=whole.__getitem__)
    return record | {what: record[what] | {BEST_WHOLE: record[what][best]} for what in ("compute_ms", "overall_ms")}
