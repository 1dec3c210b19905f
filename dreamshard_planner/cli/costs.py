# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``doctor``, ``observed``, ``learn``, ``calibrate``, ``train``, ``collect`` and ``fit``: commands that check or make
costs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamshard_planner.cli.app import Panel, command
from dreamshard_planner.cli.options import (
    ADVANCED,
    COUNT,
    OUTPUT,
    SECONDS,
    SEED,
    TABLES,
    CollectivesOption,
    Device,
    DeviceOption,
    QuickOption,
    StartOption,
    StatisticsOption,
    ThreadsOption,
    UpdatesOption,
    listed,
    load_plan,
    read_statistics,
)
from dreamshard_planner.cli.output import Format, FormatOption, facts, grid, show
from dreamshard_planner.errors import CalibrationRefused, CheckpointError, DatasetError, StatisticsError
from dreamshard_planner.support.files import check_writable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dreamshard_planner.checkpoints.checkpoint import Checkpoint
    from dreamshard_planner.cost.dataset import CostDataset
    from dreamshard_planner.observing.comparison import RunComparison
    from dreamshard_planner.training import TrainingConfig
    from dreamshard_planner.workload.tables import Table

CostsOutput = Annotated[
    Path | None,
    OUTPUT(help="Cost checkpoint to write; default: a file in your folder, named by the hardware, which auto finds."),
]
FilesArgument = Annotated[
    list[Path],
    typer.Argument(
        help="Files of observe(...), all ranks and runs; observation.json stands for observation.0.json and so on."
    ),
]


@command("dreamshard doctor", Panel.costs)
def doctor(format: FormatOption = Format.table) -> None:
    """Check this machine: libraries, devices, the costs that plans would be made with, and what CUDA lacks.

    Exit status 1 if planning is not possible.
    """
    from dreamshard_planner.cli.diagnosis import PREVENTS_PLANNING, diagnose

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of half installed libraries; their findings say it
        findings = diagnose()
    rows = [(finding.subject, finding.found, finding.verdict, finding.advice) for finding in findings]
    show(findings, format, grid(("", "found", "", "advice"), rows))
    if any(finding.verdict in PREVENTS_PLANNING for finding in findings):
        raise typer.Exit(1)


@command("dreamshard observed observation.json", Panel.costs)
def observed(
    files: FilesArgument,
    out: Annotated[Path | None, OUTPUT(help="Statistics of all observed batches to write, to plan with.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Show predicted beside observed times, by rank and kind of work, and say how far to trust the prediction."""
    from dreamshard_planner.observing.comparison import compare
    from dreamshard_planner.observing.observation import Observation
    from dreamshard_planner.workload.statistics import TableStatistics

    observation = Observation.load_all(files)
    if out is not None:
        try:
            merged = TableStatistics.merge(run.statistics for run in observation.runs)
        except StatisticsError as error:
            raise StatisticsError(f"{', '.join(map(str, files))}, for --out: {error}") from error
        merged.to_json(out)
    found = [compare(run) for run in observation.runs]
    ranks = [[rank.rank for rank in run.ranks] for run in observation.runs]
    told = [table for one, of_run in zip(found, ranks, strict=True) for table in _tables(one, of_run)]
    show(found, format, *told)


def _tables(found: RunComparison, ranks: list[int]) -> list[RenderableType]:
    columns, rows = ("milliseconds of a step", *(f"rank {rank}" for rank in ranks)), []
    for one in found.kinds:
        predicted = [""] * len(ranks) if one.predicted_ms is None else [f"{ms:,.3f} -> " for ms in one.predicted_ms]
        pairs = zip(predicted, one.observed_ms, strict=True)
        rows.append((one.what, *(f"{before}{observed:,.3f}" for before, observed in pairs)))
    said = [f"{sentence}." for sentence in filter(None, (*found.meaning, found.embeddings, found.verdict))]
    return [grid(columns, rows, title=f"{found.title}; predicted -> observed"), *said]


@command("dreamshard learn observation.json", Panel.costs)
def learn(
    files: FilesArgument,
    costs: StartOption = "auto",
    out: CostsOutput = None,
    force: Annotated[bool, typer.Option("--force", help="Keep the result, even if nothing is better.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Correct costs by observed steps, as far as held-out kernels confirm.

    If they confirm nothing, nothing is written, and the exit status is 1.
    """
    from dreamshard_planner.checkpoints.choice import resolve
    from dreamshard_planner.observing.learning import learn
    from dreamshard_planner.observing.observation import Observation

    if costs != "auto" and out is None:
        raise typer.BadParameter(
            f"{costs} may be further off than what plans take now, which auto corrects: say where to, --out FILE",
            param_hint="--costs",
        )
    observation = Observation.load_all(files)
    hardware = observation.hardware
    device = str(hardware["device"])
    start = resolve(costs, device, threads=int(hardware["threads"]), card=str(hardware["name"]))
    path = out or _keep_in(hardware, "learned")
    with _refusal_told(path):
        made = learn(start, observation, path, force=force)
    told = made.metadata["learned"]
    _tell_where(path, out is not None)
    typer.echo(f"corrected: {told['from']}", err=True)
    checks = [check["said"] for check in told["checks"]]
    show(told, format, "\n".join([*checks, *told["exchanges"], told["said"], *told["left_out"]]))


@command("dreamshard calibrate --seconds 60", Panel.costs)
def calibrate(
    out: CostsOutput = None,
    costs: StartOption = "auto",
    seconds: Annotated[float, SECONDS(min=1, help="Time for measuring kernels.")] = 60.0,
    tables: Annotated[str | None, TABLES] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan file that gives tables and batches, instead of --tables.")
    ] = None,
    statistics: StatisticsOption = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    collectives: CollectivesOption = None,
    seed: Annotated[int, SEED(help="Seed of the sets.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Keep the result, even of few sets or a busy core.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Correct costs for this machine, by optimizer, forward and backward. Show their errors before and after.

    Costs stay unless held-out sets confirm the correction. On a busy core, or with few sets, nothing is written, and
    the exit status is 1.
    """
    from dreamshard_planner.checkpoints.choice import resolve
    from dreamshard_planner.measure.hardware import describe_hardware
    from dreamshard_planner.training import calibrate

    start = resolve(costs, device.value, threads=threads)
    if start.cost is None:
        raise CheckpointError(
            f"{start.name} holds a policy and no cost network to calibrate, since nothing was measured on a device "
            f"like this: make one with dreamshard train --device {device.value}{'' if out is None else f' --out {out}'}"
        )
    own, batches = _own_tables(tables, plan, statistics)
    path = out or _keep_in(describe_hardware(device.value, threads), how="calibrated")
    with _refusal_told(path):
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
        )
    told = made.metadata["calibration"]
    _tell_where(path, out is not None)
    show(told, format, "\n".join(check["said"] for check in told["checks"]))


def _own_tables(source: str | None, plan: Path | None, statistics: Path | None) -> tuple[list[Table] | None, list[int]]:
    """Return the tables of a list or of a plan, None without either, and the batches that the plan's kernels see."""
    from dreamshard_planner.offline.jobs import read_model
    from dreamshard_planner.workload.statistics import TableStatistics

    if (source is None) == (plan is None):
        if source is not None or statistics is not None:
            raise typer.BadParameter("give --tables or --plan, one of them, with --statistics or without")
        return None, []
    known = read_statistics(statistics)
    if plan is not None:
        saved = load_plan(plan)
        inputs = saved.inputs
        if known is not None:
            known.unused(name for table in inputs.tables.values() for name in table.features)
        known = TableStatistics({**inputs.features, **(known or {})})
        of_plan = [table.table(name, known) for name, table in inputs.tables.items()]
        return of_plan, [inputs.batch_size * inputs.topology.world_size]
    if source is None or not (model := read_model(source)).specs:
        raise typer.BadParameter(f"--tables {source}: of a function's model, give a plan, with --plan")
    if known is not None:
        model = model.with_statistics(known)
    return [spec.table(model.statistics or {}) for spec in model.specs], []


@command("dreamshard train --out my.safetensors", Panel.advanced)
def train(
    out: CostsOutput = None,
    seconds: Annotated[
        float | None, SECONDS(min=1, help="Time for measuring kernels; default: 300, or 8 with --quick.")
    ] = None,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    seed: Annotated[int, SEED(help="Seed of tables, sets, networks and policy.")] = 0,
    roofline: Annotated[
        bool, typer.Option(help="Train a policy on the roofline model; measures nothing.", **ADVANCED)
    ] = False,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
    format: FormatOption = Format.table,
) -> None:
    """Make a cost checkpoint: measure fused kernels, fit the cost network, train the policy.

    The same command continues an interrupted run. Training starts from the shipped policy and, on CPUs, the shipped
    cost network. --quick starts the cost network from nothing, --roofline the policy. Times of collectives stay those
    in use, unless --collectives gives measured ones.
    """
    from dreamshard_planner.checkpoints.choice import SHIPPED, resolve, shipped
    from dreamshard_planner.measure.hardware import describe_hardware
    from dreamshard_planner.policy.reinforce import FROM_SCRATCH
    from dreamshard_planner.training import train, train_on_roofline

    _check_out(out, quick, roofline)
    path = out or _keep_in(describe_hardware(device.value, threads))
    config = replace(_config(quick, updates, collectives, seed), device=device.value, threads=threads)
    config = config if seconds is None else replace(config, seconds=seconds)
    if not (roofline or quick):
        kept = config.collectives or resolve("auto", device.value, threads=threads).metadata.get("collectives")
        # Whatever the user's own are, an interrupted training goes on as it began. On GPUs costs start from bandwidths.
        start = shipped(SHIPPED, "cpu") if device is Device.cpu else None
        config = replace(config, start=start, collectives=kept)
    if roofline and not quick:
        config = replace(config, reinforce=replace(FROM_SCRATCH, updates=updates or FROM_SCRATCH.updates))
    with _measuring():
        checkpoint = train_on_roofline(config, path) if roofline else train(config, path)
    _show_made(checkpoint, path, out is not None, format)


@command("dreamshard collect --seconds 60 --out sets.npz", Panel.advanced)
def collect(
    out: Annotated[Path, OUTPUT(help="Dataset to write, .npz; its measured blocks are kept beside it.")],
    pools: Annotated[str, typer.Option(help="Table pools, separated by commas.")] = "meta_like_2021,broad",
    held_out: Annotated[bool, typer.Option(help="Measure the held-out half of each pool, for tests.")] = False,
    sets: Annotated[int, typer.Option(min=1, help="Number of sets to draw.", **ADVANCED)] = 5000,
    seconds: Annotated[float | None, SECONDS(min=0, help="Time after which to stop, to be continued.")] = None,
    batch_sizes: Annotated[
        list[int] | None, COUNT(help="Samples that a kernel sees; repeatable; default: by device.", **ADVANCED)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each set.", **ADVANCED)] = 5,
    device: DeviceOption = Device.cpu,
    threads: ThreadsOption = 1,
    seed: Annotated[int, SEED(help="Seed of sets, indices and order.")] = 0,
    format: FormatOption = Format.table,
) -> None:
    """Measure random sets of tables as fused kernels. The same command continues an interrupted run."""
    from dreamshard_planner.measure.sets import MAX_TABLES, SHARD_SHARE, collect, draw_sets
    from dreamshard_planner.workload.pools import pool_tables

    folder = out.with_suffix(".blocks")
    if folder == out:
        raise typer.BadParameter(f"{out}: the measured blocks go there; a dataset ends in .npz")
    tables = pool_tables(listed(pools))[held_out]
    drawn = draw_sets(tables, sets, seed, batch_sizes or None, MAX_TABLES, device=device.value, shard_share=SHARD_SHARE)
    with _measuring():
        dataset = collect(drawn, folder, device.value, threads, repeats, seed, seconds)
    dataset.save(out)
    spread, told = float(dataset.spread.mean()), {"dataset": str(out), "blocks": str(folder), "sets": len(dataset)}
    told |= {"sets_drawn": sets, "spread_of_repeats": spread}
    show(told, format, f"{out}: {len(dataset)} of {sets} sets, spread of repeats {spread:.1%}; blocks in {folder}")


@command("dreamshard fit --dataset sets.npz --test-dataset held_out.npz --out my.safetensors", Panel.advanced)
def fit(
    dataset: Annotated[list[Path], typer.Option(help="Measured sets, .npz; repeatable.")],
    test_dataset: Annotated[list[Path], typer.Option(help="Measured sets of held-out tables, .npz; repeatable.")],
    out: CostsOutput = None,
    seed: Annotated[int, SEED(help="Seed of networks and policy.")] = 0,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
    format: FormatOption = Format.table,
) -> None:
    """Make a cost checkpoint from measured sets; needs no hardware."""
    from dreamshard_planner.training import learn

    _check_out(out, quick)
    config = _config(quick, updates, collectives, seed)
    train_data, test_data = (_joined(paths) for paths in (dataset, test_dataset))
    path = out or _keep_in(train_data.hardware)
    checkpoint, _ = learn(config, train_data, test_data)
    checkpoint.save(path)
    _show_made(checkpoint, path, out is not None, format)


def _keep_in(hardware: Mapping[str, Any], how: str = "") -> Path:
    """Return the file among the user's own checkpoints to write, checked."""
    from dreamshard_planner.checkpoints import choice

    out = choice.new_file(hardware, how)
    check_writable(out)
    return out


def _check_out(out: Path | None, quick: bool, roofline: bool = False) -> None:
    """Refuse to put a checkpoint that no plan should use where auto finds it."""
    if out is None and (quick or roofline):
        made = "a policy for any hardware" if roofline else "nothing to plan with"
        raise typer.BadParameter(f"--{'roofline' if roofline else 'quick'} makes {made}: say where to, with --out FILE")


def _tell_where(out: Path, given: bool) -> None:
    """Say on stderr how to use a new checkpoint."""
    if given:
        typer.echo(f'plan with it: DreamShardPlanner(checkpoint="{out}"), or dreamshard plan --costs {out}', err=True)
    else:
        typer.echo(f"kept in {out}; dreamshard info auto tells which file plans on this machine take", err=True)


def _show_made(checkpoint: Checkpoint, path: Path, given: bool, format: Format) -> None:
    """Show a new checkpoint's errors on held-out tables, and how to use it."""
    validation = checkpoint.metadata["validation"]
    _tell_where(path, given)
    show(validation, format, facts(validation, str(path)))


@contextmanager
def _refusal_told(out: Path) -> Iterator[None]:
    """Say on stderr what was checked if costs are not corrected and nothing is written."""
    try:
        yield
    except CalibrationRefused as refused:
        for check in refused.checks:
            typer.echo(check["said"], err=True)
        raise CalibrationRefused(f"{out} stays as it was: {refused}; or --force") from refused


@contextmanager
def _measuring() -> Iterator[None]:
    """Say on stderr how to go on after an interruption."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on with what is measured already", err=True)
        raise


def _joined(paths: Sequence[Path]) -> CostDataset:
    """Join datasets; DatasetError names one that does not go with the first."""
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
    from dreamshard_planner.training import QUICK, TrainingConfig

    config = QUICK if quick else TrainingConfig()
    if updates is not None:
        config = replace(config, reinforce=replace(config.reinforce, updates=updates))
    return replace(config, collectives=_read_collectives(collectives), seed=seed)
