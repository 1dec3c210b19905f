# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ``dreamshard`` command. Data goes to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamshard_planner.checkpoint import RECIPES
from dreamshard_planner.errors import DreamShardError, FileError
from dreamshard_planner.files import check_writable

if TYPE_CHECKING:
    from dreamshard_planner.training import TrainingConfig


class Device(str, Enum):
    """Where kernels run."""

    cpu = "cpu"
    cuda = "cuda"


Recipe = Enum("Recipe", {name: name for name in RECIPES}, type=str)


def _writable(path: Path) -> Path:
    """Before minutes of measuring, not after."""
    try:
        check_writable(path)
    except FileError as error:
        raise typer.BadParameter(str(error)) from error
    return path


def _present(device: Device) -> Device:
    import torch

    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("cuda: no GPU that this torch can use")
    return device


DeviceOption = Annotated[Device, typer.Option(help="Where kernels run.", callback=_present)]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Intra-op threads of a rank (CPU).")]
RecipeOption = Annotated[Recipe, typer.Option(help="paper: the networks as published; autoshard: its policy.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Tiny settings, to try the flow; no use for planning.")]
CollectivesOption = Annotated[
    Path | None, typer.Option(help="JSON of python -m dreamshard_planner.measure.collectives, to keep and plan with.")
]
UpdatesOption = Annotated[int | None, typer.Option(min=1, help="Policy updates; by default what a few minutes allow.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Learned placement of embedding tables.")


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Checkpoint to write; its dataset is kept beside it.", callback=_writable)],
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Time for measuring kernels; 300, or 8 with --quick.")
    ] = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    seed: Annotated[int, typer.Option(help="Of tables, sets, networks and policy.")] = 0,
    recipe: RecipeOption = Recipe.default,
    roofline: Annotated[bool, typer.Option(help="Train a policy on the roofline model; measures nothing.")] = False,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
) -> None:
    """Make a checkpoint from nothing: measure fused kernels, fit the cost network, train the policy.

    An interrupted run, started again with the same options, continues its measurements. Under torchrun all ranks
    measure.
    """
    from dreamshard_planner.measure.ranks import Ranks
    from dreamshard_planner.training import QUICK, TrainingConfig, train, train_on_roofline

    config = _with_updates(QUICK if quick else TrainingConfig(), updates)
    config = replace(config, collectives=_read_collectives(collectives))
    config = replace(config, device=device.value, threads=threads, seed=seed, recipe=recipe.value)
    config = config if seconds is None else replace(config, seconds=seconds)
    with Ranks.joined(device.value) as ranks:
        if roofline:
            checkpoint = ranks.from_first(lambda: train_on_roofline(config, out))
        else:
            checkpoint = train(config, out, ranks=ranks)
        if ranks.leads:
            typer.echo(json.dumps(checkpoint.metadata["validation"], indent=2))


@app.command()
def collect(
    out: Annotated[
        Path, typer.Option(help="Dataset to write, .npz; its journal is kept beside it.", callback=_writable)
    ],
    pools: Annotated[str, typer.Option(help="Table pools, separated by commas.")] = "meta_like_2021,broad",
    held_out: Annotated[bool, typer.Option(help="Measure the held-out half of each pool, for tests.")] = False,
    sets: Annotated[int, typer.Option(min=1, help="Sets to draw, measured in this order.")] = 5000,
    seconds: Annotated[float | None, typer.Option(min=0, help="Stop after this time, to be continued.")] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Samples that a kernel sees, separated by commas; default: by device.")
    ] = None,
    max_tables: Annotated[int, typer.Option(min=1, help="Tables of the largest set; sizes are log-uniform.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each set.")] = 5,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    seed: Annotated[int, typer.Option(help="Of sets, indices and order.")] = 0,
) -> None:
    """Measure random sets of tables as fused kernels; the same command continues what was interrupted.

    Under torchrun (--nproc_per_node=8 -m dreamshard_planner collect ...) all ranks share the sets, each on a GPU, or on
    cores, of its own.
    """
    from dreamshard_planner.measure.collect import collect, draw_sets
    from dreamshard_planner.measure.ranks import Ranks
    from dreamshard_planner.training import pool_tables

    journal = out.with_suffix(".journal")
    if journal == out:
        raise typer.BadParameter(f"{out}: that is the journal's name; a dataset ends in .npz")
    names = tuple(name.strip() for name in pools.split(","))
    try:
        batches = None if batch_sizes is None else [int(size) for size in batch_sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"whole numbers, separated by commas, got {batch_sizes!r}") from error
    tables = pool_tables(names)[held_out]
    drawn = draw_sets(tables, sets, seed, batches, max_tables, device=device.value)
    with Ranks.joined(device.value) as ranks:
        own = ranks.device(device.value)
        dataset = collect(drawn, journal, own, threads, repeats, seed, seconds, ranks=ranks)
        if ranks.leads:
            dataset.save(out)
            typer.echo(f"{out}: {len(dataset)} of {sets} sets, noise floor {dataset.spread.mean():.1%}")


@app.command()
def fit(
    dataset: Annotated[list[Path], typer.Option(help="Measured sets, .npz; may be given several times.")],
    test_dataset: Annotated[list[Path], typer.Option(help="Measured sets of held-out tables; likewise.")],
    out: Annotated[Path, typer.Option(help="Checkpoint to write.", callback=_writable)],
    recipe: RecipeOption = Recipe.default,
    seed: Annotated[int, typer.Option(help="Of networks and policy.")] = 0,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
) -> None:
    """Make a checkpoint from measured sets; needs no hardware."""
    from dreamshard_planner.cost.dataset import CostDataset
    from dreamshard_planner.training import QUICK, TrainingConfig, learn

    config = _with_updates(QUICK if quick else TrainingConfig(), updates)
    config = replace(config, collectives=_read_collectives(collectives), recipe=recipe.value, seed=seed)
    train_data, test_data = (
        CostDataset.concatenate([CostDataset.load(path) for path in paths]) for paths in (dataset, test_dataset)
    )
    checkpoint, _ = learn(config, train_data, test_data)
    checkpoint.save(out)
    typer.echo(json.dumps(checkpoint.metadata["validation"], indent=2))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Checkpoint to write.", callback=_writable)],
    checkpoint: Annotated[str, typer.Option(help="Checkpoint to start from; auto: what ships.")] = "auto",
    seconds: Annotated[float, typer.Option(min=1, help="Time for measuring kernels.")] = 60.0,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    collectives: CollectivesOption = None,
    seed: Annotated[int, typer.Option(help="Of the sets.")] = 0,
) -> None:
    """Fit a checkpoint's cost network on to this machine; prints its error before and after.

    Under torchrun all ranks measure.
    """
    from dreamshard_planner.checkpoint import resolve
    from dreamshard_planner.measure.ranks import Ranks
    from dreamshard_planner.training import calibrate

    start = resolve(checkpoint, device.value)
    with Ranks.joined(device.value) as ranks:
        made = calibrate(
            start,
            out,
            seconds=seconds,
            device=device.value,
            threads=threads,
            collectives=_read_collectives(collectives),
            seed=seed,
            ranks=ranks,
        )
        if ranks.leads:
            typer.echo(json.dumps(made.metadata["calibration"], indent=2))


@app.command()
def info(checkpoint: Annotated[Path, typer.Argument(help="A checkpoint file.")]) -> None:
    """Print what a checkpoint was made from, as JSON."""
    from dreamshard_planner.checkpoint import Checkpoint

    typer.echo(json.dumps(Checkpoint.load(checkpoint).metadata, indent=2))


def _read_collectives(path: Path | None) -> dict | None:
    from dreamshard_planner.measure.collectives import Collectives

    return None if path is None else Collectives.load(path).metadata()


def _with_updates(config: TrainingConfig, updates: int | None) -> TrainingConfig:
    if updates is None:
        return config
    return replace(
        config,
        reinforce=replace(config.reinforce, updates=updates),
        paper_reinforce=replace(config.paper_reinforce, updates=updates),
    )


def main() -> None:
    """Entry point: the package's own errors, and the system's, become one line and exit status 1."""
    try:
        app()
    except (DreamShardError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error
