# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``plan``, ``explain``, ``report`` and ``compare``: plans made offline, and plans in files."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.options import JobOptions, PlanOrJobOptions, load_plan, output, takes, tell_other_statistics
from dreamshard_planner.cli.output import Format, FormatOption, grid, show
from dreamshard_planner.support.formatting import ranges, short
from dreamshard_planner.support.progress import working

if TYPE_CHECKING:
    from dreamshard_planner.offline.jobs import Job, PlannedJob
    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.plans.replan import Replan
    from dreamshard_planner.plans.report import MemoryEntry, Report

TABLES_SHOWN = 20
RANKS_SHOWN = 16
PlanArgument = Annotated[Path, typer.Argument(help="A plan, .json, of dreamshard plan or DreamShardPlanner.save_plan.")]

HtmlOption = Annotated[Path | None, output("The report as a page, .html: one file, without scripts or network.")]


@command("dreamshard plan --tables mlperf_dlrm_dcnv2 --gpus 8 --hbm 80GB --batch-size 8192")
@takes(JobOptions)
def plan(
    options: JobOptions,
    out: Annotated[Path | None, output("Plan to write, .json: JsonPlanLoader reads it in training.")] = None,
    html: HtmlOption = None,
    every_table: Annotated[bool, typer.Option("--all", help="Show all tables, not only the costliest.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Shard tables over devices that need not be here, and say what it costs and why."""
    job = options.job()
    with working(_planning(job)):
        planned = job.plan()
        report = planned.report
    if out is not None:
        planned.saved.save(out)
        typer.echo(f"written to {out}", err=True)
    save_page(report, html, f"{job.model.name}: {job.machine.title}, {job.batch_size:,} samples each")
    show(lambda: _document(planned), format, str(report), "", _costliest(report, None if every_table else TABLES_SHOWN))


@command("dreamshard explain plan.json --rank 1")
@takes(PlanOrJobOptions)
def explain(
    options: PlanOrJobOptions,
    rank: Annotated[int | None, typer.Option(min=0, help="Default: the slowest.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Why a rank is slow: its fused kernels and costliest tables, and what moving or splitting them gains."""
    job, saved = options.job(), None if options.plan is None else load_plan(options.plan)
    with working(_planning(job)):
        found = (job.plan().planner if saved is None else job.read()).explain(rank, saved)
    if saved is not None:
        tell_other_statistics(saved, job.model.statistics, options.statistics)
    show(found.to_dict(), format, str(found))


@command("dreamshard report plan.json --html plan.html")
def report(
    plan: PlanArgument,
    html: HtmlOption = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show all tables and ranks, not only the costliest.")
    ] = False,
    format: FormatOption = Format.table,
) -> None:
    """What a plan in a file and those that it was chosen from cost, as predicted when it was made; where tables are."""
    saved = load_plan(plan)
    save_page(saved, html)
    show(saved.to_dict, format, *_saved_tables(saved, everything))


@command("dreamshard compare before.json after.json")
def compare(
    before: PlanArgument,
    after: PlanArgument,
    out: Annotated[
        Path | None, output("The plan after, with like ranks named so that most weights stay where they are.")
    ] = None,
    format: FormatOption = Format.table,
) -> None:
    """Tables that moved or changed how they are sharded, bytes to move, and costs before and after."""
    from dreamshard_planner.plans.comparison import compare, renamed

    found = compare(before, after)
    if out is not None:
        renamed(load_plan(after), found.names).save(out)
        typer.echo(f"written to {out}", err=True)
    show(found.to_dict(), format, str(found))


def _planning(job: Job) -> str:
    return f"planning {job.model.name} for {job.machine.title}"


def save_page(subject: Report | SavedPlan | Replan, html: Path | None, title: str | None = None) -> None:
    """Write the page, if one was asked for."""
    if html is not None:
        from dreamshard_planner.plans.page import save_html

        save_html(subject, html, title)
        typer.echo(f"written to {html}", err=True)


def _document(planned: PlannedJob) -> dict[str, Any]:
    """What was planned, for programs."""
    job = planned.job
    return {
        "tables": job.model.name,
        "machine": job.machine.title,
        "ranks": job.machine.ranks,
        "batch_size": job.batch_size,
        "seconds": planned.seconds,
        "report": planned.report.to_dict(),
        "plan": planned.saved.to_dict(),
    }


def _costliest(report: Report, limit: int | None) -> RenderableType:
    """Tables and where their shards went, the costliest first."""
    by_cost = sorted(report.tables, key=lambda table: -table.most_ms)
    shown = by_cost[:limit]
    rows = [(short(table.name), table.label, ranges(table.ranks), table.most_ms) for table in shown]
    more = f", the {len(shown)} costliest of {len(by_cost)}" if len(shown) < len(by_cost) else ""
    return grid(("table", "sharding", "ranks", "ms on a rank, by itself"), rows, f"Tables{more}")


def _saved_tables(saved: SavedPlan, everything: bool) -> list[RenderableType]:
    report = saved.report()
    libraries = ", ".join(f"{name} {version}" for name, version in saved.libraries.items())
    return [
        f"{saved.name}: {len(saved.inputs.tables)} tables on {saved.inputs.topology}, "
        f"{saved.inputs.batch_size:,} samples each; {libraries}.",
        str(report),
        "",
        _ranks(report, everything or len(report.chosen.rank_ms) <= RANKS_SHOWN),
        _costliest(report, None if everything else TABLES_SHOWN),
    ]


def _ranks(report: Report, every_rank: bool) -> RenderableType:
    """What each rank computes and holds, or the slowest, the fastest and all on average."""
    forward, backward, both = report.chosen.forward_ms, report.chosen.backward_ms, report.chosen.rank_ms
    columns = ("rank", "forward ms", "backward ms", *(f"{entry.kind} GiB" for entry in report.memory))

    def row(name: str | int, rank: int) -> list[Any]:
        return [name, forward[rank], backward[rank], *(_filled(entry, rank) for entry in report.memory)]

    if every_rank:
        return grid(columns, [row(rank, rank) for rank in range(len(both))])
    slowest, fastest = both.index(max(both)), both.index(min(both))
    memory = [
        f"{fmean(entry.used_bytes) / 2**30:.2f} of {fmean(entry.limit_bytes) / 2**30:.2f}" for entry in report.memory
    ]
    return grid(
        columns,
        [
            row(f"{slowest}, the slowest", slowest),
            row(f"{fastest}, the fastest", fastest),
            [f"mean of {len(both):,}", fmean(forward), fmean(backward), *memory],
        ],
    )


def _filled(entry: MemoryEntry, rank: int) -> str:
    return f"{entry.used_bytes[rank] / 2**30:.2f} of {entry.limit_bytes[rank] / 2**30:.2f}"
