# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One policy for all sizes: what it loses against policies that were trained at the size of the task.

    python benchmarks/generalization.py --json benchmarks/results/2026-11-21-generalization.json

Trains a policy at each of ``SIZES``, on tasks of training tables, and rolls out each, the shipped one and an untrained
one, greedily and without search on tasks of held-out tables of every size (DreamShard, section 4.2, transfer between
tables and device counts). A cell is the geometric mean of predicted overall cost over that of the policy trained at the
size of the column. Where one table alone is the bottleneck all the same, all policies reach the same; how often is
told. Large sizes get fewer updates, as each takes longer. ``--measured`` tasks of each smaller size are also measured
on fused kernels: the shipped policy against the one trained there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchrec.distributed.planner import Topology

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import SetClock
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.policy.network import AnyPolicy, Policy, PolicyConfig, greedy_plan
from dreamshard_planner.policy.reinforce import ReinforceConfig, train_policy
from dreamshard_planner.research.refine import MeasuredCosts, RefineConfig
from dreamshard_planner.training import WITH_ROOM, PricedTask, TrainingConfig, pool_tables, priced_tasks, rated_ms
from dreamshard_planner.workload.tables import Table


@dataclass(frozen=True)
class Size:
    """Of tasks, and how a policy is trained at it."""

    tables: int
    devices: int
    updates: int
    tasks_per_update: int = 6

    def __str__(self) -> str:
        return f"{self.tables}x{self.devices}"

    def tasks(self, compute: ComputeCost, tables: Sequence[Table], count: int, seed: int) -> list[PricedTask]:
        """Random tasks of this size, drawn as training draws them: without tables that are a bottleneck alone."""
        config = replace(WITH_ROOM, min_tables=self.tables, max_tables=self.tables, devices=(self.devices,))
        return priced_tasks(compute, tables, count, config, seed)


SIZES = (
    Size(10, 2, 500),
    Size(20, 4, 500),
    Size(50, 8, 500),
    Size(100, 16, 250),
    Size(200, 32, 150, tasks_per_update=2),
    Size(500, 128, 50, tasks_per_update=1),
)
MEASURED = SIZES[:3]


def train_at(size: Size, tasks: Sequence[PricedTask], seed: int) -> Policy:
    """A policy that has only seen these tasks of one size."""
    policy = untrained(tasks, seed)
    config = ReinforceConfig(updates=size.updates, tasks_per_update=size.tasks_per_update, seed=seed)
    train_policy(policy, [task.cost for task in tasks], config)
    return policy


def untrained(tasks: Sequence[PricedTask], seed: int) -> Policy:
    """A policy that knows the scale of these tasks' features and nothing else."""
    policy = Policy(PolicyConfig(), seed=seed)
    policy.initialize(torch.cat([task.cost.problem.features_PF for task in tasks]))
    return policy


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The grid, and the spot check."""
    checkpoint = resolve(args.checkpoint, args.device)
    compute = checkpoint.compute_cost(Topology(world_size=1, compute_device=args.device))
    train_tables, test_tables = pool_tables(TrainingConfig().pools)
    schools = {size: size.tasks(compute, train_tables, 60, args.seed) for size in SIZES}
    policies: dict[str, AnyPolicy] = {
        "shipped": checkpoint.policy,
        "untrained": untrained(schools[SIZES[2]], args.seed),
    }
    for size in track(SIZES, "training", console=Console(stderr=True)):
        policies[str(size)] = train_at(size, schools[size], args.seed)
    grid: dict[str, dict[str, dict[str, float]]] = {name: {} for name in policies}
    bottlenecks = {}
    for size in track(SIZES, "testing", console=Console(stderr=True)):
        tasks = size.tasks(compute, test_tables, args.tasks, args.seed + 7)
        plans = {name: [greedy_plan(policy, task.cost) for task in tasks] for name, policy in policies.items()}
        bottlenecks[str(size)] = sum(map(one_table_is_the_bottleneck, tasks, plans["shipped"]))
        cost_ms = {name: np.array(list(map(rated_ms, (t.cost for t in tasks), own))) for name, own in plans.items()}
        for name, values in cost_ms.items():
            both = np.isfinite(values) & np.isfinite(cost_ms[str(size)])
            logs = np.log(values[both] / cost_ms[str(size)][both])
            grid[name][str(size)] = {"ratio": float(np.exp(logs.mean())), "infeasible": int(np.isinf(values).sum())}
    arena = Arena(args.device, seed=args.seed)
    spot = {
        str(size): spot_check(
            (checkpoint.policy, policies[str(size)]),
            size.tasks(compute, test_tables, args.measured, args.seed + 7),
            arena,
            args,
        )
        for size in (MEASURED if args.measured else ())
    }
    trained = {str(size): size.updates * size.tasks_per_update for size in SIZES}
    return {"grid": grid, "tasks": args.tasks, "trained_tasks": trained, "bottlenecks": bottlenecks, "measured": spot}


def one_table_is_the_bottleneck(task: PricedTask, plan: Tensor | None) -> bool:
    """Whether the heaviest table alone takes, by prediction, over 95 % of what the slowest device does."""
    if plan is None:
        return False
    return float(task.cost.single_ms_P.max()) > 0.95 * float(task.cost.rate(plan[None]).device_ms_BD.max())


def spot_check(
    policies: tuple[AnyPolicy, AnyPolicy], tasks: Sequence[PricedTask], arena: Arena, args: argparse.Namespace
) -> list[float]:
    """Measured compute under the first policy over that under the second, task by task; 1 where the plans' slowest
    devices hold the same tables."""
    ratios = []
    for task in tasks:
        clock = SetClock(task.workloads, args.device, arena, seed=args.seed)
        measured = MeasuredCosts(task.cost, clock, RefineConfig())
        plans = [greedy_plan(policy, task.cost) for policy in policies]
        if all(plan is not None for plan in plans):
            measured.time(plans, args.rounds)
            ours, theirs = (float(measured.rate(plan).device_ms_BD.max()) for plan in plans)
            ratios.append(ours / theirs)
    return ratios


def print_result(result: dict[str, Any]) -> None:
    """For people."""
    sizes = [str(size) for size in SIZES]
    title = f"predicted cost over the policy trained at that size, {result['tasks']} tasks each"
    table = table_of(title, "trained at", *sizes)
    for name, row in result["grid"].items():
        cells = (row[size] for size in sizes)
        table.add_row(
            name, *(f"{c['ratio']:.3f}" + (f" ({c['infeasible']} inf.)" if c["infeasible"] else "") for c in cells)
        )
    console = wide_console()
    console.print(table)
    alone = ", ".join(f"{size} {count}" for size, count in result["bottlenecks"].items())
    console.print(f"tasks in which one table alone is the bottleneck: {alone}")
    for size, ratios in result["measured"].items():
        cells = " ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
        console.print(f"measured at {size}, shipped over trained there: {mean:.3f} ({cells})")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20, help="held-out tasks of each size")
    parser.add_argument("--measured", type=int, default=8, help="tasks of the spot check; 0: none")
    parser.add_argument("--rounds", type=int, default=9, help="times that each placement is measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with pinned(1):
        result = compare(args)
        origin = provenance(torch.device(args.device))
    print_result(result)
    write_result(args.json, origin, result)


if __name__ == "__main__":
    main()
