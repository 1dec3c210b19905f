# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What was chosen and why, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dreamshard_planner.cost.model import PlacementCost, PlacementCosts
from dreamshard_planner.placement.place import Contender, Placement

MAX_RANKS_SHOWN = 8


@dataclass(frozen=True)
class ReportEntry:
    """Predicted cost of one plan."""

    name: str
    feasible: bool
    total_ms: float
    """Overall: slowest rank's compute plus both collectives; infinite where infeasible."""
    rank_ms: tuple[float, ...]
    """Compute (forward + backward) per rank."""
    forward_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    collectives_ms: float

    @classmethod
    def of(cls, name: str, costs: PlacementCosts | None) -> ReportEntry:
        """From the costs of one plan, None for a method that found none."""
        if costs is None:
            return cls(name, False, float("inf"), (), (), (), float("inf"))
        return cls(
            name=name,
            feasible=True,
            total_ms=float(costs.overall_ms_B[0]),
            rank_ms=tuple(costs.device_ms_BD[0].tolist()),
            forward_ms=tuple(costs.forward_ms_BD[0].tolist()),
            backward_ms=tuple(costs.backward_ms_BD[0].tolist()),
            collectives_ms=float(costs.forward_collective_ms_B[0] + costs.backward_collective_ms_B[0]),
        )


@dataclass(frozen=True)
class Report:
    """Predicted costs of the chosen plan and of the plans it was chosen from."""

    chosen: ReportEntry
    rivals: tuple[ReportEntry, ...]
    """TorchRec's own plan, the policy's first draft, and each greedy rule."""
    cost_source: str
    """Of compute."""
    collectives_source: str
    candidates: int
    """Moves and swaps that the search evaluated."""
    notes: tuple[str, ...] = ()
    measured: ReportEntry | None = None
    """The chosen plan with its compute as measured on this machine, where ``refine="measure"`` chose it."""
    measured_before: ReportEntry | None = None
    """The plan that prediction would have chosen, measured beside it."""

    @classmethod
    def of(cls, placement: Placement, cost: PlacementCost) -> Report:
        """From a finished placement and the cost by which it was chosen."""

        def entry(contender: Contender) -> ReportEntry:
            return ReportEntry.of(contender.name, contender.costs)

        notes = (*cost.notes(placement.chosen.assignment_S), *placement.notes)
        if placement.cut_short:
            notes = (*notes, "the search was cut short by search_seconds; more time may give another plan")
        rivals = tuple(sorted((entry(rival) for rival in placement.rivals), key=lambda rival: rival.total_ms))
        chosen = ReportEntry.of("dreamshard", placement.chosen.costs)
        sources = str(cost.compute.source), cost.collectives.source
        if placement.refined is None:
            return cls(chosen, rivals, *sources, placement.candidates, notes)
        refined = placement.refined
        notes = (*notes, f"chosen by measuring {refined.plans} plans, {refined.sets} fused groups, on this machine")
        before = ReportEntry.of("before", refined.first)
        measured = ReportEntry.of("dreamshard", refined.measured)
        return cls(chosen, rivals, *sources, placement.candidates, notes, measured, before)

    def rival(self, name: str) -> ReportEntry:
        """The rival of that name; KeyError lists the known ones."""
        for entry in self.rivals:
            if entry.name == name:
                return entry
        raise KeyError(f"no rival {name!r}; there are {', '.join(entry.name for entry in self.rivals)}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON; the infinite costs of infeasible rivals, which JSON lacks, become None."""

        def entry(values: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: None if value == float("inf") else value for name, value in values}

        return asdict(self, dict_factory=entry)

    def __str__(self) -> str:
        lines = [
            f"Predicted milliseconds of embedding work per training step. Compute: {self.cost_source}.",
            f"Collectives: {self.collectives_source}.",
            f"{'plan':<20}{'total':>10}{'vs chosen':>11}{'collectives':>13}   compute per rank",
        ]
        lines += [_line(entry, self.chosen.total_ms) for entry in (self.chosen, *self.rivals)]
        if self.measured is not None and self.measured_before is not None:
            lines.append("Measured on this machine instead of predicted:")
            lines += [_line(entry, self.measured.total_ms) for entry in (self.measured, self.measured_before)]
        lines.append(f"The search evaluated {self.candidates:,} moves and swaps.")
        lines += [f"Note: {note}." for note in self.notes]
        return "\n".join(lines)


def _line(entry: ReportEntry, chosen_ms: float) -> str:
    if not entry.feasible:
        return f"{entry.name:<20}{'infeasible':>10}"
    shown = " ".join(f"{value:.3f}" for value in entry.rank_ms[:MAX_RANKS_SHOWN])
    if len(entry.rank_ms) > MAX_RANKS_SHOWN:
        shown += f" ... max {max(entry.rank_ms):.3f} min {min(entry.rank_ms):.3f} of {len(entry.rank_ms)} ranks"
    ratio = entry.total_ms / chosen_ms if chosen_ms > 0 else 1.0
    return f"{entry.name:<20}{entry.total_ms:>10.3f}{ratio:>11.3f}{entry.collectives_ms:>13.3f}   {shown}"
