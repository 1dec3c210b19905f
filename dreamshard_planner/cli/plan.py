# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``plan``, ``what-if`` and ``replan``: commands that search for plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from dreamshard_planner.cli.app import Panel, command
from dreamshard_planner.cli.options import (
    ADVANCED,
    COUNT,
    NODES,
    PLAN_AGAIN,
    RANKS,
    RATE,
    SECONDS,
    SIZE,
    TABLES,
    HtmlOption,
    JobOptions,
    PlanArgument,
    PlanOutput,
    RatingOptions,
    bytes_per_s,
    gpu,
    listed,
    load_plan,
    ranks_of,
    read_statistics,
    size_bytes,
    takes,
    whole,
)
from dreamshard_planner.cli.output import Format, FormatOption, costliest, grid, save_page, show, working
from dreamshard_planner.support.formatting import size_in_words

if TYPE_CHECKING:
    from dreamshard_planner.offline.jobs import Job
    from dreamshard_planner.offline.what_if import Point, WhatIf
    from dreamshard_planner.planner import DreamShardPlanner


@command("dreamshard plan --tables mlperf_dlrm_dcnv2 --gpus-per-node 8 --gpu h100 --batch-size 8192", Panel.plan)
@takes(JobOptions)
def plan(
    options: JobOptions, out: PlanOutput = None, html: HtmlOption = None, format: FormatOption = Format.table
) -> None:
    """Shard tables over devices that need not be here, and say what it costs and why."""
    job = options.job()
    with working(f"planning {job.model.name} for {job.machine.title}"):
        planner = job.plan()
        report = planner.report()
    if out is not None:
        planner.save_plan(out)
        typer.echo(f"written to {out}", err=True)
    save_page(report, html, f"{job.model.name}: {job.machine.title}, {job.batch_size:,} samples each")
    show(lambda: _document(job, planner), format, str(report), "", costliest(report))


def _document(job: Job, planner: DreamShardPlanner) -> dict[str, Any]:
    return {
        "tables": job.model.name,
        "machine": job.machine.title,
        "ranks": job.machine.ranks,
        "batch_size": job.batch_size,
        "report": planner.report().to_dict(),
        "plan": planner.saved_plan().to_dict(),
    }


AXES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "gpus-per-node": ("ranks", whole),
    "ranks": ("ranks", whole),
    "nodes": ("hosts", whole),
    "batch-size": ("batch_size", whole),
    "gpu": ("gpu", gpu),
    "intra-bandwidth": ("intra_bytes_per_s", bytes_per_s),
    "inter-bandwidth": ("inter_bytes_per_s", bytes_per_s),
    "hot-rows": ("hot_rows_bytes", size_bytes),
}
"""Axis and reader of its values, by the option that gives one value. Results carry an axis's first option, or ``ranks``
for CPU ranks."""


@command("dreamshard what-if plan.json --vary nodes=1,2", Panel.plan, name="what-if")
@takes(RatingOptions)
def what_if(
    options: RatingOptions,
    plan: PlanArgument,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help=f"An option and its values, as nodes=1,2,4; one of {', '.join(AXES)}. Repeatable; default: half and "
            "twice the ranks, batch size and bandwidth.",
            metavar="OPTION=VALUES",
        ),
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Sweep over GPUs, their model, batch size and bandwidths. Each line is a plan of its own."""
    varied: dict[str, list[Any]] = {}
    for axis, values in map(_axis, vary or ()):
        varied[axis] = list(dict.fromkeys([*varied.get(axis, ()), *values]))
    saved = load_plan(plan)
    job = options.job_of(saved)
    from dreamshard_planner.offline.what_if import what_if

    effort = "quick" if options.effort is None else options.effort.value
    with working("planning"):
        found = what_if(job, varied or _around(job), saved, effort)
    show(found, format, *_sweeps(found, effort, job.machine.device))


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if name.strip() not in AXES or not equals or not listed(values):
        raise typer.BadParameter(f"--vary {text!r}: give one of {', '.join(AXES)} and its values, as nodes=1,2,4")
    axis, read = AXES[name.strip()]
    try:
        return axis, [read(value) for value in listed(values)]
    except typer.BadParameter as error:
        raise typer.BadParameter(f"--vary {text!r}: {error}") from error


def _around(job: Job) -> dict[str, list[Any]]:
    """Return half and twice of the job's ranks, batch size and bandwidth."""
    machine, rates = job.machine, job.machine.topology().comms_bandwidths
    counts = {"hosts": machine.hosts} if machine.hosts > 1 else {"ranks": machine.ranks_per_host}
    counts["batch_size"] = job.batch_size
    around: dict[str, list[Any]] = {name: sorted({max(1, now // 2), 2 * now}) for name, now in counts.items()}
    if machine.ranks > 1 and machine.device == "cuda":  # those of CPU ranks are measured
        inter = machine.hosts > 1
        rate = rates.inter_host_bw if inter else rates.intra_host_bw
        around["inter_bytes_per_s" if inter else "intra_bytes_per_s"] = [rate * 1e3 / 2, rate * 1e3 * 2]
    return around


def _sweeps(found: WhatIf, effort: str, device: str) -> list[RenderableType]:
    columns = ("", "machine", "batch size", "total ms", "vs now", "compute", "collectives", "us per sample", "memory")
    points = [("now", found.base), *((_label(p, device), p) for sweep in found.sweeps.values() for p in sweep)]
    return [
        f"Predicted milliseconds of embedding work per training step, of plans searched with --effort {effort}. "
        f"Compute: {found.cost_source}.",
        "",
        grid(columns, [_row(label, point, found.base) for label, point in points]),
        *(f"{label}: {point.reason}" for label, point in points if point.reason),
        *(f"Note: {note}." for note in found.notes),
    ]


def _row(label: str, point: Point, base: Point) -> tuple[Any, ...]:
    if not point.fits:
        return (label, point.machine, point.batch_size, None, None, None, None, None, "does not fit")
    times = f"{point.total_ms / base.total_ms:.3f}" if base.total_ms else "-"
    costs = (point.total_ms, times, point.compute_ms, point.collectives_ms, point.us_per_sample)
    return (label, point.machine, point.batch_size, *costs, f"{point.fullest:.0%}")


def _label(point: Point, device: str) -> str:
    name = next(name for name, (axis, _) in AXES.items() if axis == point.axis)
    if point.axis == "ranks" and device == "cpu":
        name = point.axis
    if isinstance(point.value, str):
        return f"{name} {point.value}"
    if point.axis == "hot_rows_bytes":
        return f"{name} {size_in_words(int(point.value))}"
    return f"{name} {point.value / 1e9:,.1f} GB/s" if point.axis.endswith("_s") else f"{name} {point.value:,}"


@command("dreamshard replan plan.json --statistics today.json --steps 100000 --out new.json", Panel.plan)
@takes(RatingOptions)
def replan(
    options: RatingOptions,
    plan: PlanArgument,
    steps: Annotated[int, COUNT(help="Training steps that remain.")],
    gpus_per_node: Annotated[int | None, RANKS] = None,
    nodes: Annotated[int | None, NODES] = None,
    lost: Annotated[
        str,
        typer.Option(
            help="Ranks of the plan that are gone, as 0,4-7; default: the last, if fewer ranks remain.", metavar="RANKS"
        ),
    ] = "",
    out: PlanOutput = None,
    html: HtmlOption = None,
    batch_size: Annotated[int | None, COUNT(help="Samples in the batch of one rank.", **ADVANCED)] = None,
    tables: Annotated[str | None, TABLES] = None,
    max_bytes_moved: Annotated[
        int | None, SIZE(help="Limit on moved weights and optimizer states, all ranks together, as 20GB.", **ADVANCED)
    ] = None,
    restart_seconds: Annotated[
        float,
        SECONDS(
            min=0, help="Time of a restart that moves nothing, from the last step to the first new one.", **ADVANCED
        ),
    ] = 60.0,
    bandwidth: Annotated[
        float | None, RATE(help="Bandwidth to one rank while moving; default: its slowest link.", **ADVANCED)
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Find the few moves that pay. Show cost against bytes moved, and the best plan for the steps that remain.

    Nodes, ranks, batch size and tables are those of the plan unless given. Exit status 3 if moving pays or
    is unavoidable; 0 if the plan may stay.
    """
    from dreamshard_planner.offline.from_plan import as_its_file_tells
    from dreamshard_planner.offline.jobs import read_model

    saved, gone = load_plan(plan), ranks_of(lost) if lost else []
    if (ranks := saved.inputs.topology.world_size) <= max(gone, default=0):
        raise typer.BadParameter(f"--lost {max(gone)}: the ranks of {saved.name} are 0 to {ranks - 1}")
    job = made = options.job_of(saved)
    if tables is not None:
        model, known = read_model(tables), read_statistics(options.statistics)
        job = replace(job, model=model if known is None else model.with_statistics(known))
    machine = replace(
        job.machine, ranks_per_host=gpus_per_node or job.machine.ranks_per_host, hosts=nodes or job.machine.hosts
    )
    job = replace(job, machine=machine, batch_size=batch_size or job.batch_size)
    with working(f"planning {saved.name} for {job.machine.title}"):
        planner = job.plan()
    with working(f"looking for few moves from {saved.name}"):
        found = planner.replan(
            saved,
            steps=steps,
            max_bytes_moved=max_bytes_moved,
            restart_seconds=restart_seconds,
            bytes_per_s=bandwidth,
            lost=gone,
        )
    found = as_its_file_tells(found, saved, machine == made.machine, tables is None)
    if out is not None:
        found.plan.save(out)
        typer.echo(f"written to {out}", err=True)
    save_page(found, html)
    show(found.to_dict(), format, found.sentence, grid(found.COLUMNS, found.rows()))
    if not found.stays:
        raise typer.Exit(PLAN_AGAIN)
