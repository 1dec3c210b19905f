# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options that several commands share, their values, and the job that they describe."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from dreamshard_planner.devices import GPUS, MAX_RANKS, Machine
from dreamshard_planner.errors import FileError, TaskError
from dreamshard_planner.search.effort import EFFORTS
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.support.formatting import brief

if TYPE_CHECKING:
    from dreamshard_planner.offline.jobs import Job
    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.search_space.placement_rules import PlacementRules
    from dreamshard_planner.workload.statistics import TableStatistics

ADVANCED: dict[str, Any] = {"rich_help_panel": "Advanced"}
"""For options beyond a help's first screen."""
PLAN_AGAIN = 3
"""Exit status if planning again, or moving, is worth it. Errors have 1, and unreadable command lines 2."""
DAY = 86_400
"""Most seconds that any option takes."""
MAX_COUNT, MAX_BYTES, MAX_SEED = 2**53, 2**60, 2**53
"""Larger values are mistyped, and fit into no tensor."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NUMBER = r"\d+(?:\.\d*)?|\.\d+"


class Device(StrEnum):
    """Kind of device that kernels run on."""

    cpu = "cpu"
    cuda = "cuda"


Effort = StrEnum("Effort", list(EFFORTS))  # type: ignore[misc]  # mypy wants the names spelled out


def gpu(text: str) -> str:
    """Read a name of :data:`~dreamshard_planner.devices.GPUS`."""
    try:
        Machine(ranks_per_host=1, gpu=text.lower())
    except TaskError as error:
        raise typer.BadParameter(str(error)) from error
    return text.lower()


def whole(text: str | int) -> int:
    """Read a count from 1, such as ``8192`` or ``1e6``."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)(?:e\+?(\d{1,2}))?\s*", str(text), re.IGNORECASE | re.ASCII)
    value = Fraction(match[1]) * 10 ** int(match[2] or 0) if match else Fraction(0)
    if not 1 <= value <= MAX_COUNT or value.denominator > 1:
        raise typer.BadParameter(f"{brief(text)} is no whole number from 1 to {MAX_COUNT:,}: give one as 8192 or 1e6")
    return int(value)


def size_bytes(text: str) -> int:
    """Read a size, such as ``80GB`` or ``80Gi``, in bytes."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*([kmgt]i?)b?\s*", text, re.IGNORECASE)
    size = float(match[1]) * UNITS[match[2].lower()] if match else math.inf
    if size > MAX_BYTES:
        raise typer.BadParameter(f"{brief(text)} is no size up to {MAX_BYTES >> 40:,}TiB: give one as 80GB or 80GiB")
    return round(size)


def bytes_per_s(text: str) -> float:
    """Read a bandwidth, such as ``25GB/s`` (bytes) or ``200Gb/s`` (bits), in bytes per second."""
    match = re.fullmatch(rf"\s*({NUMBER})\s*([kKmMgGtT]i?)([bB])(?:/s|ps)\s*", text)
    rate = float(match[1]) * UNITS[match[2].lower()] / (8 if match[3] == "b" else 1) if match else math.inf
    if not 1 <= rate <= MAX_BYTES:
        raise typer.BadParameter(
            f"{brief(text)} is no bandwidth from 1 byte to {MAX_BYTES >> 40:,}TiB per second: give one as 25GB/s "
            "(bytes) or 200Gb/s (bits)"
        )
    return rate


def listed(text: str) -> tuple[str, ...]:
    """Read words separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def ranks_of(text: str) -> list[int]:
    """Read ranks, such as ``0,2,4-7``."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not 0 <= last - first < MAX_RANKS:
            raise typer.BadParameter(f"{part!r} is neither a rank nor a range of them: give them as 0,2,4-7")
        found += range(first, last + 1)
    return found


def _seed(seed: int | None) -> int | None:
    if abs(seed or 0) > MAX_SEED:
        raise typer.BadParameter(f"{brief(seed)} is no seed from -2**53 to 2**53")
    return seed


def _writable(path: Path | None) -> Path | None:
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


COUNT = partial(typer.Option, parser=whole, metavar="COUNT")
SIZE = partial(typer.Option, parser=size_bytes, metavar="SIZE")
RATE = partial(typer.Option, parser=bytes_per_s, metavar="RATE")
SECONDS = partial(typer.Option, max=DAY)
SEED = partial(typer.Option, callback=_seed, **ADVANCED)
OUTPUT = partial(typer.Option, callback=_writable)
"""Makers of options whose values are parsed or checked. A file to write is checked before any work."""

TABLES = typer.Option(
    help="The tables: a .json list, a function that returns the model (module:function), or a shipped collection "
    "(mlperf_dlrm_dcnv2, merlin_small, meta_like_2021, ...).",
    metavar="SOURCE",
)
RANKS = COUNT("--gpus-per-node", "--ranks", help="Ranks of each node: GPUs, or with --device cpu processes.")
NODES = COUNT(help="Nodes.")
BATCH_SIZE = COUNT(help="Samples in the batch of one rank.")
PlanArgument = Annotated[Path, typer.Argument(help="A plan, .json, of dreamshard plan or DreamShardPlanner.save_plan.")]
PlanOutput = Annotated[Path | None, OUTPUT(help="Plan to write, .json: JsonPlanLoader reads it in training.")]
HtmlOption = Annotated[
    Path | None, OUTPUT(help="Page to write, .html: the report in one file, without scripts or network.")
]
DeviceOption = Annotated[Device, typer.Option(help="Device that kernels run on.", callback=_present)]
ThreadsOption = Annotated[
    int, typer.Option(min=1, help="Intra-op threads of a rank (CPU).", callback=_threads, **ADVANCED)
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="Tiny settings, to try the flow; no use for planning.", **ADVANCED)
]
CollectivesOption = Annotated[
    Path | None,
    typer.Option(
        help="Measured collectives, .json of python -m dreamshard_planner.measure.collectives; kept in the checkpoint.",
        **ADVANCED,
    ),
]
UpdatesOption = Annotated[
    int | None, typer.Option(min=1, help="Policy updates; default: as many as a few minutes allow.", **ADVANCED)
]
StatisticsOption = Annotated[
    Path | None,
    typer.Option(help="Statistics of the data, .json, of dreamshard stats; default: those of the plan file."),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        metavar="auto|roofline|torchrec|FILE",
        help="Costs to rate plans by. auto: your own for this machine, else the ones that ship. roofline: bandwidths. "
        "torchrec: TorchRec's estimates. FILE: a cost checkpoint. Default: auto, or those of the plan file.",
    ),
]
StartOption = Annotated[
    str,
    typer.Option(
        metavar="auto|roofline|FILE",
        help="Costs to correct. auto: those in use on that hardware. roofline: bandwidths. FILE: a cost checkpoint.",
    ),
]
COST_SOURCES = ("auto", "roofline", "torchrec")
"""Names of costs that are no file."""


def read_statistics(path: Path | None) -> TableStatistics | None:
    """Read a file of statistics if there is one."""
    if path is None:
        return None
    from dreamshard_planner.workload.statistics import TableStatistics

    return TableStatistics.from_json(path)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of every command that searches or rates plans."""

    costs: CostsOption = None
    effort: Annotated[
        Effort | None,
        typer.Option(
            help="Number of plans to try. Without it: that of the plan file, otherwise default; in what-if: quick.",
            **ADVANCED,
        ),
    ] = None
    seed: Annotated[int | None, SEED(help="Seed of the search. Without it: that of the plan file, otherwise 0.")] = None
    search_seconds: Annotated[
        float | None,
        SECONDS(min=0.01, help="Cap on the search; reading and rating the tables comes on top.", **ADVANCED),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the planner's arguments that were given."""
        is_file = self.costs is not None and self.costs not in COST_SOURCES
        given = {
            "cost_source": "auto" if is_file else self.costs,
            "checkpoint": self.costs if is_file else None,
            "seed": self.seed,
            "effort": self.effort and self.effort.value,
            "search_seconds": self.search_seconds,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RatingOptions(SearchOptions):
    """Options of every command that rates the plan of a file."""

    statistics: StatisticsOption = None
    hot_rows: Annotated[
        int | None,
        SIZE(help="Memory limit of a rank for hot rows of sequence tables, as 1GB; needs statistics.", **ADVANCED),
    ] = None
    vocabulary: Annotated[
        str | None,
        typer.Option(help="Name of the mapping from items to ids, such as its date; only for hot rows.", **ADVANCED),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the planner's arguments that were given."""
        hot = {"hot_rows_bytes": self.hot_rows, "vocabulary": self.vocabulary}
        return super().settings() | {name: value for name, value in hot.items() if value is not None}

    def job_of(self, saved: SavedPlan) -> Job:
        """Return a plan's job with the given statistics, costs and search."""
        from dreamshard_planner.offline.from_plan import job_of

        job = job_of(saved, read_statistics(self.statistics))
        return replace(job, settings={**job.settings, **self.settings()})


@dataclass(frozen=True, kw_only=True)
class JobOptions(RatingOptions):
    """Options of ``plan``: the job."""

    tables: Annotated[str, TABLES]
    gpus_per_node: Annotated[int, RANKS]
    nodes: Annotated[int, NODES] = 1
    gpu: Annotated[str | None, typer.Option(help=f"Model of GPU: {', '.join(GPUS)}.")] = None
    batch_size: Annotated[int, BATCH_SIZE]
    device: Annotated[Device, typer.Option(help="Device that trains.", **ADVANCED)] = Device.cuda
    memory: Annotated[int | None, SIZE(help="Memory of one rank, as 80GB.", **ADVANCED)] = None
    memory_bandwidth: Annotated[float | None, RATE(help="Bandwidth of that memory, as 2039GB/s.", **ADVANCED)] = None
    host_memory: Annotated[int | None, SIZE(help="A GPU's part of its host's memory.", **ADVANCED)] = None
    intra_bandwidth: Annotated[
        float | None, RATE(help="Bandwidth of a rank to its own node, one direction.", **ADVANCED)
    ] = None
    inter_bandwidth: Annotated[
        float | None, RATE(help="Bandwidth of a rank to other nodes, one direction.", **ADVANCED)
    ] = None
    reserve: Annotated[
        float | None,
        typer.Option(
            min=0, max=0.99, help="Share of the memory kept free of tables; default: TorchRec's estimate.", **ADVANCED
        ),
    ] = None
    sharding_types: Annotated[
        str | None, typer.Option(help="TorchRec's names, separated by commas; default: all.", **ADVANCED)
    ] = None
    together: Annotated[
        list[str] | None,
        typer.Option(help="Tables to keep on one rank; repeatable.", metavar="TABLE,TABLE,...", **ADVANCED),
    ] = None
    apart: Annotated[
        list[str] | None,
        typer.Option(help="Tables to keep on different ranks; repeatable.", metavar="TABLE,TABLE,...", **ADVANCED),
    ] = None
    on_ranks: Annotated[
        list[str] | None,
        typer.Option(
            help="Ranks that may hold a table, as user_id=0,2,4-7; repeatable.", metavar="TABLE=RANKS", **ADVANCED
        ),
    ] = None
    sharding_group: Annotated[int | None, COUNT(help="Ranks of a sharding group (2D parallelism).", **ADVANCED)] = None
    sync_interval: Annotated[int, COUNT(help="Batches between two averagings of the groups' replicas.", **ADVANCED)] = 1
    exact_training: Annotated[
        bool, typer.Option(help="Leave out sharding types that change the training.", **ADVANCED)
    ] = True

    def machine(self) -> Machine:
        """Return the ranks that train."""
        if self.device is Device.cpu and self.host_memory is not None:
            raise typer.BadParameter("--host-memory is of GPUs' hosts: give CPU ranks' memory as --memory")
        return Machine(
            ranks_per_host=self.gpus_per_node,
            hosts=self.nodes,
            device=self.device.value,
            gpu=None if self.gpu is None else self.gpu.lower(),
            memory_bytes=self.memory,
            memory_bytes_per_s=self.memory_bandwidth,
            host_memory_bytes=self.host_memory,
            intra_bytes_per_s=self.intra_bandwidth,
            inter_bytes_per_s=self.inter_bandwidth,
        )

    def job(self) -> Job:
        """Return the job."""
        if self.sync_interval != 1 and self.sharding_group is None:
            raise typer.BadParameter("--sync-interval is of sharding groups: give --sharding-group as well")
        machine, rules = self.machine(), self._placement_rules()
        from dreamshard_planner.offline.jobs import Job, read_model
        from dreamshard_planner.planning.ranks import ShardingGroups

        model, size = read_model(self.tables), self.sharding_group
        if (statistics := read_statistics(self.statistics)) is not None:
            model = model.with_statistics(statistics)
        settings = {
            "sharding_types": None if self.sharding_types is None else self._sharding_types(self.sharding_types),
            "exact_training": self.exact_training,
            "optimizers_attached": True,  # the plan is for this package's DistributedModelParallel
            "placement_rules": rules,
            "sharding_groups": None if size is None else ShardingGroups(size=size, sync_interval=self.sync_interval),
            **self.settings(),
        }
        return Job(model=model, machine=machine, batch_size=self.batch_size, reserve=self.reserve, settings=settings)

    def _placement_rules(self) -> PlacementRules | None:
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
        together, apart = ([listed(text) for text in given or ()] for given in (self.together, self.apart))
        try:
            return PlacementRules(together=together, apart=apart, on_ranks=on_ranks)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    def _sharding_types(self, given: str) -> tuple[str, ...]:
        from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

        types = listed(given)
        unknown = [kind for kind in types if kind not in SHARDING_TYPES]
        if unknown or not types:
            raise typer.BadParameter(
                f"--sharding-types: {unknown[0] if unknown else given!r} is none of {', '.join(SHARDING_TYPES)}"
            )
        return types


def takes(options: type[SearchOptions]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the fields of a dataclass into options of a command, whose first argument is an instance of it."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(options, include_extras=True)
        rating = {entry.name for entry in fields(RatingOptions)}
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
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = sorted([*shared, *own], key=lambda parameter: parameter.name in rating)  # as the help shows them

        def run(**given: Any) -> None:
            mine = {entry.name: given.pop(entry.name) for entry in fields(options)}
            function(options(**mine), **given)

        command: Any = wraps(function)(run)
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        del command.__wrapped__
        return command

    return decorate


def load_plan(path: Path) -> SavedPlan:
    """Load a plan file."""
    from dreamshard_planner.plans.plan_file import SavedPlan

    return SavedPlan.load(path)
