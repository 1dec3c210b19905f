# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The report on a rated plan, with notes on its costs.

Shapes: P parts, F features, D ranks, X parts of an option.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torchrec.distributed.planner.types import Perf, ShardingOption, Topology

from dreamshard_planner.checkpoints.choice import checkpoint_notes, confidence
from dreamshard_planner.cost.collectives import OPERATIONS
from dreamshard_planner.cost.problem import MEMORY_KINDS, SharedCores
from dreamshard_planner.devices import default_notes
from dreamshard_planner.planning.rater import CheckpointCosts, PlanRater, RatedPlan, measured_exchanges
from dreamshard_planner.plans.report import ESTIMATE_PARTS, MemoryEntry, Note, Report, ReportEntry, TableEntry, noted
from dreamshard_planner.search.search import SearchResult
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of, perf_of, ranks_of, type_of
from dreamshard_planner.search_space.sharding_types import is_known, serves
from dreamshard_planner.support.formatting import first_of, size_in_words
from dreamshard_planner.workload.tables import FEATURE_INDEX, OPTIMIZERS

_UNCOUNTED = (
    "the exchange of lookups is not counted: collectives of {} were measured without it "
    "(python -m dreamshard_planner.measure.collectives measures it)"
)
_QUANTIZED = (
    "the model has quantized tables, whose kernels were not measured: bandwidths give the costs of all its tables"
)
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
        *_source_notes(rater, plan),
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
        confidence=_confidence(rater.costs, plan),
        averaging_ms=averaging_ms,
        estimate_ms=_estimate_ms(plan) if rater.costs.takes_estimates else {},
        embedding_share=rater.ranks.checkpoint.known.learned.embedding_share,
        tables=tuple(
            TableEntry(
                name, option.sharding_type, option.kernel, tuple(ranks), tuple(single_ms_P[option.parts].tolist())
            )
            for name, option, ranks in rated.placed
        ),
    ).noting(notes)


def _confidence(costs: CheckpointCosts, plan: Sequence[ShardingOption]) -> str:
    """Tell how far to trust the milliseconds of a plan."""
    if costs.takes_estimates:
        return "TorchRec's estimates, nothing measured: trust the order of plans, not their milliseconds"
    ranks = costs.ranks
    return confidence(ranks.checkpoint, ranks.topology, costs.uses_network and not _is_quantized(plan))


def _estimate_ms(plan: Sequence[ShardingOption]) -> dict[str, float]:
    """Return the parts of TorchRec's estimate of the slowest rank; empty without estimates."""
    of_rank: dict[int, list[Perf]] = {}
    for option in plan:
        for rank, perf in zip(ranks_of(option), perf_of(option), strict=True):
            if rank is None or perf is None:
                return {}
            of_rank.setdefault(rank, []).append(perf)
    slowest = max(of_rank.values(), key=lambda perfs: sum(perf.total for perf in perfs), default=[])
    return {name: sum(getattr(perf, name) for perf in slowest) for name in ESTIMATE_PARTS if slowest}


def _source_notes(rater: PlanRater, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on the sources of a plan's cost."""
    costs, topology, checkpoint = rater.costs, rater.ranks.topology, rater.ranks.checkpoint
    if costs.takes_estimates:
        return (
            *noted("assumption", default_notes(topology)),
            *noted("source", checkpoint_notes(checkpoint, topology, uses_network=False)),
        )
    measured = measured_exchanges(topology, checkpoint).keys() >= {*OPERATIONS}
    uncounted = "lookups" not in costs.links() and topology.world_size > 1
    quantized = costs.uses_network and _is_quantized(plan)
    uses_network = costs.uses_network and not quantized
    shared_cores = costs.shared_cores()
    return (
        *noted("assumption", default_notes(topology, links_measured=measured)),
        *noted("source", [_UNCOUNTED.format(checkpoint.name)] if uncounted else []),
        *noted("source", [_QUANTIZED] if quantized else []),
        *noted("source", checkpoint_notes(checkpoint, topology, uses_network=uses_network)),
        *noted("source", [] if shared_cores is None else [_cores(shared_cores, topology)]),
        *noted("optimizer", _costed_optimizers(rater, plan, uses_network)),
    )


def _is_quantized(plan: Sequence[ShardingOption]) -> bool:
    return any(serves(option.compute_kernel) for option in plan)


def _cores(shared: SharedCores, topology: Topology) -> str:
    hosts = " of a host" * (shared.on_host < topology.world_size)
    return (
        f"{shared.at_once:g} of {shared.on_host} ranks{hosts} can compute at once, since they share cores: the work of "
        "all counts"
    )


def _costed_optimizers(rater: PlanRater, plan: Sequence[ShardingOption], uses_network: bool) -> tuple[str, ...]:
    """Return a sentence on tables whose optimizer is costed as row-wise Adagrad, if there are any."""
    checkpoint, topology = rater.ranks.checkpoint, rater.ranks.topology
    unknown = {"other"}
    if uses_network and checkpoint.cost is not None:
        unknown = OPTIMIZERS.keys() - {*checkpoint.cost.optimizers, *checkpoint.known.corrections}
    optimizers = {fqn_of(option): rater.reader.table(option, topology).optimizer for option in plan}
    others = {name: optimizer for name, optimizer in optimizers.items() if optimizer in unknown}
    if not others:
        return ()
    return (
        f"{first_of(sorted(others))}: costed as with row-wise Adagrad, since no kernels of their optimizer are "
        "known" + ("; dreamshard calibrate measures Adagrad's" if "adagrad" in others.values() else ""),
    )


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
