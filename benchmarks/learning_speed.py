# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How fast the policy learns: trained episodes per second, and the learning curve of a whole training.

    python benchmarks/learning_speed.py --json benchmarks/results/2026-11-21-learning.json

An episode places all tables of one task; trained means that its gradient is taken too. The curve is that of the
training that ships: tasks of training tables, with what one greedy roll-out costs on tasks of *held-out* tables,
without search, at every tenth of the way. Costs are predicted by the shipped cost network. Writes a PNG beside the
JSON.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from rich.console import Console
from rich.progress import track

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.policy.environment import TaskBatch
from dreamshard_planner.policy.network import Policy, PolicyConfig, roll_out
from dreamshard_planner.policy.reinforce import (
    ReinforceConfig,
    UpdateStatistics,
    best_heuristic_ms,
    reinforce_update,
    train_policy,
)
from dreamshard_planner.policy.tasks import problem_of
from dreamshard_planner.training import TrainingConfig, pool_tables, priced_tasks
from dreamshard_planner.workload.tables import workloads_of

SHAPES = ((20, 2), (50, 4), (100, 4), (100, 8))
"""Tables and devices."""
BATCHES = ((6, 12), (4, 32), (6, 64), (8, 128))
"""Tasks and episodes per task of an update; the first is what training uses."""
POOL = "meta_like_2021"


def episodes_per_second(
    compute: ComputeCost, tables: int, devices: int, tasks: int, episodes: int, repeats: int
) -> float:
    """Median over updates, each on ``tasks`` tasks of that shape."""
    pool, _ = pool_tables((POOL,))
    costs = []
    for task in range(tasks):
        chosen = [pool[(17 * task + index) % len(pool)] for index in range(tables)]
        problem = problem_of(workloads_of(chosen, 512), devices)
        costs.append(Cost(problem.over(CollectiveModel(devices, 1e7)), compute))
    policy, generator = Policy(PolicyConfig()), torch.Generator().manual_seed(0)
    policy.initialize(costs[0].problem.features_PF)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    config = ReinforceConfig(tasks_per_update=tasks, episodes_per_task=episodes)
    heuristic_ms_T, times_s = torch.tensor([best_heuristic_ms(cost) for cost in costs]), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        reinforce_update(
            policy, optimizer, TaskBatch.collate(costs), config, config.entropy_weight, generator, heuristic_ms_T
        )
        times_s.append(time.perf_counter() - start)
    return tasks * episodes / statistics.median(times_s[1:])  # the first one warms up


@torch.no_grad()
def held_out_ratio(policy: Policy, costs: list[Cost], rules_ms: list[float]) -> float:
    """Geometric mean of one greedy roll-out's cost over the best rule's, on tasks that both place."""
    logs = []
    for cost, rule_ms in zip(costs, rules_ms, strict=True):
        environment = roll_out(policy, TaskBatch.collate([cost]), 1).environment
        logs.append((environment.overall_ms()[0] / rule_ms).log())
    ratios = torch.stack(logs)
    return float(ratios[ratios.isfinite()].mean().exp())


def learning_curve(compute: ComputeCost) -> tuple[float, list[UpdateStatistics], dict[int, float]]:
    """Seconds of the default training, statistics of its updates, and the held-out ratio after some of them."""
    config = TrainingConfig()
    train_tables, test_tables = pool_tables(config.pools)
    training, held_out = (
        [task.cost for task in priced_tasks(compute, tables, count, config.tasks, seed)]
        for tables, count, seed in (
            (train_tables, config.num_tasks, config.seed),
            (test_tables, config.validation_tasks, config.seed + 7),
        )
    )
    rules_ms = [best_heuristic_ms(cost) for cost in held_out]
    policy = Policy(PolicyConfig(), seed=config.seed)
    policy.initialize(torch.cat([cost.problem.features_PF for cost in training]))
    ratios = {0: held_out_ratio(policy, held_out, rules_ms)}
    looked_s = 0.0

    def look(index: int, _: UpdateStatistics) -> None:
        nonlocal looked_s
        if (index + 1) % (config.recipe.reinforce.updates // 10) == 0:
            start = time.perf_counter()
            ratios[index + 1] = held_out_ratio(policy, held_out, rules_ms)
            looked_s += time.perf_counter() - start

    start = time.perf_counter()
    told = train_policy(policy, training, config.recipe.reinforce, look)
    return time.perf_counter() - start - looked_s, told, ratios


def draw_figure(told: list[UpdateStatistics], ratios: dict[int, float], path: Path) -> None:
    """Cost over the best rule's and entropy, by update."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    axes[0].plot([entry.over_best_heuristic for entry in told], color="0.75", label="sampled, training tables")
    axes[0].plot(list(ratios), list(ratios.values()), "o-", color="tab:red", label="greedy, held-out tables")
    axes[0].axhline(1.0, color="0.3", linewidth=0.8)
    axes[0].set_ylabel("predicted cost / best rule's")
    axes[0].legend()
    axes[1].plot([entry.entropy for entry in told])
    axes[1].set_ylabel("entropy, nats")
    for ax in axes:
        ax.set_xlabel("update")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    compute = resolve("auto", "cpu").cost
    with pinned(args.threads):
        result = provenance(torch.device("cpu"))
        cases = [(shape, batch) for shape in SHAPES for batch in BATCHES]
        speeds = {
            case: episodes_per_second(compute, *case[0], *case[1], args.repeats)
            for case in track(cases, "speeds", console=Console(stderr=True))
        }
        seconds, told, ratios = learning_curve(compute)
    result |= {
        "episodes_per_second": [
            {"tables": t, "devices": d, "tasks": n, "episodes_per_task": e, "value": round(speed)}
            for ((t, d), (n, e)), speed in speeds.items()
        ],
        "training_seconds": seconds,
        "held_out_over_best_rule": ratios,
        "updates": [asdict(entry) for entry in told],
    }
    write_result(args.json, result)
    draw_figure(told, ratios, args.json.with_suffix(".png"))
    batches = (f"{tasks} tasks x {episodes}" for tasks, episodes in BATCHES)
    table = table_of(f"trained episodes per second, {args.threads} threads", "tables x devices", *batches)
    for shape in SHAPES:
        table.add_row(f"{shape[0]} x {shape[1]}", *(f"{speeds[shape, batch]:,.0f}" for batch in BATCHES))
    console = wide_console()
    console.print(table)
    console.print(
        f"{len(told)} updates of the default training: {seconds:.0f} s; greedy roll-outs on held-out tables over the "
        f"best rule: {ratios[0]:.3f} untrained, {list(ratios.values())[-1]:.3f} at the end"
    )


if __name__ == "__main__":
    main()
