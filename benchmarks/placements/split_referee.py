# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Planners that may split tables, and one contest of them: all plan, and everything is measured together.

A planner takes a task and returns a sharding, or nothing where it finds none. All but
``dreamshard`` choose among TorchRec's own options of the task.

What TorchRec runs as one fused kernel is measured as one: the whole tables of a rank, its column slices, and its
data-parallel tables each have kernels of their own, and a rank costs the sum. Of data-parallel tables, the kernel is
measured at the local batch as a fused one; what the table-sized gradient adds is modelled.

Shapes: D ranks, 2 = forward and backward.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from torch import Tensor
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from common.measured_costs import SetClock
from common.output import commit
from dreamshard_planner.cost.problem import PlacementCosts, Sharding
from dreamshard_planner.cost.roofline import dense_ms
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.search_space.sharding_types import TW
from placements.placers import Field
from placements.split_contests import SameStorage, SplitContest, SplitTask
from placements.summary import ANCHOR, print_table, summarize

SplitPlacer = Callable[[SplitTask], Sharding | None]

WHOLE = ("dreamshard_whole", "torchrec_whole")
"""Placers that split nothing."""


class SplitField:
    """All of them by name.

    Args:
        field: checkpoint and fitted costs.
        device: compute device.
        seed: of the searches.
    """

    def __init__(self, field: Field, device: str = "cpu", seed: int = 0) -> None:
        self.field, self._device, self._seed = field, device, seed
        self.placers: dict[str, SplitPlacer] = {
            "dreamshard": partial(self._dreamshard, None),
            "dreamshard_whole": partial(self._dreamshard, (TW,)),
            "torchrec": partial(self._torchrec, None, True),
            "torchrec_default": partial(self._torchrec, None, False),
            "torchrec_whole": partial(self._torchrec, (TW,), True),
        }

    def _dreamshard(self, sharding_types: Sequence[str] | None, task: SplitTask) -> Sharding | None:
        """The planner as a user calls it, with the field's checkpoint. It merges slices, and so has more widths than
        TorchRec's planner."""
        planner = DreamShardPlanner(
            topology=task.topology,
            batch_size=task.local_batch_size,
            constraints=copy.deepcopy(task.constraints),
            statistics=task.statistics,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            checkpoint=self.field.learned,
            sharding_types=sharding_types or task.contest.sharding_types,
            seed=self._seed,
            debug=False,
        )
        return _planned(planner, task)

    def _torchrec(self, sharding_types: Sequence[str] | None, known: bool, task: SplitTask) -> Sharding | None:
        """TorchRec's planner with its own proposers and partitioner."""
        constraints = task.constraints_with(sharding_types or task.contest.sharding_types, known)
        planner = EmbeddingShardingPlanner(
            topology=task.topology,
            batch_size=task.local_batch_size,
            enumerator=SameStorage(task.topology, task.local_batch_size, constraints, storages=task.storages),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=constraints,
            debug=False,
        )
        return _planned(planner, task)


def _planned(planner: EmbeddingShardingPlanner, task: SplitTask) -> Sharding | None:
    try:
        return task.sharding(planner.plan(copy.copy(task.module), task.sharders))
    except PlannerError:
        return None


BEST_WHOLE = "best_whole"
"""The better one of the plans that split nothing, in summaries."""

PartSet = tuple[int, ...]
"""Parts of one fused kernel, ascending; equal slices of a table are one part, and may come several times."""


class MeasuredShardings:
    """Measured times of the fused kernels of one task."""

    def __init__(self, task: SplitTask, clock: SetClock) -> None:
        self._task, self._clock = task, clock
        self._extra_ms_P = dense_ms(task.read.column("dense_elements"), task.read.column("dense_passes"), task.topology)
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

    def time(self, shardings: Sequence[Sharding], repeats: int) -> None:
        """Measure the kernels of some shardings together, each once."""
        sets = {kernel for sharding in shardings for rank in self.sets_of(sharding) for kernel in rank}
        todo = sorted(sets - self.set_ms.keys())
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


def play_splits(
    contest: SplitContest, field: SplitField, names: Sequence[str], arena: Arena, args: argparse.Namespace
) -> dict:
    """One task: plan, then measure everything together."""
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
