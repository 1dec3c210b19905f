# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The exchange of lookups: predicted against measured, and what counting it changes in plans.

    torchrun --standalone --nproc_per_node=2 benchmarks/lookups.py --json lookups-2.json
    python benchmarks/lookups.py --json lookups-plans.json

Under torchrun: models of one sharding type each, planned by ours and sharded by TorchRec, with 1 to 300 lookups a
sample. ``input_dist`` of TorchRec's module is timed from batch to sorted lookups, on the slowest rank. Predicted is the
report's ``lookups`` and ``bucketing``, by collectives measured just before and just after, the mean of both. Times are
trimmed means, as there.

Else: random models are planned with and without lookups in the cost; both plans are rated with them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import trim_mean
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.meta_model import meta_collection
from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from common.tasks import random_tables
from dlrm.model import EveryTypeSharder
from dlrm.node import Node
from dreamshard_planner import Checkpoint, DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.checkpoints.checkpoint import SHIPPED, shipped
from dreamshard_planner.devices import Machine
from dreamshard_planner.measure.collectives import TRIMMED, measure
from dreamshard_planner.measure.timing import freed_memory_kept, pinned
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.cost_sources import COST_SOURCES, NetworkCosts
from dreamshard_planner.problem.exchanges import Links
from dreamshard_planner.torchrec_components.estimates import DreamShardPerfModel

ROWS, DIM, SLICE = 100_000, 16, 8
KINDS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")
SEQUENCES = KINDS[:3]
SIZES = ((4, 512), (16, 512), (48, 256))
"""Tables and local batch."""
LOOKUPS = (1, 10, 100, 300)
MOST_IDS = 2_000_000
"""Of a rank's batch."""


@dataclass(frozen=True)
class Model:
    """Tables of one sharding type."""

    kind: str
    tables: int
    batch_size: int
    content: str = "pooled"
    """``pooled``, ``weighted`` or ``sequence``."""

    def module(self) -> nn.Module:
        """On the meta device, with SGD in its kernels."""
        config = EmbeddingConfig if self.content == "sequence" else EmbeddingBagConfig
        configs: list[Any] = [
            config(name=f"t{index}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{index}"])
            for index in range(self.tables)
        ]
        model, meta = nn.Module(), torch.device("meta")
        if self.content == "sequence":
            model.sparse = EmbeddingCollection(tables=configs, device=meta)
        else:
            model.sparse = EmbeddingBagCollection(tables=configs, device=meta, is_weighted=self.content == "weighted")
        apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.01})
        return model

    def planner(self, lookups: int, node: Node, checkpoint: Checkpoint) -> DreamShardPlanner:
        """Which knows how many lookups a sample has."""
        constraint = ParameterConstraints([self.kind], pooling_factors=[float(lookups)], min_partition=SLICE)
        return DreamShardPlanner(
            topology=node.topology(),
            batch_size=self.batch_size,
            constraints={f"t{index}": constraint for index in range(self.tables)},
            checkpoint=checkpoint,
            stats=[],
            debug=False,
        )

    @property
    def sharders(self) -> list[Any]:
        return [EmbeddingCollectionSharder() if self.content == "sequence" else EveryTypeSharder()]

    def batch(self, lookups: int, generator: torch.Generator) -> KeyedJaggedTensor:
        """Of a rank, random ids."""
        lengths = torch.full((self.tables * self.batch_size,), lookups, dtype=torch.int32)
        ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(ids), generator=generator) if self.content == "weighted" else None
        return KeyedJaggedTensor.from_lengths_sync([f"f{index}" for index in range(self.tables)], ids, lengths, weights)


def cells() -> Iterator[tuple[Model, int]]:
    """Models and lookups per sample; weighted and unpooled ones of the middle size."""
    for kind, (tables, batch_size) in itertools.product(KINDS, SIZES):
        for content in ("pooled", "weighted", "sequence"):
            if content == "sequence" and kind not in SEQUENCES or content != "pooled" and tables != SIZES[1][0]:
                continue
            for lookups in LOOKUPS:
                if tables * batch_size * lookups <= MOST_IDS:
                    yield Model(kind, tables, batch_size, content), lookups


def lookups_ms(planner: DreamShardPlanner) -> float:
    """What its plan's exchange of lookups is predicted to take."""
    return sum(ms for name, ms in planner.report().collectives if name.endswith(("lookups", "bucketing")))


def measured_exchanges(node: Node, repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of every cell, as predicted and as measured."""
    every, models = list(cells()), {}
    predicted: dict[tuple[Model, int], list[float]] = {cell: [] for cell in every}

    def predict() -> None:
        known = measure(node.device, local_world_size=node.world_size).metadata()
        start = shipped(SHIPPED, "cpu", "default")
        checkpoint = Checkpoint(start.policy, start.cost, {**start.metadata, "collectives": known})
        for model, lookups in every:
            planner = model.planner(lookups, node, checkpoint)
            plan = planner.collective_plan(module := model.module(), model.sharders, dist.group.WORLD)
            if node.rank == 0:
                predicted[model, lookups].append(lookups_ms(planner))
            if model not in models:
                models[model] = DistributedModelParallel(
                    module, plan=plan, sharders=model.sharders, device=node.device
                ).module.sparse

    predict()
    gc.freeze()  # else what collects garbage looks through all models, in the middle of an exchange
    generator, order = torch.Generator().manual_seed(node.rank), random.Random(0)
    times: dict[tuple[Model, int], list[float]] = {cell: [] for cell in every}
    for _ in range(repeats + 1):
        for model, lookups in order.sample(every, len(every)):
            batch, sparse = model.batch(lookups, generator), models[model]
            context = sparse.create_context()
            dist.barrier()
            start = time.perf_counter()
            with torch.no_grad():
                sparse.input_dist(context, batch).wait().wait()
            times[model, lookups].append(1e3 * (time.perf_counter() - start))
    predict()
    slowest = torch.tensor([times[cell][1:] for cell in every], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if node.rank:
        return []
    quartiles = slowest.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64), dim=1).T.tolist()
    means = trim_mean(slowest.numpy(), TRIMMED, axis=1).tolist()
    return [
        {
            **vars(model),
            "lookups": lookups,
            "predicted_ms": round(statistics.mean(predicted[model, lookups]), 3),
            "mean_ms": round(mean_ms, 3),
            "quartiles_ms": [round(ms, 3) for ms in three],
        }
        for (model, lookups), mean_ms, three in zip(every, means, quartiles, strict=True)
    ]


def tell_exchanges(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors by type and content."""
    console, found = wide_console(), {}
    columns = ("cells", "mean error", "within 20 %", "bias")
    table = table_of("Predicted over measured exchange of lookups", "type", *columns)
    for kind, content in itertools.product(KINDS, ("pooled", "weighted", "sequence")):
        off = [
            row["predicted_ms"] / row["mean_ms"] - 1 for row in rows if (row["kind"], row["content"]) == (kind, content)
        ]
        if off:
            mean, near = statistics.mean(map(abs, off)), statistics.mean(abs(one) <= 0.2 for one in off)
            found[f"{kind} {content}"] = {"cells": len(off), "mean": mean, "near": near, "bias": statistics.mean(off)}
            table.add_row(
                f"{kind} {content}", str(len(off)), f"{mean:.0%}", f"{near:.0%}", f"{statistics.mean(off):+.0%}"
            )
    console.print(table)
    return found


class WithoutLookups(NetworkCosts):
    """As costs were before lookups were counted."""

    def links(self) -> Links:
        """All but theirs."""
        return replace(super().links(), lookups=None, bucketing=None)


MACHINES = {
    "2 CPU ranks": lambda: Topology(2, "cpu", local_world_size=2, ddr_cap=2**34),
    "8 x H100": lambda: Machine(ranks_per_host=8, gpu="h100").topology(),
    "2 hosts of 8 x H100": lambda: Machine(hosts=2, ranks_per_host=8, gpu="h100").topology(),
}


def changed_plan(machine: str, seed: int, count: int) -> dict[str, Any]:
    """Of some random tables: both plans, rated with lookups."""
    tables = random.Random(seed).sample(random_tables(200), count)
    if machine == "2 CPU ranks":
        tables = [replace(table, rows=min(table.rows, 1_000_000), dim=min(table.dim, 64)) for table in tables]
    constraints = {
        table.name: ParameterConstraints(pooling_factors=[one.pooling_factor for one in table.features])
        for table in tables
    }
    batch_size, plans = 512 if machine == "2 CPU ranks" else 2048, {}
    for source in ("auto", "without lookups"):
        model = nn.Module()
        model.sparse = meta_collection(tables)
        planner = DreamShardPlanner(
            topology=MACHINES[machine](),
            batch_size=batch_size,
            constraints=constraints,
            cost_source=source,
            stats=[],
            debug=False,
        )
        planner.plan(model, [EmbeddingBagCollectionSharder()])
        plans[source] = planner.options
        if source == "auto":
            exchange_ms = lookups_ms(planner)
    topology = MACHINES[machine]()
    rating = DreamShardPerfModel(topology, context=PlanningContext.of(topology, constraints))
    cost_ms = {source: float(rating.costs(plan).overall_ms_B[0]) for source, plan in plans.items()}
    types = {source: {one.name: (one.sharding_type, one.num_shards) for one in plan} for source, plan in plans.items()}
    return {
        "machine": machine,
        "seed": seed,
        "ms": round(cost_ms["auto"], 4),
        "lookups_ms": round(exchange_ms, 4),
        "ratio": round(cost_ms["auto"] / cost_ms["without lookups"], 4),
        "types_changed": sum(types["auto"][name] != types["without lookups"][name] for name in types["auto"]),
    }


def tell_plans(rows: Sequence[dict[str, Any]]) -> None:
    """By machine."""
    columns = ("tasks", "share of cost", "cost", "best", "tables changed")
    table = table_of("Plans with lookups in the cost", "machine", *columns)
    for machine in MACHINES:
        some = [row for row in rows if row["machine"] == machine]
        share = statistics.mean(row["lookups_ms"] / row["ms"] for row in some)
        ratios, changed = [row["ratio"] for row in some], statistics.mean(row["types_changed"] for row in some)
        cells = (len(some), f"{share:.1%}", f"{statistics.mean(ratios):.3f}", f"{min(ratios):.3f}", f"{changed:.1f}")
        table.add_row(machine, *map(str, cells))
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="of each exchange")
    parser.add_argument("--tasks", type=int, default=20, help="models for each machine")
    parser.add_argument("--count", type=int, default=30, help="tables of each")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        COST_SOURCES["without lookups"] = WithoutLookups
        rows = [changed_plan(machine, seed, given.count) for machine in MACHINES for seed in range(given.tasks)]
        tell_plans(rows)
        write_result(given.json, provenance(torch.device("cpu")), {"tasks": rows})
        return
    with freed_memory_kept(), pinned(1):
        node = Node.join()
        rows = measured_exchanges(node, given.repeats)
    if node.rank == 0:
        write_result(given.json, provenance(node.device), {"errors": tell_exchanges(rows), "cells": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
