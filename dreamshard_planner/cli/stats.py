# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``stats``: how features read their tables, from files of data, merged, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from dreamshard_planner.cli.app import Commands, app, command
from dreamshard_planner.cli.job import JobOptions, quiet
from dreamshard_planner.cli.options import listed, output, takes, whole
from dreamshard_planner.cli.output import Format, FormatOption, grid, show

if TYPE_CHECKING:
    from dreamshard_planner.workload.statistics import TableStatistics

stats = typer.Typer(cls=Commands, no_args_is_help=True, help="How features read their tables: counted in your data.")
app.add_typer(stats, name="stats")


@command("dreamshard stats parquet day0.parquet --batch-size 8192 --out statistics.json", of=stats)
def parquet(
    paths: Annotated[list[Path], typer.Argument(help="Files, or folders of .parquet files.")],
    batch_size: Annotated[int, typer.Option(parser=whole, metavar="COUNT", help="Samples in the batch of one rank.")],
    out: Annotated[Path, output("Statistics to write, .json.")],
    features: Annotated[
        str | None,
        typer.Option(help="Columns, separated by commas, feature=column where names differ; default: lists of ids."),
    ] = None,
    max_batches: Annotated[int | None, typer.Option(parser=whole, metavar="COUNT", help="Stop after so many.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Count parquet files, one batch in memory at a time; needs pyarrow."""
    statistics = _statistics()
    names = None
    if features is not None:
        pairs = [name.partition("=") for name in listed(features)]
        names = {feature.strip(): (column or feature).strip() for feature, _, column in pairs}
    counted = statistics.from_parquet(paths, batch_size, names, max_batches, progress=True)
    if names is None:
        from dreamshard_planner.workload.parquet import columns_left_out

        if left := columns_left_out(paths):
            typer.echo(
                f"not counted, since they hold no lists: {', '.join(left)}; name all that are ids with --features",
                err=True,
            )
    _keep(counted, out, format)


@command("dreamshard stats show statistics.json", name="show", of=stats)
def show_(
    path: Annotated[Path, typer.Argument(help="Statistics, .json.")], format: FormatOption = Format.table
) -> None:
    """What a file of statistics says of each feature."""
    counted = _statistics().from_json(path)
    show(_document(counted), format, _table(counted, str(path)))


@command("dreamshard stats merge monday.json tuesday.json --out week.json", of=stats)
def merge(
    paths: Annotated[list[Path], typer.Argument(help="Statistics, .json, all of one batch size.")],
    out: Annotated[Path, output("Statistics to write, .json.")],
    format: FormatOption = Format.table,
) -> None:
    """One of several, each counting by its batches."""
    statistics = _statistics()
    _keep(statistics.merge([statistics.from_json(path) for path in paths]), out, format)


@dataclass(frozen=True, kw_only=True)
class DiffOptions(JobOptions):
    """Of ``diff``: a job is wanted only where the gain of planning again is."""

    tables: Annotated[str | None, typer.Option(help="What to plan: also tells what planning again would gain.")] = None
    gpus: Annotated[
        int, typer.Option("--gpus", "--ranks", parser=whole, metavar="COUNT", help="Ranks of each node.")
    ] = 8
    batch_size: Annotated[
        int | None,
        typer.Option(
            parser=whole, metavar="COUNT", help="Samples in the batch of one rank; default: that of the statistics."
        ),
    ] = None


@command("dreamshard stats diff monday.json tuesday.json", of=stats)
@takes(DiffOptions)
def diff(
    options: DiffOptions,
    before: Annotated[Path, typer.Argument(help="Statistics, .json.")],
    after: Annotated[Path, typer.Argument(help="Newer ones.")],
    every_feature: Annotated[bool, typer.Option("--all", help="Show all, not only those that drifted.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """What drifted; with --tables also what planning again would gain."""
    statistics = _statistics()
    one, other = statistics.from_json(before), statistics.from_json(after)
    found = one.diff(other)
    document: dict[str, Any] = found.to_dict()
    shown = found.features if every_feature else found.drifted
    rows = [
        (
            f.name,
            f.pooling_before,
            f.pooling_after,
            _share(f.pooling_change),
            _share(f.reuse_change),
            _share(f.ids_change),
        )
        for f in shown
    ]
    columns = ("feature", "lookups before", "after", "changed", "reuse changed", "ids changed")
    told: list[Any] = [str(found).splitlines()[0], *([grid(columns, rows)] if rows else [])]
    if options.tables is not None:
        from dataclasses import replace

        from dreamshard_planner.offline.what_if import replanning

        size = options.batch_size or max(feature.batch_size for feature in other.values())
        gain = replanning(replace(options, batch_size=size, statistics=None).job(), one, other)
        document["replanning"] = {"keep_ms": gain.keep_ms, "again_ms": gain.again_ms, "gain": gain.gain}
        told.append(
            f"Keeping the plan of {before.name}: {gain.keep_ms:.3f} ms; planning again: {gain.again_ms:.3f} ms, "
            f"{gain.gain:.1%} less."
        )
    show(document, format, *told)


def _statistics() -> type[TableStatistics]:
    with quiet():
        from dreamshard_planner.workload.statistics import TableStatistics
    return TableStatistics


def _keep(counted: TableStatistics, out: Path, format: Format) -> None:
    counted.to_json(out)
    typer.echo(f"written to {out}", err=True)
    show(_document(counted), format, _table(counted, str(out)))


def _document(counted: TableStatistics) -> dict[str, Any]:
    return {
        name: {
            "pooling_factor": feature.pooling_factor,
            "batch_size": feature.batch_size,
            "batches": feature.batches,
            "distinct_rows": feature.distinct_rows,
            "mean_reuse": _reuse(feature),
            "largest_id": None if feature.ids is None else feature.ids.end - 1,
        }
        for name, feature in counted.items()
    }


def _table(counted: TableStatistics, title: str) -> Table:
    columns = ("feature", "lookups per sample", "batch size", "batches", "distinct rows", "reads of each", "largest id")
    return grid(columns, [(name, *values.values()) for name, values in _document(counted).items()], title)


def _reuse(feature: Any) -> float | None:
    if not feature.distinct_rows:
        return None
    return feature.pooling_factor * feature.batch_size / feature.distinct_rows


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
