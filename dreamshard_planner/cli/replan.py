# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``replan``: from the plan that runs to one that pays over the steps that remain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.options import COUNT, RATE, SECONDS, SIZE, TABLES, EffortOption, load_plan, output, ranks_of
from dreamshard_planner.cli.output import Format, FormatOption, grid, show
from dreamshard_planner.cli.place import HtmlOption, PlanArgument, save_page
from dreamshard_planner.cli.stats import PLAN_AGAIN
from dreamshard_planner.support.formatting import first_of
from dreamshard_planner.support.progress import working


@command("dreamshard replan plan.json --statistics today.json --steps 100000 --out new.json")
def replan(
    plan: PlanArgument,
    steps: Annotated[int, COUNT(help="Training steps that remain.")],
    statistics: Annotated[
        Path | None, typer.Option(help="Of the data as it is now; default: those that the plan's file holds.")
    ] = None,
    max_bytes_moved: Annotated[
        int | None, SIZE(help="Of weights and optimizer states, all ranks together, as 20GB.")
    ] = None,
    restart_seconds: Annotated[
        float, SECONDS(min=0, help="From the last step before to the first one after, without moving.")
    ] = 60.0,
    bandwidth: Annotated[float | None, RATE(help="At which they come to one rank; default: its slowest link.")] = None,
    gpus: Annotated[int | None, COUNT("--gpus", "--ranks", help="Ranks of each node now.")] = None,
    nodes: Annotated[int | None, COUNT(help="Hosts now.")] = None,
    lost: Annotated[
        str, typer.Option(help="Ranks of the plan that are gone, as 0,4-7; default: the last ones.", metavar="RANKS")
    ] = "",
    batch_size: Annotated[int | None, COUNT(help="Samples in the batch of one rank now.")] = None,
    tables: Annotated[str | None, TABLES] = None,
    effort: EffortOption = None,
    out: Annotated[Path | None, output("Plan to write, .json: JsonPlanLoader reads it in training.")] = None,
    html: HtmlOption = None,
    format: FormatOption = Format.table,
) -> None:
    """What few moves gain: the curve of cost against bytes moved, and the plan that pays over the steps that remain.

    Exit status 3 where moving is worth it, or has to be; 0 where the plan may stay.
    """
    from dreamshard_planner.offline.from_plan import as_its_file_tells, check_statistics, job_of, not_held
    from dreamshard_planner.offline.jobs import read_model
    from dreamshard_planner.workload.statistics import TableStatistics

    saved, gone = load_plan(plan), ranks_of(lost) if lost else []
    if (ranks := saved.inputs.topology.world_size) <= max(gone, default=0):
        raise typer.BadParameter(f"--lost {max(gone)}: the ranks of {saved.name} are 0 to {ranks - 1}")
    known = None if statistics is None else TableStatistics.from_json(statistics)
    job = made = job_of(saved, known)
    if tables is not None:
        model = read_model(tables)
        job = replace(job, model=model if known is None else model.with_statistics(known))
    if missing := not_held(saved, job.model.statistics or ()):
        if statistics is None:
            check_statistics(saved, job.model.statistics, given=False)  # raises
        typer.echo(
            f"note: {saved.name} may have been made with statistics of {first_of(missing, 3)}; neither its file nor "
            f"{statistics} has any: lookups per sample of its constraints are taken, or one",
            err=True,
        )
    machine = replace(job.machine, ranks_per_host=gpus or job.machine.ranks_per_host, hosts=nodes or job.machine.hosts)
    settings = job.settings if effort is None else {**job.settings, "effort": effort.value}
    job = replace(job, machine=machine, batch_size=batch_size or job.batch_size, settings=settings)
    with working(f"planning {saved.name} for {job.machine.title}"):
        planner = job.plan().planner
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
