# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learn from nothing, as a researcher would: measure, fit, train, place: python examples/train_policy.py

Settings are tiny, a quarter of a minute in all; `dreamshard train --out FILE` makes a checkpoint worth planning with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch

from dreamshard_planner import Checkpoint
from dreamshard_planner.policy.network import greedy_plan
from dreamshard_planner.search.effort import DEFAULT_SEARCH, Deadline
from dreamshard_planner.search.heuristics import HEURISTICS, place_by_heuristic
from dreamshard_planner.search.moves import local_search
from dreamshard_planner.training import QUICK, TrainingConfig, pool_tables, priced_tasks, rated_ms, train


def main(folder: Path) -> None:
    config = replace(QUICK, seconds=4.0)
    checkpoint = train(config, folder / "tiny.safetensors", progress=False)  # real FBGEMM kernels are timed
    forward, backward = checkpoint.metadata["validation"]["network_mape"]
    print(f"cost network: {forward:.0%} forward and {backward:.0%} backward off, on sets of held-out tables")

    place_unseen(checkpoint, config)


@torch.no_grad()
def place_unseen(checkpoint: Checkpoint, config: TrainingConfig) -> None:
    """Rules, policy and search on three tasks of tables that nothing was learned from.

    Which tables a task has depends on what kernels cost here, so no placement may fit into the memory drawn: inf.
    """
    _, held_out = pool_tables(config.pools)
    for task in priced_tasks(checkpoint.cost, held_out, 3, config.tasks, seed=7):
        problem = task.cost.problem
        print(f"\n{problem.num_parts} unseen tables on {problem.num_ranks} devices, predicted ms")
        plans = {rule: place_by_heuristic(problem, rule) for rule in HEURISTICS}
        plans["policy, one roll-out"] = greedy_plan(checkpoint.policy, task.cost)
        starts = [assignment_S for assignment_S in plans.values() if assignment_S is not None]
        if starts:
            best = min(starts, key=lambda assignment_S: rated_ms(task.cost, assignment_S))
            moved = local_search(task.cost, best, DEFAULT_SEARCH, Deadline(None), torch.Generator().manual_seed(0))
            plans["the best of these, searched on"] = moved.assignment_S
        for name, assignment_S in plans.items():
            print(f"  {name:30} {rated_ms(task.cost, assignment_S):8.3f}")


if __name__ == "__main__":
    main(Path(mkdtemp()))
