# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How much each part of planning brings, by predicted cost, on tasks of held-out tables of several sizes.

Tables that would be a bottleneck alone are replaced, as in training: with one, every method reaches the same.

    python benchmarks/ablation.py --json benchmarks/results/2026-11-21-ablation.json

    rule             the cheapest greedy rule of each task, single-table cost included: what ratios refer to
    policy           one greedy roll-out
    best of 16       that and 15 sampled ones
    search alone     local search from the rules, without a policy
    policy + search  what the planner does, with the same candidates

What the cost itself brings, search on other costs instead of the network, takes measurement: compare_placements.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torchrec.distributed.planner import Topology

from common.bootstrap import mean_interval
from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.policy.environment import TaskBatch
from dreamshard_planner.policy.network import AnyPolicy, roll_out
from dreamshard_planner.policy.place import place
from dreamshard_planner.search.local_search import DEFAULT_SEARCH, SearchConfig, local_search
from dreamshard_planner.training import WITH_ROOM, TrainingConfig, pool_tables, priced_tasks, rated_ms
from placements.placers import rule_starts

SIZES = ((20, 2), (50, 8), (100, 16), (200, 32), (400, 64))
"""Tables and devices."""
BUDGETS = (2_000, 30_000)
"""Candidates of the search."""
SAMPLES = 15


@torch.no_grad()
def methods_ms(cost: Cost, policy: AnyPolicy, seed: int) -> dict[str, float]:
    """Predicted overall cost under each method; NaN where it finds no placement."""
    rules = rule_starts(cost)
    if not rules:
        return {"rule": float("nan")}
    generator = torch.Generator().manual_seed(seed)
    batch = TaskBatch.collate([cost])
    rollout_ms_E = roll_out(policy, batch, 1 + SAMPLES, generator, greedy_first=True).environment.overall_ms()
    values = {
        "rule": rated_ms(cost, rules[0]),
        "policy": float(rollout_ms_E[0]),
        f"best of {1 + SAMPLES}": float(rollout_ms_E.min()),
    }
    for budget in BUDGETS:
        config = replace(DEFAULT_SEARCH, candidates=budget)
        values[f"search alone, {budget:,}"] = _searched_ms(cost, rules, config, seed)
        values[f"policy + search, {budget:,}"] = place(cost, policy, config, seed=seed).chosen.total_ms
    return values


def _searched_ms(cost: Cost, starts: Sequence[torch.Tensor], config: SearchConfig, seed: int) -> float:
    return local_search(cost, starts[: config.starts], config, torch.Generator().manual_seed(seed)).overall_ms


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Geometric means over the tasks of each size, over the best rule; and how often the policy's start won."""
    checkpoint = resolve(args.checkpoint, args.device)
    compute = checkpoint.compute_cost(Topology(world_size=1, compute_device=args.device))
    tables = pool_tables(TrainingConfig().pools)[1]
    rows = []
    for count, devices in track(SIZES, "sizes", console=Console(stderr=True)):
        sized = replace(WITH_ROOM, min_tables=count, max_tables=count, devices=(devices,))
        tasks = priced_tasks(compute, tables, args.tasks, sized, args.seed)
        values = [methods_ms(task.cost, checkpoint.policy, args.seed) for task in tasks]
        values = [value for value in values if np.isfinite(list(value.values())).all()]
        names = list(values[0])
        logs_TN = np.log([[value[name] / value["rule"] for name in names] for value in values])
        ratios = dict(zip(names, np.exp(logs_TN.mean(0)).tolist(), strict=True))
        pairs = {
            f"{budget:,}": _paired(logs_TN, names, f"policy + search, {budget:,}", f"search alone, {budget:,}")
            for budget in BUDGETS
        }
        rows.append(
            {"tables": count, "devices": devices, "tasks": len(values), "over_rule": ratios, "policy_pays": pairs}
        )
    return {"drawn": args.tasks, "rows": rows}


def _paired(logs_TN: np.ndarray, names: Sequence[str], ours: str, theirs: str) -> dict[str, Any]:
    """Ratio of two methods with its 95 % bootstrap interval over tasks."""
    log_T = logs_TN[:, names.index(ours)] - logs_TN[:, names.index(theirs)]
    interval = np.exp(mean_interval(log_T, np.random.default_rng(0)))
    return {"ratio": float(np.exp(log_T.mean())), "interval": interval.tolist()}


def print_result(result: dict[str, Any]) -> None:
    """For people."""
    rows = result["rows"]
    sizes = (f"{row['tables']} x {row['devices']} ({row['tasks']})" for row in rows)
    table = table_of("predicted cost over the task's best greedy rule", "method", *sizes)
    for name in rows[0]["over_rule"]:
        table.add_row(name, *(f"{row['over_rule'][name]:.3f}" for row in rows))
    for budget in rows[0]["policy_pays"]:
        cells = []
        for row in rows:
            paired = row["policy_pays"][budget]
            cells.append("{:.4f} ({:.4f}-{:.4f})".format(paired["ratio"], *paired["interval"]))
        table.add_row(f"with policy over without, {budget}", *cells)
    wide_console(160).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=20, help="of each size")
    parser.add_argument("--seed", type=int, default=5)
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
