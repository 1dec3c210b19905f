# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans whose data drifted: staying, planning afresh, and re-planning by few bytes.

    python benchmarks/drift.py --record benchmarks/results/2026-11-24-drift.jsonl

60 tasks, 20 of each kind: pooling factors of some features trade places (``popularity``), an eighth more tables come
(``tables``), the batch is doubled (``batch``). Models of 16 to 64 tables with row-wise Adagrad, of Meta's published
statistics and at random, on 4 to 16 H100s. A plan is made for what was, and re-planned for what is; costs are those
that plans are chosen by. Shares of bytes are of those that moving to the plan made afresh takes, with its ranks named
so that most stay. Of tables that come, staying has each where the plan made afresh has it, and the others as they were.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from all_types.tasks import RANKS_PER_HOST
from common.meta_model import feature_names, meta_collection
from common.output import table_of, wide_console
from common.provenance import provenance
from default_plans import drawn
from dreamshard_planner import DreamShardPlanner, TableStatistics
from dreamshard_planner.devices import Machine
from dreamshard_planner.plans.replan import Replan
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.tables import Table
from full_search import SHARDERS, append

KINDS = ("popularity", "tables", "batch")
SHARES = (0.0, 0.05, 0.2, 1.0)
"""Of the bytes to the plan made afresh."""
EACH = 20
"""Tasks of a kind."""
NEW = 8
"""One of so many tables comes later."""


@dataclass(frozen=True)
class DriftTask:
    """A model and machine, and what becomes of it."""

    kind: str
    index: int

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

    def planner(self, after: bool) -> DreamShardPlanner:
        """For what is before or after."""
        ranks = (4, 8, 16)[self.index % 3]
        machine = Machine(ranks_per_host=min(ranks, RANKS_PER_HOST), hosts=-(-ranks // RANKS_PER_HOST), gpu="h100")
        known = {
            name: feature
            for table in self.tables(after)
            for name, feature in zip(feature_names(table), table.features, strict=True)
        }
        return DreamShardPlanner(
            topology=machine.topology(),
            batch_size=2048 * (2 if after and self.kind == "batch" else 1),
            statistics=TableStatistics(known),
            stats=[],
            debug=False,
            optimizers_attached=True,
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

    @staticmethod
    def at(found: Replan, share: float) -> float:
        """Milliseconds of the cheapest plan with this share of the bytes."""
        limit = share * found.afresh.bytes_moved
        return min((move.step_ms for move in found.curve if move.bytes_moved <= limit), default=found.now.step_ms)


def tasks() -> list[DriftTask]:
    """Kinds in turns."""
    return [DriftTask(kind, index) for index in range(EACH) for kind in KINDS]


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
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if not args.record.exists():
        append(args.record, provenance(torch.device("cpu")))
    lines = [line for line in map(json.loads, args.record.read_text().splitlines()) if "task" in line]
    done = {line["task"] for line in lines}
    for task in tasks()[: args.tasks]:
        if task.name not in done:
            lines.append(task.run())
            append(args.record, lines[-1])
    summarize(lines)


if __name__ == "__main__":
    main()
