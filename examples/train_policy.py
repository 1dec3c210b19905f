# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learn from nothing, as a researcher would: measure, fit, train, plan: python examples/train_policy.py

Settings are tiny, a quarter of a minute in all; `dreamshard train --out FILE` makes a checkpoint worth planning with.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from tempfile import mkdtemp

import torch

from dreamshard_planner import Checkpoint
from dreamshard_planner.policy.network import policy_starts, roll_out
from dreamshard_planner.policy.task import WHOLE_TYPES, ShardingTask
from dreamshard_planner.search.starts import OptionTotals, level_starts
from dreamshard_planner.training import QUICK, TrainingConfig, drawn_tasks, train
from dreamshard_planner.workload.pools import pool_tables


def main(folder: Path) -> None:
    config = replace(QUICK, seconds=4.0)
    checkpoint = train(config, folder / "tiny.safetensors", progress=False)  # real FBGEMM kernels are timed
    forward, backward = checkpoint.metadata["validation"]["network_mape"]
    print(f"cost network: {forward:.0%} forward and {backward:.0%} backward off, on sets of held-out tables")

    plan_unseen(checkpoint, config)


@torch.no_grad()
def plan_unseen(checkpoint: Checkpoint, config: TrainingConfig) -> None:
    """Show the policy's plans, without search, of three tasks of tables that nothing was learned from."""
    _, held_out = pool_tables(config.pools)
    for drawn in drawn_tasks(checkpoint, held_out, 3, config, seed=7):
        task, cost = drawn.task, drawn.task.cost
        asked = OptionTotals(cost)
        whole = ShardingTask(cost, asked, WHOLE_TYPES)
        plans = {
            "level start": level_starts(cost, asked),
            "policy, whole tables": roll_out(checkpoint.policy, whole, 1).shardings(),
            "policy, one roll-out": roll_out(checkpoint.policy, task, 1).shardings(),
            "policy, best start": policy_starts(cost, checkpoint.policy, asked),
        }
        print(f"\n{task.num_tables} unseen tables on {cost.problem.num_ranks} ranks, predicted ms")
        for name, found in plans.items():
            print(f"  {name:22} {min((cost.overall_ms(plan) for plan in found if plan is not None), default=inf):8.3f}")


if __name__ == "__main__":
    main(Path(mkdtemp()))
