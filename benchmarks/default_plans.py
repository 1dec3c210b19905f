# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Default plans, as a user gets them who changes one line: ours against TorchRec's default planner, run to its end.

    python benchmarks/default_plans.py --record benchmarks/results/2026-11-24-default-plans.jsonl

Six models of tables with row-wise Adagrad in the backward, on one and two hosts of eight H100s, local batch 2,048, all
planners told the true pooling factors. TorchRec's planner replicates tables as it likes, and they lose that optimizer.
Ours keeps training exact: through this package's ``DistributedModelParallel`` it may replicate tables, since their
replicas keep the optimizer; for TorchRec's own class with nothing attached it may not. ``--full-search`` takes, instead
of these models, 17 tasks of ``common/tasks.py`` on which TorchRec's search ended, with batches of their own.

Planners rate plans by TorchRec's estimates (``cost_source="torchrec"``) or by our own costs; every plan is then rated
by both. ``--limit`` ends TorchRec's proposals after so many seconds of processor time: marked ``>`` then.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from common.output import append, opened, quiet, table_of
from common.tasks import RANKS_PER_HOST, FullTask, random_tables, tasks
from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.devices import Machine
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.enumeration import estimate_all, torchrec_estimators
from dreamshard_planner.search_space.sharding_types import sharding_in_words
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import FeatureStatistics, Table

LOCAL_BATCH = 2048
HOSTS = (1, 2)
SHARDERS = [EmbeddingBagCollectionSharder()]


def drawn(
    count: int, rows: tuple[float, float], dims: Sequence[int], lookups: tuple[float, float], seed: int
) -> list[Table]:
    """Tables with powers of ten of rows, and lookups per sample, in these bounds."""
    rng = random.Random(seed)
    return [
        Table(
            f"t{seed}_{index}",
            int(10 ** rng.uniform(*rows)),
            rng.choice(dims),
            (FeatureStatistics(10 ** rng.uniform(*lookups)),),
        )
        for index in range(count)
    ]


MODELS: dict[str, Callable[[], list[Table]]] = {
    "MLPerf, 26 tables": lambda: named_pool("mlperf_dlrm_dcnv2"),
    "200 small + 10 large": lambda: [
        *drawn(200, (2, 4.5), (16, 32, 64), (0, 0.5), 1),
        *drawn(10, (6.5, 7.5), (128,), (0, 1), 2),
    ],
    "100 small": lambda: drawn(100, (2, 4.5), (16, 32, 64), (0, 0.7), 3),
    "40 categorical + 4 hot": lambda: [
        *drawn(40, (1, 5), (32, 64), (0, 0), 4),
        *drawn(4, (5.5, 6.5), (128,), (1.7, 2), 5),
    ],
    "100 mixed": lambda: random_tables(100),
    "8 large": lambda: drawn(8, (7, 7.5), (128,), (0, 0.7), 6),
}


FULL_SEARCH = (
    "mlperf x 8; random 50 x 8; merlin tiny x 8; meta 60 x 8; merlin small x 8; merlin tiny x 16; meta 200 x 8; "
    "random 200 x 8; merlin small x 16; merlin tiny x 64; meta 60 x 64; merlin medium x 16; merlin small x 64; "
    "merlin tiny x 128; random 200 x 64; meta 200 x 64; merlin medium x 8"
).split("; ")
"""Tasks over every sharding type on which TorchRec's search was run to its end."""


class DefaultTask(FullTask):
    """One of them, on hosts of eight H100s."""

    def model(self) -> nn.Module:
        """With row-wise Adagrad in the backward."""
        model = super().model()
        apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.01})
        return model

    def topology(self) -> Topology:
        """As published."""
        return Machine(ranks_per_host=RANKS_PER_HOST, hosts=self.ranks // RANKS_PER_HOST, gpu="h100").topology()


@dataclass(frozen=True)
class Made:
    """A plan, and whether its search came to an end."""

    plan: list[ShardingOption]
    finished: bool


class Timed(Proposer):
    """Another proposer, until there is no time left."""

    def __init__(self, inner: Proposer, left: Callable[[], bool]) -> None:
        self._inner, self._left, self.cut = inner, left, False

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """The other's."""
        self._inner.load(search_space, enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """The other's, or None where time is up."""
        proposal = self._inner.propose()
        self.cut = proposal is not None and not self._left()
        return None if self.cut else proposal

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        """The other's."""
        self._inner.feedback(*args, **kwargs)


class Contest:
    """One task; planners as a user makes them."""

    def __init__(self, task: DefaultTask, limit: float) -> None:
        self.task, self.limit = task, limit
        self._start = time.process_time()
        self.model, self.constraints, self.topology = task.model(), task.constraints("all"), task.topology()
        self.planners: dict[str, Callable[[], Made]] = {"torchrec": self.torchrec} | {
            f"{name}, {source}": lambda attached=attached, source=source: self.ours(attached, source)
            for name, attached in (("attached", True), ("nothing attached", False))
            for source in ("torchrec", "auto")
        }

    def torchrec(self) -> Made:
        """Plan by TorchRec's planner until the limit."""
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.task.batch_size,
            constraints=self.constraints,
            stats=[],
            debug=False,
        )
        timed = [Timed(proposer, self.left) for proposer in planner._proposers]
        planner._proposers = timed
        planner.plan(self.model, SHARDERS)
        return Made(planner._best_plan, not any(proposer.cut for proposer in timed))

    def left(self) -> bool:
        """Return whether the limit allows more proposals."""
        return time.process_time() - self._start < self.limit

    def ours(self, attached: bool, cost_source: str) -> Made:
        """Exact training."""
        planner = DreamShardPlanner(
            topology=self.topology,
            batch_size=self.task.batch_size,
            constraints=self.constraints,
            stats=[],
            debug=False,
            optimizers_attached=attached,
            cost_source=cost_source,
        )
        planner.plan(self.model, SHARDERS)
        return Made(planner.options, True)

    def play(self, name: str) -> dict[str, Any]:
        """Plan by one planner, and rate its plan by TorchRec's perf model and by our costs."""
        self._start = time.process_time()
        made = self.planners[name]()
        seconds = time.process_time() - self._start
        estimate_all(torchrec_estimators(self.topology, self.constraints), made.plan, SHARDERS)
        context = PlanRater(PlannedRanks.of(self.topology), OptionReader(self.constraints))
        kinds = (sharding_in_words(option.sharding_type, option.compute_kernel) for option in made.plan)
        return {
            "seconds": round(seconds, 2),
            "torchrec_ms": NoopPerfModel(self.topology).rate(made.plan),
            "own_ms": context.rated(made.plan).total_ms,
            "own_source": str(context.compute.source),
            "types": dict(Counter(kinds).most_common()),
            "finished": made.finished,
        }


COLUMNS = (
    ("ours, TorchRec's estimates", "torchrec_ms", "attached, torchrec"),
    ("nothing attached", "torchrec_ms", "nothing attached, torchrec"),
    ("ours, own costs", "own_ms", "attached, auto"),
    ("nothing attached", "own_ms", "nothing attached, auto"),
)
"""Heading, by whose figures, and of which planner: over TorchRec's plan."""


def summarize(lines: Sequence[dict[str, Any]], console: Console) -> None:
    """Ratios to TorchRec's plan, and geometric means."""
    of = {(line["model"], line["hosts"], line["planner"]): line for line in lines if "model" in line}
    table = table_of("Cost over that of TorchRec's default plan", "model", "hosts", "TorchRec's, ms", "own, ms")
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    logs: list[list[float]] = [[] for _ in COLUMNS]
    for model, hosts in dict.fromkeys(key[:2] for key in of):
        theirs = of[model, hosts, "torchrec"]
        row = [f"{'' if theirs['finished'] else '>'}{theirs[name]:.3f}" for name in ("torchrec_ms", "own_ms")]
        for column, (_, by, planner) in enumerate(COLUMNS):
            ours = of.get((model, hosts, planner))
            row.append("" if ours is None else f"{ours[by] / theirs[by]:.3f}")
            if ours is not None:
                logs[column].append(math.log(ours[by] / theirs[by]))
        table.add_row(model, f"{hosts} x {RANKS_PER_HOST}", *row)
    means = [f"{math.exp(sum(log) / len(log)):.3f}" if log else "" for log in logs]
    table.add_row("geometric mean", "", "", "", *means)
    console.print(table)


def chosen_tasks(args: argparse.Namespace) -> list[DefaultTask]:
    """Return the tasks that the command asks for."""
    if args.full_search:
        every = tasks()
        return [DefaultTask(name, every[name].make, every[name].ranks, every[name].batch_size) for name in FULL_SEARCH]
    return [
        DefaultTask(model, MODELS[model], hosts * RANKS_PER_HOST, LOCAL_BATCH)
        for hosts in args.hosts
        for model in args.models.split(";")
    ]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("default-plans.jsonl"))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of TorchRec's search")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS)
    parser.add_argument("--models", default=";".join(MODELS), help="separated by semicolons")
    parser.add_argument("--full-search", action="store_true", help="17 tasks of common/tasks.py instead of models")
    args = parser.parse_args()
    quiet()
    console = Console(width=150)
    lines = opened(args.record)
    for task in chosen_tasks(args):
        contest = Contest(task, args.limit)
        for name in contest.planners:
            where = {"model": task.name, "hosts": task.ranks // RANKS_PER_HOST, "planner": name}
            if any(where.items() <= line.items() for line in lines):
                continue
            line = where | contest.play(name)
            append(args.record, line)
            lines.append(line)
            console.print(*where.values(), f"{line['torchrec_ms']:.3f} {line['own_ms']:.3f} {line['seconds']} s")
    summarize(lines, console)


if __name__ == "__main__":
    main()
