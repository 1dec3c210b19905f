# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sweeps over GPUs, batch sizes and bandwidths, offline. Each point is a plan, or the present one if that is cheaper.

job = Job(model=read_model("tables.json"), machine=Machine(ranks_per_host=8, gpu="h100"), batch_size=8192)
print(what_if(job, {"ranks": [4, 8, 16], "batch_size": [4096, 8192]}))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import DreamShardError, TaskError
from dreamshard_planner.offline.jobs import Job
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Note, Report

AXES: dict[str, Callable[[Job, Any], Job]] = {
    "ranks": lambda job, value: replace(job, machine=replace(job.machine, ranks_per_host=value)),
    "hosts": lambda job, value: replace(job, machine=replace(job.machine, hosts=value)),
    "batch_size": lambda job, value: replace(job, batch_size=value),
    "gpu": lambda job, value: replace(job, machine=_with_gpu(job.machine, value)),
    "intra_bytes_per_s": lambda job, value: replace(job, machine=replace(job.machine, intra_bytes_per_s=value)),
    "inter_bytes_per_s": lambda job, value: replace(job, machine=replace(job.machine, inter_bytes_per_s=value)),
    "hot_rows_bytes": lambda job, value: replace(job, settings={**job.settings, "hot_rows_bytes": value}),
}
"""Function that sets an axis of a job, by its name. ``ranks`` counts the ranks of a host."""


@dataclass(frozen=True)
class Point:
    """Cost of one plan."""

    axis: str
    value: float | str
    machine: str
    ranks: int
    batch_size: int
    """Samples of one rank."""
    total_ms: float = math.inf
    """Cost of one step; infinite if nothing fits."""
    compute_ms: float = math.inf
    """Compute of the slowest rank."""
    collectives_ms: float = math.inf
    fullest: float = 0.0
    """Used share of the memory left for tables, on the fullest rank."""
    reason: str = ""
    """Reason if nothing fits."""

    @property
    def fits(self) -> bool:
        return math.isfinite(self.total_ms)

    @property
    def us_per_sample(self) -> float:
        """Microseconds per sample of all ranks."""
        return self.total_ms * 1e3 / (self.ranks * self.batch_size)

    @classmethod
    def of(cls, axis: str, value: float | str, job: Job, found: Report | str) -> Point:
        """Make a point of a report, or of the reason why nothing fits."""
        place = (axis, value, job.machine.title, job.machine.ranks, job.batch_size)
        if isinstance(found, str):
            return cls(*place, reason=found)
        fullest = max((share for entry in found.memory for share in entry.shares), default=0.0)
        chosen = found.chosen
        return cls(*place, chosen.total_ms, max(chosen.rank_ms), chosen.collectives_ms, fullest)


@dataclass(frozen=True)
class WhatIf:
    """The present point and the sweeps around it."""

    base: Point
    cost_source: str
    sweeps: dict[str, tuple[Point, ...]]
    """By axis."""
    notes: tuple[Note, ...] = ()


def what_if(
    job: Job, vary: Mapping[str, Sequence[Any]], saved: SavedPlan | None = None, effort: str = "quick"
) -> WhatIf:
    """Plan a job and its variations, one by one.

    Args:
        job: the present job.
        vary: values by a name of :data:`AXES`.
        saved: the job's present plan; without it, one is made.
        effort: of each search.

    Raises:
        PlannerError: the job's own tables do not fit, or the saved plan is not of its tables and ranks.
        TaskError: an unknown axis.
    """
    unknown = sorted(set(vary) - AXES.keys())
    if unknown:
        raise TaskError(f"nothing called {unknown[0]!r} varies; {', '.join(AXES)} do")
    job = replace(job, settings={**job.settings, "effort": effort})
    present = job.plan().saved_plan() if saved is None else job.read().saved_plan(saved)
    report = present.report()
    sweeps = {axis: tuple(_point(axis, value, job, present) for value in values) for axis, values in vary.items()}
    return WhatIf(Point.of("", 0.0, job, report), report.cost_source, sweeps, report.notes)


def _point(axis: str, value: Any, present: Job, plan: SavedPlan) -> Point:
    """Plan the present job at another value; its present plan stays if it fits there and a new one is no cheaper."""
    job = present
    try:
        job = AXES[axis](present, value)
        planner = job.plan()
        point = Point.of(axis, value, job, planner.report())
        same_ranks = (job.machine.hosts, job.machine.ranks) == (present.machine.hosts, present.machine.ranks)
        if same_ranks and axis != "hot_rows_bytes":
            kept = Point.of(axis, value, job, planner.saved_plan(plan).report())
            if kept.fullest <= 1 and kept.total_ms < point.total_ms:
                return kept
        return point
    except (PlannerError, DreamShardError, ValueError) as error:
        return Point.of(axis, value, job, " ".join(str(error).split()))


def _with_gpu(machine: Machine, gpu: str) -> Machine:
    """Return as many of another model, with its own memory and links; a given network between hosts stays."""
    alike = replace(machine, memory_bytes=None, memory_bytes_per_s=None, host_bytes_per_s=None, intra_bytes_per_s=None)
    return replace(alike, gpu=str(gpu).lower())
