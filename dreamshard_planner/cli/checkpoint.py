# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``checkpoint``: checkpoints of training jobs, told and cut for other plans, without their ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dreamshard_planner.cli.app import Commands, app, command
from dreamshard_planner.cli.options import listed
from dreamshard_planner.cli.output import Format, FormatOption, grid, show
from dreamshard_planner.support.formatting import size_in_words

checkpoint = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Checkpoints of training jobs (torch.distributed.checkpoint)."
)
app.add_typer(checkpoint, name="checkpoint")


@command("dreamshard checkpoint info checkpoints/1000", of=checkpoint)
def info(path: Annotated[Path, typer.Argument(help="Folder.")], format: FormatOption = Format.table) -> None:
    """Which tables a checkpoint holds, how they are cut, and which optimizer states they have."""
    from dreamshard_planner.across_plans.convert import describe

    found = describe(path)
    columns = ("table", "rows", "dim", "type", "column slices", "row blocks", "states", "size")
    rows = []
    for name, table in found["tables"].items():
        *facts, states, size = table.values()
        told = ", ".join(f"{state} {' x '.join(map(str, shape))}" for state, shape in states.items())
        rows.append((name, *facts, told or "-", size_in_words(size)))
    show(
        found, format, grid(columns, rows), f"and {len(found['others'])} others; {size_in_words(found['bytes'])} in all"
    )


@command("dreamshard checkpoint convert checkpoints/1000 checkpoints/new --plan plan.json", of=checkpoint)
def convert(
    source: Annotated[Path, typer.Argument(help="Folder.")],
    target: Annotated[Path, typer.Argument(help="New folder: there whole, or not at all.")],
    plan: Annotated[Path, typer.Option(help="Plan, .json, to cut for.")],
    dropped: Annotated[str, typer.Option(help="Tables, and keys of others, to leave out, separated by commas.")] = "",
    added: Annotated[str, typer.Option(help="Tables of the plan that the checkpoint may lack, by commas.")] = "",
    fresh: Annotated[str, typer.Option(help="Tables whose states may be left out where no rule makes them.")] = "",
) -> None:
    """Cut a checkpoint for another plan or number of ranks, with little memory."""
    from dreamshard_planner.across_plans import convert as converting
    from dreamshard_planner.plans.plan_file import SavedPlan

    converting.convert(source, target, SavedPlan.load(plan), listed(dropped), listed(added), listed(fresh))
    typer.echo(f"wrote {target}", err=True)
