# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What roll-outs of the joint policy bring: as plans themselves, and as further starts of the joint search.

    python benchmarks/joint_policy.py --sizes 200x64 --record benchmarks/results/2026-11-24-joint-policy.jsonl
    python benchmarks/joint_policy.py --summary benchmarks/results/2026-11-24-joint-policy.jsonl

    level       the best of the level starts
    greedy      one greedy roll-out of the trained policy
    samples     the best of 8 roll-outs sampled
    relaid      the best of the cheapest level starts' options, laid down anew by a policy that was never trained: a
                greedy heuristic of positions alone
    untrained   the best of roll-outs of that policy, as the planner plays them: they choose options, or take those of
                level starts
    trained     the same of the policy that ships

and searches with a share of the planner's candidates, from

    today       level starts, and whole tables placed by heuristics and search
    +relaid     these and the plan above; in the same way
    +untrained
    +trained
    in time     the same with so many fewer candidates that it should take no longer than ``today``

Tasks are drawn by seeds that no training has seen. Seconds are of processor time on one thread,
roll-outs included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders

from common.output import mean_interval, provenance, quiet, table_of, wide_console
from common.tasks import meta_collection
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.search_plan import fastest_whole, wide_units_laid_down
from dreamshard_planner.policy.joint_environment import JointTask
from dreamshard_planner.policy.joint_network import (
    RELAID,
    JointPolicy,
    JointPolicyConfig,
    joint_roll_out,
    joint_starts,
    shipped_joint_policy,
)
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.search.effort import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.search.search import search
from dreamshard_planner.search.starts import JointOptions, level_starts
from dreamshard_planner.search_space.usable_options import usable_options
from dreamshard_planner.workload.pools import meta_like
from placements.placers import rule_starts
from placements.placers import searched as placed_by_search

LEAST_SHARE = 0.005
SHARES = (0.1, 1 / 3, 1.0)
BATCH_SIZE = 2048
FIRST_SEED = 7_000
GPU_BYTES, HOST_BYTES, RANKS_PER_HOST = 80 * 2**30, 128 * 2**30, 8
Timed = tuple[list[Sharding], float]
"""Plans, the cheapest first, and the seconds that they took."""


class Task:
    """One model on some ranks, read once."""

    def __init__(self, tables: int, ranks: int, seed: int) -> None:
        drawn = meta_like(seed, tables)
        topology = Topology(ranks, "cuda", hbm_cap=GPU_BYTES, ddr_cap=HOST_BYTES, local_world_size=RANKS_PER_HOST)
        constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling_factor]) for t in drawn}
        model, sharders = torch.nn.Module(), get_default_sharders()
        model.sparse = meta_collection(drawn)
        self.context = PlanningContext.of(topology, constraints)
        self.context = replace(self.context, constraints=constraints, sharders=sharders)
        reservation = EmbeddingShardingPlanner(topology, BATCH_SIZE, stats=[])._storage_reservation
        left = reservation.reserve(topology, BATCH_SIZE, model, sharders, constraints)
        estimator = self.context._torchrec[0]
        options = self.context.enumerator(BATCH_SIZE, estimator).enumerate(model, sharders)
        options = usable_options(options, "cuda")
        self.read = self.context.read(options, left)
        self.cost = self.context.cost(self.read)
        self.whole: ReadProblem = self.context.read(fastest_whole(options), left)


def timed(make: Callable[[], Sequence[Sharding]]) -> Timed:
    """What is made, and seconds of processor time."""
    start = time.process_time()
    return list(make()), time.process_time() - start


def rolled_out(task: Task, policy: JointPolicy, episodes: int) -> list[Sharding]:
    """One greedy roll-out, or several sampled ones, the cheapest first."""
    generator = None if episodes == 1 else torch.Generator().manual_seed(0)
    prepared = JointTask(task.cost, JointOptions(task.cost))
    plans = joint_roll_out(policy, prepared, episodes, generator).shardings()
    return sorted((plan for plan in plans if plan is not None), key=task.cost.overall_ms)


def levels(task: Task) -> list[Sharding]:
    """Today's starts but for whole tables, the cheapest first."""
    return sorted(level_starts(task.cost, JointOptions(task.cost)), key=task.cost.overall_ms)


def relaid(task: Task, plans: Sequence[Sharding], policy: JointPolicy) -> list[Sharding]:
    """Plans with the same options, each of whose rules of position the policy chooses, the cheapest first."""
    prepared, option_ET = JointTask(task.cost, JointOptions(task.cost)), torch.tensor([plan.options for plan in plans])
    anew = joint_roll_out(policy, prepared, len(plans), option_ET=option_ET).shardings()
    return sorted((plan for plan in anew if plan is not None), key=task.cost.overall_ms)


def whole_tables(task: Task, config: SearchConfig) -> list[Sharding]:
    """Placed by heuristics and search; nothing where they do not fit."""
    cost = task.context.cost(task.whole)
    try:
        chosen = wide_units_laid_down(cost)
    except PlannerError:
        return []
    rank_S = placed_by_search(chosen.cost, rule_starts(chosen.cost), config)
    return [task.read.sharding(task.whole.assign(chosen.placed(rank_S)))]


def shared(share: float) -> SearchConfig:
    """Settings with so much of the default's candidates."""
    counts = ("reshards", "reshards_per_table", "last_moves")
    return replace(DEFAULT_SEARCH, **{name: max(1, round(share * getattr(DEFAULT_SEARCH, name))) for name in counts})


def searched(task: Task, whole: Timed, share: float, beside: Timed = ([], 0.0)) -> dict[str, float]:
    """Cost and seconds of a search from level starts, whole tables and, as the planner has the policy's, plans beside
    them."""
    start = time.process_time()
    found = search(task.cost, whole[0], shared(share), further=lambda *_: beside[0]).sharding
    seconds = time.process_time() - start + whole[1] + beside[1]
    return {"ms": task.cost.overall_ms(found), "seconds": seconds, "share": share}


def row_of(task: Task, trained: JointPolicy, untrained: JointPolicy) -> dict[str, Any]:
    """All of one task."""
    asked = JointOptions(task.cost)
    level = timed(lambda: levels(task))
    made = {
        "level": level,
        "greedy": timed(lambda: rolled_out(task, trained, 1)),
        "samples": timed(lambda: rolled_out(task, trained, 8)),
        "relaid": timed(lambda: relaid(task, level[0][:RELAID], untrained)),
        "untrained": timed(lambda: joint_starts(task.cost, untrained, asked, level[0])),
        "trained": timed(lambda: joint_starts(task.cost, trained, asked, level[0])),
    }
    row: dict[str, Any] = {
        name: {"ms": task.cost.overall_ms(plans[0]), "seconds": seconds} for name, (plans, seconds) in made.items()
    }
    for share in SHARES:
        whole = timed(partial(whole_tables, task, shared(share)))
        today = searched(task, whole, share)
        best = made["relaid"][0][:1], made["relaid"][1]
        trained_too = searched(task, whole, share, made["trained"])
        over = trained_too["seconds"] - today["seconds"]
        searching = today["seconds"] - whole[1] - made["level"][1]
        less = max(LEAST_SHARE, share * (1 - over / max(searching, over, 1e-3)))
        row[f"{share:.2f}"] = {
            "today": today,
            "+relaid": searched(task, whole, share, best),
            "+untrained": searched(task, whole, share, made["untrained"]),
            "+trained": trained_too,
            "in time": trained_too if over <= 0 else searched(task, whole, less, made["trained"]),
        }
    return row


def summary(rows: Sequence[dict[str, Any]]) -> None:
    """Ratios to level starts and to today's search, with intervals."""

    def cell(ratios: list[float]) -> str:
        low, high = mean_interval(np.array(ratios), np.random.default_rng(0))
        return f"{np.mean(ratios):.4f} ({low:.4f} to {high:.4f})"

    def seconds(some: list[dict[str, Any]]) -> str:
        return f"{np.median([one['seconds'] for one in some]):.2f} s"

    plans = table_of("over the best level start", "tables x ranks", "tasks", "plans", "cost", "seconds")
    ends = table_of("over today's search", "tables x ranks", "share", "starts", "cost", "seconds")
    for size in dict.fromkeys(row["size"] for row in rows):
        some = [row for row in rows if row["size"] == size]
        for name in ("level", "greedy", "samples", "relaid", "untrained", "trained"):
            ratios = [row[name]["ms"] / row["level"]["ms"] for row in some]
            plans.add_row(size, str(len(some)), name, cell(ratios), seconds([row[name] for row in some]))
        ratios = [row["1.00"]["today"]["ms"] / row["level"]["ms"] for row in some]
        plans.add_row(size, str(len(some)), "today's search", cell(ratios), seconds([r["1.00"]["today"] for r in some]))
        for share in (f"{share:.2f}" for share in SHARES):
            for way in ("today", "+relaid", "+untrained", "+trained", "in time"):
                ratios = [row[share][way]["ms"] / row[share]["today"]["ms"] for row in some]
                ends.add_row(size, share, way, cell(ratios), seconds([row[share][way] for row in some]))
        ratios = [row["0.10"]["+trained"]["ms"] / row["1.00"]["today"]["ms"] for row in some]
        ends.add_row(
            size, "0.10", "+trained, over all of today's", cell(ratios), seconds([r["0.10"]["+trained"] for r in some])
        )
        for way in ("relaid", "untrained"):
            ratios = [row["1.00"]["+trained"]["ms"] / row["1.00"][f"+{way}"]["ms"] for row in some]
            ends.add_row(size, "1.00", f"+trained, over +{way}", cell(ratios), "")
    wide_console().print(plans)
    wide_console().print(ends)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Of a record, without where they come from."""
    return [row for row in map(json.loads, path.read_text().splitlines()) if "size" in row]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="60x16,200x64", help="tables x ranks, separated by commas")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first task")
    parser.add_argument("--record", type=Path, help="record that rows are added to")
    parser.add_argument("--summary", type=Path, help="only show what a record says")
    args = parser.parse_args()
    if args.summary:
        summary(read_rows(args.summary))
        return
    quiet()
    torch.set_grad_enabled(False)
    trained, untrained = shipped_joint_policy(), JointPolicy(JointPolicyConfig())
    lines, rows = [json.dumps(provenance(torch.device("cpu")))], []
    for size in args.sizes.split(","):
        tables, ranks = map(int, size.split("x"))
        for number in range(args.first, args.tasks):
            row = row_of(Task(tables, ranks, FIRST_SEED + number), trained, untrained)
            rows.append({"size": size, "task": number, **row})
            lines.append(json.dumps(rows[-1]))
            print(lines[-1], flush=True)
            if args.record is not None:
                with args.record.open("a") as file:
                    file.write("".join(f"{line}\n" for line in lines))
                lines.clear()
    summary(rows)


if __name__ == "__main__":
    main()
