# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sweeps over GPUs, their kind, batch size and bandwidths, offline: each point is a plan of its own.

job = Job(model=read_model("tables.json"), machine=Machine(ranks_per_host=8, gpu="h100"), batch_size=8192)
print(what_if(job, {"ranks": [4, 8, 16], "batch_size": [4096, 8192]}))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import DreamShardError, TaskError
from dreamshard_planner.offline.jobs import Job, PlannedJob
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report
from dreamshard_planner.search_space.kernels import memory_of
from dreamshard_planner.torchrec_components.plan_loader import JsonPlanLoader
from dreamshard_planner.workload.statistics import TableStatistics

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
    """What one plan costs."""

    axis: str
    value: float | str
    machine: str
    ranks: int
    batch_size: int
    """Of one rank."""
    total_ms: float
    """Of one step; infinite where nothing fits."""
    compute_ms: float
    """Of the slowest rank."""
    collectives_ms: float
    fullest: float
    """Share of the memory left for tables that they take on the fullest rank."""
    outside: int = 0
    """Tables whose weights are not all in device memory, but in the host's."""
    reason: str = ""
    """Why nothing fits."""

    @property
    def fits(self) -> bool:
        return math.isfinite(self.total_ms)

    @property
    def us_per_sample(self) -> float:
        """Microseconds per sample of all ranks: what scaling gains."""
        return self.total_ms * 1e3 / (self.ranks * self.batch_size)

    @classmethod
    def of(cls, axis: str, value: float | str, job: Job, found: Report | str) -> Point:
        """From a report, or from why nothing fits."""
        of_job = partial(cls, axis, value, job.machine.title, job.machine.ranks, job.batch_size)
        if isinstance(found, str):
            return of_job(math.inf, math.inf, math.inf, fullest=0.0, reason=found)
        chosen = found.chosen
        filled = [
            used / limit
            for entry in found.memory
            for used, limit in zip(entry.used_bytes, entry.limit_bytes, strict=True)
            if limit > 0
        ]
        return of_job(
            chosen.total_ms,
            max(chosen.rank_ms),
            chosen.collectives_ms,
            fullest=max(filled, default=0.0),
            outside=sum(memory_of(entry.kernel) != "device" for entry in found.tables),
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
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Replanning:
    """What planning again for newer statistics would gain."""

    keep_ms: float
    """Of the plan that was made with the older ones, as the newer ones have it."""
    again_ms: float
    """Of a plan made with the newer ones."""

    @property
    def gain(self) -> float:
        """Share of the cost that planning again takes away; not below 0."""
        return max(0.0, 1 - self.again_ms / self.keep_ms) if self.keep_ms > 0 else 0.0


def what_if(job: Job, vary: Mapping[str, Sequence[Any]], plan_file: Path | None = None) -> WhatIf:
    """Plan a job, and its variations one by one.

    Args:
        job: the present job.
        vary: values by a name of :data:`AXES`.
        plan_file: the job's present plan; without it, one is made.

    Raises:
        PlannerError: the job's own tables do not fit.
        TaskError: an unknown axis.
    """
    unknown = sorted(set(vary) - AXES.keys())
    if unknown:
        raise TaskError(f"nothing called {unknown[0]!r} varies; {', '.join(AXES)} do")
    present, refused = (job.plan(), ()) if plan_file is None else _as_filed(job, plan_file)
    report = present.report
    made: list[tuple[Job, Report | str]] = [(present.job, report)]
    sweeps = {axis: tuple(_point(axis, value, present, made) for value in values) for axis, values in vary.items()}
    return WhatIf(
        base=Point.of("", 0.0, job, report),
        cost_source=report.cost_source,
        sweeps=sweeps,
        notes=(*refused, *(note for note in report.notes if note.code != "stale")),  # of how files are read offline
    )


def _as_filed(job: Job, path: Path) -> tuple[PlannedJob, tuple[Note, ...]]:
    """A job with the plan of a file; with one made anew, and a note why, where that does not fit the job."""
    try:
        filed = replace(job, settings={**job.settings, "plan_loader": JsonPlanLoader(path)}).plan()
    except PlannerError as error:
        told = f"{path.name} is not the plan of the first line, which was made anew: {error}"
        return job.plan(), (Note("loaded", told),)
    return replace(filed, job=job), ()


def _point(axis: str, value: Any, present: PlannedJob, made: list[tuple[Job, Report | str]]) -> Point:
    """Plan the present job at another value, unless that job was made before; say why if nothing fits."""
    try:
        job = AXES[axis](present.job, value)
    except DreamShardError as error:
        return Point.of(axis, value, present.job, str(error))
    found = next((report for known, report in made if known == job), None)
    if found is None:
        try:
            found = _cheaper(job.plan(), present)
        except (PlannerError, DreamShardError) as error:
            found = " ".join(str(error).split())
        made.append((job, found))
    return Point.of(axis, value, job, found)


def _cheaper(planned: PlannedJob, present: PlannedJob) -> Report:
    """Return the report of the new plan, or of the present one if that fits and costs less: a search may miss it."""
    report = planned.report
    if _ranks(planned.job) != _ranks(present.job):
        return report
    if planned.planner.predict(present.plan).total_ms >= report.chosen.total_ms:
        return report
    kept = planned.planner.saved_plan(present.plan).report()
    fits = all(max(map(sub, entry.used_bytes, entry.limit_bytes)) <= 0 for entry in kept.memory)
    return kept if fits else report


def _ranks(job: Job) -> tuple[Any, ...]:
    """Fields that must match for one job to take the other's plan."""
    return job.model, job.settings, job.machine.device, job.machine.ranks_per_host, job.machine.hosts


def _with_gpu(machine: Machine, gpu: str) -> Machine:
    """As many of another model, with its own memory and links; a network between hosts that was given stays."""
    alike = replace(machine, memory_bytes=None, memory_bytes_per_s=None, host_bytes_per_s=None, intra_bytes_per_s=None)
    return replace(alike, gpu=gpu.lower(), cards=())


def replanning(job: Job, before: TableStatistics | SavedPlan, after: TableStatistics) -> Replanning:
    """What a plan, or one made with the statistics ``before``, costs by those ``after``, and what a new one would.

    Raises:
        PlannerError: the tables do not fit.
    """
    kept = (
        before if isinstance(before, SavedPlan) else replace(job, model=job.model.with_statistics(before)).plan().plan
    )
    again = replace(job, model=job.model.with_statistics(after)).plan()
    return Replanning(again.planner.predict(kept).total_ms, again.report.chosen.total_ms)
