# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``plan``, ``what-if`` and ``replan``: commands that search for plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

import dreamshard_planner as api
from dreamshard_planner.cli.app import ADVANCED, Panel, Result, command, grid, save, working
from dreamshard_planner.cli.options import (
    BATCH_SIZE,
    COUNT,
    FURTHER,
    NODES,
    PLAN_AGAIN,
    RANKS,
    RATE,
    SECONDS,
    SIZE,
    TABLES,
    Device,
    HtmlOption,
    PlanArgument,
    PlanOutput,
    RatingOptions,
    bytes_per_s,
    gpu,
    listed,
    ranks_of,
    read_statistics,
    size_bytes,
    whole,
)
from dreamshard_planner.cli.understand import costliest
from dreamshard_planner.devices import GPUS, Machine
from dreamshard_planner.support.formatting import size_in_words

if TYPE_CHECKING:
    from dreamshard_planner.offline import Job
    from dreamshard_planner.offline.what_if import Point


@command("dreamshard plan --tables mlperf_dlrm_dcnv2 --gpus-per-node 8 --gpu h100 --batch-size 8192", Panel.plan)
def plan(
    options: RatingOptions,
    *,
    tables: Annotated[str, TABLES],
    gpus_per_node: Annotated[int, RANKS],
    nodes: Annotated[int, NODES] = 1,
    gpu: Annotated[str | None, typer.Option(help=f"Model of GPU: {', '.join(GPUS)}.")] = None,
    batch_size: Annotated[int, BATCH_SIZE],
    device: Annotated[Device, FURTHER(help="Device that trains.")] = "cuda",
    memory: Annotated[int | None, SIZE(help="Memory of one rank, as 80GB.")] = None,
    memory_bandwidth: Annotated[float | None, RATE(help="Bandwidth of that memory, as 2039GB/s.")] = None,
    host_memory: Annotated[int | None, SIZE(help="A GPU's part of its host's memory.")] = None,
    intra_bandwidth: Annotated[float | None, RATE(help="Bandwidth of a rank to its own node, one direction.")] = None,
    inter_bandwidth: Annotated[float | None, RATE(help="Bandwidth of a rank to other nodes, one direction.")] = None,
    reserve: Annotated[
        float | None,
        FURTHER(min=0, max=0.99, help="Share of the memory kept free of tables; default: TorchRec's estimate."),
    ] = None,
    sharding_types: Annotated[str | None, FURTHER(help="TorchRec's names, separated by commas; default: all.")] = None,
    together: Annotated[
        list[str] | None, FURTHER(help="Tables to keep on one rank; repeatable.", metavar="TABLE,TABLE,...")
    ] = None,
    apart: Annotated[
        list[str] | None, FURTHER(help="Tables to keep on different ranks; repeatable.", metavar="TABLE,TABLE,...")
    ] = None,
    on_ranks: Annotated[
        list[str] | None,
        FURTHER(help="Ranks that may hold a table, as user_id=0,2,4-7; repeatable.", metavar="TABLE=RANKS"),
    ] = None,
    sharding_group: Annotated[int | None, COUNT(help="Ranks of a sharding group (2D parallelism).", **ADVANCED)] = None,
    sync_interval: Annotated[
        int, COUNT(help="Batches between two averagings of the groups' replicas.", **ADVANCED)
    ] = 1,
    exact_training: Annotated[bool, FURTHER(help="Leave out sharding types that change the training.")] = True,
    out: PlanOutput = None,
    html: HtmlOption = None,
) -> Result:
    """Shard tables over devices that need not be here, and say what it costs and why."""
    if device == "cpu" and host_memory is not None:
        raise typer.BadParameter("--host-memory is of GPUs' hosts: give CPU ranks' memory as --memory")
    if sync_interval != 1 and sharding_group is None:
        raise typer.BadParameter("--sync-interval is of sharding groups: give --sharding-group as well")
    machine = Machine(
        ranks_per_host=gpus_per_node,
        hosts=nodes,
        device=device,
        gpu=None if gpu is None else gpu.lower(),
        memory_bytes=memory,
        memory_bytes_per_s=memory_bandwidth,
        host_memory_bytes=host_memory,
        intra_bytes_per_s=intra_bandwidth,
        inter_bytes_per_s=inter_bandwidth,
    )
    rules = _placement_rules(together or (), apart or (), on_ranks or ())
    from dreamshard_planner.offline import Job, read_model

    settings = {
        "sharding_types": None if sharding_types is None else _sharding_types(sharding_types),
        "exact_training": exact_training,
        "optimizers_attached": True,  # the plan is for this package's DistributedModelParallel
        "placement_rules": rules,
        "sharding_groups": sharding_group and api.ShardingGroups(size=sharding_group, sync_interval=sync_interval),
        **options.settings(),
    }
    model = read_model(tables).with_statistics(read_statistics(options.statistics))
    job = Job(model=model, machine=machine, batch_size=batch_size, reserve=reserve, settings=settings)
    with working(f"planning {model.name} for {machine.title}"):
        planner = job.plan()
        report = planner.report()
    save(out, planner.save_plan)
    save(html, lambda path: api.save_html(report, path, f"{model.name}: {machine.title}, {batch_size:,} samples each"))

    def document() -> dict[str, Any]:
        return {
            "tables": model.name,
            "machine": machine.title,
            "ranks": machine.ranks,
            "batch_size": batch_size,
            "report": report.to_dict(),
            "plan": planner.saved_plan().to_dict(),
        }

    return Result(document, [str(report), "", costliest(report)])


def _placement_rules(
    together: Sequence[str], apart: Sequence[str], on_ranks: Sequence[str]
) -> api.PlacementRules | None:
    """Read the options of these names."""
    if not (together or apart or on_ranks):
        return None
    ranks: dict[str, list[int]] = {}
    for text in on_ranks:
        name, equals, given = text.rpartition("=")
        if not equals or not name.strip():
            raise typer.BadParameter(f"--on-ranks {text!r}: give a table and its ranks, as user_id=0,2,4-7")
        if name.strip() in ranks:
            raise typer.BadParameter(f"--on-ranks names table {name.strip()!r} twice")
        ranks[name.strip()] = ranks_of(given)
    try:
        return api.PlacementRules([*map(listed, together)], [*map(listed, apart)], ranks)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _sharding_types(text: str) -> tuple[str, ...]:
    from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

    types = listed(text)
    for kind in types or (text,):
        if kind not in SHARDING_TYPES:
            raise typer.BadParameter(f"--sharding-types: {kind!r} is none of {', '.join(SHARDING_TYPES)}")
    return types


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
) -> Result:
    """Sweep over GPUs, their model, batch size and bandwidths. Each line is a plan of its own."""
    varied: dict[str, list[Any]] = {}
    for axis, values in map(_axis, vary or ()):
        varied[axis] = list(dict.fromkeys([*varied.get(axis, ()), *values]))
    saved, effort = api.SavedPlan.load(plan), options.effort or "quick"
    job = options.job_of(saved, read_statistics(options.statistics))
    from dreamshard_planner.offline.what_if import what_if

    with working("planning"):
        found = what_if(job, varied or _around(job), saved, effort)
    points = [("now", found.base)]
    points += [(_label(p, job.machine.device), p) for sweep in found.sweeps.values() for p in sweep]
    columns = ("", "machine", "batch size", "total ms", "vs now", "compute", "collectives", "us per sample", "memory")
    shown = [
        f"Predicted milliseconds of embedding work per training step, of plans searched with --effort {effort}. "
        f"Compute: {found.cost_source}.",
        "",
        grid(columns, [_row(label, point, found.base) for label, point in points]),
        *(f"{label}: {point.reason}" for label, point in points if point.reason),
        *(f"Note: {note}." for note in found.notes),
    ]
    return Result(found, shown)


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
        int | None, SIZE(help="Limit on moved weights and optimizer states, all ranks together, as 20GB.")
    ] = None,
    restart_seconds: Annotated[
        float,
        SECONDS(
            min=0, help="Time of a restart that moves nothing, from the last step to the first new one.", **ADVANCED
        ),
    ] = 60.0,
    bandwidth: Annotated[
        float | None, RATE(help="Bandwidth to one rank while moving; default: its slowest link.")
    ] = None,
) -> Result:
    """Find the few moves that pay. Show cost against bytes moved, and the best plan for the steps that remain.

    Nodes, ranks, batch size and tables are those of the plan unless given. Exit status 3 if moving pays or
    is unavoidable; 0 if the plan may stay.
    """
    from dreamshard_planner.offline import read_model
    from dreamshard_planner.offline.from_plan import as_in_file
    from dreamshard_planner.plans.comparison import stale_differences

    saved, gone = api.SavedPlan.load(plan), ranks_of(lost) if lost else []
    if (ranks := saved.inputs.topology.world_size) <= max(gone, default=0):
        raise typer.BadParameter(f"--lost {max(gone)}: the ranks of {saved.name} are 0 to {ranks - 1}")
    known = read_statistics(options.statistics)
    job = options.job_of(saved, known)
    was = job.machine
    machine = replace(was, ranks_per_host=gpus_per_node or was.ranks_per_host, hosts=nodes or was.hosts)
    job = replace(job, machine=machine, batch_size=batch_size or job.batch_size)
    if tables is not None:
        job = replace(job, model=read_model(tables).with_statistics(known))
    with working(f"planning {saved.name} for {machine.title}"):
        planner = job.plan()
    with working(f"looking for few moves from {saved.name}"):
        made = planner.replan(
            saved,
            steps=steps,
            max_bytes_moved=max_bytes_moved,
            restart_seconds=restart_seconds,
            bytes_per_s=bandwidth,
            lost=gone,
        )
    found = replace(made, make=cache(lambda index: as_in_file(made.make(index), saved, machine == was, tables is None)))
    found = replace(found, stale=tuple(stale_differences(saved.inputs, found.plan.inputs)))
    save(out, lambda path: found.plan.save(path))
    save(html, lambda path: api.save_html(found, path))
    shown = [found.sentence, grid(found.COLUMNS, found.rows())]
    return Result(found.to_dict(), shown, 0 if found.stays else PLAN_AGAIN)
