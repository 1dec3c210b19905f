# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``doctor`` and ``info``: what this machine has, and what files hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.options import Device
from dreamshard_planner.cli.output import Format, FormatOption, facts, grid, show
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import read_json
from dreamshard_planner.support.formatting import size_in_words

if TYPE_CHECKING:
    from dreamshard_planner.cost.collectives import CollectiveFit


@command("dreamshard doctor")
def doctor(
    measure: Annotated[
        bool, typer.Option("--measure", help="Time kernels for ten seconds: how far off costs are, by optimizer.")
    ] = False,
    format: FormatOption = Format.table,
) -> None:
    """What is installed, which devices there are, which checkpoint would be used and why, what CUDA lacks.

    Exit status 1 where planning is not possible.
    """
    from dreamshard_planner.cli.diagnosis import PREVENTS_PLANNING, diagnose

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of half installed libraries; their findings say it
        findings = diagnose(measure)
    rows = [(finding.subject, finding.found, finding.verdict, finding.advice) for finding in findings]
    show([asdict(finding) for finding in findings], format, grid(("", "found", "", "advice"), rows))
    if any(finding.verdict in PREVENTS_PLANNING for finding in findings):
        raise typer.Exit(1)


@command("dreamshard info auto")
def info(
    source: Annotated[
        str,
        typer.Argument(help="A file of this package, or the folder of a training's checkpoint; or auto."),
    ],
    device: Annotated[Device, typer.Option(help="Whose checkpoint auto stands for.")] = Device.cpu,
    format: FormatOption = Format.table,
) -> None:
    """What a file holds and what it was made from; auto is the checkpoint that planning would take."""
    kind, document = _described(source, device.value)
    shown = IN_WORDS[kind](document) if kind in IN_WORDS else document
    show({"kind": kind, **document}, format, facts(shown, f"{source}: {kind}"))


def _checkpoint_in_words(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What people ask of a checkpoint, with units; the JSON has the rest."""
    hardware, validation, data = (checkpoint.get(name) or {} for name in ("hardware", "validation", "dataset"))
    sets, test_sets = (data.get(name, 0) for name in ("sets", "test_sets"))
    told = {
        "file": checkpoint.get("file"),
        "taken because": checkpoint.get("why"),
        "hardware": checkpoint.get("hardware_name") or hardware.get("name"),
        "made with": _made_with(hardware),
        "created": checkpoint.get("created"),
        "measured": f"{sets:,} sets of tables to learn from, {test_sets:,} held out" if data else None,
        "network starts from": checkpoint.get("started_from"),
        "corrected": checkpoint.get("corrected"),
        "learned": (checkpoint.get("learned") or {}).get("said"),
        "error": _error(validation.get("network_mape")),
        "error of a linear model": _error(validation.get("linear_mape")),
    }
    over = validation.get("policy_over_rule") or {}
    told |= {f"policy against {rule}": f"{share:.2f} of its cost" for rule, share in over.items()}
    if collectives := checkpoint.get("collectives"):
        from dreamshard_planner.cost.collectives import fits_of

        told["collectives"] = f"{collectives['world_size']} ranks of {collectives['hardware']['name']}"
        told |= {name: _collective(fit) for name, fit in fits_of(collectives).items()}
    return {name: text for name, text in told.items() if text}


def _made_with(hardware: dict[str, Any]) -> str:
    names = ("torch", "fbgemm", "torchrec", "python", "instruction_set")
    return ", ".join(f"{name.replace('_', ' ')} {hardware[name]}" for name in names if name in hardware)


def _training_in_words(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Describe each table of a training's checkpoint in a line."""
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
"""Shown content of kinds of files whose JSON is long."""


def _error(shares: Sequence[float] | None) -> str | None:
    if not shares:
        return None
    forward, backward = shares
    return f"{forward:.0%} forward, {backward:.0%} backward, on held-out sets of all kinds"


def _collective(fit: CollectiveFit) -> str:
    from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS

    rates = {"of a rank": fit.bytes_per_ms, "of all ranks": fit.shared_bytes_per_ms}
    limits = [f"{rate / 1e6:,.1f} GB/s {of}" for of, rate in rates.items() if rate < MAX_BYTES_PER_MS]
    return f"{fit.latency_ms:.2f} ms and {', '.join(limits) or 'no limit'}; error {fit.relative_error:.0%}"


def _described(source: str, device: str) -> tuple[str, dict[str, Any]]:
    """Return kind and content of a file, by its suffix."""
    from dreamshard_planner.checkpoints.checkpoint import Checkpoint, resolve
    from dreamshard_planner.checkpoints.user_folder import folder

    path = Path(source)
    if path.is_dir() and (path / ".metadata").exists():
        from dreamshard_planner.across_plans.reading import describe

        return "training checkpoint", describe(path)
    if source == "auto":
        checkpoint = resolve(source, device)
        why = checkpoint.why or f"{checkpoint.name} ships; none of your own is in {folder()}"
        return "checkpoint", {"file": checkpoint.name, "why": why, **checkpoint.metadata}
    if path.suffix == ".npz":
        return "dataset", _dataset(path)
    if path.suffix == ".json":
        return _json(path)
    return "checkpoint", Checkpoint.load(path).metadata


def _dataset(path: Path) -> dict[str, Any]:
    from dreamshard_planner.cost.dataset import CostDataset

    dataset = CostDataset.load(path)
    batch_sizes = sorted(set(dataset.columns["batch_size"].tolist()))
    return {
        "sets": len(dataset),
        "shards": len(dataset.columns["name"]),
        "batch_sizes": batch_sizes,
        "repeats": dataset.samples_ms.shape[1],
        "spread_of_repeats": float(dataset.spread.mean()),
        "usual_ms": dataset.usual_ms,
        "seed": dataset.seed,
        "created": dataset.created,
        "digest": dataset.digest,
        "hardware": dict(dataset.hardware),
    }


def _json(path: Path) -> tuple[str, dict[str, Any]]:
    from dreamshard_planner.observing import observation
    from dreamshard_planner.offline import table_list
    from dreamshard_planner.plans import plan_file
    from dreamshard_planner.workload import pools, statistics

    files = observation.files_of(path)
    document = read_json(files[0], DreamShardError)
    document = document if isinstance(document, dict) else {}
    if document.get("format") == plan_file.FORMAT:
        saved = plan_file.SavedPlan.load(path)
        return "plan", {
            "tables": len(saved.inputs.tables),
            "ranks": saved.inputs.topology.all_ranks,
            "total_ms": saved.predicted.chosen.total_ms,
            "cost_source": saved.predicted.cost_source,
            "libraries": saved.libraries,
            "settings": saved.inputs.settings,
        }
    if document.get("format") == observation.FORMAT:
        seen = observation.Observation.load_all([path])
        ranks = sorted({rank.rank for run in seen.runs for rank in run.ranks})
        told = {"runs": len(seen.runs), "steps": seen.steps, "ranks": ranks, "hardware": seen.hardware}
        return "observation", told
    schema = document.get("schema")
    if schema == statistics.SCHEMA:
        found = statistics.TableStatistics.from_json(path)
        factors = {name: feature.pooling_factor for name, feature in found.items()}
        return "statistics", {"features": len(found), "pooling_factors": factors}
    if schema in (table_list.SCHEMA, pools.TABLES_SCHEMA):
        specs = table_list.read_table_list(path)
        weights = sum(spec.num_embeddings * spec.embedding_dim for spec in specs)
        return "tables", {
            "tables": len(specs),
            "features": sum(len(spec.features) for spec in specs),
            "rows": sum(spec.num_embeddings for spec in specs),
            "weights": weights,
        }
    raise DreamShardError(f"{path}: a JSON file of no kind that this package writes or reads")
