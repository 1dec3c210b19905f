# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``observed`` and ``learn``: what training steps took, and costs corrected by it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dreamshard_planner.cli.app import command
from dreamshard_planner.cli.learn import KEPT, keep_in, refusal_told, tell_where
from dreamshard_planner.cli.options import output
from dreamshard_planner.cli.output import Format, FormatOption, grid, show
from dreamshard_planner.errors import StatisticsError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dreamshard_planner.observing.comparison import Compared, RunComparison

FilesArgument = Annotated[
    list[Path],
    typer.Argument(help="Files of observe(...), all ranks and runs; observation.json stands for those of its ranks."),
]


@command("dreamshard observed observation.json")
def observed(
    files: FilesArgument,
    statistics: Annotated[Path | None, output("Write the statistics of all observed batches, to plan with.")] = None,
    format: FormatOption = Format.table,
) -> None:
    """Predicted beside observed, by rank and kind of work, what the difference means, and whether to trust it."""
    from dreamshard_planner.observing.comparison import compare
    from dreamshard_planner.observing.observation import Observation
    from dreamshard_planner.workload.statistics import TableStatistics

    observation = Observation.load_all(files)
    if statistics is not None:
        try:
            merged = TableStatistics.merge(run.statistics for run in observation.runs)
        except StatisticsError as error:
            raise StatisticsError(f"{', '.join(map(str, files))}, for --statistics: {error}") from error
        merged.to_json(statistics)
    found = [compare(run) for run in observation.runs]
    ranks = [[rank.rank for rank in run.ranks] for run in observation.runs]
    told = [table for one, of_run in zip(found, ranks, strict=True) for table in _tables(one, of_run)]
    show([asdict(one) for one in found], format, *told)


def _tables(found: RunComparison, ranks: list[int]) -> list[RenderableType]:
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
        str,
        typer.Option(
            help="To do better than; auto: what plans for the observed hardware take now; roofline: bandwidths."
        ),
    ] = "auto",
    out: Annotated[Path | None, output(f"Checkpoint to write; {KEPT}")] = None,
    force: Annotated[bool, typer.Option("--force", help="Keep the result, even if nothing is better.")] = False,
    format: FormatOption = Format.table,
) -> None:
    """Correct costs by observed steps: level by optimizer and direction, then more, as far as held-out kernels confirm.

    Where they confirm nothing, nothing is written, and the exit status is 1.
    """
    from dreamshard_planner.checkpoints.checkpoint import resolve
    from dreamshard_planner.observing.learning import learn
    from dreamshard_planner.observing.observation import Observation

    if checkpoint != "auto" and out is None:
        raise typer.BadParameter(
            f"{checkpoint} may be further off than what plans take now, which auto corrects: say where to, --out FILE",
            param_hint="--checkpoint",
        )
    observation = Observation.load_all(files)
    hardware = observation.hardware
    device = str(hardware["device"])
    start = resolve(checkpoint, device, threads=int(hardware["threads"]), card=str(hardware["name"]))
    path = out or keep_in(hardware, "learned")
    with refusal_told(path):
        made = learn(start, observation, path, force=force)
    told = made.metadata["learned"]
    tell_where(path, out is not None, made)
    typer.echo(f"corrected: {told['from']}", err=True)
    checks = [check["said"] for check in told["checks"]]
    show(told, format, "\n".join([*checks, *told["exchanges"], told["said"], *told["left_out"]]))
