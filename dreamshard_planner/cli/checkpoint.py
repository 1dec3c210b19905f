# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``checkpoint``: describe checkpoints of training jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dreamshard_planner.cli.app import Commands, app, command
from dreamshard_planner.cli.output import Format, FormatOption, grid, show
from dreamshard_planner.support.formatting import size_in_words

checkpoint = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Checkpoints of training jobs (torch.distributed.checkpoint)."
)
app.add_typer(checkpoint, name="checkpoint")


@command("dreamshard checkpoint info checkpoints/1000", of=checkpoint)
def info(path: Annotated[Path, typer.Argument(help="Folder.")], format: FormatOption = Format.table) -> None:
    """Which tables a checkpoint holds, how they are cut, and which optimizer states they have."""
    from dreamshard_planner.across_plans.describing import describe

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
