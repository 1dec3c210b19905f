# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options that several commands share, and the job that they describe."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from dreamshard_planner.devices import GPUS, MAX_RANKS, Machine
from dreamshard_planner.errors import FileError, TaskError
from dreamshard_planner.search.effort import EFFORTS
from dreamshard_planner.support.files import brief, check_writable

if TYPE_CHECKING:
    from dreamshard_planner.offline.jobs import Job
    from dreamshard_planner.planning.ranks import ShardingGroups
    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.search_space.placement_rules import PlacementRules
    from dreamshard_planner.workload.statistics import TableStatistics


class Device(StrEnum):
    """Where kernels run."""

    cpu = "cpu"
    cuda = "cuda"


Effort = StrEnum("Effort", list(EFFORTS))  # type: ignore[misc]  # mypy wants the names spelled out


def _output(path: Path | None) -> Path | None:
    """Before minutes of measuring, not after."""
    try:
        if path is not None:
            check_writable(path)
    except FileError as error:
        raise typer.BadParameter(str(error)) from error
    return path


def _present(device: Device) -> Device:
    if device is Device.cuda:
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter("cuda: no GPU that this torch can use")
    return device


def _threads(count: int) -> int:
    if count > (cores := os.cpu_count() or 1):
        raise typer.BadParameter(f"{count} threads: this machine has {cores} core(s)")
    return count


def output(help: str) -> typer.models.OptionInfo:
    """A file to write, checked before any work."""
    return typer.Option(help=help, callback=_output)


DeviceOption = Annotated[Device, typer.Option(help="Where kernels run.", callback=_present)]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Intra-op threads of a rank (CPU).", callback=_threads)]
QuickOption = Annotated[bool, typer.Option("--quick", help="Tiny settings, to try the flow; no use for planning.")]
EffortOption = Annotated[
    Effort | None,
    typer.Option(help="How many plans the search tries; default: a given plan's, else default; of what-if: quick."),
]
CollectivesOption = Annotated[
    Path | None, typer.Option(help="JSON of python -m dreamshard_planner.measure.collectives, to keep and plan with.")
]
UpdatesOption = Annotated[int | None, typer.Option(min=1, help="Policy updates; by default what a few minutes allow.")]


DAY = 86_400
"""Seconds that anything may take."""
MAX_COUNT, MAX_BYTES, MAX_SEED = 2**53, 2**60, 2**53
"""What is larger is mistyped, and fits into no tensor."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


NUMBER = r"\d+(?:\.\d*)?|\.\d+"


def gpu(text: str) -> str:
    """A name of :data:`~dreamshard_planner.devices.GPUS`."""
    try:
        Machine(ranks_per_host=1, gpu=text.lower())
    except TaskError as error:
        raise typer.BadParameter(str(error)) from error
    return text.lower()


def whole(text: str | int) -> int:
    """``8192`` or ``1e6``, from 1."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)(?:e\+?(\d{1,2}))?\s*", str(text), re.IGNORECASE | re.ASCII)
    value = Fraction(match[1]) * 10 ** int(match[2] or 0) if match else Fraction(0)
    if not 1 <= value <= MAX_COUNT or value.denominator > 1:
        raise typer.BadParameter(f"{brief(text)} is no whole number from 1 to {MAX_COUNT:,}: give one as 8192 or 1e6")
    return int(value)


def size_bytes(text: str) -> int:
    """``80GB`` or ``80G``, ``80GiB`` or ``80Gi`` in bytes."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*([kmgt]i?)b?\s*", text, re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].lower()] if match else math.inf
    if size > MAX_BYTES:
        raise typer.BadParameter(f"{brief(text)} is no size up to {MAX_BYTES >> 40:,}TiB: give one as 80GB or 80GiB")
    return round(size)


def bytes_per_s(text: str) -> float:
    """``25GB/s`` (bytes) or ``200Gb/s`` (bits) in bytes per second."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*([kKmMgGtT]i?)([bB])(?:/s|ps)\s*", text)
    rate = float(match[1]) * UNITS[match[2].lower()] / (8 if match[3] == "b" else 1) if match else math.inf
    if not 1 <= rate <= MAX_BYTES:
        raise typer.BadParameter(
            f"{brief(text)} is no bandwidth from 1 byte to {MAX_BYTES >> 40:,}TiB per second: give one as 25GB/s "
            "(bytes) or 200Gb/s (bits)"
        )
    return rate


def _seed(seed: int) -> int:
    if abs(seed) > MAX_SEED:
        raise typer.BadParameter(f"{brief(seed)} is no seed from -2**53 to 2**53")
    return seed


COUNT = partial(typer.Option, parser=whole, metavar="COUNT")
SIZE = partial(typer.Option, parser=size_bytes, metavar="SIZE")
RATE = partial(typer.Option, parser=bytes_per_s, metavar="RATE")
SECONDS = partial(typer.Option, max=DAY)
SEED = partial(typer.Option, callback=_seed)
"""Makers of options whose values are read, or bounded, so."""


def listed(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def ranks_of(text: str) -> list[int]:
    """``0,2,4-7`` as ranks."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < MAX_RANKS:
            raise typer.BadParameter(f"{part!r} is neither a rank nor a range of them: give them as 0,2,4-7")
        found += range(first, last + 1)
    return found


class CostSourceName(StrEnum):
    """Of :data:`dreamshard_planner.planning.cost_sources.COST_SOURCES`."""

    auto = "auto"
    roofline = "roofline"
    torchrec = "torchrec"


def takes(options: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first argument is an instance of this dataclass: its fields become options of their own."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)
        shared = [
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if entry.default is MISSING else entry.default,
                annotation=hints[entry.name],
            )
            for entry in fields(options)
        ]
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        parameters = [*shared, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own)]

        def run(**given: Any) -> None:
            mine = {entry.name: given.pop(entry.name) for entry in fields(options)}
            function(options(**mine), **given)

        command: Any = wraps(function)(run)
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del command.__wrapped__
        return command

    return decorate


TABLES = typer.Option(
    help="What to plan: a .json list of tables, a function that returns the model (module:function), or a "
    "shipped collection (mlperf_dlrm_dcnv2, merlin_small, meta_like_2021, ...).",
    metavar="SOURCE",
)
RANKS = COUNT("--gpus", "--ranks", help="Ranks of each node.")
BATCH_SIZE = COUNT(help="Samples in the batch of one rank.")
BESIDE_PLAN = ("checkpoint", "cost_source", "seed", "effort", "search_seconds")
"""Options that may be given beside a plan, which says all else."""


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """Of every command that plans; some know otherwise what to plan."""

    tables: Annotated[str | None, TABLES] = None
    gpus: Annotated[int | None, RANKS] = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    nodes: Annotated[int, COUNT(help="Hosts.")] = 1
    gpu: Annotated[
        str | None, typer.Option(help=f"Model of GPU, for its memory and bandwidths: {', '.join(GPUS)}.")
    ] = None
    device: Annotated[Device, typer.Option(help="What trains.")] = Device.cuda
    hbm: Annotated[int | None, SIZE("--hbm", "--memory", help="Memory of one rank, as 80GB.")] = None
    hbm_bandwidth: Annotated[float | None, RATE(help="To that memory, as 2039GB/s.")] = None
    host_memory: Annotated[int | None, SIZE(help="A GPU's part of its host's memory.")] = None
    intra_bandwidth: Annotated[float | None, RATE(help="Of a rank to those of its host, one direction.")] = None
    inter_bandwidth: Annotated[float | None, RATE(help="Of a rank to other hosts, one direction.")] = None
    reserve: Annotated[
        float | None,
        typer.Option(min=0, max=0.99, help="Share of the memory kept for all else; default: TorchRec's estimate."),
    ] = None
    statistics: Annotated[Path | None, typer.Option(help="How features read their tables, of dreamshard stats.")] = None
    checkpoint: Annotated[str, typer.Option(help="auto: your own for this machine, else what ships.")] = "auto"
    cost_source: Annotated[CostSourceName, typer.Option(help="Whose costs.")] = CostSourceName.auto
    sharding_types: Annotated[
        str | None, typer.Option(help="TorchRec's names of the types to use, separated by commas; default: all.")
    ] = None
    together: Annotated[
        list[str] | None,
        typer.Option(help="Tables that must lie on one rank; may be given several times.", metavar="TABLE,TABLE,..."),
    ] = None
    apart: Annotated[
        list[str] | None,
        typer.Option(
            help="Tables of which no rank may hold two shards; may be given several times.", metavar="TABLE,TABLE,..."
        ),
    ] = None
    on_ranks: Annotated[
        list[str] | None,
        typer.Option(
            help="The ranks that may hold a table, as user_id=0,2,4-7; may be given several times.",
            metavar="TABLE=RANKS",
        ),
    ] = None
    sharding_group: Annotated[int | None, COUNT(help="Ranks of a sharding group (2D parallelism).")] = None
    sync_interval: Annotated[int, COUNT(help="Batches between two averagings of its replicas.")] = 1
    exact_training: Annotated[bool, typer.Option(help="Leave out sharding types that change what is trained.")] = True
    seed: Annotated[int, SEED(help="Of the search.")] = 0
    effort: EffortOption = None
    search_seconds: Annotated[
        float | None, SECONDS(min=0.01, help="Cap on the search; reading and rating the tables comes on top.")
    ] = None

    def machine(self, ranks_per_host: int) -> Machine:
        """What is to train."""
        if self.device is Device.cpu and self.host_memory is not None:
            raise typer.BadParameter("--host-memory is of GPUs' hosts: give CPU ranks' memory as --memory")
        return Machine(
            ranks_per_host=ranks_per_host,
            hosts=self.nodes,
            device=self.device.value,
            gpu=None if self.gpu is None else self.gpu.lower(),
            memory_bytes=self.hbm,
            memory_bytes_per_s=self.hbm_bandwidth,
            host_memory_bytes=self.host_memory,
            intra_bytes_per_s=self.intra_bandwidth,
            inter_bytes_per_s=self.inter_bandwidth,
        )

    def job(self) -> Job:
        """Read; mistakes in it are found before anything is planned."""
        if self.tables is None or self.gpus is None or self.batch_size is None:
            missing = [flag(name) for name in ("tables", "gpus", "batch_size") if getattr(self, name) is None]
            raise typer.BadParameter(f"give a plan, or what to plan: {', '.join(missing)} missing")
        machine, rules = self.machine(self.gpus), self.placement_rules()
        from dreamshard_planner.offline.jobs import Job, read_model

        model = read_model(self.tables)
        if (statistics := self.statistics_read()) is not None:
            model = model.with_statistics(statistics)
        settings = {
            "checkpoint": self.checkpoint,
            "cost_source": self.cost_source.value,
            "sharding_types": None if self.sharding_types is None else self.sharding_types_named(),
            "exact_training": self.exact_training,
            "optimizers_attached": True,  # the plan is for this package's DistributedModelParallel
            "placement_rules": rules,
            "sharding_groups": self.sharding_groups(),
            "seed": self.seed,
            "search_seconds": self.search_seconds,
            **({} if self.effort is None else {"effort": self.effort.value}),
        }
        return _doubted(
            Job(model=model, machine=machine, batch_size=self.batch_size, reserve=self.reserve, settings=settings)
        )

    def sharding_groups(self) -> ShardingGroups | None:
        """Of 2D parallelism; None where all ranks are one."""
        if self.sharding_group is None:
            if self.sync_interval != 1:
                raise typer.BadParameter("--sync-interval is of sharding groups: give --sharding-group as well")
            return None
        from dreamshard_planner.planning.ranks import ShardingGroups

        return ShardingGroups(size=self.sharding_group, sync_interval=self.sync_interval)

    def statistics_read(self) -> TableStatistics | None:
        """Those of the file that was given."""
        if self.statistics is None:
            return None
        from dreamshard_planner.workload.statistics import TableStatistics

        return TableStatistics.from_json(self.statistics)

    def placement_rules(self) -> PlacementRules | None:
        """Where tables must lie; None where that is free."""
        if not (self.together or self.apart or self.on_ranks):
            return None
        from dreamshard_planner.search_space.placement_rules import PlacementRules

        on_ranks: dict[str, list[int]] = {}
        for text in self.on_ranks or ():
            name, equals, ranks = text.rpartition("=")
            if not equals or not name.strip():
                raise typer.BadParameter(f"--on-ranks {text!r}: give a table and its ranks, as user_id=0,2,4-7")
            if on_ranks.setdefault(name.strip(), found := ranks_of(ranks)) is not found:
                raise typer.BadParameter(f"--on-ranks names table {name.strip()!r} twice")
        groups = {
            name: [listed(text) for text in given or ()]
            for name, given in (("together", self.together), ("apart", self.apart))
        }
        try:
            return PlacementRules(**groups, on_ranks=on_ranks)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def sharding_types_named(self) -> tuple[str, ...]:
        """Those asked for."""
        from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

        types = listed(self.sharding_types or "")
        unknown = [kind for kind in types if kind not in SHARDING_TYPES]
        if unknown or not types:
            raise typer.BadParameter(
                f"--sharding-types: {unknown[0] if unknown else self.sharding_types!r} is none of "
                f"{', '.join(SHARDING_TYPES)}"
            )
        return types


@dataclass(frozen=True, kw_only=True)
class JobOptions(PlanningOptions):
    """Of commands that are told what to plan."""

    tables: Annotated[str, TABLES] = field()
    gpus: Annotated[int, RANKS] = field()
    batch_size: Annotated[int, BATCH_SIZE] = field()


@dataclass(frozen=True, kw_only=True)
class PlanOrJobOptions(PlanningOptions):
    """Of commands that also take what to plan from a plan."""

    plan: Annotated[
        Path | None, typer.Argument(help="A plan, .json, that says what to plan; or give --tables and the others.")
    ] = None

    def job(self) -> Job:
        """The plan's, with statistics, checkpoint, costs and search as options say."""
        if self.plan is None:
            return super().job()
        from dreamshard_planner.offline.from_plan import job_of

        given = {
            entry.name: value
            for entry in fields(self)
            if (value := getattr(self, entry.name)) != entry.default and entry.name not in ("plan", "statistics")
        }
        if twice := sorted(given.keys() - set(BESIDE_PLAN)):
            raise typer.BadParameter(f"{self.plan} says what to plan: leave out {', '.join(map(flag, twice))}")
        job = job_of(load_plan(self.plan), self.statistics_read())
        return _doubted(replace(job, settings={**job.settings, **given}))


def load_plan(path: Path) -> SavedPlan:
    """Of a file."""
    from dreamshard_planner.plans.plan_file import SavedPlan

    return SavedPlan.load(path)


def tell_other_statistics(saved: SavedPlan, known: TableStatistics | None, given: Path | None) -> None:
    """On stderr, where others were given than a plan was made with; PlanError where the plan's are not known."""
    from dreamshard_planner.offline.from_plan import check_statistics

    if told := check_statistics(saved, known, given is not None):
        typer.echo(f"note: {told}", err=True)


def _doubted(job: Job) -> Job:
    """Tells on stderr what of a job is hardly meant."""
    for text in job.doubtful:
        typer.echo(f"note: {text}", err=True)
    return job


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
