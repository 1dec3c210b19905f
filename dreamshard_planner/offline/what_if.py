# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What another machine, batch or table would cost: each answer is a plan of its own, offline.

job = Job(model=read_model("tables.json"), machine=Machine(ranks_per_host=8, gpu="h100"), batch_size=8192)
print(what_if(job, {"ranks": [4, 8, 16], "batch_size": [4096, 8192]}))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType

from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import DreamShardError, TaskError
from dreamshard_planner.offline.jobs import Job, PlannedJob
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report
from dreamshard_planner.problem.sharding_groups import ShardingGroups
from dreamshard_planner.search_space.kernels import CACHING, memory_of
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.torchrec_components.plan_loader import JsonPlanLoader
from dreamshard_planner.workload.statistics import TableStatistics

AXES: dict[str, Callable[[Job, Any], Job]] = {
    "ranks": lambda job, value: replace(job, machine=replace(job.machine, ranks_per_host=value)),
    "hosts": lambda job, value: replace(job, machine=replace(job.machine, hosts=value)),
    "batch_size": lambda job, value: replace(job, batch_size=value),
    "gpu": lambda job, value: replace(job, machine=_with_gpu(job.machine, value)),
    "memory_bytes": lambda job, value: replace(job, machine=replace(job.machine, memory_bytes=value)),
    "intra_bytes_per_s": lambda job, value: replace(job, machine=replace(job.machine, intra_bytes_per_s=value)),
    "inter_bytes_per_s": lambda job, value: replace(job, machine=replace(job.machine, inter_bytes_per_s=value)),
    "sharding_group": lambda job, value: _grouped(job, value),
}
"""What may vary, and a job with another value of it. ``ranks`` are those of each host."""
CANDIDATES = 16
"""Tables of which the one that hurts most is found: the costliest, those of the slowest rank first."""
HURTS = 5e-3
"""Share of the cost that a plan must be spared without a table for it to be worth changing."""
MAX_HOSTS = 64
"""Up to which the smallest machine is looked for."""
Step = Callable[[str], Any]
"""Told of every plan, before it is made."""
Ready = Callable[["Point"], Any]
"""Told what a plan costs, as soon as it is made."""


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
class Remedy:
    """One thing to do to one table, and what the best plan costs then."""

    what: str
    total_ms: float
    """Infinite where that cannot be planned."""
    gain_ms: float
    reason: str = ""
    """Why it cannot."""


@dataclass(frozen=True)
class WorstTable:
    """The table that hurts most."""

    table: str
    sharding: str
    ranks: tuple[int, ...]
    without_ms: float
    """Cost of the plan, were the table not there."""
    remedies: tuple[Remedy, ...]
    """Best first; none where the plan costs as much without the table, as that of level ranks does."""


@dataclass(frozen=True)
class WhatIf:
    """What :func:`what_if` found."""

    base: Point
    cost_source: str
    sweeps: dict[str, tuple[Point, ...]] = field(default_factory=dict)
    """By axis."""
    smallest: Point | None = None
    """The smallest machine that the tables fit on, be it with some in host memory; None where none was found, or asked
    for."""
    smallest_on_device: Point | None = None
    """The same with all of them in device memory."""
    worst: WorstTable | None = None
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


class Plans:
    """The report of each job's best plan, which is made once; or why there is none.

    Args:
        step: told of every plan, before it is made.
        ready: told what it costs.
        present: what is planned now. A plan that fits still is not passed over for a dearer one.
    """

    def __init__(
        self,
        step: Step = lambda what: None,
        present: PlannedJob | None = None,
        ready: Ready = lambda point: None,
    ) -> None:
        self._step, self._present, self._ready = step, present, ready
        self._made: list[tuple[Job, Report | str]] = []
        if present is not None:
            self._made.append((present.job, present.report))

    def point(self, axis: str, value: float | str, job: Job) -> Point:
        """What a job costs, or why it does not fit; its model is as it was when it was planned before."""
        known = next((made for known, made in self._made if known == job), None)
        if known is not None:
            return Point.of(axis, value, job, known)
        self._step(f"{axis} {value if isinstance(value, str) else format(value, ',')}")
        try:
            found: Report | str = self._cheaper(job.plan())
        except (PlannerError, DreamShardError) as error:
            found = " ".join(str(error).split())
        self._made.append((job, found))
        point = Point.of(axis, value, job, found)
        self._ready(point)
        return point

    def varied(self, axis: str, value: Any, job: Job) -> Point:
        """The same of a job with another value of an axis, where there is such a machine."""
        try:
            changed = AXES[axis](job, value)
        except DreamShardError as error:
            return Point.of(axis, value, job, str(error))
        return self.point(axis, value, changed)

    def _cheaper(self, planned: PlannedJob) -> Report:
        """Of the plan, or of the present one, which a search may miss."""
        report, present = planned.report, self._present
        if present is None or _ranks(planned.job) != _ranks(present.job):
            return report
        if planned.planner.predict(present.plan).total_ms >= report.chosen.total_ms:
            return report
        kept = planned.planner.saved_plan(present.plan).report()
        fits = all(max(map(sub, entry.used_bytes, entry.limit_bytes)) <= 0 for entry in kept.memory)
        return kept if fits else report


def _ranks(job: Job) -> tuple[Any, ...]:
    """What two jobs must have alike for one to take the other's plan."""
    return job.model, job.settings, job.machine.device, job.machine.ranks_per_host, job.machine.hosts


def what_if(
    job: Job,
    vary: Mapping[str, Sequence[Any]] | None = None,
    smallest: bool = True,
    worst: bool = True,
    step: Step = lambda what: None,
    plan_file: Path | None = None,
    ready: Ready = lambda point: None,
) -> WhatIf:
    """Plan a job, and its variations one by one.

    Args:
        job: what is planned now.
        vary: values by a name of :data:`AXES`.
        smallest: also look for the smallest machine that fits.
        worst: also look for the table that hurts most, and what would help it.
        step: called before every plan, with what it is of.
        plan_file: of the plan that the job has; without it, one is made.
        ready: called with the cost of every plan but those of single tables, as soon as it is made.

    Raises:
        PlannerError: the job's own tables do not fit.
        TaskError: an unknown axis.
    """
    unknown = sorted(set(vary or {}) - AXES.keys())
    if unknown:
        raise TaskError(f"nothing called {unknown[0]!r} varies; {', '.join(AXES)} do")
    step("as it is")
    planned, refused = (job.plan(), ()) if plan_file is None else _as_filed(job, plan_file)
    report = planned.report
    base, plans = Point.of("", 0.0, job, report), Plans(step, planned, ready)
    ready(base)
    sweeps = {axis: sweep(job, axis, values, plans) for axis, values in (vary or {}).items()}  # first what was asked
    any_memory, on_device = smallest_that_fits(job, plans) if smallest else (None, None)
    return WhatIf(
        base=base,
        cost_source=report.cost_source,
        sweeps=sweeps,
        smallest=any_memory,
        smallest_on_device=on_device,
        worst=worst_table(planned, step) if worst else None,
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


def sweep(job: Job, axis: str, values: Sequence[Any], plans: Plans | None = None) -> tuple[Point, ...]:
    """The cost at each value; what does not fit, or cannot be, is a point that says why."""
    plans = plans or Plans()
    return tuple(plans.varied(axis, value, job) for value in values)


def _grouped(job: Job, size: int) -> Job:
    """In sharding groups of so many ranks, averaged as often as those that there are."""
    known = job.settings.get("sharding_groups")
    try:
        groups = ShardingGroups(size=size) if known is None else replace(known, size=size)
    except ValueError as error:
        raise TaskError(str(error)) from error
    return replace(job, settings={**job.settings, "sharding_groups": groups})


def _with_gpu(machine: Machine, gpu: str) -> Machine:
    """As many of another model, with its own memory and links; a network between hosts that was given stays."""
    alike = replace(machine, memory_bytes=None, memory_bytes_per_s=None, host_bytes_per_s=None, intra_bytes_per_s=None)
    return replace(alike, gpu=gpu.lower(), cards=())


def smallest_that_fits(job: Job, plans: Plans | None = None) -> tuple[Point | None, Point | None]:
    """The fewest ranks that the tables fit on, be it with some in host memory, and the fewest whose device memory has
    them all: on one host while it has room for more, then on whole hosts.

    Looked for by bisection, since what fits on some ranks fits on more of them but for the last few bytes; None where
    :data:`MAX_HOSTS` are too few. Ranks are whole sharding groups, where there are some.

    Args:
        job: with as many ranks per host as a host has room for.
        plans: made before.
    """
    groups, plans = job.settings.get("sharding_groups"), plans or Plans()
    machines = [one for one in _machines(job.machine) if groups is None or one.ranks % groups.size == 0]

    def tried(index: int) -> Point:
        return plans.point("ranks", machines[index].ranks, replace(job, machine=machines[index]))

    def smallest(fits: Callable[[Point], bool]) -> Point | None:
        low, high = -1, max(0, sum(one.hosts == 1 for one in machines) - 1)  # low: does not fit
        while not fits(tried(high)):
            low = high
            if high == len(machines) - 1:
                return None
            high = min(2 * high + 1, len(machines) - 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(tried(middle)) else (middle, high)
        return tried(high)

    return smallest(lambda point: point.fits), smallest(lambda point: point.fits and not point.outside)


def _machines(machine: Machine) -> list[Machine]:
    """From one rank to whole hosts, ascending; one host alone where nothing is known of a network."""
    per_host = machine.ranks_per_host
    made = [replace(machine, ranks_per_host=ranks, hosts=1) for ranks in range(1, per_host + 1)]
    try:
        return [*made, *(replace(machine, hosts=hosts) for hosts in range(2, MAX_HOSTS + 1))]
    except TaskError:
        return made


def worst_table(planned: PlannedJob, step: Step = lambda what: None) -> WorstTable | None:
    """The table without which the plan would cost least, and what splitting, caching or shrinking it would gain."""
    tables, now = planned.report.tables, planned.report.chosen
    if len(tables) < 2:
        return None
    by_cost = sorted(tables, key=lambda entry: (-entry.on_rank_ms(now.slowest), -entry.most_ms))
    rated = ((planned.planner.without_ms(entry.name), entry) for entry in by_cost[:CANDIDATES])
    least_ms, entry = min(rated, key=lambda pair: pair[0])
    hurts = least_ms < now.total_ms * (1 - HURTS)
    remedies = sorted(_remedies(planned, entry.name, step), key=lambda remedy: remedy.total_ms) if hurts else ()
    return WorstTable(entry.name, entry.label, entry.ranks, least_ms, tuple(remedies))


def _remedies(planned: PlannedJob, table: str, step: Step) -> Iterator[Remedy]:
    """Of the table with this fully qualified name."""
    job, base_ms = planned.job, planned.report.chosen.total_ms
    name = table.rpartition(".")[2]
    label = next(entry.label for entry in planned.report.tables if entry.name == table)

    def tried(what: str, changed: Job) -> Remedy:
        step(f"{name}: {what}")
        try:
            total_ms = changed.plan().report.chosen.total_ms
        except (PlannerError, TaskError) as error:
            return Remedy(what, math.inf, 0.0, " ".join(str(error).split()))
        return Remedy(what, total_ms, base_ms - total_ms)

    for kind, spec in SHARDING_TYPES.items():
        if spec.splits_unasked and kind != label and (spec.span != "host" or job.machine.hosts > 1):
            yield tried(f"split {kind}", _constrained(job, name, sharding_types=[kind]))
    if job.machine.device == "cuda":
        yield tried("cached in unified memory", _constrained(job, name, compute_kernels=[CACHING]))
    for what, change in (
        ("half the rows", {"rows": 0.5}),
        ("half the dim", {"dim": 0.5}),
        ("fp16 weights", {"data_type": DataType.FP16}),
    ):
        with resized(job.model.module, table, **change) as possible:
            if possible:
                yield tried(what, job)


def _constrained(job: Job, table: str, **change: list[str]) -> Job:
    constraint = job.model.constraints.get(table) or ParameterConstraints()
    constraints = {**job.model.constraints, table: replace(constraint, **change)}
    return replace(job, model=replace(job.model, constraints=constraints))


@contextmanager
def resized(
    module: nn.Module, table: str, rows: float = 1.0, dim: float = 1.0, data_type: DataType | None = None
) -> Iterator[bool]:
    """The model with a table of this share of the rows and columns, or of another type, on the meta device; as it was
    afterwards. False where the table is of a kind that this cannot be done with, or would be as it is.

    Args:
        module: the model.
        table: its fully qualified name.
    """
    path, _, name = table.rpartition(".")
    try:
        collection: Any = module.get_submodule(path)
        bags = hasattr(collection, "embedding_bag_configs")
        configs = collection.embedding_bag_configs() if bags else collection.embedding_configs()
        holder = collection.embedding_bags if bags else collection.embeddings
        config = next(config for config in configs if config.name == name)
    except (AttributeError, StopIteration):
        yield False
        return
    new_rows, new_dim = max(1, round(config.num_embeddings * rows)), max(4, round(config.embedding_dim * dim / 4) * 4)
    new_type = data_type or config.data_type
    old, known = holder[name], (config.num_embeddings, config.embedding_dim, config.data_type)
    smaller = (new_rows, new_dim) < known[:2] or DATA_TYPE_NUM_BITS[new_type] < DATA_TYPE_NUM_BITS[known[2]]
    if not smaller or (new_dim != known[1] and not bags):  # tables of a sequence collection have one dim
        yield False
        return
    shape = {"num_embeddings": new_rows, "embedding_dim": new_dim, "device": torch.device("meta")}
    dtype = torch.float16 if new_type == DataType.FP16 else old.weight.dtype
    made = nn.EmbeddingBag(**shape, mode=old.mode, include_last_offset=True) if bags else nn.Embedding(**shape)
    made.weight = nn.Parameter(made.weight.to(dtype))
    made.weight.__dict__.update(old.weight.__dict__)  # its optimizer
    holder[name] = made
    config.num_embeddings, config.embedding_dim, config.data_type = new_rows, new_dim, new_type
    try:
        yield True
    finally:
        holder[name] = old
        config.num_embeddings, config.embedding_dim, config.data_type = known


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
