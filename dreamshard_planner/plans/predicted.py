# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Predicted costs as plan files hold them, in milliseconds of embedding work per training step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.report import MemoryEntry, Report, ReportEntry, TableEntry
from dreamshard_planner.support.documents import STRICT, Amount, Count


@dataclass(frozen=True)
class PlanCost:
    """Of one plan."""

    __pydantic_config__: ClassVar = STRICT
    total_ms: Amount
    collectives_ms: Amount
    forward_ms: tuple[Amount, ...]
    """Compute of each rank."""
    backward_ms: tuple[Amount, ...]

    @property
    def rank_ms(self) -> tuple[float, ...]:
        """Compute of each rank, forward and backward."""
        return tuple(map(sum, zip(self.forward_ms, self.backward_ms, strict=True)))

    @classmethod
    def of(cls, entry: ReportEntry | None) -> PlanCost | None:
        """To the nanosecond; None where there is no such plan."""
        if entry is None or not entry.feasible:
            return None
        forward_ms, backward_ms = (tuple(round(ms, 6) for ms in each) for each in (entry.forward_ms, entry.backward_ms))
        return PlanCost(round(entry.total_ms, 6), round(entry.collectives_ms, 6), forward_ms, backward_ms)

    def entry(self, name: str) -> ReportEntry:
        """For a report."""
        return ReportEntry(
            name, True, self.total_ms, self.rank_ms, self.forward_ms, self.backward_ms, self.collectives_ms
        )


@dataclass(frozen=True)
class RivalCost:
    """Of a plan that the chosen one was compared with."""

    __pydantic_config__: ClassVar = STRICT
    name: str
    cost: PlanCost | None
    """None where no plan of that name keeps within memory and rules."""

    @property
    def entry(self) -> ReportEntry:
        """For a report."""
        return ReportEntry.of(self.name, None) if self.cost is None else self.cost.entry(self.name)


@dataclass(frozen=True)
class Predicted(PlanCost):
    """All that a report says of a plan but how its tables are sharded. What has a default is missing from files of
    version 1; a plan that was given, and not searched for, has no rivals."""

    __pydantic_config__: ClassVar = STRICT
    cost_source: str
    """Of compute."""
    collectives_source: str
    memory: tuple[MemoryEntry, ...]
    """What tables take on every rank, and what the storage reservation left."""
    rivals: tuple[RivalCost, ...] = ()
    """The cheapest first."""
    alone_ms: dict[str, Amount | tuple[Amount, ...]] = field(default_factory=dict)
    """What the shards of each table would cost alone on their ranks: each of them, or their sum where they are alike,
    as older files have it of all."""
    each_collective_ms: dict[str, Amount] = field(default_factory=dict)
    """Both passes together."""
    candidates: Count = 0
    """Moves and swaps that the search evaluated."""
    reshards: Count = 0
    """Changes of how a table is split that it evaluated."""
    measured: PlanCost | None = None
    """The plan with its compute as measured where it was made, if it was."""
    measured_before: PlanCost | None = None
    """The plan that prediction would have chosen, measured beside it."""
    notes: tuple[Note, ...] = ()

    @classmethod
    def of_report(cls, report: Report) -> Predicted:
        """What a report says."""
        return cls(
            **vars(PlanCost.of(report.chosen)),
            cost_source=report.cost_source,
            collectives_source=report.collectives_source,
            memory=report.memory,
            rivals=tuple(RivalCost(rival.name, PlanCost.of(rival)) for rival in report.rivals),
            alone_ms={table.name: _alone_ms(table) for table in report.tables},
            each_collective_ms={name: round(ms, 6) for name, ms in report.collectives},
            candidates=report.candidates,
            reshards=report.reshards,
            measured=PlanCost.of(report.measured),
            measured_before=PlanCost.of(report.measured_before),
            notes=report.notes,
        )

    def shard_ms(self, table: str, shards: int) -> tuple[float, ...]:
        """What each of a table's shards would cost alone on its rank; NaN where the file does not say."""
        known = self.alone_ms.get(table, math.nan)
        return known if isinstance(known, tuple) else (known / shards,) * shards


def _alone_ms(table: TableEntry) -> float | tuple[float, ...]:
    alike = max(table.shard_ms, default=0.0) - min(table.shard_ms, default=0.0) < 1e-6
    return round(table.alone_ms, 6) if alike else tuple(round(ms, 6) for ms in table.shard_ms)
