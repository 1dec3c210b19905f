# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What the policy brings where tables may be split: searches over all types with and without it, by equal candidates.

    python benchmarks/policy_with_splits.py --json benchmarks/results/2026-11-24-policy-with-splits.json

    starts   level starts alone
    rules    beside them, whole tables placed by heuristics and search; what spans one rank is placed so again at last
    policy   the same with roll-outs of the shipped policy among the heuristics: what the planner does

Each search has a share of the planner's candidates. Tables are drawn anew for each task, by a seed that no training has
seen; costs are those of the planner for H100s. Ratios are to ``starts`` with the same share.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders

from common.bootstrap import mean_interval
from common.meta_model import meta_collection
from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.joint_plan import fastest_whole
from dreamshard_planner.planning.placing import wide_units_laid_down
from dreamshard_planner.policy.place import place
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.search.joint import DEFAULT_JOINT, joint_search
from dreamshard_planner.search.local_search import DEFAULT_SEARCH, SearchConfig, local_search
from dreamshard_planner.search_space.usable_options import usable_options
from dreamshard_planner.workload.pools import meta_like
from placements.placers import rule_starts

SIZES = "60x16,200x64"
SHARES = (0.1, 1 / 3, 1.0)
BATCH_SIZE = 2048
FIRST_SEED = 7_000
GPU_BYTES, HOST_BYTES, RANKS_PER_HOST = 80 * 2**30, 128 * 2**30, 8


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

    def placed(
        self, cost: Cost, search: SearchConfig, given: torch.Tensor | None, with_policy: bool
    ) -> torch.Tensor | None:
        """Ranks of units of span 1, from heuristics, a given placement and, or not, roll-outs."""
        known = {} if given is None else {"joint": given}
        if with_policy:
            return place(cost, self.context.checkpoint.policy, search, given=known, packing=0).assignment_S
        starts = [*rule_starts(cost), *known.values()]
        starts.sort(key=lambda rank_S: float(cost.rate(rank_S[None]).overall_ms_B))
        return local_search(cost, starts[: search.starts], search, torch.Generator().manual_seed(0)).assignment_S

    def searched(self, way: str, share: float) -> dict[str, float]:
        """Cost and processor seconds of one search."""
        start, starts = time.process_time(), list[Sharding]()
        joint = replace(
            DEFAULT_JOINT,
            reshards=round(share * DEFAULT_JOINT.reshards),
            reshards_per_table=round(share * DEFAULT_JOINT.reshards_per_table),
        )
        search = replace(DEFAULT_SEARCH, candidates=round(share * DEFAULT_SEARCH.candidates))
        if way != "starts":
            cost = self.context.cost(self.whole)
            try:
                chosen = wide_units_laid_down(cost)
                rank_S = self.placed(chosen.cost, search, None, way == "policy")
                starts.append(self.read.sharding(self.whole.assign(chosen.placed(rank_S))))
            except PlannerError:
                pass  # whole tables do not fit
        found = joint_search(self.cost, starts, joint, search)
        sharding = found.sharding
        if way != "starts":
            chosen = self.cost.chosen(sharding)
            if len(chosen.assignment_S):
                sharding = chosen.placed(self.placed(chosen.cost, search, chosen.assignment_S, way == "policy"))
        return {"ms": self.cost.overall_ms(sharding), "seconds": time.process_time() - start}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="tables x ranks, separated by commas")
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table = table_of("over level starts alone", "tables x ranks", "share", "rules", "policy", "seconds of each")
    results: list[dict[str, Any]] = []
    for size in args.sizes.split(","):
        tables, ranks = map(int, size.split("x"))
        rows = []
        for number in range(args.tasks):
            task = Task(tables, ranks, FIRST_SEED + number)
            for share in SHARES:
                found = {way: task.searched(way, share) for way in ("starts", "rules", "policy")}
                rows.append({"size": size, "task": number, "share": share, **found})
                print(rows[-1], flush=True)
        results += rows
        for share in SHARES:
            some = [row for row in rows if row["share"] == share]
            cells = []
            for way in ("rules", "policy"):
                ratios = np.array([row[way]["ms"] / row["starts"]["ms"] for row in some])
                cells.append(
                    "{:.4f} ({:.4f} to {:.4f})".format(ratios.mean(), *mean_interval(ratios, np.random.default_rng(0)))
                )
            seconds = [np.median([row[way]["seconds"] for row in some]) for way in ("starts", "rules", "policy")]
            table.add_row(size, f"{share:.2f}", *cells, " ".join(f"{one:.1f}" for one in seconds))
    wide_console().print(table)
    write_result(args.json, provenance(torch.device("cpu")), {"results": results})


if __name__ == "__main__":
    main()
