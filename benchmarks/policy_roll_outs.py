# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Predicted costs of the policy's roll-outs as plans, and of searches from them, over the full search.

    python benchmarks/policy_roll_outs.py --sizes 60x16,200x64 --tasks 20 --costs roofline,torchrec,h100,cpu
    python benchmarks/policy_roll_outs.py --summarize policy.jsonl

    level       the best level start
    greedy      one greedy roll-out of the policy that ships
    one         the same with the opening whose first sweep is the cheapest of all
    starts      the best of its roll-outs, as the planner plays them: one for each opening
    first       the same after their first sweep alone, which is all that the policy decides
    whole       one greedy roll-out that leaves tables whole
    quick       the search of effort="quick": the roll-outs, polished
    third       the search from the starts, with a third of the candidates
    search      the same with all of them: what the planner does, which the others are compared with
    without     the search without the policy

Costs are bandwidths or TorchRec's estimates (its default topology, whose hosts have slow links), or a network that
ships: of the H100, on hosts of eight, or of CPUs. Tables are drawn by seeds that no training has seen. Seconds are of
processor time on one thread. A record has one JSON line a task; the same command continues it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders

from common.output import append, mean_interval, opened, quiet, table_of, wide_console
from common.tasks import meta_collection
from dreamshard_planner.checkpoints.choice import prior_policy
from dreamshard_planner.cost.problem import Cost, Sharding
from dreamshard_planner.devices import Machine
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import COST_SOURCES, PlanRater
from dreamshard_planner.policy.mdp import Sweep
from dreamshard_planner.policy.network import SWEEPS, Policy, opening_types, policy_starts, roll_out
from dreamshard_planner.policy.task import WHOLE_TYPES, ShardingTask
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.effort import EFFORTS, SearchSettings
from dreamshard_planner.search.search import search
from dreamshard_planner.search.starts import OptionTotals, level_starts
from dreamshard_planner.search_space.constraints import PlanningConstraints
from dreamshard_planner.workload.pools import meta_like

BATCH_SIZE = 2048
FIRST_SEED = 7_000
GPU_BYTES, HOST_BYTES, RANKS_PER_HOST = 80 * 2**30, 128 * 2**30, 8
COSTS = ("roofline", "torchrec", "h100", "cpu")
PLAYING = {"starts", "quick", "third", "search"}
KINDS = ("level", "greedy", "one", "starts", "first", "whole", "quick", "third", "search", "without")


def cost_of(tables: int, ranks: int, seed: int, costs: str = "roofline") -> Cost:
    """Return the costs of one model on some ranks, over all types that TorchRec offers."""
    drawn, device = meta_like(seed, tables), "cpu" if costs == "cpu" else "cuda"
    topology = Topology(ranks, device, hbm_cap=GPU_BYTES, ddr_cap=HOST_BYTES, local_world_size=RANKS_PER_HOST)
    if costs == "h100":
        hosts = ranks // RANKS_PER_HOST
        topology = Machine(ranks_per_host=RANKS_PER_HOST, hosts=hosts, gpu="h100", memory_bytes=GPU_BYTES).topology()
    known = {t.name: ParameterConstraints(pooling_factors=[t.pooling_factor]) for t in drawn}
    constraints = PlanningConstraints(known)
    model, sharders = torch.nn.Module(), get_default_sharders()
    model.sparse = meta_collection(drawn)
    reader = OptionReader(constraints)
    source = costs if costs in COST_SOURCES else "auto"
    rater = PlanRater(PlannedRanks.of(topology), reader, source, constraints=constraints, sharders=sharders)
    reservation = EmbeddingShardingPlanner(topology, BATCH_SIZE, stats=[])._storage_reservation
    left = reservation.reserve(topology, BATCH_SIZE, model, sharders, constraints)
    options = rater.enumerator(BATCH_SIZE).enumerate(model, sharders)
    return rater.cost(rater.read(rater.usable_options(options), left))


def row_of(cost: Cost, policy: Policy, kinds: Sequence[str] = KINDS) -> dict[str, dict[str, float]]:
    """Return cost and seconds of the cheapest plan of each kind. Roll-outs that several start from are played once."""
    began = time.process_time()
    rolled_out = policy_starts(cost, policy, OptionTotals(cost)) if PLAYING & {*kinds} else []
    played_seconds = time.process_time() - began

    def searched(effort: float, plays: bool) -> list[Sharding | None]:
        found = search(cost, [], SearchSettings(effort), further=(lambda *_: rolled_out) if plays else None)
        return [None if found is None else found.sharding]

    def played(types: Sequence[str] | None = None) -> list[Sharding | None]:
        return roll_out(policy, ShardingTask(cost, OptionTotals(cost), *([types] if types else [])), 1).shardings()

    def opened_by_all(sweeps: Sequence[Sweep]) -> list[Sharding | None]:
        task = ShardingTask(cost, OptionTotals(cost))
        types_ETN = opening_types(task.num_tables)
        return roll_out(policy, task, len(types_ETN), None, types_ETN, sweeps, survivors=[1]).shardings()

    makes: dict[str, Callable[[], Sequence[Sharding | None]]] = {
        "level": lambda: level_starts(cost, OptionTotals(cost)),
        "greedy": played,
        "one": lambda: opened_by_all(SWEEPS),
        "starts": lambda: rolled_out,
        "first": lambda: opened_by_all(SWEEPS[:1]),
        "whole": lambda: played(WHOLE_TYPES),
        "quick": lambda: searched(EFFORTS["quick"], True),
        "third": lambda: searched(1 / 3, True),
        "search": lambda: searched(1.0, True),
        "without": lambda: searched(1.0, False),
    }
    row = {}
    for kind in kinds:
        start = time.process_time()
        plans = [plan for plan in makes[kind]() if plan is not None]
        seconds = time.process_time() - start + (played_seconds if kind in PLAYING else 0.0)
        row[kind] = {"seconds": seconds, "ms": min(map(cost.overall_ms, plans), default=math.inf)}
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="60x16,200x64", help="tables x ranks, separated by commas")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--costs", default="roofline", help=f"of {', '.join(COSTS)}, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of the plans above, with search")
    parser.add_argument("--record", type=Path, default=Path("policy.jsonl"), help="continue this file")
    parser.add_argument("--summarize", type=Path, nargs="+", help="print the table of these records, and end")
    args = parser.parse_args()
    quiet()
    if not args.summarize:
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        policy, kinds = prior_policy(), args.kinds.split(",")
        done = {(row["costs"], row["size"], row["task"]) for row in opened(args.record) if "task" in row}
        for task, costs, size in itertools.product(range(args.tasks), args.costs.split(","), args.sizes.split(",")):
            if (costs, size, task) not in done:
                tables, ranks = map(int, size.split("x"))
                row = row_of(cost_of(tables, ranks, FIRST_SEED + task, costs), policy, kinds)
                append(args.record, {"costs": costs, "size": size, "task": task, **row})
    tell([row for path in args.summarize or [args.record] for row in opened(path) if "size" in row])


def tell(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the mean cost over the full search, the tasks without a plan, and the seconds, by costs, size and kind."""
    table = table_of("over the full search", "costs", "tables x ranks", "plans", "tasks", "none", "cost", "seconds")
    for costs, size in dict.fromkeys((row["costs"], row["size"]) for row in rows):
        mine = [row for row in rows if (row["costs"], row["size"]) == (costs, size)]
        for kind in KINDS:
            made = [row for row in mine if kind in row]
            if not made:
                continue
            logs = np.log([row[kind]["ms"] / row["search"]["ms"] for row in made])
            found = logs[np.isfinite(logs)]
            mean, low, high = np.exp([found.mean(), *mean_interval(found, np.random.default_rng(0))])
            seconds = np.median([row[kind]["seconds"] for row in made])
            cost = f"{mean:.4f} ({low:.4f} to {high:.4f})"
            counts = str(len(made)), str(len(made) - len(found))
            table.add_row(costs, size, kind, *counts, cost, f"{seconds:.2f} s")
    wide_console().print(table)


if __name__ == "__main__":
    main()
