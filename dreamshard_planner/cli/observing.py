# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``observed`` and ``learn``: what training steps took, and costs corrected by it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.learn import KEPT, keep_in, tell_where
from dreamshard_planner.cli.options import output
from dreamshard_planner.cli.output import Format, FormatOption, grid, show

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dreamshard_planner.observing.comparison import Compared, Comparison

FilesArgument = Annotated[
    list[Path], typer.Argument(help="Of with observe(...), all ranks and runs; observation.json stands for its ranks'.")
]


@command("dreamshard observed observation.json")
def observed(files: FilesArgument, format: FormatOption = Format.table) -> None:
    """Predicted beside observed, by rank and kind of work, what the difference means, and whether to trust it."""
    from dreamshard_planner.observing.comparison import compare
    from dreamshard_planner.observing.observation import Observation

    observation = Observation.load_all(files)
    found = [compare(run) for run in observation.runs]
    ranks = [[rank.rank for rank in run.ranks] for run in observation.runs]
    told = [table for one, of_run in zip(found, ranks, strict=True) for table in _tables(one, of_run)]
    show([asdict(one) for one in found], format, *told)


def _tables(found: Comparison, ranks: list[int]) -> list[RenderableType]:
    columns = ("milliseconds of a step", *(f"rank {rank}" for rank in ranks))
    rows = [(one.what, *(_cell(one, at) for at in range(len(ranks)))) for one in found.kinds]
    said = [f"{sentence}." for sentence in (*found.meaning, found.verdict)]
    return [grid(columns, rows, title=f"{found.title}; predicted -> observed"), *said]


def _cell(one: Compared, at: int) -> str:
    predicted = "" if one.predicted_ms is None else f"{one.predicted_ms[at]:,.3f} -> "
    return f"{predicted}{one.observed_ms[at]:,.3f}"


@command("dreamshard learn observation.json")
def learn(
    files: FilesArgument,
    checkpoint: Annotated[
        str, typer.Option(help="To do better than; auto: what plans take on this machine now; roofline: bandwidths.")
    ] = "auto",
    out: Annotated[Path | None, output(f"Checkpoint to write; {KEPT}")] = None,
    force: Annotated[bool, typer.Option("--force", help="Keep the result, even if nothing is better.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Correct costs by observed steps: level by optimizer and direction, then more, as far as held-out kernels confirm.

    Where they confirm nothing, nothing is written, and the exit status is 1.
    """
    from dreamshard_planner.checkpoints.checkpoint import resolve
    from dreamshard_planner.errors import CalibrationRefused
    from dreamshard_planner.observing.learning import learn
    from dreamshard_planner.observing.observation import Observation

    observation = Observation.load_all(files)
    hardware = observation.hardware
    start = resolve(checkpoint, str(hardware["device"]), threads=int(hardware["threads"]))
    path = out or keep_in(hardware, start.recipe, "learned")
    try:
        made = learn(start, observation, path, force=force)
    except CalibrationRefused as refused:
        for check in refused.checks:
            typer.echo(check["said"], err=True)
        raise CalibrationRefused(f"{path} stays as it was: {refused}; or --force") from refused
    told = made.metadata["learned"]
    tell_where(path, out is not None)
    show(
        told,
        format,
        "\n".join([*(check["said"] for check in told["checks"]), *told["exchanges"], told["said"], *told["left_out"]]),
    )
