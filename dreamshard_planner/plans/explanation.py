# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Why a rank is slow: what it computes, which tables cost most there, and what each change would gain."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dreamshard_planner.support.formatting import first_of, short, short_words, size_in_words

MAX_NAMED = 4
"""Tables of a fused group named in the text."""


@dataclass(frozen=True)
class GroupCost:
    """One fused kernel of the rank."""

    label: str
    """Module, sharding type, data type."""
    tables: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    alone_ms: float
    """What its shards would cost in a kernel each, summed: fusion is what lies between."""


@dataclass(frozen=True)
class Change:
    """One table sharded another way, all others as they are."""

    how: str
    """In words."""
    total_ms: float
    """Of the whole plan, predicted."""
    gain_ms: float
    """What the plan takes less; below zero where it takes more."""


@dataclass(frozen=True)
class TableCost:
    """What a table costs on the rank."""

    table: str
    sharding: str
    """In words."""
    marginal_ms: float
    """Compute that the rank would be spared without it."""
    alone_ms: float
    """What its shards there would cost alone."""
    bytes: int
    """Of memory on the rank, all kinds."""
    leaving: Change | None
    """What there is of it on the rank, on the best other rank with room; None where there is none."""
    splitting: Change | None
    """The best way to shard it in more parts, or in parts of another type; None where none is allowed or fits."""
    caching: Change | None
    """Its rows in unified memory behind a cache; None where that is not allowed, not there, or so already."""
    why_staying: str = ""
    """Why none of it can leave the rank, where ``leaving`` is None."""
    why_whole: str = ""
    """Why it is not split further, where nothing splits it."""


@dataclass(frozen=True)
class RankMemory:
    """One kind of memory of the rank, in bytes."""

    kind: str
    used: int
    limit: int
    """What the storage reservation left."""
    reserved: int
    """What it took."""


@dataclass(frozen=True)
class Explanation:
    """What ``DreamShardPlanner.explain`` found."""

    rank: int
    headline: str
    """In words: whether one table is the bottleneck."""
    bottleneck: str | None
    """That table."""
    total_ms: float
    """Of the plan: the slowest rank's compute and all collectives."""
    rank_ms: tuple[float, ...]
    """Compute of every rank."""
    collectives_ms: float
    waiting_ms: float
    """How long the rank waits for the slowest one."""
    groups: tuple[GroupCost, ...]
    """Fused kernels of the rank, the longest first."""
    tables: tuple[TableCost, ...]
    """The costliest on the rank, with what changes of each would gain."""
    other_tables: int
    """On the rank beside these."""
    memory: tuple[RankMemory, ...]
    cost_source: str
    """Of compute."""
    collectives_source: str
    assumptions: tuple[str, ...] = ()
    """What these figures rest on that nobody said."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        own_ms, mean_ms = self.rank_ms[self.rank], sum(self.rank_ms) / len(self.rank_ms)
        lines = [
            self.headline,
            *(f"Note: {assumption}." for assumption in self.assumptions),
            f"Rank {self.rank} of {len(self.rank_ms)}: {own_ms:.3f} ms of compute (slowest {max(self.rank_ms):.3f}, "
            f"mean {mean_ms:.3f}, fastest {min(self.rank_ms):.3f}), {self.waiting_ms:.3f} ms of waiting; collectives "
            f"{self.collectives_ms:.3f} ms, in all {self.total_ms:.3f}.",
        ]
        labels = [short_words(group.label) for group in self.groups]
        wide = max([20, *map(len, labels)])
        lines.append(
            f"{'fused kernels, in ms':<{wide}}{'tables':>8}{'forward':>9}{'backward':>10}"
            f"{'if each table had its own':>27}"
        )
        lines += [
            f"{label:<{wide}}{len(group.tables):>8}{group.forward_ms:>9.3f}{group.backward_ms:>10.3f}"
            f"{group.alone_ms:>27.3f}  {first_of([short(name.rpartition('.')[2]) for name in group.tables], MAX_NAMED)}"
            for label, group in zip(labels, self.groups, strict=True)
        ]
        if self.tables:
            width = max(20, *(len(short(table.table)) for table in self.tables))
            lines.append(f"{'costliest tables':<{width}}{'ms it adds':>12}{'ms by itself':>14}{'memory':>12}  sharded")
            for table in self.tables:
                lines.append(
                    f"{short(table.table):<{width}}{table.marginal_ms:>12.3f}{table.alone_ms:>14.3f}"
                    f"{size_in_words(table.bytes):>12}  {table.sharding}"
                )
                lines.append(f"    moved away: {_gain(table.leaving) or f'not possible, {table.why_staying}'}")
                lines.append(f"    split further: {_gain(table.splitting) or f'not possible, {table.why_whole}'}")
                lines += [f"    cached: {_gain(table.caching)}"] if table.caching else []
        lines += [f"... and {self.other_tables} more tables on this rank"] if self.other_tables else []
        lines += [
            f"{memory.kind}: {size_in_words(memory.used)} of {size_in_words(max(0, memory.limit))} used; the storage "
            f"reservation took {size_in_words(memory.reserved)}."
            for memory in self.memory
        ]
        return short_words("\n".join([*lines, f"Compute: {self.cost_source}. Collectives: {self.collectives_source}."]))


def _gain(change: Change | None) -> str:
    if change is None:
        return ""
    than_now = "faster" if change.gain_ms >= 0 else "slower"
    return f"{change.how}: {abs(change.gain_ms):.3f} ms {than_now}, {change.total_ms:.3f} ms a step"
