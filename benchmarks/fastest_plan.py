# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Count how often the plan that is predicted to be the fastest trains the fastest, before and after ``learn``.

    torchrun --standalone --nproc_per_node=2 benchmarks/fastest_plan.py --models 20 --record fastest-plan.jsonl
    python benchmarks/fastest_plan.py --summarize fastest-plan.jsonl

CPU ranks over gloo, one thread each. A model has 4 to 60 random tables and a small dense net; half of the models have a
hot table, half have skewed ids. Plans are ours (with statistics of the batches, and told nothing), TorchRec's (with
true pooling factors, and told nothing), and whole tables by two greedy rules. Steps under three of these are observed,
and ``learn`` corrects the costs; the plan by these costs is measured as well. Blocks of steps of two models per plan
come in shuffled turns, since the place in memory alone changes steps by some percent. Ratios of plans are medians over
rounds, with 95 % intervals over models and rounds. Plans are tied if the interval contains 1.

Costs predict the embedding work alone. A predicted step is the measured step under TorchRec's default plan, plus the
predicted difference between the two plans.

Shapes: C copies of a model, N rounds.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.types import ShardingPlan

from common.output import append, opened, quiet, table_of, wide_console
from dlrm.job import RulePartitioner
from dlrm.options import Node, cpu_rank
from dlrm.random_models import SHARDERS, RandomJob, RandomModel, Tables, mean_ratio, ratio
from dreamshard_planner import Checkpoint, DreamShardPlanner, Observation, TableStatistics, compare_steps
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.observing.learning import learn

BASE, INFORMED, OURS, LEARNED = "torchrec_default", "torchrec", "dreamshard", "dreamshard_learned"
RULES = ("lookup_greedy", "size_greedy")
OBSERVED = (BASE, INFORMED, RULES[1])


class Contest(RandomJob):
    """One model on this rank, and its planners."""

    def __init__(self, tables: Tables, node: Node) -> None:
        super().__init__(tables, node)
        self._statistics = TableStatistics.from_batches(self.batches).all_gather()

    def planners(self) -> dict[str, EmbeddingShardingPlanner]:
        """Return the planners of all plans but the learned one."""
        whole = self.informed(["table_wise"])
        rules = {name: RulePartitioner(name, self.given["topology"], whole) for name in RULES}
        return {
            BASE: EmbeddingShardingPlanner(**self.given),
            INFORMED: EmbeddingShardingPlanner(**self.given, constraints=self.informed()),
            **{
                name: EmbeddingShardingPlanner(**self.given, constraints=whole, partitioner=rule)
                for name, rule in rules.items()
            },
            "dreamshard_default": DreamShardPlanner(**self.given),
            OURS: self.planner(resolve("auto", "cpu")),
        }

    def planner(self, checkpoint: Checkpoint) -> DreamShardPlanner:
        """Return our planner with statistics and these costs."""
        return DreamShardPlanner(
            **self.given, statistics=self._statistics, checkpoint=checkpoint, optimizers_attached=True
        )

    def learned(self, plans: Mapping[str, ShardingPlan], steps: int) -> Checkpoint:
        """Return costs corrected by observed steps; the shipped costs if learning is refused."""
        plans = {name: plans[name] for name in OBSERVED}
        few = {"copies": 1, "rounds": 1, "block_seconds": 0.0}
        seen = compare_steps(self.build, plans, self.batches, **few, observed_steps=steps).observed
        prior = resolve("auto", "cpu")
        with tempfile.TemporaryDirectory() as folder:
            try:
                return learn(prior, Observation.merge(seen), Path(folder) / "learned.safetensors")
            except CalibrationRefused:
                return prior

    def predicted_ms(self, checkpoint: Checkpoint, plans: Mapping[str, ShardingPlan]) -> dict[str, float]:
        """Return the predicted embedding work of each plan."""
        planner = self.planner(checkpoint)
        planner.read(RandomModel(self.tables), SHARDERS)
        return {name: round(planner.predict(plan, name).total_ms, 4) for name, plan in plans.items()}


def run_model(seed: int, args: argparse.Namespace, node: Node) -> dict[str, Any]:
    """Plan, observe, learn and measure one model."""
    start, contest = time.monotonic(), Contest(Tables.draw(seed), node)
    plans = {name: contest.plan(planner) for name, planner in contest.planners().items()}
    learned = contest.learned(plans, args.observed_steps)
    plans[LEARNED] = contest.plan(contest.planner(learned))
    return {
        **contest.measured(plans, rounds=args.rounds, block_seconds=args.block_seconds),
        "predicted_ms": {
            "shipped": contest.predicted_ms(resolve("auto", "cpu"), plans),
            "learned": contest.predicted_ms(learned, plans),
        },
        "seconds": round(time.monotonic() - start),
    }


def verdict(row: Mapping[str, Any], costs: str) -> dict[str, Any]:
    """Return how good the plan is that some costs predict to be the fastest, and how far predicted steps are off."""
    predicted_ms, step_ms = (
        row["predicted_ms"][costs],
        {name: float(np.median(ms)) for name, ms in row["step_ms"].items()},
    )
    fastest = min(step_ms, key=step_ms.__getitem__)
    others = [name for name in step_ms if name != row["same_as"][BASE]]
    base_ms = step_ms[row["same_as"][BASE]]
    off = [abs(base_ms + predicted_ms[name] - predicted_ms[BASE] - step_ms[name]) / step_ms[name] for name in others]
    behind = {name: ratio(row, name, fastest) for name in step_ms}
    picked = min(step_ms, key=predicted_ms.__getitem__)
    return {
        "picked": picked,
        "is_fastest": behind[picked][0] <= 1.0,
        "over_fastest": behind[picked][1],
        "by_chance": float(np.mean([low <= 1.0 for low, *_ in behind.values()])),
        "step_error": float(np.mean(off)) if off else None,
    }


def tell(path: Path) -> None:
    """Print the shares of hits, the errors of predicted steps, and the ratios to TorchRec's default plan."""
    rows = [line for line in opened(path) if "model" in line]
    if not rows:
        return
    title = f"{path.name}: {len(rows)} models"
    table = table_of(title, "costs", "picked the fastest", "by chance", "picked over fastest", "steps are off")
    for costs in ("shipped", "learned"):
        told = [verdict(row, costs) for row in rows]
        hits, chance = (np.mean([one[key] for one in told]) for key in ("is_fastest", "by_chance"))
        behind = float(np.exp(np.mean(np.log([one["over_fastest"] for one in told]))))
        off = np.mean([one["step_error"] for one in told if one["step_error"] is not None])
        table.add_row(costs, f"{hits:.0%}", f"{chance:.0%}", f"{behind:.3f}", f"{off:.1%}")
    wide_console().print(table)
    for base in (BASE, INFORMED):
        table = table_of(f"Step over {base}'s", "plan", "mean", "95 %", "over 1.02")
        for name in rows[0]["same_as"]:
            table.add_row(name, *mean_ratio([ratio(row, name, base)[1] for row in rows]))
        wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--first-model", type=int, default=0, help="its seed")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each model")
    parser.add_argument("--block-seconds", type=float, default=0.3)
    parser.add_argument("--observed-steps", type=int, default=50, help="under each observed plan")
    parser.add_argument("--record", type=Path, default=Path("fastest-plan.jsonl"), help="continue this file")
    parser.add_argument("--summarize", type=Path, nargs="+", help="print the tables of these records, and end")
    args = parser.parse_args()
    quiet()
    if args.summarize:
        for path in args.summarize:
            tell(path)
        return
    node = cpu_rank()
    lines = node.gather(opened(args.record) if node.rank == 0 else [])[0]
    rows = [line for line in lines if "model" in line]
    if any(row["ranks"] != node.world_size for row in rows):
        parser.error(f"{args.record} has steps of {rows[0]['ranks']} ranks, not {node.world_size}: name another file")
    for seed in range(args.first_model, args.first_model + args.models):
        if all(row["model"] != seed for row in rows):
            rows.append(run_model(seed, args, node))
            gc.collect()  # models are cyclic
            if node.rank == 0:
                append(args.record, rows[-1])
                print(f"model {seed}: {rows[-1]['seconds']} s, {verdict(rows[-1], 'shipped')}", flush=True)
    if node.rank == 0:
        tell(args.record)
    gc.collect()  # models hold the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
