# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A DLRM for a table collection, batches that read the tables as the collection says, and planners that shard it.

Shape letters: B local batch, D dense features or columns, R rows, F sparse features x global batch, L lookups.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import Partitioner, ShardingOption
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.tasks import feature_names, meta_collection
from dlrm.options import OPTIMIZERS, SIZES, Config, Node
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, TableStatistics
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.measure.kernels import draw_inputs
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.starts import HEURISTICS, place_by_heuristic
from dreamshard_planner.search_space.sharding_types import DP, SHARDING_TYPES
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.tables import Table, workloads_of

DENSE_FEATURES = 13  # Criteo's
CROSS_LAYERS, CROSS_RANK = 3, 512  # MLPerf DLRM-DCNv2


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
    if hot != 1:  # how lookups reuse rows is then derived from rows and lookups
        features = tuple(FeatureStatistics(feature.pooling_factor * hot) for feature in tables[hottest].features)
        tables[hottest] = replace(tables[hottest], features=features)
    heat = f", {tables[hottest].name} read {hot:g} times as often" if hot != 1 else ""
    before, after = (sum(table.rows for table in some) for some in (pool, tables))
    size_gb = [sum(table.rows * table.dim * table.weight_bytes for table in some) / 1e9 for some in (pool, tables)]
    return tables, (
        f"{len(tables)} tables of dim {dims[0]}, {cut} of them cut to {max_rows:,} rows: "
        f"rows in all {before:,} -> {after:,}, weights {size_gb[0]:,.1f} -> {size_gb[1]:,.2f} GB{heat}"
    )


def make_model(tables: Sequence[Table], size: str, seed: int, device: torch.device) -> DLRMTrain:
    """DLRM with its loss.

    Dense weights come from the seed and are on ``device``. Embeddings are on no device until the model is sharded.
    """
    below, above = SIZES[size]
    arguments = (meta_collection(tables), DENSE_FEATURES, [*below, tables[0].dim], list(above))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if size == "mlperf":
            return DLRMTrain(DLRM_DCN(*arguments, CROSS_LAYERS, CROSS_RANK, dense_device=device))
        return DLRMTrain(DLRM(*arguments, dense_device=device))


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
        sharder = EmbeddingBagCollectionSharder()
        if not set(config.kinds) <= set(sharder.sharding_types(node.device.type)):
            sharder = EveryTypeSharder()
        batches = make_batches(tables, config.batches, config.batch_size, node.rank, node.world_size, config.seed)
        if node.device.type == "cuda":  # else each copy waits for the device
            batches = [batch.pin_memory() for batch in batches]
        bare_model = make_model(tables, config.size, config.seed, node.device)
        return cls(tables, batches, bare_model, [sharder], config, node)

    def fresh_model(self) -> nn.Module:
        """Not sharded yet, with the tables' optimizer in the backward pass."""
        model = copy.deepcopy(self.bare_model)
        tables_of = model.model.sparse_arch.parameters()
        apply_optimizer_in_backward(OPTIMIZERS[self.config.optimizer], tables_of, {"lr": 0.01})
        return model

    def sharded(self, plan: ShardingPlan) -> DistributedModelParallel:
        """Return a model under a plan."""
        return DistributedModelParallel(self.fresh_model(), plan=plan, sharders=self.sharders, device=self.node.device)

    def planners(self) -> dict[str, EmbeddingShardingPlanner]:
        """Return planners by name. ``dreamshard`` is always there, and first; the others are TorchRec's planner with
        other parts or less knowledge."""
        statistics = TableStatistics.from_batches(batch.sparse_features for batch in self.batches)
        topology, planners = self.node.topology(), {}
        for name in dict.fromkeys(("dreamshard", *self.config.names)):
            is_rule = name in HEURISTICS
            kinds = ("table_wise",) if is_rule else self.config.kinds
            given = {"topology": topology, "batch_size": self.config.batch_size}
            given["constraints"] = self._constraints(kinds, informed=name != "torchrec_default")
            if name == "dreamshard":
                ours = {"statistics": statistics, "seed": self.config.seed, "checkpoint": self.config.checkpoint}
                planners[name] = DreamShardPlanner(**given, **ours, optimizers_attached=True)
            else:
                rule = RulePartitioner(name, topology, given["constraints"]) if is_rule else None
                planners[name] = EmbeddingShardingPlanner(**given, partitioner=rule)
        return planners

    def _constraints(self, kinds: Sequence[str], informed: bool) -> dict[str, ParameterConstraints]:
        kernels = ["fused", "dense"] if DP in kinds else ["fused"]
        return {
            table.name: ParameterConstraints(
                list(kinds),
                kernels,
                min_partition=self.config.min_partition or None,
                pooling_factors=[f.pooling_factor if informed else 1.0 for f in table.features],
            )
            for table in self.tables
        }


class RulePartitioner(Partitioner):
    """Places whole tables by a greedy heuristic, a name of :data:`~dreamshard_planner.search.starts.HEURISTICS`."""

    def __init__(self, rule: str, topology: Topology, constraints: Mapping[str, ParameterConstraints]) -> None:
        self._rule = rule
        self._rater = PlanRater(PlannedRanks.of(topology), OptionReader(constraints))

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return ``proposal`` with ranks; raises ``PlannerError`` if the heuristic runs out of memory."""
        read = self._rater.read(proposal, storage_constraint)
        cost = self._rater.cost(read)
        chosen = cost.chosen(Sharding((0,) * len(read.options), ((0,),) * len(read.options)))
        assignment_S = place_by_heuristic(chosen.cost.problem, self._rule)
        if assignment_S is None:
            raise infeasible(chosen.cost.problem, self._rater.splitting_left_out)
        read.assign(chosen.placed(assignment_S))
        return proposal
