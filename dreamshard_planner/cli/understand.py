# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``report``, ``explain``, ``compare``, ``info`` and ``stats``: commands that tell of plans, data and other files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

import dreamshard_planner as api
from dreamshard_planner.cli.app import Commands, Panel, Result, app, command, facts, grid, save, working
from dreamshard_planner.cli.options import (
    BATCH_SIZE,
    COUNT,
    OUTPUT,
    PLAN_AGAIN,
    CostsOption,
    Device,
    HtmlOption,
    PlanArgument,
    SearchOptions,
    StatisticsOption,
    listed,
    read_statistics,
)
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import read_json
from dreamshard_planner.support.formatting import first_of, ranges, short, size_in_words

TABLES_SHOWN = 20
ENTRIES_SHOWN = 16
"""Most entries of a part of a file that ``info`` shows one by one."""
StatisticsOutput = Annotated[Path, OUTPUT(help="Statistics to write, .json.")]
stats = typer.Typer(cls=Commands, no_args_is_help=True, help="Count how features read their tables in your data.")
app.add_typer(stats, name="stats", rich_help_panel=Panel.data)


@command("dreamshard report plan.json --html plan.html", Panel.understand)
def report(plan: PlanArgument, html: HtmlOption = None) -> Result:
    """Show a plan's file: predicted costs of the plan and its rivals when it was made, and where tables are.

    --html and --format json have all tables and ranks.
    """
    saved = api.SavedPlan.load(plan)
    save(html, lambda path: api.save_html(saved, path))
    made, libraries = saved.report(), ", ".join(f"{name} {version}" for name, version in saved.libraries.items())
    title = (
        f"{saved.name}: {len(saved.inputs.tables)} tables on {saved.inputs.topology}, "
        f"{saved.inputs.batch_size:,} samples each; {libraries}."
    )
    return Result(saved.to_dict, [title, str(made), "", costliest(made)])


def costliest(report: api.Report) -> RenderableType:
    """Return the costliest tables and their ranks."""
    by_cost = sorted(report.tables, key=lambda table: -table.most_ms)
    shown = by_cost[:TABLES_SHOWN]
    rows = [(short(table.name), table.label, ranges(table.ranks), table.most_ms) for table in shown]
    more = f", the {len(shown)} costliest of {len(by_cost)}" if len(shown) < len(by_cost) else ""
    return grid(("table", "sharding", "ranks", "ms on a rank, by itself"), rows, f"Tables{more}")


@command("dreamshard explain plan.json --rank 1", Panel.understand)
def explain(
    plan: PlanArgument,
    rank: Annotated[int | None, typer.Option(min=0, help="Rank to explain; default: the slowest.")] = None,
    statistics: StatisticsOption = None,
    costs: CostsOption = None,
) -> Result:
    """Explain why a rank is slow: its fused kernels, its costliest tables, and the gain of moving or splitting them."""
    saved = api.SavedPlan.load(plan)
    with working(f"rating {saved.name}"):
        found = _read(saved, statistics, costs).explain(rank, saved)
    return Result(found.to_dict(), [str(found)])


@command("dreamshard compare before.json after.json", Panel.understand)
def compare(
    before: PlanArgument, after: PlanArgument, statistics: StatisticsOption = None, costs: CostsOption = None
) -> Result:
    """Compare two plans: tables that moved or changed, bytes to move, and costs before and after.

    --statistics and --costs rate both plans anew. Without them, costs are those of the files.
    """
    plans: list[Any] = [before, after]
    if statistics is not None or costs is not None:
        with working("rating both plans"):
            loaded = map(api.SavedPlan.load, plans)
            plans = [_read(saved, statistics, costs).saved_plan(saved, saved.name) for saved in loaded]
    found = api.compare(*plans)
    return Result(found.to_dict(), [str(found)])


def _read(saved: api.SavedPlan, statistics: Path | None, costs: str | None) -> api.DreamShardPlanner:
    """Return a planner that has read a plan's job, with other statistics and costs if they are given."""
    return SearchOptions(costs=costs).job_of(saved, read_statistics(statistics)).read()


@command("dreamshard info auto", Panel.understand)
def info(
    source: Annotated[
        str, typer.Argument(help="A file of this package, the folder of a training's checkpoint, or auto.")
    ],
    device: Annotated[Device, typer.Option(help="Device whose cost checkpoint auto stands for.")] = "cpu",
) -> Result:
    """Show what a file holds and was made from. auto is the cost checkpoint that planning would take."""
    kind, document = _described(source, device)
    shown = IN_WORDS[kind](document) if kind in IN_WORDS else document
    return Result({"kind": kind, **document}, [facts(shown, f"{source}: {kind}")])


def _checkpoint_in_words(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the main facts of a cost checkpoint, with units; the JSON has all."""
    hardware, validation, data = (checkpoint.get(name) or {} for name in ("hardware", "validation", "dataset"))
    sets, test_sets = (data.get(name, 0) for name in ("sets", "test_sets"))
    libraries = ("torch", "fbgemm", "torchrec", "python", "instruction_set")
    told = {
        "file": checkpoint.get("file"),
        "taken because": checkpoint.get("why"),
        "hardware": checkpoint.get("hardware_name") or hardware.get("name"),
        "made with": ", ".join(f"{name.replace('_', ' ')} {hardware[name]}" for name in libraries if name in hardware),
        "created": checkpoint.get("created"),
        "measured": f"{sets:,} sets of tables to learn from, {test_sets:,} held out" if data else None,
        "network starts from": checkpoint.get("started_from"),
        "corrected": checkpoint.get("corrected"),
        "learned": (checkpoint.get("learned") or {}).get("said"),
    }
    if errors := validation.get("network_mape"):
        told["error"] = "{:.0%} forward, {:.0%} backward, on held-out sets of all kinds".format(*errors)
    over = validation.get("policy_over_rule") or {}
    told |= {f"policy against {rule}": f"{share:.2f} of its cost" for rule, share in over.items()}
    if collectives := checkpoint.get("collectives"):
        from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS, MeasuredCollectives
        from dreamshard_planner.support.documents import parsed

        measured = parsed(MeasuredCollectives, collectives, "collectives", api.CheckpointError)
        told["collectives"] = f"{measured.world_size} ranks of {measured.hardware.name}"
        for name, fit in measured.known.items():
            rates = {"of a rank": fit.bytes_per_ms, "of all ranks": fit.shared_bytes_per_ms}
            limits = [f"{rate / 1e6:,.1f} GB/s {of}" for of, rate in rates.items() if rate < MAX_BYTES_PER_MS]
            limit = ", ".join(limits) or "no limit"
            told[name] = f"{fit.latency_ms:.2f} ms and {limit}; error {fit.relative_error:.0%}"
    return {name: text for name, text in told.items() if text}


def _training_in_words(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return one line for each table of a training's checkpoint."""
    told = {}
    for name, table in checkpoint["tables"].items():
        states = ", ".join(f"{state} {' x '.join(map(str, shape))}" for state, shape in table["states"].items())
        told[name] = (
            f"{table['rows']:,} x {table['dim']} {table['data_type']}, {size_in_words(table['bytes'])}; columns of "
            f"slices {table['column_slices']}, {table['row_blocks']} row blocks; states: {states or 'none'}"
        )
    return {**told, "others": checkpoint["others"], "in all": size_in_words(checkpoint["bytes"])}


IN_WORDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "checkpoint": _checkpoint_in_words,
    "training checkpoint": _training_in_words,
}
"""Facts for people about kinds of files whose JSON is long."""


def _described(source: str, device: str) -> tuple[str, dict[str, Any]]:
    """Return kind and content of a file, by its suffix."""
    path = Path(source)
    if path.is_dir() and (path / ".metadata").exists():
        from dreamshard_planner.across_plans.reading import describe

        return "training checkpoint", describe(path)
    if source == "auto":
        from dreamshard_planner.checkpoints.choice import folder, resolve

        checkpoint = resolve(source, device)
        why = checkpoint.why or f"{checkpoint.name} ships; none of your own is in {folder()}"
        return "checkpoint", {"file": checkpoint.name, "why": why, **checkpoint.metadata}
    if path.suffix == ".json":
        return _json(path)
    if path.suffix != ".npz":
        return "checkpoint", api.Checkpoint.load(path).metadata
    from dreamshard_planner.cost.dataset import CostDataset

    dataset = CostDataset.load(path)
    batch_sizes = sorted({shard.batch_size for shard in dataset.shards})
    counted = {"sets": len(dataset), "shards": len(dataset.shards), "batch_sizes": batch_sizes}
    told = {name: getattr(dataset, name) for name in ("repeats", "usual_ms", "seed", "created", "digest")}
    spread = {"spread_of_repeats": float(dataset.spread.mean())}
    return "dataset", {**counted, **told, **spread, "hardware": dict(dataset.hardware)}


def _json(path: Path) -> tuple[str, dict[str, Any]]:
    from dreamshard_planner.observing.observation import files_of

    document = read_json(files_of(path)[0], DreamShardError)
    document = document if isinstance(document, dict) else {}
    form = re.match(r"dreamshard_planner[ .](\w+)", str(document.get("format", document.get("schema"))))
    if form is None:
        raise DreamShardError(f"{path}: a JSON file of no kind that this package writes or reads")
    kind = form[1].replace("table_list", "tables")
    return kind, {name: _counted(value) for name, value in document.items()}


def _counted(value: Any) -> Any:
    """Return a part of a document with the number of entries in place of long parts."""
    if isinstance(value, list) or isinstance(value, dict) and len(value) > ENTRIES_SHOWN:
        return f"{len(value):,} entries"
    return {name: _counted(part) for name, part in value.items()} if isinstance(value, dict) else value


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


@command("dreamshard stats diff monday.json tuesday.json", of=stats)
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
    ] = 0.05,
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
