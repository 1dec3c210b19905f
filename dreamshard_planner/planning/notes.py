# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The report on a rated plan, with notes on its costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torchrec.distributed.planner.types import ShardingOption

from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.planning.rater import PlanRater, RatedPlan
from dreamshard_planner.plans.report import MemoryEntry, Note, Report, ReportEntry, TableEntry, noted
from dreamshard_planner.search.search import SearchResult
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of, type_of
from dreamshard_planner.search_space.sharding_types import is_known
from dreamshard_planner.support.formatting import first_of, size_in_words
from dreamshard_planner.workload.tables import FEATURE_INDEX

SKEW_SHOWN = 2.0
"""Lookups of a row block over its even share from which a note tells it."""


def report_on(
    rater: PlanRater,
    rated: RatedPlan,
    notes: Sequence[Note] = (),
    rivals: Sequence[ReportEntry] = (),
    result: SearchResult | None = None,
) -> Report:
    """Return the report on a plan, with notes on its cost.

    Args:
        rated: the plan.
        notes: further notes, which come first.
        rivals, result: of the search that found it.
    """
    plan, synced_bytes = rated.options, _synced_bytes(rated) if rater.ranks.sync_ms_per_byte else 0.0
    averaging_ms = synced_bytes * rater.ranks.sync_ms_per_byte
    cut_short = "the search was cut short (search_seconds, timeout_seconds); more time may give another plan"
    notes = (
        *noted("cost", rated.cost.notes(rated.sharding)),
        *noted("skew", _skews(rated)),
        *notes,
        *rater.costs.notes(plan, rater.reader),
        *_price_notes(rater, plan),
        *_hot_rows_notes(rater, plan),
        *([_averaging(rater, plan, synced_bytes, averaging_ms)] if averaging_ms else []),
        *noted("table", rater.reader.notes(plan)),
        *noted("search", [cut_short] if result is not None and result.cut_short else []),
    )
    problem, collectives = rated.read.problem, rated.read.problem.collectives
    laid, single_ms_P = problem.laid(rated.sharding), rated.cost.single_ms_P.numpy()
    memory = zip(MEMORY_KINDS, problem.taken(*laid).T.tolist(), problem.limits_DM.T.tolist(), strict=False)
    exchanges_ms = zip(collectives.collectives, collectives.each_ms(rated.cost.bytes_sent(*laid)), strict=True)
    return Report(
        chosen=ReportEntry.of("dreamshard", rated.costs),
        rivals=tuple(sorted(rivals, key=lambda rival: rival.total_ms)),
        cost_source=str(rated.cost.compute.source),
        collectives_source=collectives.world.source,
        candidates=0 if result is None else result.candidates,
        reshards=0 if result is None else result.reshards,
        memory=tuple(MemoryEntry(kind, tuple(used), tuple(left)) for kind, used, left in memory if any(used)),
        collectives=tuple((collective.name, ms) for collective, ms in exchanges_ms if ms > 0),
        confidence=rater.costs.confidence(plan),
        averaging_ms=averaging_ms,
        estimate_ms=rater.costs.estimate_ms(plan),
        embedding_share=rater.ranks.checkpoint.known.learned.embedding_share,
        tables=tuple(
            TableEntry(
                name, option.sharding_type, option.kernel, tuple(ranks), tuple(single_ms_P[option.parts].tolist())
            )
            for name, option, ranks in rated.placed
        ),
    ).noting(notes)


def _hot_rows_notes(rater: PlanRater, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on the hot rows of all tables, if there are any."""
    told, rows, memory_bytes = [], 0, 0
    for option in plan:
        if (hot := hot_rows_of(option)) is not None:
            table, declared = rater.reader.table(option, rater.ranks.topology), rater.reader.declared(option)
            lookups = table.pooling_factor + table.hot_lookups
            share = f"{table.hot_lookups / lookups:.0%}" if table.hot_lookups else "an unknown share"
            told.append(f"{fqn_of(option)} {len(hot):,} of {hot.table_rows:,} for {share} of its lookups")
            rows += len(hot)
            memory_bytes += declared.trained_bytes(len(hot) * declared.dim, declared.dim)
    text = f"hot rows on every rank, {size_in_words(memory_bytes)} each: {', '.join(told)}"
    return (Note("hot_rows", text, {"rows": float(rows), "memory_bytes": float(memory_bytes)}),) * bool(told)


def _averaging(rater: PlanRater, plan: Sequence[ShardingOption], synced_bytes: float, averaging_ms: float) -> Note:
    """Return a note on averaging replicas, in 2D parallelism."""
    text = (
        f"the plan is for the ranks of one sharding group; averaging up to {size_in_words(int(synced_bytes))} of a "
        f"rank with its replicas takes {averaging_ms:.3f} ms of each batch in the mean, counted as backward, and "
        "happens in place"
    )
    if any(type_of(option).span == "host" for option in plan):
        text += f"; DMPCollection needs node_group_size={rater.ranks.topology.local_world_size}"
    return Note("source", text, {"sync_bytes": synced_bytes})


def _price_notes(rater: PlanRater, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note per unknown kernel."""
    priced: dict[str, list[str]] = {}
    for option in plan:
        if not is_known(option.compute_kernel) and not rater.costs.takes_estimates:
            priced.setdefault(option.compute_kernel, []).append(fqn_of(option))
    return tuple(
        Note(
            "source",
            f"{len(tables)} table(s) ({first_of(tables)}) use compute kernel {kernel!r}, of which this "
            "planner has no costs: their compute is priced by the estimates of their options, which are TorchRec's "
            "unless an estimator that was given made them",
            {"tables": float(len(tables))},
        )
        for kernel, tables in sorted(priced.items())
    )


def _synced_bytes(rated: RatedPlan) -> float:
    """Return the most bytes that a rank averages with its replicas."""
    rank_X, part_X = rated.read.problem.laid(rated.sharding)
    synced_D = torch.zeros(rated.read.problem.num_ranks, dtype=torch.float64)
    synced_P = torch.tensor([part.synced_bytes for part in rated.read.parts], dtype=torch.float64)
    return float(synced_D.index_add(0, rank_X, synced_P[part_X]).max())


def _skews(rated: RatedPlan) -> Iterator[str]:
    """Yield a sentence per table with a block of rows that is read much more than its share of the rows."""
    features_PF = rated.read.problem.features_PF
    rows_P, lookups_P = features_PF[:, [FEATURE_INDEX["rows"], FEATURE_INDEX["lookups"]]].double().T.numpy()
    for name, option, ranks in rated.placed:
        rows_X, lookups_X = rows_P[option.parts], lookups_P[option.parts]
        heaviest = int(lookups_X.argmax())
        share, even = lookups_X[heaviest] / max(1e-9, lookups_X.sum()), rows_X[heaviest] / max(1, rows_X.sum())
        shown = min(SKEW_SHOWN * even, (1 + even) / 2)  # of two ranks, none can have more than twice an even share
        if share > shown and rows_X[heaviest] != 1:  # the rows of a block of one cannot be split
            yield (
                f"{name}, {option.sharding_type}: rank {ranks[heaviest]} has {share:.0%} of the lookups with "
                f"{even:.0%} of the rows, since its ids are not read evenly; shuffled ids would spread them"
            )
