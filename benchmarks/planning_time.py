# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How long planning takes, beside TorchRec's planner: the whole of ``plan()``, table-wise, on one thread.

    python benchmarks/planning_time.py --device cpu --json benchmarks/results/2026-11-21-planning-cpu.json

Each size is planned several times by both in turn; medians and quartiles. With ``--statistics`` our planner also gets
the reuse histogram of every feature at the local batch, and rescales it to the batch that kernels see. The memory is
the largest that the process has held up to then, libraries included.
"""

from __future__ import annotations

import argparse
import logging
import resource
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from common.meta_model import feature_names, meta_collection
from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.tables import Table, workloads_of

BATCH_SIZE = 512
SIZES = "20x2,100x8,300x32,1000x128,5000x1024"


def statistics_of(tables: list[Table]) -> TableStatistics:
    """What batches of the local size would tell."""
    return TableStatistics(
        {
            name: FeatureStatistics(w.pooling_factor, w.reuse_histogram if w.lookups else None, BATCH_SIZE)
            for table, w in zip(tables, workloads_of(tables, BATCH_SIZE), strict=True)
            for (name,) in [feature_names(table)]  # tables of this pool have one feature
        }
    )


def seconds_to_plan(
    name: str, tables: list[Table], ranks: int, device: str, statistics: TableStatistics | None = None
) -> float:
    """One plan from nothing but the model: planner made and asked. Only ours takes ``statistics``."""
    constraints = {
        t.name: ParameterConstraints(["table_wise"], ["fused"], pooling_factors=[t.pooling_factor]) for t in tables
    }
    model, memory = meta_collection(tables), {"hbm_cap" if device == "cuda" else "ddr_cap": 2**40}
    start = time.perf_counter()
    make = partial(DreamShardPlanner, statistics=statistics) if name == "dreamshard" else EmbeddingShardingPlanner
    planner = make(
        topology=Topology(ranks, device, local_world_size=min(8, ranks), **memory),
        batch_size=BATCH_SIZE,
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.1),
        debug=False,
    )
    planner.plan(model, [EmbeddingBagCollectionSharder()])
    return time.perf_counter() - start


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES, help="tables x ranks, separated by commas")
    parser.add_argument("--repeats", type=int, default=5, help="of sizes that take under 10 s; others once")
    parser.add_argument("--statistics", action="store_true")
    parser.add_argument("--device", default="cuda", help="of the topology; nothing runs there")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pool = meta_like(num_tables=max(int(size.split("x")[0]) for size in args.sizes.split(",")))
    tables = [replace(table, rows=min(table.rows, 10**6)) for table in pool]
    seconds_to_plan("dreamshard", tables[:4], 2, args.device)  # loads what is loaded once
    results: list[dict[str, Any]] = []
    for size in args.sizes.split(","):
        count, ranks = (int(part) for part in size.split("x"))
        statistics = statistics_of(tables[:count]) if args.statistics else None
        seconds: dict[str, list[float]] = {"dreamshard": [], "torchrec": []}
        for _ in range(args.repeats):
            for name, taken in seconds.items():
                taken.append(seconds_to_plan(name, tables[:count], ranks, args.device, statistics))
            if max(map(max, seconds.values())) > 10:
                break
        quartiles = {name: np.percentile(taken, (25, 50, 75)).tolist() for name, taken in seconds.items()}
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results.append({"tables": count, "ranks": ranks, "seconds": quartiles, "peak_bytes": peak_bytes})
        print(f"{size}: {quartiles}", flush=True)
    title = "seconds to plan: median (quartiles)"
    table = table_of(title, "tables x ranks", "dreamshard", "torchrec", "peak memory, GB")
    for row in results:
        cells = [f"{median:.2f} ({low:.2f}-{high:.2f})" for low, median, high in row["seconds"].values()]
        table.add_row(f"{row['tables']} x {row['ranks']}", *cells, f"{row['peak_bytes'] / 1e9:.2f}")
    wide_console().print(table)
    write_result(args.json, provenance(torch.device("cpu")), {"results": results})


if __name__ == "__main__":
    main()
