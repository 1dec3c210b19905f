# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A plan that Meta published of a model of 1,935 tables on 96 GPUs, against ours, by the same costs.

    python benchmarks/published_plan.py --record published-plan.jsonl
    python benchmarks/published_plan.py --record published-plan.jsonl --costs auto
    python benchmarks/published_plan.py --record published-plan.jsonl --costs auto --zipf 1.05

The published plan has row-wise and column-wise shards, all in device memory. Its optimizer is not published. Here it is
row-wise Adagrad, so exact training leaves our planner no column slices but of tables that FBGEMM cannot train unsplit.
Ranks have the published network of 25 GiB/s; with ``--costs auto``, they are H100s. The bound is what a rank takes in
the mean if every table has its cheapest option: no plan is below it by TorchRec's estimates, which add up.
``benchmarks/data/published_plan.json`` has the source, the licence and what is unknown.

With ``--zipf`` the rows of both sequence tables are taken to be read by a power law of this exponent, which nobody
published, at random places; the planner may then hold hot rows on every rank.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from common.output import append, provenance, quiet
from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.devices import Machine
from dreamshard_planner.search_space.sharding_types import sharding_in_words
from dreamshard_planner.workload.counting import LEAST_READS, MOST_IDS
from dreamshard_planner.workload.lookups import HotIds
from dreamshard_planner.workload.reuse import default_reuse

LOCAL_BATCH, RANKS, RANKS_PER_HOST = 2560, 96, 8
HBM_GIB, DDR_GIB = 57.1, 128
INTER_HOST_BYTES_PER_S = 25 * 2**30
"""At which exchanges take as long as printed."""
HALF = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
CODECS = get_qcomm_codecs_registry(HALF)
SHARDERS = [
    EmbeddingBagCollectionSharder(qcomm_codecs_registry=CODECS),
    EmbeddingCollectionSharder(qcomm_codecs_registry=CODECS),
]
"""Exchanges are of fp16, as printed times of three modules say. The other two, 4 of 1,300 ms, are taken to be so."""
WIDEST = 1024
"""Columns of a table that FBGEMM trains unsplit: 29 wider ones may be split, whatever the optimizer."""
SEQUENCES = "sequence_ec"
DATA = Path(__file__).parent / "data" / "published_plan.json"


@cache
def rows() -> list[dict[str, Any]]:
    """Return the tables of the file, by column."""
    document = json.loads(DATA.read_text())
    return [dict(zip(document["columns"], row, strict=True)) for row in document["tables"]]


def model(sequences: bool = True) -> nn.Module:
    """Return the tables on the meta device, of fp16, with row-wise Adagrad in the backward."""
    made = nn.Module()
    for name in sorted({row["module"] for row in rows()} - ({SEQUENCES} if not sequences else set())):
        mine = [row for row in rows() if row["module"] == name]
        shared = [
            {
                "name": row["table"],
                "num_embeddings": row["rows"],
                "embedding_dim": row["dim"],
                "feature_names": [f"{row['table']}_{index}" for index in range(row["features"])],
                "data_type": DataType.FP16,
            }
            for row in mine
        ]
        device = torch.device("meta")
        if name == SEQUENCES:
            setattr(made, name, EmbeddingCollection([EmbeddingConfig(**one) for one in shared], device))
        else:
            bags = [EmbeddingBagConfig(**one, pooling=PoolingType.SUM) for one in shared]
            setattr(made, name, EmbeddingBagCollection(bags, device=device))
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.1})
    return made


def constraints() -> dict[str, ParameterConstraints]:
    """Return lookups per pooling and poolings per sample of each feature, as published: sums over a table's features,
    which are taken for alike."""
    return {
        row["table"]: ParameterConstraints(
            pooling_factors=[row["indices"] / row["poolings"]] * row["features"],
            num_poolings=[row["poolings"] / row["features"]] * row["features"],
            sharding_types=["column_wise", "table_column_wise", "grid_shard"] if row["dim"] > WIDEST else None,
        )
        for row in rows()
    }


def assumed_statistics(exponent: float) -> TableStatistics:
    """Return statistics of the features of sequence tables whose rows are read by a power law."""
    found = {}
    for row in (row for row in rows() if row["module"] == SEQUENCES):
        pooling_factor = row["indices"] / row["poolings"]
        lookups = pooling_factor * LOCAL_BATCH
        bins_TK, distinct_T = default_reuse([row["rows"]], [lookups], exponent)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(row["rows"], (2 * MOST_IDS,), generator=generator).unique()
        ids = ids[torch.randperm(len(ids), generator=generator)[:MOST_IDS]]
        popularity = torch.arange(1, row["rows"] + 1, dtype=torch.float64) ** -exponent
        reads = lookups * popularity[: len(ids)] / popularity.sum()
        kept = reads >= LEAST_READS
        order = ids[kept].argsort()
        hot = HotIds(tuple(ids[kept][order].tolist()), tuple(reads[kept][order].tolist())) if bool(kept.any()) else None
        for index in range(row["features"]):
            found[f"{row['table']}_{index}"] = FeatureStatistics(
                pooling_factor, tuple(bins_TK[0].tolist()), LOCAL_BATCH, float(distinct_T[0]), hot=hot
            )
    return TableStatistics(found)


def given(hbm_gib: float = HBM_GIB, gpu: str | None = None) -> dict[str, Any]:
    """Return the arguments that both planners take. Without a GPU, bandwidths are TorchRec's defaults."""
    machine = Machine(
        ranks_per_host=RANKS_PER_HOST,
        hosts=RANKS // RANKS_PER_HOST,
        gpu=gpu,
        memory_bytes=int(hbm_gib * 2**30),
        host_memory_bytes=DDR_GIB * 2**30,
        inter_bytes_per_s=None if gpu else INTER_HOST_BYTES_PER_S,
    )
    return {
        "topology": machine.topology(),
        "batch_size": LOCAL_BATCH,
        "constraints": constraints(),
        "storage_reservation": FixedPercentageStorageReservation(0.0),
        "stats": [],
        "debug": False,
    }


def published_options(planner: DreamShardPlanner, sequences: bool = True) -> list[ShardingOption]:
    """Return the published plan as options of a planner that has read or planned the model."""
    return list(planner._model().rated(published_plan(sequences)).options)


def ranks_of(part: str) -> range:
    """Return the ranks of ``7`` or ``3-6``."""
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def published_plan(sequences: bool = True) -> ShardingPlan:
    """Return the published plan."""
    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    for row in rows():
        if row["module"] == SEQUENCES and not sequences:
            continue
        by_rows = row["type"] == "RW"
        ranks = [rank for part in row["ranks"].split(",") for rank in ranks_of(part)]
        height, width = (-(-row["rows"] // RANKS), row["dim"]) if by_rows else (row["rows"], row["slice_dim"])
        places = [(index * height, 0) if by_rows else (0, index * width) for index in range(len(ranks))]
        shards = [
            ShardMetadata([top, left], [min(height, row["rows"] - top), width], f"rank:{rank}/cuda:{rank % 8}")
            for (top, left), rank in zip(places, ranks, strict=True)
        ]
        kind = "row_wise" if by_rows else "column_wise" if len(ranks) > 1 else "table_wise"
        modules.setdefault(row["module"], EmbeddingModuleShardingPlan())[row["table"]] = ParameterSharding(
            kind, "fused", ranks, EnumerableShardingSpec(shards)
        )
    return ShardingPlan(modules)


def lower_bound_ms(planner: DreamShardPlanner) -> float:
    """Return the mean of the ranks if every table has its cheapest option by TorchRec's estimates."""
    least: dict[str, float] = {}
    for option in planner._model().search_space:
        # A whole sequence table would take 96 times as long as its blocks of rows.
        if option.module[0] != SEQUENCES or option.sharding_type == "row_wise":
            least[option.fqn] = min(least.get(option.fqn, math.inf), option.total_perf)
    return sum(least.values()) / RANKS


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", choices=("torchrec", "auto"), default="torchrec")
    parser.add_argument("--hbm-gib", type=float, default=HBM_GIB, help="of a rank")
    parser.add_argument("--fused", action="store_true", help="no tables in unified memory")
    parser.add_argument("--no-sequences", dest="sequences", action="store_false", help="leave sequence tables out")
    parser.add_argument("--effort", default="default")
    parser.add_argument("--zipf", type=float, help="exponent of the reads of sequence rows, not 1")
    parser.add_argument("--hot-gib", type=float, default=1.0, help="with --zipf: most memory for hot rows of a rank")
    parser.add_argument("--record", type=Path, help="add a line to this file")
    args = parser.parse_args()
    quiet()
    arguments = given(args.hbm_gib, "h100" if args.costs == "auto" else None)
    for constraint in arguments["constraints"].values() if args.fused else ():
        constraint.compute_kernels = ["fused"]
    if args.zipf is not None:
        arguments["statistics"] = assumed_statistics(args.zipf)
        arguments["hot_rows_bytes"] = int(args.hot_gib * 2**30)
        # Replicas could not follow float16 weights that are rounded at random.
        SHARDERS[1] = EmbeddingCollectionSharder({"stochastic_rounding": False}, qcomm_codecs_registry=CODECS)
    planner = DreamShardPlanner(**arguments, cost_source=args.costs, effort=args.effort)
    start = time.process_time()
    planner.plan(model(args.sequences), SHARDERS)
    seconds = time.process_time() - start
    chosen, published = planner.report().chosen, planner.predict(published_plan(args.sequences), "published")
    told = {
        "settings": {name: value for name, value in vars(args).items() if name != "record"},
        "seconds": round(seconds, 1),
        "ours_ms": chosen.total_ms,
        "published_ms": published.total_ms,
        "torchrec_ms": {one.name: one.total_ms for one in planner.report().rivals}.get("torchrec"),
        "bound_ms": lower_bound_ms(planner) if args.costs == "torchrec" else None,
        "hot_rows": [str(note) for note in planner.report().notes if note.code in ("hot_rows", "index_dedup")],
        "types": dict(Counter(sharding_in_words(o.sharding_type, o.compute_kernel) for o in planner.options)),
    }
    print(json.dumps(told, indent=1))
    if args.record:
        append(args.record, provenance(torch.device("cpu")) | told)


if __name__ == "__main__":
    main()
