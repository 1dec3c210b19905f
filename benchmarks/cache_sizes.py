# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables larger than all HBM: what choosing each cache's size is worth.

    python benchmarks/cache_sizes.py --record benchmarks/results/2026-11-24-cache-sizes.jsonl

Tables of a pool, their rows scaled until all are so many times as large as the HBM of one or two hosts of eight 80 GB
GPUs, each with a popularity of its own (power laws of exponent 0.6 to 1.3), which statistics tell all planners. Plans
are rated by our own cost: ours, ours with TorchRec's factor of 0.2 in every cache and with the best of other uniform
ones, TorchRec's scale-up proposer, which is given the same hit rates, and TorchRec's default planner.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams, CacheStatistics, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from common.output import table_of, wide_console
from common.provenance import provenance
from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.reuse import cache_hits, default_reuse

GIB = 2**30
SHARDERS = [EmbeddingBagCollectionSharder()]
LOCAL_BATCH, HOST = 2048, 8
POOLS = ("mlperf_dlrm_dcnv2", "meta_like_2021", "meta_like_2022", "broad", "merlin_tiny")
UNIFORM = (0.01, 0.05, 0.1, 0.4)


class HitRates(CacheStatistics):
    """What TorchRec's scale-up proposer asks of a table, from the same reuse as ours."""

    def __init__(self, feature: FeatureStatistics, rows: int, lookups: float) -> None:
        self._feature, self._rows, self._lookups = feature, rows, lookups

    @property
    def expected_lookups(self) -> int:
        """Of a batch of all ranks."""
        return round(self._lookups)

    def expected_miss_rate(self, clf: float) -> float:
        """Of a cache that holds such a share of the rows."""
        histogram, distinct = self._feature.reuse_histogram, self._feature.distinct_rows
        return 1 - float(cache_hits([histogram], [self._rows], [self._lookups], [distinct], [clf * self._rows]))

    @property
    def cacheability(self) -> float:
        """The area under the curve of misses, as in TorchRec's own."""
        shares = [(index + 0.5) / 20 for index in range(20)]
        return sum(map(self.expected_miss_rate, shares)) / len(shares)


class CacheTask:
    """Tables of a pool, ``excess`` times as large as the HBM of their ranks."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.pool, hosts, self.excess = rng.choice(POOLS), rng.choice((1, 1, 2)), rng.uniform(1.2, 4)
        self.ranks = hosts * HOST
        pool = named_pool(self.pool)
        tables = rng.sample(pool, min(len(pool), rng.choice((26, 40, 60))))
        scale = self.excess * self.ranks * 80 * GIB / sum(table.rows * table.dim * 4 for table in tables)
        self.topology = Topology(
            self.ranks, "cuda", hbm_cap=80 * GIB, ddr_cap=512 * GIB, local_world_size=HOST, hbm_mem_bw=3350 * 10**6
        )
        batch = LOCAL_BATCH * self.ranks
        configs, features, self.stats = [], {}, {}
        for index, table in enumerate(tables):
            rows = max(4, int(table.rows * scale)) if table.rows > 1000 else table.rows
            name = f"t{index}"
            lookups = max(1.0, table.pooling_factor * batch)
            histogram, distinct = default_reuse([rows], [lookups], round(rng.uniform(0.6, 1.3), 2) + 0.001)
            feature = FeatureStatistics(
                lookups / batch, tuple(histogram[0].tolist()), batch_size=batch, distinct_rows=float(distinct)
            )
            features[f"f{index}"], self.stats[name] = feature, HitRates(feature, rows, lookups)
            configs.append(
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=table.dim, feature_names=[f"f{index}"])
            )
        self.statistics = TableStatistics(features)
        self.model = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, self.model.parameters(), {"lr": 0.1})

    def ours(self, load_factor: float | None = None) -> tuple[DreamShardPlanner, ShardingPlan]:
        """Our planner and its plan, with caches of any size, or all of one."""
        planner = DreamShardPlanner(
            topology=self.topology,
            batch_size=LOCAL_BATCH,
            statistics=self.statistics,
            constraints=None if load_factor is None else self._constraints(load_factor),
            cost_source="roofline",
            optimizers_attached=True,  # as our DistributedModelParallel has them
            stats=[],
            debug=False,
        )
        return planner, planner.plan(self.model, SHARDERS)

    def torchrec(self, scale_up: bool) -> ShardingPlan:
        """TorchRec's planner, default or with its scale-up proposer and caches wherever they are allowed."""
        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=LOCAL_BATCH,
            constraints=self._constraints(0.1 if scale_up else None, cached=scale_up),
            proposer=EmbeddingOffloadScaleupProposer() if scale_up else None,
            debug=False,
        )
        return planner.plan(self.model, SHARDERS)

    def _constraints(self, load_factor: float | None, cached: bool = False) -> dict[str, ParameterConstraints]:
        return {
            name: ParameterConstraints(
                compute_kernels=["fused_uvm_caching"] if cached else None,
                pooling_factors=[known.expected_lookups / (LOCAL_BATCH * self.ranks)],
                cache_params=CacheParams(load_factor=load_factor, stats=known) if load_factor is not None else None,
            )
            for name, known in self.stats.items()
        }

    def rated(self) -> dict[str, float | None]:
        """Milliseconds by our cost of each planner's plan; None where it finds none. And our seconds of planning."""
        start = time.process_time()
        judge, _ = self.ours()
        seconds = time.process_time() - start
        limit = max(max(entry.used_bytes) / min(entry.limit_bytes) for entry in judge.report().memory)
        result: dict[str, float | None] = {"ours": judge.report().chosen.total_ms, "seconds": seconds, "fullest": limit}

        def tried(name: str, plan: Callable[[], ShardingPlan]) -> None:
            try:
                result[name] = judge.predict(plan()).total_ms
            except PlannerError:
                result[name] = None

        for factor in (0.2, *UNIFORM):
            tried(f"uniform {factor}", lambda factor=factor: self.ours(factor)[1])
        tried("scale-up", lambda: self.torchrec(True))
        tried("torchrec", lambda: self.torchrec(False))
        return result


def summarize(lines: list[dict], columns: int = 120) -> None:
    """Our cost over that of each other planner, over the tasks where it finds a plan."""
    table = table_of("Our cost over theirs", "planner", "plans", "geometric mean", "worst", "best")
    for line in lines:
        known = [line[f"uniform {factor}"] for factor in (0.2, *UNIFORM)]
        line["best uniform"] = min((cost for cost in known if cost is not None), default=None)
    for name in ("uniform 0.2", "best uniform", "scale-up", "torchrec"):
        ratios = [line["ours"] / line[name] for line in lines if line[name] is not None]
        figures = [f"{value:.3f}" for value in (geometric_mean(ratios), max(ratios), min(ratios))] if ratios else []
        table.add_row(name, f"{len(ratios)} of {len(lines)}", *figures)
    wide_console(columns).print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path("cache-sizes.jsonl"), help="resumed where it exists")
    parser.add_argument("--tasks", type=int, default=30)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    if not args.record.exists():
        args.record.write_text(json.dumps(provenance(torch.device("cpu"))) + "\n")
    lines = [json.loads(text) for text in args.record.read_text().splitlines()[1:]]
    for seed in range(len(lines), args.tasks):
        task = CacheTask(seed)
        where = {"task": seed, "pool": task.pool, "tables": len(task.stats), "ranks": task.ranks, "excess": task.excess}
        try:
            lines.append(where | task.rated())
        except PlannerError as error:
            lines.append(where | {"infeasible": str(error).splitlines()[0]})
        with args.record.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(json.dumps(lines[-1]), flush=True)
    summarize([line for line in lines if "ours" in line])
    print(f"{sum('infeasible' in line for line in lines)} of {len(lines)} infeasible")


if __name__ == "__main__":
    main()
