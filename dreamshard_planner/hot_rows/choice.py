# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows chosen for a whole plan, by its predicted cost.

Each hot row saves exchanges of its lookups and their gradients. It costs its memory on every rank and a part of an
all-reduce. The rows of all tables are taken in the order of their reads down to one threshold, the one with the lowest
cost of the plan. Tables that are cheaper without hot rows then lose them again.

Shapes: D ranks, M limits, C collectives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.hot_rows.other_lookups import without_rows
from dreamshard_planner.hot_rows.replicas import why_not_hot_rows
from dreamshard_planner.hot_rows.sharded import HotRowsSharder
from dreamshard_planner.planning.context import RatedPlan
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.plans.report import Note
from dreamshard_planner.search_space.options import fqn_of, set_ranks
from dreamshard_planner.search_space.replica_rules import in_backward_arguments
from dreamshard_planner.support.formatting import size_in_words
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import OPTIMIZERS, costed_optimizer

LEAST_GAIN = 0.02
"""Share of a plan's cost that hot rows must save."""
LEAST_READS = (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024)
"""Thresholds: reads of a hot row by each rank's batch."""
GRADIENT_BYTES = 4
HOT_LOOKUP_PASSES = 5
"""Passes of an embedding's bytes through memory, for a lookup of a hot row: gather, its gradient, sum by row."""
HOT_ROW_PASSES = 10
"""Passes of a hot row's bytes through memory: copy, gradient, update, copy to the shard, comparison with it."""
ROUTED_BYTES = 120
"""Bytes of memory traffic that tell a lookup of a hot row from another."""


@dataclass(frozen=True)
class HotTable:
    """Hot rows of one table."""

    name: str
    ids: Tensor
    """Most read first."""
    table_rows: int
    lookup_share: float
    """Share of the table's lookups that read hot rows."""
    memory_bytes: int
    """Memory of the hot rows on every rank."""


@dataclass(frozen=True)
class HotRowsChoice:
    """A plan with the hot rows that were chosen for it. Its ``str()`` is for people."""

    options: tuple[ShardingOption, ...]
    """One option with ranks for every table. Tables with hot rows are row_wise."""
    tables: tuple[HotTable, ...] = ()
    """Tables with hot rows."""
    before_ms: float = 0.0
    """Predicted cost of a step under the given plan."""
    after_ms: float = 0.0
    """Predicted cost of a step with hot rows."""
    before_bytes: float = 0.0
    """Bytes that a rank sends per step under the given plan, for all tables, mean over ranks."""
    after_bytes: float = 0.0
    """Bytes that a rank sends per step with hot rows, their all-reduce included."""

    @property
    def ids(self) -> dict[str, Tensor]:
        """Ids of the hot rows by table, for :func:`~dreamshard_planner.hot_rows.hot_set.replicate_hot_rows`."""
        return {table.name: table.ids for table in self.tables}

    @property
    def memory_bytes(self) -> int:
        """Memory of all hot rows on every rank."""
        return sum(table.memory_bytes for table in self.tables)

    def __str__(self) -> str:
        if not self.tables:
            return "no hot rows: they would not lower the predicted cost of a step"
        each = ", ".join(
            f"{table.name} {len(table.ids):,} of {table.table_rows:,} rows for {table.lookup_share:.0%} of its lookups"
            for table in self.tables
        )
        return (
            f"hot rows on every rank: {each}; they take {size_in_words(self.memory_bytes)} of each rank, lower the "
            f"bytes that it sends per step from {size_in_words(int(self.before_bytes))} to "
            f"{size_in_words(int(self.after_bytes))}, and the predicted step from {self.before_ms:.3f} to "
            f"{self.after_ms:.3f} ms"
        )

    def notes(self) -> tuple[Note, ...]:
        """Return a note for the report, whose other figures are without hot rows."""
        figures = {
            "hot_rows": float(sum(len(table.ids) for table in self.tables)),
            "memory_bytes": float(self.memory_bytes),
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
        }
        more = ". Other figures of this report are without hot rows" if self.tables else ""
        return (Note("hot_rows", f"{self}{more}", figures),)


@dataclass(frozen=True)
class _Candidate:
    """A table that may have hot rows."""

    option: ShardingOption
    """Its row_wise option with ranks."""
    features: tuple[str, ...]
    ids: Tensor
    """Most read first."""
    reads: Tensor
    """Reads of each id by a rank's batch."""
    lookups: float
    """Lookups of a rank's batch."""
    row_bytes: int
    """Bytes of one hot row with its optimizer state."""

    @property
    def dim(self) -> int:
        return int(self.option.tensor.shape[1])


@dataclass(frozen=True)
class _Rated:
    """A plan with hot rows, rated."""

    options: tuple[ShardingOption, ...]
    counts: Mapping[str, int]
    """Hot rows of each table that has some."""
    ms: float
    sent_bytes: float


def choose_hot_rows(model: ModelProblem, plan: Sequence[ShardingOption], budget_bytes: int) -> HotRowsChoice:
    """Choose hot rows for the sequence tables of a plan.

    Only tables with counted ids (:class:`~dreamshard_planner.workload.ids.HotIds`), a row_wise option and an
    optimizer that replicas can follow may have hot rows.

    Args:
        model: of the plan.
        plan: one option with ranks for every table.
        budget_bytes: most memory that hot rows may take on each rank.
    """
    candidates = {fqn_of(one.option): one for one in _candidates(model)}
    if not candidates or budget_bytes <= 0:
        return HotRowsChoice(tuple(plan))
    before = _rated(model, plan, candidates, {})
    assert before is not None
    best = before
    reads = torch.cat([one.reads for one in candidates.values()])
    costs_bytes = torch.cat([torch.full((len(one.ids),), one.row_bytes) for one in candidates.values()])
    order = reads.argsort(descending=True)
    affordable = int((costs_bytes[order].cumsum(0) <= budget_bytes).sum())
    least = float(reads[order[affordable - 1]]) if affordable else torch.inf
    tried: list[dict[str, int]] = []
    for threshold in (least, *(one for one in LEAST_READS if one > least)):
        counts = {name: int((one.reads >= threshold).sum()) for name, one in candidates.items()}
        # Rows with as many reads as the last affordable one may exceed the budget.
        if counts in tried or sum(counts[name] * one.row_bytes for name, one in candidates.items()) > budget_bytes:
            continue
        tried.append(counts)
        best = _better(best, _rated(model, plan, candidates, counts))
    for name in list(best.counts):
        if name in best.counts:
            others = {other: count for other, count in best.counts.items() if other != name}
            best = _better(best, _rated(model, plan, candidates, others))
    if best.ms > before.ms * (1 - LEAST_GAIN):
        best = before
    tables = tuple(_hot_table(candidates[name], count) for name, count in best.counts.items())
    return HotRowsChoice(best.options, tables, before.ms, best.ms, before.sent_bytes, best.sent_bytes)


def _better(best: _Rated, other: _Rated | None) -> _Rated:
    return best if other is None or other.ms >= best.ms else other


def _hot_table(candidate: _Candidate, count: int) -> HotTable:
    share = float(candidate.reads[:count].sum()) / candidate.lookups
    return HotTable(
        fqn_of(candidate.option),
        candidate.ids[:count],
        int(candidate.option.tensor.shape[0]),
        min(1.0, share),
        count * candidate.row_bytes,
    )


def _candidates(model: ModelProblem) -> list[_Candidate]:
    """Return the tables of a model that may have hot rows."""
    statistics, topology = model.settings.statistics, model.ranks.topology
    sharder = next((one for one in model.sharders if one.module_type is EmbeddingCollection), None)
    if statistics is None or topology.world_size == 1 or model.ranks.groups > 1:
        return []
    if type(sharder) not in (EmbeddingCollectionSharder, HotRowsSharder):
        return []
    found = []
    for option in model.context.searched_options(model.search_space):
        module = option.module[1]
        if type(module) is not EmbeddingCollection or option.sharding_type != ShardingType.ROW_WISE.value:
            continue
        names = [name for config in module.embedding_configs() for name in config.feature_names]
        known = model.context.reader.kernel_params(option)
        arguments = in_backward_arguments(option.tensor, {k: v for k, v in known.items() if v is not None})
        if (
            option.compute_kernel != "fused"
            or len(set(names)) < len(names)
            or why_not_hot_rows(arguments, option.tensor.dtype, topology.compute_device)
        ):
            continue
        states = OPTIMIZERS[costed_optimizer(str(getattr(arguments["optimizer"], "name", arguments["optimizer"])))]
        rows, dim = option.tensor.shape
        features = model.context.reader.declared(option).features
        reads: dict[int, float] = {}
        for feature in (statistics[name] for name in features if name in statistics):
            scale = option.batch_size / feature.samples
            for row, mean in zip(*((feature.hot.ids, feature.hot.reads) if feature.hot else ((), ())), strict=True):
                reads[row] = reads.get(row, 0.0) + mean * scale
        if not reads or max(reads) >= rows:
            continue
        order = sorted(reads, key=lambda row: -reads[row])
        placed = copy.deepcopy(option)
        set_ranks(placed, range(topology.world_size))
        found.append(
            _Candidate(
                placed,
                features,
                torch.tensor(order, dtype=torch.int64),
                torch.tensor([reads[row] for row in order], dtype=torch.float64),
                sum(model.context.reader.pooling_factors(option)) * option.batch_size,
                dim * (option.tensor.element_size() + 4 * states.per_weight) + 4 * states.per_row,
            )
        )
    return found


def _rated(
    model: ModelProblem, plan: Sequence[ShardingOption], candidates: Mapping[str, _Candidate], counts: Mapping[str, int]
) -> _Rated | None:
    """Rate a plan with so many hot rows of each table; None if a rank lacks memory for them."""
    counts = {name: count for name, count in counts.items() if count}
    hot = {name: candidates[name] for name in counts}
    statistics = dict(model.settings.statistics or {})
    for name, one in hot.items():
        for feature in one.features:
            if feature in statistics:
                statistics[feature] = without_rows(statistics[feature], one.ids[: counts[name]])
    options = tuple(hot[fqn_of(option)].option if fqn_of(option) in hot else option for option in plan)
    context, topology = model.context.with_statistics(TableStatistics(statistics)), model.ranks.topology
    rated, ranks = context.rated(options, model.left), topology.world_size
    if counts and _room_bytes(rated, topology.compute_device) < sum(
        count * candidates[name].row_bytes for name, count in counts.items()
    ):
        return None
    reduced_bytes = sum(count * candidates[name].dim * GRADIENT_BYTES for name, count in counts.items())
    reduce_ms = context.links.all_reduce.all_to_all_ms(torch.full((ranks,), reduced_bytes / ranks))
    on_cpu = topology.compute_device == "cpu"
    bytes_per_ms = topology.ddr_mem_bw / topology.local_world_size if on_cpu else topology.hbm_mem_bw
    passed_bytes = sum(
        ROUTED_BYTES * one.lookups
        + (HOT_LOOKUP_PASSES * float(one.reads[: counts[name]].sum()) + HOT_ROW_PASSES * counts[name]) * 4 * one.dim
        for name, one in hot.items()
    )
    return _Rated(
        options,
        counts,
        rated.total_ms + float(reduce_ms) + passed_bytes / bytes_per_ms,
        _sent_bytes(rated) + 2 * reduced_bytes * (ranks - 1) / ranks,
    )


def _room_bytes(rated: RatedPlan, device: str) -> float:
    """Return the least memory that a plan leaves on a rank."""
    problem = rated.read.problem
    left_DM = problem.limits_DM - problem.taken(*problem.laid(rated.sharding))
    return float(left_DM[:, MEMORY_KINDS.index("DDR" if device == "cpu" else "HBM")].min())


def _sent_bytes(rated: RatedPlan) -> float:
    """Return the bytes that a rank sends per step, mean over ranks, without an all-reduce's second pass."""
    problem = rated.read.problem
    bytes_CD = rated.cost.bytes_sent(*problem.laid(rated.sharding)).squeeze(0)
    peers_C = torch.tensor(
        [
            0.0 if one.name.endswith("bucketing") else sum(model.world_size - 1 for model in one.passes)
            for one in problem.collectives.collectives
        ],
        dtype=torch.float64,
    )
    return float((bytes_CD * peers_C[:, None]).sum(0).mean())
