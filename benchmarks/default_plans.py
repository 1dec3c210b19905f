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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import ShardingOption
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from common.output import append, opened, quiet, table_of
from common.tasks import RANKS_PER_HOST, FullTask, named_task, random_tables
from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.devices import Machine
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.enumeration import PerfEstimator, estimate_all
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.sharding_types import sharding_in_words
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import Table

LOCAL_BATCH = 2048
RANKS = (8, 16)
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


PLANNERS = {
    "torchrec": None,
    **{
        f"{name}, {source}": {"optimizers_attached": attached, "cost_source": source}
        for name, attached in (("attached", True), ("nothing attached", False))
        for source in ("torchrec", "auto")
    },
}
"""Arguments of our planner; None for TorchRec's."""


def plan_within(
    planner: EmbeddingShardingPlanner, model: nn.Module, seconds: float
) -> tuple[list[ShardingOption], bool]:
    """Plan by TorchRec's planner, whose proposals end after so many seconds of processor time. Return the best plan,
    and whether the search came to its own end."""
    deadline, cut = time.process_time() + seconds, []

    def propose(proposer: Callable[[], list[ShardingOption] | None]) -> list[ShardingOption] | None:
        proposal = proposer()
        if proposal is None or time.process_time() < deadline:
            return proposal
        cut.append(proposal)
        return None

    for proposer in planner._proposers or ():  # ours makes its own
        proposer.propose = partial(propose, proposer.propose)
    planner.plan(model, SHARDERS)
    return planner._best_plan, not cut


def play(task: DefaultTask, name: str, limit: float) -> dict[str, Any]:
    """Plan by one planner, and rate its plan by TorchRec's perf model and by our costs."""
    model, given, ours, finished = task.model(), task.given(), PLANNERS[name], True
    start = time.process_time()
    if ours is None:
        plan, finished = plan_within(EmbeddingShardingPlanner(**given), model, limit)
    else:
        planner = DreamShardPlanner(**given, **ours)
        planner.plan(model, SHARDERS)
        plan = planner.options
    seconds, topology, constraints = time.process_time() - start, given["topology"], given["constraints"]
    estimate_all([PerfEstimator(topology, constraints)], plan, SHARDERS)
    rater = PlanRater(PlannedRanks.of(topology), OptionReader(constraints))
    kinds = (sharding_in_words(option.sharding_type, option.compute_kernel) for option in plan)
    return {
        "seconds": round(seconds, 2),
        "torchrec_ms": NoopPerfModel(topology).rate(plan),
        "own_ms": rater.rated(plan).total_ms,
        "own_source": str(rater.compute.source),
        "types": dict(Counter(kinds).most_common()),
        "finished": finished,
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
    headings = ("hosts", "TorchRec's, ms", "own, ms", *(heading for heading, _, _ in COLUMNS))
    table = table_of("Cost over that of TorchRec's default plan", "model", *headings)
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("default-plans.jsonl"))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of TorchRec's search")
    parser.add_argument("--full-search", action="store_true", help="17 tasks of common/tasks.py instead of models")
    args = parser.parse_args()
    quiet()
    console = Console(width=150)
    lines = opened(args.record)
    chosen = [DefaultTask(model, MODELS[model], ranks, LOCAL_BATCH) for ranks, model in product(RANKS, MODELS)]
    if args.full_search:
        chosen = [DefaultTask(**vars(named_task(name))) for name in FULL_SEARCH]
    for task, name in product(chosen, PLANNERS):
        where = {"model": task.name, "hosts": task.ranks // RANKS_PER_HOST, "planner": name}
        if any(where.items() <= line.items() for line in lines):
            continue
        lines.append(where | play(task, name, args.limit))
        append(args.record, lines[-1])
        console.print(*where.values(), "{torchrec_ms:.3f} {own_ms:.3f} {seconds} s".format(**lines[-1]))
    summarize(lines, console)


if __name__ == "__main__":
    main()
