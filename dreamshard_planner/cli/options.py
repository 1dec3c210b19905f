# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options that several commands share."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import StrEnum
from fractions import Fraction
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from dreamshard_planner.devices import MAX_RANKS, Machine
from dreamshard_planner.errors import FileError, TaskError
from dreamshard_planner.search.effort import EFFORTS
from dreamshard_planner.support.files import brief, check_writable


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
    typer.Option(help="How many plans the search tries; default: that of a given plan's file, else default."),
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
