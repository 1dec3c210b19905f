# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A DLRM for a table collection, batches that read the tables as the collection says, and planners that shard it.

Shape letters: B local batch, D dense features or columns, R rows, F sparse features x global batch, L lookups.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import Partitioner, ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.tasks import feature_names, meta_collection
from dlrm.options import ONLY, OPTIMIZERS, OURS, SIZES, WITHOUT, Config, Node
from dlrm.steps import Trainee
from dreamshard_planner import Checkpoint, DistributedModelParallel, DreamShardPlanner, TableStatistics
from dreamshard_planner.checkpoints.choice import resolve_for
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.measure.kernels import draw_inputs
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.placing import place_by_heuristic
from dreamshard_planner.search_space.sharding_types import DP, SHARDING_TYPES
from dreamshard_planner.workload.tables import FeatureStatistics, Table, workloads_of

DENSE_FEATURES = 13  # Criteo's
CROSS_LAYERS, CROSS_RANK = 3, 512  # MLPerf DLRM-DCNv2
BATCHES_KEPT = 16
"""Distinct batches; training goes round them, so that drawing data costs no time."""


class EveryTypeSharder(EmbeddingBagCollectionSharder):
    """NOT TorchRec's own: it offers on CPUs what TorchRec's sharder offers on GPUs only, row_wise, table_row_wise and
    grid_shard, so that these types run on gloo ranks, too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them."""
        return list(SHARDING_TYPES)


def scale_tables(pool: Sequence[Table], max_rows: int, dim: int = 0, hot: float = 1.0) -> tuple[list[Table], str]:
    """Tables of at most ``max_rows`` rows, and in words what was changed.

    Args:
        pool: the tables as they are.
        max_rows: larger tables are cut to this many rows.
        dim: of all tables; 0 keeps theirs, which must then be the same.
        hot: the table that is read most is read so many times as often.

    Raises:
        ValueError: the tables have several dims, which DLRM's interaction can't take.
    """
    tables = [replace(table, rows=min(table.rows, max_rows), dim=dim or table.dim) for table in pool]
    dims = sorted({table.dim for table in tables})
    if len(dims) > 1:
        raise ValueError(f"DLRM needs one embedding dim, these tables have {dims}: choose one with --dim")
    cut = sum(old.rows > new.rows for old, new in zip(pool, tables, strict=True))
    hottest = max(range(len(tables)), key=lambda index: tables[index].pooling_factor)
    tables[hottest] = heated(tables[hottest], hot)
    heat = f", {tables[hottest].name} read {hot:g} times as often" if hot != 1 else ""
    before, after = (sum(table.rows for table in some) for some in (pool, tables))
    size_gb = [sum(table.size_bytes for table in some) / 1e9 for some in (pool, tables)]
    return tables, (
        f"{len(tables)} tables of dim {dims[0]}, {cut} of them cut to {max_rows:,} rows: "
        f"rows in all {before:,} -> {after:,}, weights {size_gb[0]:,.1f} -> {size_gb[1]:,.2f} GB{heat}"
    )


def heated(table: Table, times: float) -> Table:
    """The table with more lookups per sample; how they reuse rows is then derived from rows and lookups."""
    if times == 1:
        return table
    features = tuple(FeatureStatistics(feature.pooling_factor * times) for feature in table.features)
    return replace(table, features=features)


def make_model(tables: Sequence[Table], size: str, seed: int, device: torch.device) -> DLRMTrain:
    """DLRM with its loss.

    Dense weights come from the seed and are on ``device``. Embeddings are on no device until the model is sharded;
    :func:`fill_tables` then gives them weights.
    """
    below, above = SIZES[size]
    arguments = (meta_collection(tables), DENSE_FEATURES, [*below, tables[0].dim], list(above))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if size == "mlperf":
            return DLRMTrain(DLRM_DCN(*arguments, CROSS_LAYERS, CROSS_RANK, dense_device=device))
        return DLRMTrain(DLRM(*arguments, dense_device=device))


@torch.no_grad()
def fill_tables(model: DistributedModelParallel, tables: Sequence[Table], seed: int) -> None:
    """Weights that come from the seed, whichever rank holds which part of a table."""
    index_of = {table.name: index for index, table in enumerate(tables)}
    for key, value in model.state_dict().items():
        index = index_of.get(key.split(".")[-2]) if "embedding_bags" in key else None
        if index is None:
            continue
        table = tables[index]
        limit, generator = table.rows**-0.5, torch.Generator().manual_seed(seed + index)
        weight_RD = torch.empty(table.rows, table.dim).uniform_(-limit, limit, generator=generator)
        if isinstance(value, ShardedTensor):
            parts = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
        else:  # data-parallel
            parts = [((0, 0), value)]
        for (row, column), part in parts:
            part.copy_(weight_RD[row : row + part.shape[0], column : column + part.shape[1]])


def make_batches(
    tables: Sequence[Table], count: int, batch_size: int, rank: int, world_size: int, seed: int
) -> list[Batch]:
    """One rank's share, ``batch_size`` samples, of global batches that follow the tables' pooling factors and reuse.

    All ranks draw the same global batches: rows that several ranks read are as common as the tables say.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, first = batch_size * world_size, batch_size * rank
    workloads = workloads_of(tables, samples)
    names = [name for table in tables for name in feature_names(table)]

    def draw() -> Batch:
        indices, lengths = [], []
        for workload in workloads:
            indices_L, lengths_F = draw_inputs(workload, generator)
            offsets_F = nn.functional.pad(lengths_F.cumsum(0), (1, 0))
            for start in range(first, workload.num_features * samples, samples):
                indices.append(indices_L[offsets_F[start] : offsets_F[start + batch_size]])
                lengths.append(lengths_F[start : start + batch_size])
        sparse = KeyedJaggedTensor(names, torch.cat(indices), lengths=torch.cat(lengths))
        dense_BD = torch.rand(samples, DENSE_FEATURES, generator=generator)[first : first + batch_size]
        labels_B = torch.randint(2, (samples,), generator=generator)[first : first + batch_size]
        return Batch(dense_BD, sparse, labels_B)

    return [draw() for _ in range(count)]


@dataclass(frozen=True)
class Job:
    """A model with the same weights and batches under every plan."""

    tables: Sequence[Table]
    batches: Sequence[Batch]
    """This rank's."""
    bare_model: nn.Module
    """Its dense layers are on a device, its tables on none."""
    sharders: list[EmbeddingBagCollectionSharder]
    config: Config
    node: Node

    @classmethod
    def of(cls, tables: Sequence[Table], config: Config, node: Node) -> Job:
        """From the config's seed."""
        sharder = EveryTypeSharder() if needs_every_type(config, node) else EmbeddingBagCollectionSharder()
        bare_model = make_model(tables, config.size, config.seed, node.device)
        return cls(tables, draw_batches(tables, config, node), bare_model, [sharder], config, node)

    def fresh_model(self) -> nn.Module:
        """Not sharded yet, with the tables' optimizer in the backward pass."""
        model = copy.deepcopy(self.bare_model)
        tables_of = model.model.sparse_arch.parameters()
        apply_optimizer_in_backward(OPTIMIZERS[self.config.optimizer], tables_of, {"lr": 0.01})
        return model

    def trainee(self, plan: ShardingPlan, judge: DreamShardPlanner | None = None, *, pipelined: bool = True) -> Trainee:
        """A model under a plan; ``judge`` predicts what is observed; see :class:`Trainee`."""
        model = DistributedModelParallel(self.fresh_model(), plan=plan, sharders=self.sharders, device=self.node.device)
        fill_tables(model, self.tables, self.config.seed)
        return Trainee(model, self.batches, self.node, self.config.processor_time, judge, pipelined)


def draw_batches(tables: Sequence[Table], config: Config, node: Node) -> list[Batch]:
    """This rank's."""
    count = min(config.steps, BATCHES_KEPT)
    batches = make_batches(tables, count, config.batch_size, node.rank, node.world_size, config.seed)
    # Else each copy waits for the device.
    return [batch.pin_memory() for batch in batches] if node.device.type == "cuda" else batches


def needs_every_type(config: Config, node: Node) -> bool:
    """Return whether planners may use a type that TorchRec's own sharder does not offer on this device."""
    return not set(config.kinds) <= set(EmbeddingBagCollectionSharder().sharding_types(node.device.type))


@dataclass(frozen=True)
class Planned:
    """Plans by planner."""

    plans: dict[str, ShardingPlan]
    options: dict[str, list[ShardingOption]]
    """Options of each plan, on the first rank."""
    told: dict[str, dict[str, Any]]
    """Facts of each plan, on the first rank: planning time, ranks and splits of tables, and predicted cost."""
    judge: DreamShardPlanner
    """Whose cost model predicts all of them."""


def plan_all(
    planners: dict[str, tuple[EmbeddingShardingPlanner, list[ShardingOption]]],
    fresh_model: Callable[[], nn.Module],
    sharders: Sequence[EmbeddingBagCollectionSharder],
    config: Config,
    node: Node,
) -> Planned:
    """Ask all planners, on all ranks."""
    judge = planners["dreamshard"][0]
    plans: dict[str, ShardingPlan] = {}
    told: dict[str, dict[str, Any]] = {}
    for name, (planner, options) in planners.items():
        start = time.perf_counter()
        plans[name] = planner.collective_plan(fresh_model(), sharders, dist.group.WORLD)
        if node.rank == 0:
            told[name] = {
                "plan_seconds": time.perf_counter() - start,
                "ranks": {option.name: [shard.rank for shard in option.shards] for option in options},
                "split": {o.name: o.sharding_type for o in options if o.sharding_type != "table_wise"},
                "predicted": judge.predict(options, name),
            }
    return Planned(plans, {name: options for name, (_, options) in planners.items()}, told, judge)


def make_planners(
    tables: Sequence[Table],
    batches: Sequence[Batch],
    config: Config,
    node: Node,
    more: Mapping[str, Checkpoint] = MappingProxyType({}),
) -> dict[str, tuple[EmbeddingShardingPlanner, list[ShardingOption]]]:
    """By name: the planner, and a list that holds its plan's options once it has planned.

    ``dreamshard`` is always there, and first; the others are TorchRec's planner with other parts or less knowledge. Of
    ``more``, ours with other checkpoints, by name.
    """

    def constraints(kinds: Sequence[str], informed: bool) -> dict[str, ParameterConstraints]:
        return {
            table.name: ParameterConstraints(
                list(kinds),
                ["fused", "dense"] if DP in kinds else ["fused"],
                min_partition=config.min_partition or None,
                **({"pooling_factors": [f.pooling_factor for f in table.features]} if informed else {}),
            )
            for table in tables
        }

    whole = constraints(["table_wise"], informed=True)
    statistics = TableStatistics.from_batches(batch.sparse_features for batch in batches)
    planners = {}
    for name in dict.fromkeys(("dreamshard", *config.names, *more)):
        options: list[ShardingOption] = []
        common = {
            "topology": node.topology(),
            "batch_size": config.batch_size,
            "constraints": constraints(config.kinds_of(name), informed=name != "torchrec_default"),
            "callbacks": [lambda plan, options=options: options.extend(plan) or plan],
        }
        if name in more or name in OURS or name.startswith((ONLY, WITHOUT)):
            ours = OURS.get(name, {}) | {"statistics": statistics, "seed": config.seed}
            ours |= {"checkpoint": more.get(name, config.checkpoint), "optimizers_attached": True}
            planner = DreamShardPlanner(**common, **ours)
        elif name.startswith("torchrec"):
            planner = EmbeddingShardingPlanner(**common)
        else:
            rule = RulePartitioner(name, node.topology(), whole)
            planner = EmbeddingShardingPlanner(**common | {"constraints": whole}, partitioner=rule)
        planners[name] = planner, options
    return planners


class RulePartitioner(Partitioner):
    """Places whole tables by a greedy heuristic, a name of :data:`~dreamshard_planner.search.placing.HEURISTICS`."""

    def __init__(self, rule: str, topology: Topology, constraints: Mapping[str, ParameterConstraints]) -> None:
        self._rule = rule
        self._context = PlanRater(topology, OptionReader(constraints), resolve_for(topology, "auto"))

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return ``proposal`` with ranks; raises ``PlannerError`` if the heuristic runs out of memory."""
        read = self._context.read(proposal, storage_constraint)
        cost = self._context.cost(read)
        chosen = cost.chosen(Sharding((0,) * len(read.options), ((0,),) * len(read.options)))
        assignment_S = place_by_heuristic(chosen.cost.problem, self._rule)
        if assignment_S is None:
            raise infeasible(chosen.cost.problem, self._context.splitting_left_out)
        read.assign(chosen.placed(assignment_S))
        return proposal


class SkewedPartitioner(Partitioner):
    """A placement that nobody would choose: tables in an arbitrary order, by rows or by lookups or by neither; the
    first of them on the first rank, the others spread over all ranks.

    The share of the first rank and the order's preference come from the seed: some placements are nearly balanced,
    others nearly all on one rank, some heavy there in forward and others in backward.
    """

    def __init__(self, tables: Sequence[Table], seed: int) -> None:
        generator = np.random.default_rng(seed)
        lookups = [sum(feature.pooling_factor for feature in table.features) for table in tables]
        traits = np.log1p([[table.rows for table in tables], lookups])
        traits = (traits - traits.mean(1, keepdims=True)) / (traits.std(1, keepdims=True) + 1e-9)
        preference = generator.normal(size=2) @ traits + generator.normal(size=len(tables))
        self._order = [tables[index].name for index in np.argsort(preference)]
        self._head = round(len(tables) * generator.uniform(0.0, 0.9))

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank``, whatever the memory."""
        place = {name: index for index, name in enumerate(self._order)}
        for option in proposal:
            option.shards[0].rank = max(place[option.name] - self._head, 0) % storage_constraint.world_size
        return proposal
