# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``what-if``: other GPUs, batches and bandwidths."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.options import (
    PlanOrJobOptions,
    bytes_per_s,
    gpu,
    listed,
    load_plan,
    takes,
    tell_other_statistics,
    whole,
)
from dreamshard_planner.cli.output import Format, FormatOption, grid, show

if TYPE_CHECKING:
    from dreamshard_planner.offline.jobs import Job
    from dreamshard_planner.offline.what_if import Point, WhatIf


AXES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "ranks": ("ranks", whole),
    "gpus": ("ranks", whole),
    "nodes": ("hosts", whole),
    "batch-size": ("batch_size", whole),
    "gpu": ("gpu", gpu),
    "intra-bandwidth": ("intra_bytes_per_s", bytes_per_s),
    "inter-bandwidth": ("inter_bytes_per_s", bytes_per_s),
}
"""Axis and reader of its values, by the option that gives one value; results are told by an axis's first option."""


@command(
    "dreamshard what-if --tables mlperf_dlrm_dcnv2 --gpus 8 --gpu h100 --batch-size 8192 --vary gpus=4,8,16",
    name="what-if",
)
@takes(PlanOrJobOptions)
def what_if(
    options: PlanOrJobOptions,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help=f"An option and its values, as gpus=4,8,16; of {', '.join(AXES)}. May be given several times; "
            "default: half and twice of ranks, batch size and bandwidth.",
            metavar="OPTION=VALUES",
        ),
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Sweep over GPUs, their kind, batch size and bandwidths; each line is a plan of its own, of a quick search."""
    varied: dict[str, list[Any]] = {}
    for axis, values in map(_axis, vary or ()):
        varied[axis] = list(dict.fromkeys([*varied.get(axis, ()), *values]))
    job = options.job()
    if options.plan is not None:
        tell_other_statistics(load_plan(options.plan), job.model.statistics, options.statistics)
    from dreamshard_planner.offline.what_if import what_if
    from dreamshard_planner.support.progress import working

    effort = "quick" if options.effort is None else options.effort.value
    with working("planning"):
        found = what_if(job, varied or _around(job), options.plan, effort)
    show(found.to_dict(), format, *_tables(found, effort))


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if name.strip() not in AXES or not equals or not listed(values):
        raise typer.BadParameter(f"--vary {text!r}: give one of {', '.join(AXES)} and its values, as gpus=4,8,16")
    axis, read = AXES[name.strip()]
    try:
        return axis, [read(value) for value in listed(values)]
    except typer.BadParameter as error:
        raise typer.BadParameter(f"--vary {text!r}: {error}") from error


def _around(job: Job) -> dict[str, list[Any]]:
    """Half and twice of what the job has."""
    topology = job.machine.topology()
    inside, between = topology.comms_bandwidths.intra_host_bw, topology.comms_bandwidths.inter_host_bw
    ranks, hosts = job.machine.ranks_per_host, job.machine.hosts
    size = ("hosts", hosts) if hosts > 1 else ("ranks", ranks)
    around = {
        size[0]: sorted({max(1, size[1] // 2), 2 * size[1]}),
        "batch_size": sorted({max(1, job.batch_size // 2), 2 * job.batch_size}),
    }
    if job.machine.ranks > 1 and job.machine.device == "cuda":  # those of CPU ranks are measured
        name, rate = ("inter_bytes_per_s", between) if hosts > 1 else ("intra_bytes_per_s", inside)
        around[name] = [rate * 1e3 / 2, rate * 1e3 * 2]
    return around


def _tables(found: WhatIf, effort: str) -> list[RenderableType]:
    columns = ("", "machine", "batch size", "total ms", "vs now", "compute", "collectives", "us per sample", "memory")
    points = [("now", found.base), *((_label(p), p) for sweep in found.sweeps.values() for p in sweep)]
    told: list[RenderableType] = [
        f"Predicted milliseconds of embedding work per training step, of plans searched with --effort {effort}. "
        f"Compute: {found.cost_source}.",
        "",
        grid(columns, [_row(label, point, found.base) for label, point in points]),
    ]
    told += [f"{label}: {point.reason}" for label, point in points if point.reason]
    return [*told, *(f"Note: {note}." for note in found.notes)]


def _row(label: str, point: Point, base: Point) -> tuple[Any, ...]:
    if not point.fits:
        return (label, point.machine, point.batch_size, None, None, None, None, None, "does not fit")
    return (
        label,
        point.machine,
        point.batch_size,
        point.total_ms,
        f"{point.total_ms / base.total_ms:.3f}" if base.total_ms else "-",
        point.compute_ms,
        point.collectives_ms,
        point.us_per_sample,
        f"{point.fullest:.0%}",
    )


def _label(point: Point) -> str:
    """The option and its value."""
    name = next(name for name, (axis, _) in AXES.items() if axis == point.axis)
    if isinstance(point.value, str):
        return f"{name} {point.value}"
    return f"{name} {point.value / 1e9:,.1f} GB/s" if point.axis.endswith("_s") else f"{name} {point.value:,}"
