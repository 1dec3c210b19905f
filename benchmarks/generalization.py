# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One policy for all sizes: what it loses against policies that were trained at the size of the task.

    python benchmarks/generalization.py --json benchmarks/results/2026-11-21-generalization.json

Trains a policy at each of ``SIZES``, on tasks of training tables, and rolls out each, and the shipped one, greedily and
without search on tasks of held-out tables of every size (DreamShard, section 4.2, transfer between tables and device
counts). A cell is the geometric mean of predicted overall cost over that of the policy trained at the size of the
column. ``--measured`` tasks of one size are also measured on fused kernels: shipped policy against the one trained
there.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable
from torch import Tensor
from torchrec.distributed.planner import Topology

from dreamshard_planner.checkpoint import resolve
from dreamshard_planner.cost.model import ComputeCost
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.sets import SetClock
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.placement.environment import TaskBatch
from dreamshard_planner.placement.policy import AnyPolicy, Policy, PolicyConfig, roll_out
from dreamshard_planner.placement.refine import MeasuredCosts, RefineConfig
from dreamshard_planner.placement.reinforce import ReinforceConfig, train_policy
from dreamshard_planner.placement.tasks import TaskConfig
from dreamshard_planner.training import PricedTask, TrainingConfig, pool_tables, priced_tasks
from dreamshard_planner.workload.tables import Table
from provenance import provenance


@dataclass(frozen=True)
class Size:
    """Of tasks, and how a policy is trained at it; large tasks get fewer updates, as each takes longer."""

    tables: int
    devices: int
    updates: int
    tasks_per_update: int = 6

    def __str__(self) -> str:
        return f"{self.tables}x{self.devices}"

    def tasks(self, compute: ComputeCost, tables: Sequence[Table], count: int, seed: int) -> list[PricedTask]:
        """Random tasks of this size."""
        config = TaskConfig(min_tables=self.tables, max_tables=self.tables, devices=(self.devices,))
        return priced_tasks(compute, tables, count, config, seed)


SIZES = (
    Size(10, 2, 500),
    Size(20, 4, 500),
    Size(50, 8, 500),
    Size(100, 16, 250),
    Size(200, 32, 150, tasks_per_update=2),
    Size(500, 128, 50, tasks_per_update=1),
)
MEASURED = SIZES[2]


def train_at(size: Size, compute: ComputeCost, tables: Sequence[Table], seed: int) -> Policy:
    """A policy that has only seen tasks of one size."""
    costs = [task.cost for task in size.tasks(compute, tables, 60, seed)]
    policy = Policy(PolicyConfig(), seed=seed)
    policy.initialize(torch.cat([cost.problem.features_SF for cost in costs]))
    config = ReinforceConfig(updates=size.updates, tasks_per_update=size.tasks_per_update, seed=seed)
    train_policy(policy, costs, config)
    return policy


@torch.no_grad()
def greedy_plan(policy: AnyPolicy, task: PricedTask) -> Tensor | None:
    """One roll-out; None where it dead-ends."""
    environment = roll_out(policy, TaskBatch.collate([task.cost]), 1).environment
    return environment.assignments(0)[0] if bool(environment.alive_E[0]) else None


def overall_ms(policy: AnyPolicy, tasks: Sequence[PricedTask]) -> list[float]:
    """Predicted; infinite where the roll-out dead-ends."""
    plans = [greedy_plan(policy, task) for task in tasks]
    rated = zip(plans, tasks, strict=True)
    return [math.inf if plan is None else float(task.cost.rate(plan[None]).overall_ms_B) for plan, task in rated]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """The grid, and the spot check."""
    checkpoint = resolve(args.checkpoint, args.device)
    compute = checkpoint.compute_cost(Topology(world_size=1, compute_device=args.device))
    train_tables, test_tables = pool_tables(TrainingConfig().pools)
    policies: dict[str, AnyPolicy] = {"shipped": checkpoint.policy}
    for size in track(SIZES, "training", console=Console(stderr=True)):
        policies[str(size)] = train_at(size, compute, train_tables, args.seed)
    grid: dict[str, dict[str, dict[str, float]]] = {name: {} for name in policies}
    for size in track(SIZES, "testing", console=Console(stderr=True)):
        tasks = size.tasks(compute, test_tables, args.tasks, args.seed + 7)
        cost_ms = {name: np.array(overall_ms(policy, tasks)) for name, policy in policies.items()}
        for name, values in cost_ms.items():
            both = np.isfinite(values) & np.isfinite(cost_ms[str(size)])
            logs = np.log(values[both] / cost_ms[str(size)][both])
            grid[name][str(size)] = {"ratio": float(np.exp(logs.mean())), "infeasible": int(np.isinf(values).sum())}
    spot = spot_check(policies, compute, test_tables, args) if args.measured else []
    return {"grid": grid, "tasks": args.tasks, "measured_size": str(MEASURED), "measured_ratio": spot}


def spot_check(
    policies: dict[str, AnyPolicy], compute: ComputeCost, tables: Sequence[Table], args: argparse.Namespace
) -> list[float]:
    """Measured compute under the shipped policy over that under the one trained at this size, task by task."""
    ratios = []
    arena = Arena(args.device, seed=args.seed)
    for task in MEASURED.tasks(compute, tables, args.measured, args.seed + 7):
        clock = SetClock(task.workloads, args.device, arena, seed=args.seed)
        measured = MeasuredCosts(task.cost, clock, RefineConfig())
        plans = [greedy_plan(policies[name], task) for name in ("shipped", str(MEASURED))]
        if all(plan is not None for plan in plans):
            measured.time(plans, args.rounds)
            ours, theirs = (float(measured.rate(plan).device_ms_BD.max()) for plan in plans)
            ratios.append(ours / theirs)
    return ratios


def print_result(result: dict[str, Any]) -> None:
    """For people."""
    sizes = [str(size) for size in SIZES]
    table = RichTable(title=f"predicted cost over the policy trained at that size, {result['tasks']} tasks each")
    for heading in ("trained at", *sizes):
        table.add_column(heading, justify="left" if heading == "trained at" else "right")
    for name, row in result["grid"].items():
        cells = (row[size] for size in sizes)
        table.add_row(
            name, *(f"{c['ratio']:.3f}" + (f" ({c['infeasible']} inf.)" if c["infeasible"] else "") for c in cells)
        )
    console = Console()
    console = console if console.is_terminal else Console(width=120)
    console.print(table)
    if result["measured_ratio"]:
        low, middle, high = np.percentile(result["measured_ratio"], (0, 50, 100))
        what = f"{len(result['measured_ratio'])} tasks of {result['measured_size']}, shipped over trained there"
        console.print(f"measured, {what}: median {middle:.3f}, {low:.3f} to {high:.3f}")


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
    if args.json:
        args.json.write_text(json.dumps(origin | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
