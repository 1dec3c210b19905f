# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sweeps over GPUs, their kind, batch size and bandwidths, offline: each point is a quickly searched plan of its own.

job = Job(model=read_model("tables.json"), machine=Machine(ranks_per_host=8, gpu="h100"), batch_size=8192)
print(what_if(job, {"ranks": [4, 8, 16], "batch_size": [4096, 8192]}))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import DreamShardError, TaskError
from dreamshard_planner.offline.jobs import Job
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report

AXES: dict[str, Callable[[Job, Any], Job]] = {
    "ranks": lambda job, value: replace(job, machine=replace(job.machine, ranks_per_host=value)),
    "hosts": lambda job, value: replace(job, machine=replace(job.machine, hosts=value)),
    "batch_size": lambda job, value: replace(job, batch_size=value),
    "gpu": lambda job, value: replace(job, machine=_with_gpu(job.machine, value)),
    "intra_bytes_per_s": lambda job, value: replace(job, machine=replace(job.machine, intra_bytes_per_s=value)),
    "inter_bytes_per_s": lambda job, value: replace(job, machine=replace(job.machine, inter_bytes_per_s=value)),
}
"""Each axis, with the job at another value of it. ``ranks`` counts those of each host."""


@dataclass(frozen=True)
class Point:
    """Cost of one plan."""

    axis: str
    value: float | str
    machine: str
    ranks: int
    batch_size: int
    """Of one rank."""
    total_ms: float = math.inf
    """Of one step; infinite if nothing fits."""
    compute_ms: float = math.inf
    """Of the slowest rank."""
    collectives_ms: float = math.inf
    fullest: float = 0.0
    """Share of the memory left for tables that they take on the fullest rank."""
    reason: str = ""
    """Why nothing fits."""

    @property
    def fits(self) -> bool:
        return math.isfinite(self.total_ms)

    @property
    def us_per_sample(self) -> float:
        """Microseconds per sample of all ranks: the gain of scaling."""
        return self.total_ms * 1e3 / (self.ranks * self.batch_size)

    @classmethod
    def of(cls, axis: str, value: float | str, job: Job, found: Report | str) -> Point:
        """Make it from a report, or from the reason why nothing fits."""
        point = cls(axis, value, job.machine.title, job.machine.ranks, job.batch_size)
        if isinstance(found, str):
            return replace(point, reason=found)
        chosen = found.chosen
        return replace(
            point,
            total_ms=chosen.total_ms,
            compute_ms=max(chosen.rank_ms),
            collectives_ms=chosen.collectives_ms,
            fullest=max(_filled(found), default=0.0),
        )


@dataclass(frozen=True)
class WhatIf:
    """The present point and the sweeps around it."""

    base: Point
    cost_source: str
    sweeps: dict[str, tuple[Point, ...]]
    """By axis."""
    notes: tuple[Note, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Replanning:
    """Gain of planning again for newer statistics."""

    keep_ms: float
    """Cost of the plan made with the older statistics, by the newer ones."""
    again_ms: float
    """Cost of a plan made with the newer ones."""

    @property
    def gain(self) -> float:
        """Share of the cost that planning again takes away; not below 0."""
        return max(0.0, 1 - self.again_ms / self.keep_ms) if self.keep_ms > 0 else 0.0


def what_if(
    job: Job, vary: Mapping[str, Sequence[Any]], plan_file: Path | None = None, effort: str = "quick"
) -> WhatIf:
    """Plan a job, and its variations one by one.

    Args:
        job: the present job.
        vary: values by a name of :data:`AXES`.
        plan_file: the job's present plan; without it, one is made.
        effort: of each search.

    Raises:
        PlannerError: the job's own tables do not fit, or the plan of the file is not of its tables and ranks.
        TaskError: an unknown axis.
    """
    unknown = sorted(set(vary) - AXES.keys())
    if unknown:
        raise TaskError(f"nothing called {unknown[0]!r} varies; {', '.join(AXES)} do")
    job = replace(job, settings={**job.settings, "effort": effort})
    plan: ShardingPlan | SavedPlan
    if plan_file is None:
        planned = job.plan()
        plan, report = planned.plan, planned.report
    else:
        plan = SavedPlan.load(plan_file)
        report = job.read().saved_plan(plan).report()
    sweeps = {axis: tuple(_point(axis, value, job, plan) for value in values) for axis, values in vary.items()}
    return WhatIf(Point.of("", 0.0, job, report), report.cost_source, sweeps, report.notes)


def _point(axis: str, value: Any, present: Job, plan: ShardingPlan | SavedPlan) -> Point:
    """Plan the present job at another value; keep the present plan if that fits and a new one costs no less."""
    try:
        job = AXES[axis](present, value)
    except DreamShardError as error:
        return Point.of(axis, value, present, str(error))
    try:
        planned = job.plan()
        report = planned.report
        if _ranks(job) == _ranks(present):
            kept = planned.planner.saved_plan(plan).report()
            if kept.chosen.total_ms < report.chosen.total_ms and max(_filled(kept), default=0.0) <= 1:
                report = kept
    except (PlannerError, DreamShardError) as error:
        return Point.of(axis, value, job, " ".join(str(error).split()))
    return Point.of(axis, value, job, report)


def _filled(report: Report) -> list[float]:
    """Return the used share of each rank's memory, of each kind."""
    return [
        used / max(1, limit)
        for entry in report.memory
        for used, limit in zip(entry.used_bytes, entry.limit_bytes, strict=True)
    ]


def _ranks(job: Job) -> tuple[Any, ...]:
    """Return what must match for one job to take the other's plan."""
    return job.machine.device, job.machine.ranks_per_host, job.machine.hosts


def _with_gpu(machine: Machine, gpu: str) -> Machine:
    """As many of another model, with its own memory and links; a network between hosts that was given stays."""
    alike = replace(machine, memory_bytes=None, memory_bytes_per_s=None, host_bytes_per_s=None, intra_bytes_per_s=None)
    return replace(alike, gpu=gpu.lower(), cards=())


def replanning(job: Job, kept: SavedPlan) -> Replanning:
    """Compare the cost of a plan that runs with a new one's, both for the job and by its statistics.

    Raises:
        PlannerError: the tables do not fit.
    """
    again = job.plan()
    return Replanning(again.planner.predict(kept).total_ms, again.report.chosen.total_ms)
