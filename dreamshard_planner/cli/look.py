# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``doctor`` and ``info``: what this machine has, and what files hold."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.job import quiet
from dreamshard_planner.cli.options import DEFAULT_RECIPE, Device, RecipeOption
from dreamshard_planner.cli.output import Format, FormatOption, facts, grid, show
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.support.files import read_json


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
    with quiet():
        from dreamshard_planner.cli.diagnosis import diagnose

        findings = diagnose(measure)
    rows = [(finding.subject, finding.found, finding.verdict, finding.advice) for finding in findings]
    show([asdict(finding) for finding in findings], format, grid(("", "found", "", "advice"), rows))
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


@command("dreamshard info auto")
def info(
    source: Annotated[str, typer.Argument(help="Checkpoint, dataset, statistics, list of tables or plan; or auto.")],
    device: Annotated[Device, typer.Option(help="Whose checkpoint auto stands for.")] = Device.cpu,
    recipe: RecipeOption = DEFAULT_RECIPE,
    format: FormatOption = Format.table,
) -> None:
    """What a file holds and what it was made from; auto is the checkpoint that planning would take."""
    kind, document = _described(source, device.value, recipe.value)
    show({"kind": kind, **document}, format, facts(document, f"{source}: {kind}"))


def _described(source: str, device: str, recipe: str) -> tuple[str, dict[str, Any]]:
    """Kind and content of a file."""
    with quiet():
        from dreamshard_planner.checkpoints.checkpoint import Checkpoint, resolve
        from dreamshard_planner.checkpoints.user_folder import folder

    path = Path(source)
    if source == "auto":
        checkpoint = resolve(source, device, recipe)
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
    from dreamshard_planner.offline import table_list
    from dreamshard_planner.plans import plan_file
    from dreamshard_planner.workload import pools, statistics

    document = read_json(path, DreamShardError)
    document = document if isinstance(document, dict) else {}
    if document.get("format") == plan_file.FORMAT:
        saved = plan_file.SavedPlan.load(path)
        return "plan", {
            "tables": len(saved.inputs.tables),
            "ranks": saved.inputs.topology.world_size,
            "total_ms": saved.predicted.total_ms,
            "cost_source": saved.predicted.cost_source,
            "libraries": saved.libraries,
            "settings": saved.inputs.settings,
        }
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
