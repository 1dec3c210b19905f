# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options that several commands share, and how values of options are read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import dreamshard_planner as api
from dreamshard_planner.cli.app import ADVANCED
from dreamshard_planner.devices import MAX_RANKS, Machine
from dreamshard_planner.errors import FileError, TaskError
from dreamshard_planner.support.files import check_writable
from dreamshard_planner.support.formatting import brief

if TYPE_CHECKING:
    from dreamshard_planner.offline import Job

PLAN_AGAIN = 3
"""Exit status if planning again, or moving, is worth it. Errors have 1, and unreadable command lines 2."""
DAY = 86_400
"""Most seconds that any option takes."""
MAX_COUNT, MAX_BYTES, MAX_SEED = 2**53, 2**60, 2**53
"""Larger values are mistyped, and fit into no tensor."""
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
NUMBER = r"\d+(?:\.\d*)?|\.\d+"


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


FURTHER = partial(typer.Option, **ADVANCED)
COUNT = partial(typer.Option, parser=whole, metavar="COUNT")
SIZE = partial(FURTHER, parser=size_bytes, metavar="SIZE")
RATE = partial(FURTHER, parser=bytes_per_s, metavar="RATE")
SECONDS = partial(typer.Option, max=DAY)
SEED = partial(FURTHER, callback=_seed)
OUTPUT = partial(typer.Option, callback=_writable)
"""Makers of options: further ones, and those whose values are parsed or checked. Files to write are checked before any
work."""

TABLES = typer.Option(
    help="The tables: a .json list, a function that returns the model (module:function), or a shipped collection "
    "(mlperf_dlrm_dcnv2, merlin_small, meta_like_2021, ...).",
    metavar="SOURCE",
)
RANKS = COUNT("--gpus-per-node", "--ranks", help="Ranks of each node: GPUs, or with --device cpu processes.")
NODES = COUNT(help="Nodes.")
BATCH_SIZE = COUNT(help="Samples in the batch of one rank.")
Device = Literal["cpu", "cuda"]
Effort = Literal["quick", "default", "thorough"]
PlanArgument = Annotated[Path, typer.Argument(help="A plan, .json, of dreamshard plan or DreamShardPlanner.save_plan.")]
PlanOutput = Annotated[
    Path | None,
    OUTPUT(help="Plan to write, .json: JsonPlanLoader reads it in training, if --tables named the model's function."),
]
HtmlOption = Annotated[
    Path | None, OUTPUT(help="Page to write, .html: the report in one file, without scripts or network.")
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
COST_SOURCES = ("auto", "roofline", "torchrec")
"""Names of costs that are no file."""


def read_statistics(path: Path | None) -> api.TableStatistics | None:
    """Read a file of statistics if there is one."""
    return None if path is None else api.TableStatistics.from_json(path)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of every command that searches or rates plans."""

    costs: CostsOption = None
    effort: Annotated[
        Effort | None,
        FURTHER(
            help="Number of plans to try. Without it: that of the plan file, otherwise default; in what-if: quick."
        ),
    ] = None
    seed: Annotated[int | None, SEED(help="Seed of the search. Without it: that of the plan file, otherwise 0.")] = None
    search_seconds: Annotated[
        float | None,
        SECONDS(min=0.01, help="Cap on the search; reading and rating the tables comes on top.", **ADVANCED),
    ] = None

    def settings(self) -> dict[str, Any]:
        """Return the planner's arguments that were given."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "statistics"}
        if (costs := given.pop("costs", None)) is not None:
            is_file = costs not in COST_SOURCES
            given |= {"cost_source": "auto", "checkpoint": costs} if is_file else {"cost_source": costs}
        return given

    def job_of(self, saved: api.SavedPlan, statistics: api.TableStatistics | None) -> Job:
        """Return a plan's job with these options, and with other statistics if they are given."""
        from dreamshard_planner.offline.from_plan import job_of

        job = job_of(saved, statistics)
        return replace(job, settings={**job.settings, **self.settings()})


@dataclass(frozen=True, kw_only=True)
class RatingOptions(SearchOptions):
    """Options of every command that rates the plan of a file."""

    statistics: StatisticsOption = None
    hot_rows_bytes: Annotated[
        int | None,
        SIZE("--hot-rows", help="Memory limit of a rank for hot rows of sequence tables, as 1GB; needs statistics."),
    ] = None
    vocabulary: Annotated[
        str | None, FURTHER(help="Name of the mapping from items to ids, such as its date; only for hot rows.")
    ] = None
