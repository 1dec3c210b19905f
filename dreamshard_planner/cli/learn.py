# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``train``, ``collect``, ``fit`` and ``calibrate``: what makes datasets and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.options import (
    SECONDS,
    SEED,
    CollectivesOption,
    Device,
    DeviceOption,
    QuickOption,
    ThreadsOption,
    UpdatesOption,
    load_plan,
    output,
)
from dreamshard_planner.cli.output import Format, FormatOption, facts, show
from dreamshard_planner.errors import CalibrationRefused, CheckpointError, DatasetError
from dreamshard_planner.support.files import check_writable

if TYPE_CHECKING:
    from dreamshard_planner.checkpoints.checkpoint import Checkpoint
    from dreamshard_planner.cost.dataset import CostDataset
    from dreamshard_planner.measure.ranks import Ranks
    from dreamshard_planner.training import TrainingConfig
    from dreamshard_planner.workload.tables import Table


KEPT = "default: among your own checkpoints, named by the hardware, where auto finds it."
MAX_TABLES = 100
"""Most tables of a collected set."""


def keep_in(hardware: Mapping[str, Any], how: str = "") -> Path:
    """Where a checkpoint goes that nobody gave a file for."""
    from dreamshard_planner.checkpoints import user_folder

    out = user_folder.new_file(hardware, how)
    check_writable(out)
    return out


def _described(device: Device, threads: int) -> dict[str, Any]:
    """This machine."""
    from dreamshard_planner.measure.hardware import describe_hardware

    return describe_hardware(device.value, threads)


def _check_out(out: Path | None, quick: bool, roofline: bool = False) -> None:
    """What is of no use for planning on this machine must not be what auto takes."""
    if out is None and (quick or roofline):
        made = "a policy for any hardware" if roofline else "nothing to plan with"
        raise typer.BadParameter(f"--{'roofline' if roofline else 'quick'} makes {made}: say where to, with --out FILE")


def tell_where(out: Path, given: bool, made: Checkpoint) -> None:
    """On stderr, what to do with a new checkpoint, and which plans take it by themselves."""
    how = f'DreamShardPlanner(checkpoint="{out}"), or dreamshard plan --checkpoint {out}'
    typer.echo(f"plan with it: {how}" if given else f"kept in {out}: {_taken_by(out, made, how)}", err=True)


def _taken_by(out: Path, made: Checkpoint, how: str) -> str:
    """What takes a checkpoint that is among the user's own: it may be for other hardware than this, or threads."""
    from dreamshard_planner.checkpoints.checkpoint import resolve
    from dreamshard_planner.measure.hardware import hardware_name

    hardware = made.metadata["hardware"]
    try:
        taken = resolve("auto", hardware["device"]).name
    except CheckpointError as error:  # of another file, and no reason to fail: this one is made
        return f"no plan takes it yet: {error}"
    if taken == out.name:
        return "plans on this machine take it now"
    return f"plans for {hardware_name(hardware)} take it, those on this machine {taken}; plan with it by {how}"


def _show_made(checkpoint: Checkpoint, path: Path, given: bool, format: Format) -> None:
    """How good a new checkpoint is on held-out tables, and what to do with it."""
    validation = checkpoint.metadata["validation"]
    tell_where(path, given, checkpoint)
    show(validation, format, facts(validation, str(path)))


@contextmanager
def refusal_told(out: Path) -> Iterator[None]:
    """On stderr, what was checked, where costs are not corrected and nothing is written."""
    try:
        yield
    except CalibrationRefused as refused:
        for check in refused.checks:
            typer.echo(check["said"], err=True)
        raise CalibrationRefused(f"{out} stays as it was: {refused}; or --force") from refused


@contextmanager
def _measuring(device: Device) -> Iterator[Ranks]:
    """The ranks that measure, all that torchrun starts; an interruption says how to go on."""
    from dreamshard_planner.measure.ranks import Ranks

    with Ranks.joined(device.value) as ranks:
        try:
            yield ranks
        except KeyboardInterrupt:
            if ranks.leads:
                typer.echo("interrupted: the same command goes on with what is measured already", err=True)
            raise


@command("dreamshard train --out my.safetensors")
def train(
    out: Annotated[Path | None, output(f"Checkpoint to write, its dataset beside it; {KEPT}")] = None,
    seconds: Annotated[float | None, SECONDS(min=1, help="Time for measuring kernels; 300, or 8 with --quick.")] = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    seed: Annotated[int, SEED(help="Of tables, sets, networks and policy.")] = 0,
    roofline: Annotated[bool, typer.Option(help="Train a policy on the roofline model; measures nothing.")] = False,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
    format: FormatOption = Format.table,
) -> None:
    """Make a checkpoint: measure fused kernels, fit the cost network, train the policy.

    An interrupted run, started again with the same options, continues its measurements. Under torchrun all ranks
    measure. The policy starts from the one that ships, on CPUs the network as well. Collectives stay those that plans
    on such a device use now, unless measured ones are given. With --quick the network starts from nothing, with
    --roofline the policy.
    """
    from dreamshard_planner.checkpoints.checkpoint import SHIPPED, resolve, shipped
    from dreamshard_planner.policy.reinforce import FROM_SCRATCH
    from dreamshard_planner.training import train, train_on_roofline

    _check_out(out, quick, roofline)
    path = out or keep_in(_described(device, threads))
    config = replace(_config(quick, updates, collectives, seed), device=device.value, threads=threads)
    config = config if seconds is None else replace(config, seconds=seconds)
    if not (roofline or quick):
        kept = config.collectives or resolve("auto", device.value, threads=threads).metadata.get("collectives")
        # Whatever the user's own are, an interrupted training goes on as it began. On GPUs costs start from bandwidths.
        start = shipped(SHIPPED, "cpu") if device is Device.cpu else None
        config = replace(config, start=start, collectives=kept)
    if roofline and not quick:
        config = replace(config, reinforce=replace(FROM_SCRATCH, updates=updates or FROM_SCRATCH.updates))
    with _measuring(device) as ranks:
        if roofline:
            checkpoint = ranks.from_first(lambda: train_on_roofline(config, path))
        else:
            checkpoint = train(config, path, ranks=ranks)
        if ranks.leads:
            _show_made(checkpoint, path, out is not None, format)


@command("dreamshard collect --seconds 60 --out sets.npz")
def collect(
    out: Annotated[Path, output("Dataset to write, .npz; its measured blocks are kept beside it.")],
    pools: Annotated[str, typer.Option(help="Table pools, separated by commas.")] = "meta_like_2021,broad",
    held_out: Annotated[bool, typer.Option(help="Measure the held-out half of each pool, for tests.")] = False,
    sets: Annotated[int, typer.Option(min=1, help="Sets to draw, measured in this order.")] = 5000,
    seconds: Annotated[float | None, SECONDS(min=0, help="Stop after this time, to be continued.")] = None,
    batch_sizes: Annotated[
        str | None, typer.Option(help="Samples that a kernel sees, separated by commas; default: by device.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each set.")] = 5,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    seed: Annotated[int, SEED(help="Of sets, indices and order.")] = 0,
    format: FormatOption = Format.table,
) -> None:
    """Measure random sets of tables as fused kernels; the same command continues what was interrupted.

    Under torchrun (--nproc_per_node=8 -m dreamshard_planner collect ...) all ranks share the sets, each on a GPU, or on
    cores, of its own.
    """
    from dreamshard_planner.measure.collect import collect
    from dreamshard_planner.measure.sets import draw_mixed_sets
    from dreamshard_planner.training import pool_tables

    folder = out.with_suffix(".blocks")
    if folder == out:
        raise typer.BadParameter(f"{out}: the measured blocks go there; a dataset ends in .npz")
    names = tuple(name.strip() for name in pools.split(","))
    try:
        batches = None if batch_sizes is None else [int(size) for size in batch_sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"whole numbers, separated by commas, got {batch_sizes!r}") from error
    tables = pool_tables(names)[held_out]
    drawn = draw_mixed_sets(tables, sets, seed, batches, MAX_TABLES, device.value)
    with _measuring(device) as ranks:
        own = ranks.device(device.value)
        dataset = collect(drawn, folder, own, threads, repeats, seed, seconds, ranks=ranks)
        if not ranks.leads:
            return
        dataset.save(out)
    told = {
        "dataset": str(out),
        "blocks": str(folder),
        "sets": len(dataset),
        "sets_drawn": sets,
        "spread_of_repeats": float(dataset.spread.mean()),
    }
    spread = told["spread_of_repeats"]
    show(told, format, f"{out}: {len(dataset)} of {sets} sets, spread of repeats {spread:.1%}; blocks in {folder}")


@command("dreamshard fit --dataset sets.npz --test-dataset held_out.npz --out my.safetensors")
def fit(
    dataset: Annotated[list[Path], typer.Option(help="Measured sets, .npz; may be given several times.")],
    test_dataset: Annotated[list[Path], typer.Option(help="Measured sets of held-out tables; likewise.")],
    out: Annotated[Path | None, output(f"Checkpoint to write; {KEPT}")] = None,
    seed: Annotated[int, SEED(help="Of networks and policy.")] = 0,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
    format: FormatOption = Format.table,
) -> None:
    """Make a checkpoint from measured sets; needs no hardware."""
    from dreamshard_planner.training import learn

    _check_out(out, quick)
    config = _config(quick, updates, collectives, seed)
    train_data, test_data = (_joined(paths) for paths in (dataset, test_dataset))
    path = out or keep_in(train_data.hardware)
    checkpoint, _ = learn(config, train_data, test_data)
    checkpoint.save(path)
    _show_made(checkpoint, path, out is not None, format)


@command("dreamshard calibrate --seconds 60")
def calibrate(
    out: Annotated[Path | None, output(f"Checkpoint to write; {KEPT}")] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint to do better than; auto: what plans take on this machine now.")
    ] = "auto",
    seconds: Annotated[float, SECONDS(min=1, help="Time for measuring kernels.")] = 60.0,
    tables: Annotated[
        str | None,
        typer.Option(help="Your tables, a .json list or a collection: their optimizers and dims.", metavar="SOURCE"),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Or a plan file: its tables, and the batches of its ranks.")] = None,
    statistics: Annotated[Path | None, typer.Option(help="How these read their tables, of dreamshard stats.")] = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    collectives: CollectivesOption = None,
    seed: Annotated[int, SEED(help="Of the sets.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Keep the result, even of few sets or a busy core.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Correct a checkpoint's costs for this machine, by optimizer and direction; tells their errors before and after.

    What held-out sets do not confirm stays. Where others used the core, or sets are few, nothing is written, and the
    exit status is 1. Under torchrun all ranks measure.
    """
    from dreamshard_planner.checkpoints.checkpoint import resolve
    from dreamshard_planner.training import calibrate

    start = resolve(checkpoint, device.value, threads=threads)
    if start.cost is None:
        raise CheckpointError(
            f"{start.name} holds a policy and no cost network to calibrate, since nothing was measured on a device "
            f"like this: make one with dreamshard train --device {device.value}{'' if out is None else f' --out {out}'}"
        )
    own, batches = _own_tables(tables, plan, statistics)
    path = out or keep_in(_described(device, threads), how="calibrated")
    with _measuring(device) as ranks, refusal_told(path):
        made = calibrate(
            start,
            path,
            seconds=seconds,
            device=device.value,
            threads=threads,
            tables=own,
            batch_sizes=batches,
            collectives=_read_collectives(collectives),
            seed=seed,
            force=force,
            ranks=ranks,
        )
        if not ranks.leads:
            return
    told = made.metadata["calibration"]
    tell_where(path, out is not None, made)
    show(told, format, "\n".join(check["said"] for check in told["checks"]))


def _own_tables(source: str | None, plan: Path | None, statistics: Path | None) -> tuple[list[Table] | None, list[int]]:
    """Tables of a list or of a plan, None where nobody gave them; and what batches the kernels of the plan see."""
    from dreamshard_planner.offline.from_plan import check_statistics
    from dreamshard_planner.offline.jobs import read_model
    from dreamshard_planner.workload.statistics import TableStatistics

    if (source is None) == (plan is None):
        if source is not None or statistics is not None:
            raise typer.BadParameter("give --tables or --plan, one of them, with --statistics or without")
        return None, []
    known = None if statistics is None else TableStatistics.from_json(statistics)
    if plan is not None:
        saved = load_plan(plan)
        inputs = saved.inputs
        if known is not None:
            known.unused(name for table in inputs.tables.values() for name in table.features)
        known = TableStatistics({**inputs.features, **(known or {})})
        check_statistics(saved, known or None, statistics is not None)
        of_plan = [table.table(name, known) for name, table in inputs.tables.items()]
        return of_plan, [inputs.batch_size * inputs.topology.world_size]
    if source is None or not (model := read_model(source)).specs:
        raise typer.BadParameter(f"--tables {source}: of a function's model, give a plan, with --plan")
    if known is not None:
        model = model.with_statistics(known)
    return [spec.table(model.statistics or {}) for spec in model.specs], []


def _joined(paths: Sequence[Path]) -> CostDataset:
    """One dataset of several files; DatasetError names what does not go with the first."""
    from dreamshard_planner.cost.dataset import CostDataset

    datasets = [CostDataset.load(path) for path in paths]
    for path, other in zip(paths[1:], datasets[1:], strict=True):
        try:
            CostDataset.concatenate([datasets[0], other])
        except DatasetError as error:
            raise DatasetError(f"{path} does not go with {paths[0]}: {error}") from error
    return CostDataset.concatenate(datasets)


def _read_collectives(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from dreamshard_planner.measure.collectives import MeasuredCollectives

    return MeasuredCollectives.load(path).metadata()


def _config(quick: bool, updates: int | None, collectives: Path | None, seed: int) -> TrainingConfig:
    """Of a training with these options."""
    from dreamshard_planner.training import QUICK, TrainingConfig

    config = QUICK if quick else TrainingConfig()
    if updates is not None:
        config = replace(config, reinforce=replace(config.reinforce, updates=updates))
    return replace(config, collectives=_read_collectives(collectives), seed=seed)
