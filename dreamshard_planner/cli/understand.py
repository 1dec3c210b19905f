# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``report``, ``explain``, ``compare`` and ``info``: commands that tell of plans and other files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

import dreamshard_planner as api
from dreamshard_planner.cli.app import Panel, Result, command, facts, grid, save, working
from dreamshard_planner.cli.options import (
    CostsOption,
    Device,
    HtmlOption,
    PlanArgument,
    SearchOptions,
    StatisticsOption,
    read_statistics,
)
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import read_json
from dreamshard_planner.support.formatting import ranges, short, size_in_words

TABLES_SHOWN = 20
ENTRIES_SHOWN = 16
"""Most entries of a part of a file that ``info`` shows one by one."""


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
        from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS, fits_of

        told["collectives"] = f"{collectives['world_size']} ranks of {collectives['hardware']['name']}"
        for name, fit in fits_of(collectives).items():
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
    return "dataset", {
        "sets": len(dataset),
        "shards": len(dataset.shards),
        "batch_sizes": sorted({shard.batch_size for shard in dataset.shards}),
        "repeats": dataset.repeats,
        "spread_of_repeats": float(dataset.spread.mean()),
        "usual_ms": dataset.usual_ms,
        "seed": dataset.seed,
        "created": dataset.created,
        "digest": dataset.digest,
        "hardware": dict(dataset.hardware),
    }


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
