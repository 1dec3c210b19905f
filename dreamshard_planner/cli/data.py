# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``stats``: statistics of how features read their tables, counted in data, merged, compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import dreamshard_planner as api
from dreamshard_planner.cli.app import Commands, Panel, Result, app, command, grid, save
from dreamshard_planner.cli.options import BATCH_SIZE, COUNT, OUTPUT, PLAN_AGAIN, SearchOptions, listed
from dreamshard_planner.support.formatting import first_of

stats = typer.Typer(cls=Commands, no_args_is_help=True, help="Count how features read their tables in your data.")
app.add_typer(stats, name="stats", rich_help_panel=Panel.data)
WORTH = 0.05
"""Default share of the cost from which planning again is worth it."""
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
) -> Result:
    """Count lookups in parquet files, batch by batch; needs pyarrow."""
    names: dict[str, str] | None = None
    if features is not None:
        pairs = (name.partition("=") for name in listed(features))
        names = {feature.strip(): (column or feature).strip() for feature, _, column in pairs}
    counted = api.TableStatistics.from_parquet(paths, batch_size, names, max_batches, progress=True)
    if names is None:
        from dreamshard_planner.workload.parquet import columns_left_out

        if left := columns_left_out(paths):
            typer.echo(
                f"not counted, since they hold no lists: {', '.join(left)}; name all that are ids with --features",
                err=True,
            )
    return _kept(counted, out)


@command("dreamshard stats merge monday.json tuesday.json --out week.json", of=stats)
def merge(
    paths: Annotated[list[Path], typer.Argument(help="Statistics, .json, all of one batch size.")],
    out: StatisticsOutput,
) -> Result:
    """Merge several files of statistics, weighted by their batches."""
    return _kept(api.TableStatistics.merge(map(api.TableStatistics.from_json, paths)), out)


@command("dreamshard stats diff monday.json tuesday.json", of=stats, takes=SearchOptions)
def diff(
    options: SearchOptions,
    before: Annotated[
        Path,
        typer.Argument(help="Older statistics, .json. Without AFTER: newer statistics, compared with those of --plan."),
    ],
    after: Annotated[Path | None, typer.Argument(help="Newer statistics, .json.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="The plan that runs, .json: tells whether planning again is worth it.")
    ] = None,
    worth: Annotated[
        float, typer.Option(min=0, max=1, help="Least gain, as a share of the plan's cost, for which to plan again.")
    ] = WORTH,
) -> Result:
    """Tell which features drifted, and with --plan what planning again would gain.

    With --plan, exit status 3 if that is worth it, 0 if the plan may stay.
    """
    saved = None if plan is None else api.SavedPlan.load(plan)
    if after is not None:
        one, newer = api.TableStatistics.from_json(before), after
    elif saved is not None:
        one, newer = api.TableStatistics(saved.inputs.features), before
    else:
        raise typer.BadParameter("give two files of statistics, or --plan, whose file holds the older ones")
    other = api.TableStatistics.from_json(newer)
    if saved is not None and after is None and not one.keys() & other.keys():
        held = f"none of the {len(other)} feature(s) of {newer}" if one else "no statistics"
        raise api.StatisticsError(
            f"{saved.name} holds {held}, so no drift can be seen: give the statistics that it was made with as well, "
            f"dreamshard stats diff OLDER {newer} --plan {plan}"
        )
    found = one.diff(other)
    if saved is None:
        return Result(found.to_dict(), [str(found)])
    notes = []
    if after is None and found.only_after:
        notes.append(
            f"{saved.name} holds no statistics of {len(found.only_after)} feature(s): {first_of(found.only_after, 3)}; "
            f"give those that it was made with before {newer.name} to see what drifted."
        )
    planner = options.job_of(saved, other).plan()
    keep_ms, again_ms = planner.predict(saved).total_ms, planner.report().chosen.total_ms
    gain = max(0.0, 1 - again_ms / keep_ms) if keep_ms > 0 else 0.0
    verdict = "plan again" if gain >= worth else "keep the plan"
    said = (
        f"Verdict: {verdict}. By {newer.name}, {saved.name} costs {keep_ms:.3f} ms, and planned again "
        f"{again_ms:.3f} ms: {gain:.1%} less; planning again pays from {worth:.1%}."
    )
    replanning = {"keep_ms": keep_ms, "again_ms": again_ms, "gain": gain}
    document = {**found.to_dict(), "verdict": verdict, "replanning": replanning}
    return Result(document, [said, str(found), *notes], PLAN_AGAIN if gain >= worth else 0)


def _kept(counted: api.TableStatistics, out: Path) -> Result:
    """Write statistics and show them."""
    save(out, counted.to_json)
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
    rows = [(name, *values.values()) for name, values in document.items()]
    return Result(document, [grid(columns, rows, str(out))])
