# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What holds a step up, and what would help: the first line of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dreamshard_planner.plans.report import ReportEntry, TableEntry

COLLECTIVES_DOMINATE = 0.5
"""Share of the cost from which collectives are the bottleneck."""
LEVEL = 0.02
"""How far the slowest rank may be above the mean, as a share, with ranks still called level."""
ONE_TABLE = 0.5
"""Share of the slowest rank's compute from which one table is the bottleneck."""
ESTIMATE_PARTS = ("fwd_compute", "fwd_comms", "bwd_compute", "bwd_comms", "prefetch_compute")
"""Parts of TorchRec's estimate of a rank: compute and collectives together."""
_FOR_COLLECTIVES = (
    "Fewer hosts, faster links, smaller outputs (dims, 16-bit collectives) or a smaller batch would help; "
    "moving tables would not"
)


def verdict(
    chosen: ReportEntry,
    tables: Sequence[TableEntry],
    collectives: Sequence[tuple[str, float]],
    averaging_ms: float = 0.0,
    estimate_ms: Mapping[str, float] | None = None,
) -> str:
    """A sentence or two on the chosen plan.

    Args:
        chosen: its predicted cost.
        tables: how each is sharded, with what it would cost alone.
        collectives: milliseconds of each, both passes together.
        averaging_ms: of the compute, what averaging replicas of other sharding groups takes.
        estimate_ms: of the slowest rank, by :data:`ESTIMATE_PARTS`, where costs are TorchRec's estimates.
    """
    if not chosen.total_ms > 0:
        return "Nothing to compute"
    if averaging_ms > COLLECTIVES_DOMINATE * chosen.total_ms:
        return (
            f"Bottleneck: averaging replicas, {averaging_ms / chosen.total_ms:.0%} of {chosen.total_ms:.3f} ms. A "
            "longer sync_interval or larger sharding groups would help; moving tables would not"
        )
    if collectives_dominate(chosen):
        name, ms = max(collectives, key=lambda collective: collective[1], default=("collectives", 0.0))
        return (
            f"Bottleneck: collectives, {chosen.collectives_ms / chosen.total_ms:.0%} of {chosen.total_ms:.3f} ms"
            f" ({name}: {ms:.3f} ms). {_FOR_COLLECTIVES}"
        )
    rank, mean_ms = chosen.slowest, sum(chosen.rank_ms) / len(chosen.rank_ms)
    compute_ms = chosen.rank_ms[rank]
    table = _heaviest(tables, rank)
    if len(chosen.rank_ms) > 1 and table is not None:
        alone_ms = table.on_rank_ms(rank)
        if alone_ms > ONE_TABLE * compute_ms and alone_ms > mean_ms * (1 + LEVEL):
            return (
                f"Bottleneck: table {table.name!r} ({table.label}), {alone_ms:.3f} of the {compute_ms:.3f} ms that "
                f"rank {rank} {'takes' if estimate_ms else 'computes'}; every rank would take {mean_ms:.3f} ms if all "
                "were level. Splitting it, or fewer lookups of it, could help: dreamshard explain rates other ways"
            )
    above = max(0.0, compute_ms / mean_ms - 1)
    if above <= LEVEL:
        level = f"on level ranks (the slowest is {above:.1%} above the mean)"
        where = level if len(chosen.rank_ms) > 1 else "on one rank"
        total = f"{chosen.total_ms:.3f} ms, {where}"
        sent_ms = sum(ms for name, ms in (estimate_ms or {}).items() if name.endswith("_comms"))
        if sent_ms > COLLECTIVES_DOMINATE * chosen.total_ms:
            return f"Bottleneck: collectives, {sent_ms / chosen.total_ms:.0%} of {total}. {_FOR_COLLECTIVES}"
        return (
            f"Bottleneck: compute, {(compute_ms - sent_ms) / chosen.total_ms:.0%} of {total}. "
            "Fewer lookups, smaller dims, a smaller batch or more ranks would help; moving tables would not"
        )
    return (
        f"Bottleneck: rank {rank}, {above:.0%} above the mean of {mean_ms:.3f} ms, with no table that is most of it. "
        "dreamshard explain rates changes of its costliest tables"
    )


def collectives_dominate(cost: ReportEntry) -> bool:
    """Whether they take most of a step, however its tables are placed."""
    return cost.collectives_ms > COLLECTIVES_DOMINATE * cost.total_ms


def _heaviest(tables: Sequence[TableEntry], rank: int) -> TableEntry | None:
    """The table whose shards on a rank would take longest alone."""
    here = [table for table in tables if rank in table.ranks]
    return max(here, key=lambda table: table.on_rank_ms(rank), default=None)
