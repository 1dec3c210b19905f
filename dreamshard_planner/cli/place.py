# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``plan``: offline, for devices that need not be here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.job import JobOptions
from dreamshard_planner.cli.options import takes
from dreamshard_planner.cli.output import Format, FormatOption, grid, show

if TYPE_CHECKING:
    from dreamshard_planner.offline import Planned

TABLES_SHOWN = 20


@command("dreamshard plan --tables mlperf_dlrm_dcnv2 --gpus 8 --hbm 80GB --batch-size 8192")
@takes(JobOptions)
def plan(
    options: JobOptions,
    every_table: Annotated[bool, typer.Option("--all", help="Show all tables, not only the costliest.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Shard tables over devices that need not be here, and say what it costs and why."""
    planned = options.job().plan()
    report = planned.report
    show(planned_document(planned), format, str(report), "", costliest(planned, None if every_table else TABLES_SHOWN))


def planned_document(planned: Planned) -> dict[str, Any]:
    """What was planned, for programs."""
    job = planned.job
    return {
        "tables": job.model.name,
        "machine": job.machine.title,
        "ranks": job.machine.ranks,
        "batch_size": job.batch_size,
        "seconds": planned.seconds,
        "report": planned.report.to_dict(),
    }


def costliest(planned: Planned, limit: int | None) -> Table:
    """Tables and where their shards went, the costliest first."""
    tables = sorted(planned.report.tables, key=lambda table: -table.alone_ms)
    shown = tables[:limit]
    rows = [(table.name, table.label, _ranks(table.ranks), table.alone_ms) for table in shown]
    more = f", the {len(shown)} costliest of {len(tables)}" if len(shown) < len(tables) else ""
    return grid(("table", "sharding", "ranks", "alone ms"), rows, f"Tables{more}")


def _ranks(ranks: tuple[int, ...]) -> str:
    """``0-7``, where they follow each other, else ``3, 0, 5``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))
