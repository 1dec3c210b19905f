# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``what-if``: other machines, batches and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.job import PlanOrJobOptions, load_plan, tell_other_statistics
from dreamshard_planner.cli.options import bytes_per_s, gpu, listed, size_bytes, takes, whole
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
    "memory": ("memory_bytes", size_bytes),
    "hbm": ("memory_bytes", size_bytes),
    "intra-bandwidth": ("intra_bytes_per_s", bytes_per_s),
    "inter-bandwidth": ("inter_bytes_per_s", bytes_per_s),
    "sharding-group": ("sharding_group", whole),
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
            "default: half and twice of ranks, batch size, memory and bandwidth.",
            metavar="OPTION=VALUES",
        ),
    ] = None,
    smallest: Annotated[bool, typer.Option(help="Look for the fewest ranks that the tables fit on.")] = True,
    worst: Annotated[bool, typer.Option(help="Look for the table that hurts most, and what would help.")] = True,
    format: FormatOption = Format.table,
) -> None:
    """What other machines, batches and tables would cost; each line is a plan of its own."""
    varied: dict[str, list[Any]] = {}
    for axis, values in map(_axis, vary or ()):
        varied[axis] = list(dict.fromkeys([*varied.get(axis, ()), *values]))
    job = options.job()
    if options.plan is not None:
        tell_other_statistics(load_plan(options.plan), job.model.statistics, options.statistics)
    from dreamshard_planner.offline.what_if import what_if
    from dreamshard_planner.support.progress import steps_told

    with steps_told("planning") as (begin, tell):
        found = what_if(
            job, varied or _around(job), smallest, worst, begin, options.plan, lambda point: tell(_line(point))
        )
    show(found.to_dict(), format, *_tables(found))


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
    storage = topology.devices[0].storage
    memory = storage.hbm if job.machine.device == "cuda" else storage.ddr
    inside, between = topology.comms_bandwidths.intra_host_bw, topology.comms_bandwidths.inter_host_bw
    ranks, hosts = job.machine.ranks_per_host, job.machine.hosts
    size = ("hosts", hosts) if hosts > 1 else ("ranks", ranks)
    around = {
        size[0]: sorted({max(1, size[1] // 2), 2 * size[1]}),
        "batch_size": sorted({max(1, job.batch_size // 2), 2 * job.batch_size}),
        "memory_bytes": [memory // 2, 2 * memory],
    }
    if job.machine.ranks > 1 and job.machine.device == "cuda":  # those of CPU ranks are measured
        name, rate = ("inter_bytes_per_s", between) if hosts > 1 else ("intra_bytes_per_s", inside)
        around[name] = [rate * 1e3 / 2, rate * 1e3 * 2]
    return around


def _tables(found: WhatIf) -> list[RenderableType]:
    columns = ("", "machine", "batch size", "total ms", "vs now", "compute", "collectives", "us per sample", "memory")
    points = [("now", found.base), *((_label(p), p) for sweep in found.sweeps.values() for p in sweep)]
    if found.smallest is not None:
        points.append(("smallest that fits", found.smallest))
    if found.smallest_on_device is not None and found.smallest_on_device != found.smallest:
        points.append(("smallest without host memory", found.smallest_on_device))
    told: list[RenderableType] = [
        f"Predicted milliseconds of embedding work per training step. Compute: {found.cost_source}.",
        "",
        grid(columns, [_row(label, point, found.base) for label, point in points]),
    ]
    told += [f"{label}: {point.reason}" for label, point in points if point.reason]
    if found.worst is not None:
        worst = found.worst
        what = (
            f"The table that hurts most is {worst.table}, {worst.sharding}: without it"
            if worst.remedies
            else f"No table by itself holds the step up: without {worst.table}, which matters most,"
        )
        told.append(f"\n{what} the plan would cost {worst.without_ms:.3f} ms instead of {found.base.total_ms:.3f}.")
        rows = [(r.what, r.total_ms, r.gain_ms if not r.reason else None, r.reason) for r in worst.remedies]
        told += [grid(("what would help", "total ms", "gain ms", ""), rows)] if rows else []
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
        f"{point.fullest:.0%}" + (f", {point.outside} table(s) in host memory" if point.outside else ""),
    )


def _line(point: Point) -> str:
    """While others are still being planned."""
    label = _label(point) if point.axis else "now"
    costs = f"{point.total_ms:,.3f} ms" if point.fits else "does not fit"
    return f"{label}, {point.machine}, {point.batch_size:,} samples each: {costs}"


def _label(point: Point) -> str:
    """The option and its value."""
    name = next(name for name, (axis, _) in AXES.items() if axis == point.axis)
    if isinstance(point.value, str):
        return f"{name} {point.value}"
    if point.axis == "memory_bytes":
        return f"{name} {point.value / 1e9:,.1f} GB"
    return f"{name} {point.value / 1e9:,.1f} GB/s" if point.axis.endswith("_s") else f"{name} {point.value:,}"
