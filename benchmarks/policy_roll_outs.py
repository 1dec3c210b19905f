# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Predicted costs of the policy's roll-outs as plans themselves, over the best level start.

    python benchmarks/policy_roll_outs.py --sizes 60x16,200x64 --tasks 20

    greedy      one greedy roll-out of the policy that ships
    samples     the best of 8 sampled roll-outs
    whole       one greedy roll-out that leaves tables whole
    relaid      the best of the cheapest level starts' options on new ranks, by an untrained policy: a greedy heuristic
    untrained   the best of that policy's roll-outs, as the planner plays them
    trained     the same of the policy that ships

Tables are drawn by seeds that no training has seen. Seconds are of processor time on one thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from common.output import mean_interval, provenance, quiet, table_of, wide_console
from common.tasks import meta_collection
from dreamshard_planner.checkpoints.checkpoint import prior_policy
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.policy.mdp import ShardingTask
from dreamshard_planner.policy.network import RELAID, Policy, PolicyConfig, policy_starts, roll_out
from dreamshard_planner.policy.reinforce import WHOLE_ONLY
from dreamshard_planner.search.starts import OptionTotals, level_starts
from dreamshard_planner.workload.pools import meta_like

BATCH_SIZE = 2048
FIRST_SEED = 7_000
GPU_BYTES, HOST_BYTES, RANKS_PER_HOST = 80 * 2**30, 128 * 2**30, 8
KINDS = ("level", "greedy", "samples", "whole", "relaid", "untrained", "trained")


def cost_of(tables: int, ranks: int, seed: int) -> Cost:
    """Return the costs of one model on some ranks, over all types that TorchRec offers."""
    drawn = meta_like(seed, tables)
    topology = Topology(ranks, "cuda", hbm_cap=GPU_BYTES, ddr_cap=HOST_BYTES, local_world_size=RANKS_PER_HOST)
    constraints = {t.name: ParameterConstraints(pooling_factors=[t.pooling_factor]) for t in drawn}
    model, sharders = torch.nn.Module(), get_default_sharders()
    model.sparse = meta_collection(drawn)
    context = replace(PlanRater.of(topology, constraints), constraints=constraints, sharders=sharders)
    reservation = EmbeddingShardingPlanner(topology, BATCH_SIZE, stats=[])._storage_reservation
    left = reservation.reserve(topology, BATCH_SIZE, model, sharders, constraints)
    options = context.enumerator(BATCH_SIZE, context._torchrec[0]).enumerate(model, sharders)
    return context.cost(context.read(context.usable_options(options), left))


def row_of(cost: Cost, trained: Policy, untrained: Policy) -> dict[str, dict[str, float]]:
    """Return cost and seconds of the cheapest plan of each kind."""
    asked = OptionTotals(cost)
    task, generator = ShardingTask(cost, asked), torch.Generator().manual_seed(0)
    level = sorted(level_starts(cost, asked), key=cost.overall_ms)
    option_ET = torch.tensor([plan.options for plan in level[:RELAID]])
    makes: dict[str, Callable[[], Sequence[Sharding | None]]] = {
        "level": lambda: level_starts(cost, asked),
        "greedy": lambda: roll_out(trained, task, 1).shardings(),
        "samples": lambda: roll_out(trained, task, 8, generator).shardings(),
        "whole": lambda: roll_out(trained, task, 1, types_EN=torch.tensor([WHOLE_ONLY])).shardings(),
        "relaid": lambda: roll_out(untrained, task, len(option_ET), option_ET=option_ET).shardings(),
        "untrained": lambda: policy_starts(cost, untrained, asked, level),
        "trained": lambda: policy_starts(cost, trained, asked, level),
    }
    row = {}
    for kind, make in makes.items():
        start = time.process_time()
        plans = [plan for plan in make() if plan is not None]
        row[kind] = {"seconds": time.process_time() - start, "ms": min(map(cost.overall_ms, plans))}
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="60x16,200x64", help="tables x ranks, separated by commas")
    parser.add_argument("--tasks", type=int, default=20)
    args = parser.parse_args()
    quiet()
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    trained, untrained = prior_policy(), Policy(PolicyConfig())
    print(json.dumps(provenance(torch.device("cpu"))))
    table = table_of("over the best level start", "tables x ranks", "tasks", "plans", "cost", "seconds")
    for size in args.sizes.split(","):
        tables, ranks = map(int, size.split("x"))
        rows = [row_of(cost_of(tables, ranks, FIRST_SEED + task), trained, untrained) for task in range(args.tasks)]
        for row in rows:
            print(json.dumps({"size": size, **row}), flush=True)
        for kind in KINDS:
            ratios = np.array([row[kind]["ms"] / row["level"]["ms"] for row in rows])
            low, high = mean_interval(ratios, np.random.default_rng(0))
            seconds = np.median([row[kind]["seconds"] for row in rows])
            table.add_row(
                size, str(len(rows)), kind, f"{ratios.mean():.4f} ({low:.4f} to {high:.4f})", f"{seconds:.2f} s"
            )
    wide_console().print(table)


if __name__ == "__main__":
    main()
