# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans whose data drifted: staying, planning afresh, and re-planning by few bytes.

    python benchmarks/drift.py --record benchmarks/results/2026-11-25-drift.jsonl
    python benchmarks/drift.py --measured 5 --record benchmarks/results/2026-11-25-drift-measured.jsonl

60 tasks, 20 of each kind: pooling factors of some features trade places (``popularity``), an eighth more tables come
(``tables``), the batch is doubled (``batch``). Models of 16 to 64 tables with row-wise Adagrad, of Meta's published
statistics and at random, on 4 to 16 H100s. A plan is made for what was, and re-planned for what is; costs are those
that plans are chosen by. With ``--measured``, the same is planned for as many CPU ranks of 256 samples each, and
the kernels of all plans are timed in turns, so often each; exchanges stay modelled. Where the shipped checkpoint is of
another kind of CPU, ``--checkpoint`` takes one that this machine trained.

Shares of bytes are of those that moving to the plan made afresh takes, with its ranks named so that most stay. Of
tables that come, staying has each where the plan made afresh has it, and the others as they were.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
from torch import nn
from torchrec.distributed.planner.types import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from common.measured_plans import measured_costs
from common.meta_model import feature_names, meta_collection
from common.output import append, opened, quiet, table_of, wide_console
from common.tasks import RANKS_PER_HOST
from default_plans import SHARDERS, drawn
from dreamshard_planner import DreamShardPlanner, TableStatistics
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.devices import Machine
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.given_plans import GivenPlans
from dreamshard_planner.plans.replan import Replan
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.enumeration import torchrec_estimators
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.tables import Table

KINDS = ("popularity", "tables", "batch")
SHARES = (0.0, 0.05, 0.2, 1.0)
"""Of the bytes to the plan made afresh."""
EACH = 20
"""Tasks of a kind."""
NEW = 8
"""One of so many tables comes later."""
STEPS = 10**9
"""That remain: the cheapest plan within its bytes is always worth the way."""


@dataclass(frozen=True)
class Setting:
    """What plans are for."""

    device: str
    batch_size: int
    """Of a rank, before the drift."""
    checkpoint: str = "auto"
    """That plans are chosen by."""

    def machine(self, ranks: int) -> Machine:
        """With so many ranks."""
        gpu = "h100" if self.device == "cuda" else None
        per_host = min(ranks, RANKS_PER_HOST)
        return Machine(ranks_per_host=per_host, hosts=-(-ranks // RANKS_PER_HOST), device=self.device, gpu=gpu)


PREDICTED = Setting("cuda", 2048)
MEASURED = Setting("cpu", 256)


@dataclass(frozen=True)
class DriftTask:
    """A model and machine, and what becomes of it."""

    kind: str
    index: int
    setting: Setting

    @property
    def name(self) -> str:
        return f"{self.kind} {self.index}"

    def tables(self, after: bool) -> list[Table]:
        """Before or after the drift."""
        rng = random.Random(f"{self.name}")
        count = rng.choice((16, 24, 40, 64))
        if self.index % 2:
            made = meta_like(num_tables=count, seed=self.index)
        else:
            made = drawn(count, (3, 7.3), (32, 64, 128, 256), (0, 2), 100 + self.index)
        if self.kind == "tables" and not after:
            return [table for index, table in enumerate(made) if index % NEW]
        if self.kind == "popularity" and after:
            moved = rng.sample(range(count), max(2, count // rng.choice((4, 8))))
            features = [table.features for table in made]
            for to, origin in zip(moved, moved[1:] + moved[:1], strict=True):
                pooling = features[origin][0].pooling_factor
                made[to] = replace(
                    made[to], features=tuple(replace(one, pooling_factor=pooling) for one in made[to].features)
                )
        return made

    @property
    def topology(self) -> Topology:
        """Of its ranks."""
        return self.setting.machine((4, 8, 16)[self.index % 3]).topology()

    def batch_size(self, after: bool) -> int:
        """Of a rank."""
        return self.setting.batch_size * (2 if after and self.kind == "batch" else 1)

    def statistics(self, after: bool) -> TableStatistics:
        """Of all features."""
        return TableStatistics(
            {
                name: feature
                for table in self.tables(after)
                for name, feature in zip(feature_names(table), table.features, strict=True)
            }
        )

    def planner(self, after: bool) -> DreamShardPlanner:
        """For what is before or after."""
        return DreamShardPlanner(
            topology=self.topology,
            batch_size=self.batch_size(after),
            statistics=self.statistics(after),
            stats=[],
            debug=False,
            optimizers_attached=True,
            checkpoint=self.setting.checkpoint,
        )

    def model(self, after: bool) -> nn.Module:
        """On the meta device."""
        model = nn.Module()
        model.sparse = meta_collection(self.tables(after))
        apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
        return model

    def run(self) -> dict[str, Any]:
        """What everything costs."""
        before, now = self.planner(False), self.planner(True)
        before.plan(self.model(False), SHARDERS)
        start = time.process_time()
        now.plan(self.model(True), SHARDERS)
        planned = time.process_time()
        found = now.replan(before.saved_plan(), steps=1_000_000)
        return {
            "task": self.name,
            "tables": len(self.tables(True)),
            "ranks": len(now.report().chosen.rank_ms),
            "stay_ms": found.now.step_ms,
            "afresh_ms": found.afresh.step_ms,
            "afresh_bytes": found.afresh.bytes_moved,
            "share_ms": {f"{share:.0%}": self.at(found, share) for share in SHARES},
            "curve": [(move.bytes_moved, move.step_ms) for move in found.curve],
            "forced": list(found.forced),
            "plan_seconds": round(planned - start, 2),
            "replan_seconds": round(time.process_time() - planned, 2),
        }

    def measure(self, repeats: int, arena: Arena) -> dict[str, Any]:
        """What kernels that run here say of the same plans."""
        before, now = self.planner(False), self.planner(True)
        before.plan(self.model(False), SHARDERS)
        now.plan(self.model(True), SHARDERS)
        found = now.replan(before.saved_plan(), steps=STEPS)
        plans = {"stay": found.over(0).plan, "afresh": now.saved_plan()}
        for share in SHARES:
            plans[f"{share:.0%}"] = found.over(STEPS, int(share * found.afresh.bytes_moved)).plan
        context = PlanningContext(
            self.topology,
            OptionReader(None, self.statistics(True), SHARDERS),
            resolve(self.setting.checkpoint, "cpu"),
            sharders=SHARDERS,
        )
        perf = torchrec_estimators(self.topology, None)[0]
        space = context.enumerator(self.batch_size(True), perf).enumerate(self.model(True), SHARDERS)
        given = GivenPlans(context, space, self.topology)
        rated = [given.rated(plan) for plan in plans.values()]
        measured = dict(zip(plans, measured_costs(rated, context, repeats, arena), strict=True))
        cost_ms = {name: float(costs.overall_ms_B[0]) for name, costs in measured.items()}
        return {
            "task": self.name,
            "tables": len(self.tables(True)),
            "ranks": self.topology.world_size,
            "stay_ms": cost_ms["stay"],
            "afresh_ms": cost_ms["afresh"],
            "afresh_bytes": found.afresh.bytes_moved,
            "share_ms": {f"{share:.0%}": cost_ms[f"{share:.0%}"] for share in SHARES},
            "kernels_ms": {name: float(costs.device_ms_BD.max()) for name, costs in measured.items()},
            "predicted_ms": {name: float(plan.costs.overall_ms_B[0]) for name, plan in zip(plans, rated, strict=True)},
        }

    @staticmethod
    def at(found: Replan, share: float) -> float:
        """Milliseconds of the cheapest plan with this share of the bytes."""
        limit = share * found.afresh.bytes_moved
        return min((move.step_ms for move in found.curve if move.bytes_moved <= limit), default=found.now.step_ms)


def tasks(setting: Setting) -> list[DriftTask]:
    """Kinds in turns."""
    return [DriftTask(kind, index, setting) for index in range(EACH) for kind in KINDS]


def summarize(lines: Sequence[dict[str, Any]]) -> None:
    """By kind and in all: geometric means of cost over staying, and shares of the gain of planning afresh."""
    table = table_of(
        "Cost over that of staying, geometric mean", "kind", "tasks", "afresh", *(f"{s:.0%}" for s in SHARES)
    )
    for share in SHARES[1:]:
        table.add_column(f"gain at {share:.0%}", justify="right")
    for kind in (*KINDS, ""):
        some = [line for line in lines if line["task"].startswith(kind)]
        if not some:
            continue
        afresh = sum(math.log(line["afresh_ms"] / line["stay_ms"]) for line in some)
        logs = [sum(math.log(line["share_ms"][f"{s:.0%}"] / line["stay_ms"]) for line in some) for s in SHARES]
        means = [f"{math.exp(log / len(some)):.3f}" for log in (afresh, *logs)]
        table.add_row(kind or "all", str(len(some)), *means, *(f"{log / afresh:.0%}" for log in logs[1:]))
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("drift.jsonl"))
    parser.add_argument("--tasks", type=int, default=EACH * len(KINDS), help="the first so many")
    parser.add_argument("--measured", type=int, metavar="REPEATS", help="time kernels on this CPU, so often each")
    parser.add_argument("--checkpoint", default="auto", help="that plans are chosen by")
    args = parser.parse_args()
    quiet()
    lines = [line for line in opened(args.record) if "task" in line]
    done = {line["task"] for line in lines}
    arena = Arena("cpu") if args.measured else None
    for task in tasks(replace(MEASURED if args.measured else PREDICTED, checkpoint=args.checkpoint))[: args.tasks]:
        if task.name not in done:
            lines.append(task.measure(args.measured, arena) if arena else task.run())
            append(args.record, lines[-1])
    summarize(lines)


if __name__ == "__main__":
    main()
