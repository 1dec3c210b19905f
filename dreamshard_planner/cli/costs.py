# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``doctor``, ``observed``, ``learn``, ``calibrate``, ``train``, ``collect`` and ``fit``: commands that check or make
costs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

import dreamshard_planner as api
from dreamshard_planner.cli.app import ADVANCED, Panel, Result, command, facts, grid
from dreamshard_planner.cli.options import (
    COUNT,
    FURTHER,
    OUTPUT,
    SECONDS,
    SEED,
    TABLES,
    Device,
    StatisticsOption,
    listed,
    read_statistics,
)
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.support.files import check_writable

if TYPE_CHECKING:
    from dreamshard_planner.cost.dataset import CostDataset
    from dreamshard_planner.observing.comparison import RunComparison
    from dreamshard_planner.training import TrainingConfig
    from dreamshard_planner.workload.tables import Table


def _present(device: str) -> str:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter("cuda: no GPU that this torch can use")
    return device


def _threads(count: int) -> int:
    if count > (cores := os.cpu_count() or 1):
        raise typer.BadParameter(f"{count} threads: this machine has {cores} core(s)")
    return count


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
StartOption = Annotated[
    str,
    typer.Option(
        metavar="auto|roofline|FILE",
        help="Costs to correct. auto: those in use on that hardware. roofline: bandwidths. FILE: a cost checkpoint.",
    ),
]
DeviceOption = Annotated[Device, typer.Option(help="Device that kernels run on.", callback=_present)]
ThreadsOption = Annotated[int, FURTHER(min=1, help="Intra-op threads of a rank (CPU).", callback=_threads)]
CollectivesOption = Annotated[
    Path | None,
    FURTHER(
        help="Measured collectives, .json of python -m dreamshard_planner.measure.collectives; kept in the checkpoint."
    ),
]
UpdatesOption = Annotated[int | None, FURTHER(min=1, help="Policy updates; default: as many as a few minutes allow.")]
QuickOption = Annotated[bool, FURTHER("--quick", help="Tiny settings, to try the flow; no use for planning.")]


@command("dreamshard doctor", Panel.costs)
def doctor() -> Result:
    """Check this machine: libraries, devices, the costs that plans would be made with, and what CUDA lacks.

    Exit status 1 if planning is not possible.
    """
    from dreamshard_planner.cli.diagnosis import PREVENTS_PLANNING, diagnose

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of half installed libraries; their findings say it
        findings = diagnose()
    rows = [(finding.subject, finding.found, finding.verdict, finding.advice) for finding in findings]
    status = int(any(finding.verdict in PREVENTS_PLANNING for finding in findings))
    return Result(findings, [grid(("", "found", "", "advice"), rows)], status)


@command("dreamshard observed observation.json", Panel.costs)
def observed(
    files: FilesArgument,
    out: Annotated[Path | None, OUTPUT(help="Statistics of all observed batches to write, to plan with.")] = None,
) -> Result:
    """Show predicted beside observed times, by rank and kind of work, and say how far to trust the prediction."""
    from dreamshard_planner.observing.comparison import compare

    observation = api.Observation.load_all(files)
    if out is not None:
        try:
            merged = api.TableStatistics.merge(run.statistics for run in observation.runs)
        except api.StatisticsError as error:
            raise api.StatisticsError(f"{', '.join(map(str, files))}, for --out: {error}") from error
        merged.to_json(out)
    found = [compare(run) for run in observation.runs]
    pairs = zip(found, observation.runs, strict=True)
    return Result(found, [part for one, run in pairs for part in _shown(one, [rank.rank for rank in run.ranks])])


def _shown(found: RunComparison, ranks: list[int]) -> list[RenderableType]:
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
) -> Result:
    """Correct costs by observed steps, as far as held-out kernels confirm.

    If they confirm nothing, nothing is written, and the exit status is 1.
    """
    from dreamshard_planner.checkpoints.choice import resolve
    from dreamshard_planner.observing.learning import learn

    if costs != "auto" and out is None:
        raise typer.BadParameter(
            f"{costs} may be further off than what plans take now, which auto corrects: say where to, --out FILE",
            param_hint="--costs",
        )
    observation = api.Observation.load_all(files)
    hardware = observation.hardware
    device, threads, name = str(hardware["device"]), int(hardware["threads"]), str(hardware["name"])
    start = resolve(costs, device, threads=threads, card=name)
    made = _make(out, hardware, lambda path: learn(start, observation, path, force=force), "learned")
    told = made.metadata["learned"]
    typer.echo(f"corrected: {told['from']}", err=True)
    checks = [check["said"] for check in told["checks"]]
    return Result(told, [*checks, *told["exchanges"], told["said"], *told["left_out"]])


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
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    collectives: CollectivesOption = None,
    seed: Annotated[int, SEED(help="Seed of the sets.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Keep the result, even of few sets or a busy core.")] = False,
) -> Result:
    """Correct costs for this machine, by optimizer, forward and backward. Show their errors before and after.

    Costs stay unless held-out sets confirm the correction. On a busy core, or with few sets, nothing is written, and
    the exit status is 1.
    """
    from dreamshard_planner.checkpoints.choice import resolve
    from dreamshard_planner.measure.hardware import describe_hardware
    from dreamshard_planner.training import calibrate

    start = resolve(costs, device, threads=threads)
    own, batches = _own_tables(tables, plan, statistics)
    begin = partial(
        calibrate,
        start,
        seconds=seconds,
        device=device,
        threads=threads,
        tables=own,
        batch_sizes=batches,
        collectives=_read_collectives(collectives),
        seed=seed,
        force=force,
    )
    told = _make(out, describe_hardware(device, threads), begin, "calibrated").metadata["calibration"]
    return Result(told, [check["said"] for check in told["checks"]])


def _own_tables(source: str | None, plan: Path | None, statistics: Path | None) -> tuple[list[Table] | None, list[int]]:
    """Return the tables of a source or of a plan, None without either, and the batches that the plan's kernels see."""
    from dreamshard_planner.offline import read_model
    from dreamshard_planner.offline.from_plan import job_of

    if source is not None and plan is None:
        return read_model(source).with_statistics(read_statistics(statistics)).tables(), []
    if plan is not None and source is None:
        saved = api.SavedPlan.load(plan)
        model = job_of(saved, read_statistics(statistics)).model
        return model.tables(), [saved.inputs.batch_size * saved.inputs.topology.world_size]
    if plan is not None or statistics is not None:
        raise typer.BadParameter("give --tables or --plan, one of them, with --statistics or without")
    return None, []


@command("dreamshard train --out my.safetensors", Panel.advanced)
def train(
    out: CostsOutput = None,
    seconds: Annotated[
        float | None, SECONDS(min=1, help="Time for measuring kernels; default: 300, or 8 with --quick.")
    ] = None,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    seed: Annotated[int, SEED(help="Seed of tables, sets, networks and policy.")] = 0,
    roofline: Annotated[bool, FURTHER(help="Train a policy on the roofline model; measures nothing.")] = False,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
) -> Result:
    """Make a cost checkpoint: measure fused kernels, fit the cost network, train the policy.

    The same command continues an interrupted run. Training starts from the shipped policy and, on CPUs, the shipped
    cost network. --quick starts the cost network from nothing, --roofline the policy. Times of collectives stay those
    in use, unless --collectives gives measured ones.
    """
    from dreamshard_planner.checkpoints.choice import resolve, shipped
    from dreamshard_planner.measure.hardware import describe_hardware
    from dreamshard_planner.policy.reinforce import FROM_SCRATCH
    from dreamshard_planner.training import train, train_on_roofline

    _check_out(out, quick, roofline)
    config = replace(_config(quick, updates, collectives, seed), device=device, threads=threads)
    config = config if seconds is None else replace(config, seconds=seconds)
    if not (roofline or quick):
        kept = config.collectives or resolve("auto", device, threads=threads).metadata.get("collectives")
        # Whatever the user's own are, an interrupted training goes on as it began. On GPUs costs start from bandwidths.
        start = shipped("cpu") if device == "cpu" else None
        config = replace(config, start=start, collectives=kept)
    if roofline and not quick:
        config = replace(config, reinforce=replace(FROM_SCRATCH, updates=updates or FROM_SCRATCH.updates))
    begin = partial(train_on_roofline if roofline else train, config)
    with _measuring():
        return _validated(_make(out, describe_hardware(device, threads), begin))


@command("dreamshard collect --seconds 60 --out sets.npz", Panel.advanced)
def collect(
    out: Annotated[Path, OUTPUT(help="Dataset to write, .npz; its measured blocks are kept beside it.")],
    pools: Annotated[str, typer.Option(help="Table pools, separated by commas.")] = "meta_like_2021,broad",
    held_out: Annotated[bool, typer.Option(help="Measure the held-out half of each pool, for tests.")] = False,
    sets: Annotated[int, FURTHER(min=1, help="Number of sets to draw.")] = 5000,
    seconds: Annotated[float | None, SECONDS(min=0, help="Time after which to stop, to be continued.")] = None,
    batch_sizes: Annotated[
        list[int] | None, COUNT(help="Samples that a kernel sees; repeatable; default: by device.", **ADVANCED)
    ] = None,
    repeats: Annotated[int, FURTHER(min=1, help="Timed runs of each set.")] = 5,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 1,
    seed: Annotated[int, SEED(help="Seed of sets, indices and order.")] = 0,
) -> Result:
    """Measure random sets of tables as fused kernels. The same command continues an interrupted run."""
    from dreamshard_planner.measure.sets import MAX_TABLES, SHARD_SHARE, collect, draw_sets
    from dreamshard_planner.workload.pools import pool_tables

    folder = out.with_suffix(".blocks")
    if folder == out:
        raise typer.BadParameter(f"{out}: the measured blocks go there; a dataset ends in .npz")
    tables = pool_tables(listed(pools))[held_out]
    drawn = draw_sets(tables, sets, seed, batch_sizes or None, MAX_TABLES, device=device, shard_share=SHARD_SHARE)
    with _measuring():
        dataset = collect(drawn, folder, device, threads, repeats, seed, seconds)
    dataset.save(out)
    spread, told = float(dataset.spread.mean()), {"dataset": str(out), "blocks": str(folder), "sets": len(dataset)}
    told |= {"sets_drawn": sets, "spread_of_repeats": spread}
    said = f"{out}: {len(dataset)} of {sets} sets, spread of repeats {spread:.1%}; blocks in {folder}"
    return Result(told, [said])


@command("dreamshard fit --dataset sets.npz --test-dataset held_out.npz --out my.safetensors", Panel.advanced)
def fit(
    dataset: Annotated[list[Path], typer.Option(help="Measured sets, .npz; repeatable.")],
    test_dataset: Annotated[list[Path], typer.Option(help="Measured sets of held-out tables, .npz; repeatable.")],
    out: CostsOutput = None,
    seed: Annotated[int, SEED(help="Seed of networks and policy.")] = 0,
    collectives: CollectivesOption = None,
    updates: UpdatesOption = None,
    quick: QuickOption = False,
) -> Result:
    """Make a cost checkpoint from measured sets; needs no hardware."""
    from dreamshard_planner.training import learn

    _check_out(out, quick)
    config = _config(quick, updates, collectives, seed)
    train_data, test_data = (_joined(paths) for paths in (dataset, test_dataset))

    def learned(path: Path) -> api.Checkpoint:
        checkpoint, _ = learn(config, train_data, test_data)
        checkpoint.save(path)
        return checkpoint

    return _validated(_make(out, train_data.hardware, learned))


def _check_out(out: Path | None, quick: bool, roofline: bool = False) -> None:
    """Refuse to put a checkpoint that no plan should use where auto finds it."""
    if out is None and (quick or roofline):
        made = "a policy for any hardware" if roofline else "nothing to plan with"
        raise typer.BadParameter(f"--{'roofline' if roofline else 'quick'} makes {made}: say where to, with --out FILE")


def _make(
    out: Path | None, hardware: Mapping[str, Any], make: Callable[[Path], api.Checkpoint], how: str = ""
) -> api.Checkpoint:
    """Make a checkpoint in ``out``, or in a new file among the user's own. Say on stderr how to use it, or what was
    checked if costs are not corrected."""
    from dreamshard_planner.checkpoints.choice import new_file

    path = out or new_file(hardware, how)
    check_writable(path)
    try:
        made = make(path)
    except CalibrationRefused as refused:
        for check in refused.checks:
            typer.echo(check["said"], err=True)
        raise CalibrationRefused(f"{path} stays as it was: {refused}; or --force") from refused
    kept = f"kept in {path}; dreamshard info auto tells which file plans on this machine take"
    given = f'plan with it: DreamShardPlanner(checkpoint="{path}"), or dreamshard plan --costs {path}'
    typer.echo(kept if out is None else given, err=True)
    return made


def _validated(made: api.Checkpoint) -> Result:
    """Return a new checkpoint's errors on held-out tables."""
    validation = made.metadata["validation"]
    return Result(validation, [facts(validation, "on held-out tables")])


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

    joined, *others = map(CostDataset.load, paths)
    for path, other in zip(paths[1:], others, strict=True):
        try:
            joined = CostDataset.concatenate([joined, other])
        except api.DatasetError as error:
            raise api.DatasetError(f"{path} does not go with {paths[0]}: {error}") from error
    return joined


def _read_collectives(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    from dreamshard_planner.measure.collectives import read_collectives

    return read_collectives(path)


def _config(quick: bool, updates: int | None, collectives: Path | None, seed: int) -> TrainingConfig:
    from dreamshard_planner.training import QUICK, TrainingConfig

    config = QUICK if quick else TrainingConfig()
    if updates is not None:
        config = replace(config, reinforce=replace(config.reinforce, updates=updates))
    return replace(config, collectives=_read_collectives(collectives), seed=seed)
