# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows chosen for a whole plan, by its predicted cost, and advice on TorchRec's index dedup.

Each hot row saves exchanges of its lookups and their gradients. It costs its memory on every rank and a part of an
all-reduce. The rows of all tables are taken in the order of their reads down to one threshold, the one with the lowest
cost of the plan. Tables that are cheaper without hot rows then lose them again. By index dedup a rank asks for each row
of a sequence table once per batch.

Shapes: D ranks, M limits, C collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.hot_rows.replicas import why_not_hot_rows
from dreamshard_planner.hot_rows.sharded import HotRowsSharder
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.planning.rater import RatedPlan
from dreamshard_planner.plans.report import Note
from dreamshard_planner.problem.parts import HOT_LOOKUP_PASSES
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of, set_ranks, with_hot_rows
from dreamshard_planner.search_space.replica_rules import in_backward_arguments
from dreamshard_planner.support.formatting import size_in_words
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.lookups import FeatureStatistics, HotRows

LEAST_GAIN = 0.02
"""Share of a plan's cost that hot rows must save."""
LEAST_READS = (0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024)
"""Thresholds: reads of a hot row by each rank's batch."""
SORTED_BYTES = 150
"""Bytes of memory traffic that tell repeated lookups from others, for each lookup."""


@dataclass(frozen=True)
class _Candidate:
    """A table that may have hot rows."""

    option: ShardingOption
    """Its row_wise option with ranks."""
    ids: Tensor
    """Most read first."""
    reads: Tensor
    """Reads of each id by a rank's batch."""
    row_bytes: int
    """Bytes of one hot row with its optimizer state."""


def choose_hot_rows(
    model: ModelProblem, plan: Sequence[ShardingOption], budget_bytes: int
) -> tuple[list[ShardingOption], Note]:
    """Choose hot rows for the sequence tables of a plan, whose own hot rows do not count.

    Only tables with counted ids (:class:`~dreamshard_planner.workload.lookups.HotIds`), a row_wise option, an optimizer
    that replicas can follow and batches of one size may have hot rows.

    Args:
        model: of the plan.
        plan: one option with ranks for every table.
        budget_bytes: most memory that hot rows may take on each rank.

    Returns:
        The plan, whose tables with hot rows are row_wise, and a note for the report.
    """
    candidates = {fqn_of(one.option): one for one in _candidates(model)} if budget_bytes else {}
    if not candidates:
        counted = model.settings.statistics is not None
        lack = (
            "no sequence table with counted rows may have them" if counted else "no statistics tell which rows are hot"
        )
        return list(plan), Note("hot_rows", f"no hot rows: {lack}")
    before = best = _rated(model, plan, candidates, {})
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
    for name in _counts(best):
        others = {other: count for other, count in _counts(best).items() if other != name}
        best = _better(best, _rated(model, plan, candidates, others))
    if not best.total_ms < before.total_ms * (1 - LEAST_GAIN):
        lack = f"they would not lower the predicted cost of a step by {LEAST_GAIN:.0%}"
        return before.options, Note("hot_rows", f"no hot rows: {lack}")
    figures = {
        "before_ms": before.total_ms,
        "after_ms": best.total_ms,
        "before_bytes": _sent_bytes(before),
        "after_bytes": _sent_bytes(best),
    }
    text = (
        f"hot rows lower the predicted step from {before.total_ms:.3f} to {best.total_ms:.3f} ms, and the bytes that a "
        f"rank sends per step from {size_in_words(int(figures['before_bytes']))} to "
        f"{size_in_words(int(figures['after_bytes']))}"
    )
    return best.options, Note("hot_rows", text, figures)


def _counts(rated: RatedPlan) -> dict[str, int]:
    """Return the number of hot rows of each table that has some."""
    return {fqn_of(option): len(hot) for option in rated.options if (hot := hot_rows_of(option)) is not None}


def _better(best: RatedPlan, other: RatedPlan) -> RatedPlan:
    return other if other.total_ms < best.total_ms and bool(other.read.problem.fits(other.sharding)) else best


def _candidates(model: ModelProblem) -> list[_Candidate]:
    """Return the tables of a model that may have hot rows."""
    statistics, topology = model.settings.statistics, model.ranks.topology
    sharder = next((one for one in model.sharders if one.module_type is EmbeddingCollection), None)
    if statistics is None or topology.world_size == 1 or model.ranks.groups > 1:
        return []
    if type(sharder) not in (EmbeddingCollectionSharder, HotRowsSharder):
        return []
    found = []
    for option in model.searched:
        module = option.module[1]
        if type(module) is not EmbeddingCollection or option.sharding_type != ShardingType.ROW_WISE.value:
            continue
        tables = {config.name: config.feature_names for config in module.embedding_configs()}
        names = [name for features in tables.values() for name in features]
        known = model.rater.reader.kernel_params(option)
        arguments = in_backward_arguments(option.tensor, {k: v for k, v in known.items() if v is not None})
        if (
            option.compute_kernel != "fused"
            or len(set(names)) < len(names)
            or in_smaller_batches({name: statistics[name] for name in names if name in statistics})
            or any(one.batch_sizes for name, one in model.rater.constraints.items() if name in tables)
            or why_not_hot_rows(arguments, option.tensor.dtype, topology.compute_device)
        ):
            continue
        declared = model.rater.reader.declared(option)
        reads: dict[int, float] = {}
        for feature in (statistics[name] for name in declared.features if name in statistics):
            scale = option.batch_size / feature.samples
            for row, mean in zip(*((feature.hot.ids, feature.hot.reads) if feature.hot else ((), ())), strict=True):
                reads[row] = reads.get(row, 0.0) + mean * scale
        if not reads or max(reads) >= declared.rows:
            continue
        order = sorted(reads, key=lambda row: -reads[row])
        found.append(
            _Candidate(
                option,
                torch.tensor(order, dtype=torch.int64),
                torch.tensor([reads[row] for row in order], dtype=torch.float64),
                declared.trained_bytes(declared.dim, declared.dim),
            )
        )
    return found


def _rated(
    model: ModelProblem, plan: Sequence[ShardingOption], candidates: Mapping[str, _Candidate], counts: Mapping[str, int]
) -> RatedPlan:
    """Rate a plan with so many hot rows of each table."""
    options = []
    for option in plan:
        if count := counts.get(fqn_of(option), 0):
            chosen = candidates[fqn_of(option)]
            option = with_hot_rows(chosen.option, HotRows(chosen.ids[:count], int(option.tensor.shape[0])))
            set_ranks(option, range(model.room.world_size))
        elif hot_rows_of(option):
            option = with_hot_rows(option, None)
        options.append(option)
    model.rater.estimate_missing(options)
    return model.rater.rated(options, model.room)


def _sent_bytes(rated: RatedPlan) -> float:
    """Return the bytes that a rank sends per step, mean over ranks."""
    problem = rated.read.problem
    bytes_CD = rated.cost.bytes_sent(*problem.laid(rated.sharding)).squeeze(0)
    # An all-reduce sends its part twice, and sorting of ids sends nothing.
    times = {"all-reduce": 2, "bucketing": 0}
    peers_C = torch.tensor(
        [
            times.get(one.name.rpartition(" ")[2], 1) * sum(model.world_size - 1 for model in one.passes)
            for one in problem.collectives.collectives
        ],
        dtype=torch.float64,
    )
    return float((bytes_CD * peers_C[:, None]).sum(0).mean())


def dedup_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note if index dedup is predicted to lower the cost of a plan by :data:`LEAST_GAIN`.

    It needs counted reuse of every sequence table, and CUDA: FBGEMM has no CPU kernel for it.

    Args:
        model: of the plan.
        plan: one option with ranks for every table.
    """
    plan = [with_hot_rows(option, None) if hot_rows_of(option) else option for option in plan]
    rater, topology = model.rater, model.ranks.topology
    statistics: Mapping[str, FeatureStatistics] = model.settings.statistics or {}
    if model.settings.cost_source == "torchrec" or topology.compute_device == "cpu" or topology.world_size == 1:
        return ()
    sequences = [option for option in plan if type(option.module[1]) is EmbeddingCollection]
    features = [statistics.get(name) for option in sequences for name in rater.reader.declared(option).features]
    if not features or any(feature is None or feature.reuse_histogram is None for feature in features):
        return ()
    sharders = [
        EmbeddingCollectionSharder(one.fused_params, one.qcomm_codecs_registry, use_index_dedup=True)
        if isinstance(one, EmbeddingCollectionSharder) and not compat.dedups_ids(one)
        else one
        for one in model.sharders
    ]
    if sharders == list(model.sharders):
        return ()
    reader = OptionReader(rater.constraints, model.settings.statistics, sharders)
    before_ms = rater.rated(plan).total_ms
    after_ms = replace(rater, reader=reader, sharders=sharders).rated(plan).total_ms
    after_ms += sum(
        sum(rater.reader.pooling_factors(option))
        * option.batch_size
        * (SORTED_BYTES + HOT_LOOKUP_PASSES * 4 * int(option.tensor.shape[1]))
        for option in sequences
    ) / float(topology.hbm_mem_bw)
    if after_ms > before_ms * (1 - LEAST_GAIN):
        return ()
    text = (
        f"TorchRec's index dedup, EmbeddingCollectionSharder(use_index_dedup=True), is predicted to lower the step "
        f"from {before_ms:.3f} to {after_ms:.3f} ms without hot rows: each rank's batch then asks for a row once"
    )
    return (Note("index_dedup", text, {"before_ms": before_ms, "dedup_ms": after_ms}),)
