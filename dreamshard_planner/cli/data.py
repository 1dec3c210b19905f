# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``stats``: statistics of how features read their tables, counted in data, merged, compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamshard_planner.cli.app import Commands, Panel, app, command
from dreamshard_planner.cli.options import BATCH_SIZE, COUNT, OUTPUT, listed
from dreamshard_planner.cli.output import Format, FormatOption, grid, show

if TYPE_CHECKING:
    from dreamshard_planner.workload.statistics import TableStatistics

stats = typer.Typer(cls=Commands, no_args_is_help=True, help="Count how features read their tables in your data.")
app.add_typer(stats, name="stats", rich_help_panel=Panel.data.value)
StatisticsOutput = Annotated[Path, OUTPUT(help="Statistics to write, .json.")]


@command("dreamshard stats parquet day0.parquet --batch-size 8192 --out statistics.json", of=stats)
def parquet(
    paths: Annotated[list[Path], typer.Argument(help="Files, or folders of .parquet files.")],
    batch_size: Annotated[int, BATCH_SIZE],
    out: StatisticsOutput,
    features: Annotated[
        str | None,
        typer.Option(
            help="Columns, separated by commas, feature=column if names differ; default: all that hold lists of ids."
        ),
    ] = None,
    max_batches: Annotated[int | None, COUNT(help="Most batches to count.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Count lookups in parquet files, batch by batch; needs pyarrow."""
    from dreamshard_planner.workload.statistics import TableStatistics

    names: dict[str, str] | None = None
    if features is not None:
        pairs = (name.partition("=") for name in listed(features))
        names = {feature.strip(): (column or feature).strip() for feature, _, column in pairs}
    counted = TableStatistics.from_parquet(paths, batch_size, names, max_batches, progress=True)
    if names is None:
        from dreamshard_planner.workload.parquet import columns_left_out

        if left := columns_left_out(paths):
            typer.echo(
                f"not counted, since they hold no lists: {', '.join(left)}; name all that are ids with --features",
                err=True,
            )
    _keep(counted, out, format)


@command("dreamshard stats merge monday.json tuesday.json --out week.json", of=stats)
def merge(
    paths: Annotated[list[Path], typer.Argument(help="Statistics, .json, all of one batch size.")],
    out: StatisticsOutput,
    format: FormatOption = Format.table,
) -> None:
    """Merge several files of statistics, weighted by their batches."""
    from dreamshard_planner.workload.statistics import TableStatistics

    _keep(TableStatistics.merge(map(TableStatistics.from_json, paths)), out, format)


@command("dreamshard stats diff monday.json tuesday.json", of=stats)
def diff(
    before: Annotated[Path, typer.Argument(help="Older statistics, .json.")],
    after: Annotated[Path, typer.Argument(help="Newer statistics, .json.")],
    format: FormatOption = Format.table,
) -> None:
    """Tell which features drifted. dreamshard replan tells whether planning again is worth it."""
    from dreamshard_planner.workload.statistics import TableStatistics

    found = TableStatistics.from_json(before).diff(TableStatistics.from_json(after))
    show(found.to_dict(), format, str(found))


def _keep(counted: TableStatistics, out: Path, format: Format) -> None:
    counted.to_json(out)
    typer.echo(f"written to {out}", err=True)
    document = {
        name: {
            "pooling_factor": feature.pooling_factor,
            "batch_size": feature.batch_size,
            "batches": feature.batches,
            "distinct_rows": feature.distinct_rows,
            "mean_reuse": feature.lookups / feature.distinct_rows if feature.distinct_rows else None,
            "largest_id": None if feature.ids is None else feature.ids.end - 1,
        }
        for name, feature in counted.items()
    }
    columns = ("feature", "lookups per sample", "batch size", "batches", "distinct rows", "reads of each", "largest id")
    show(document, format, grid(columns, [(name, *values.values()) for name, values in document.items()], str(out)))
