# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Show the progress of long steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(what: str, total: int, enabled: bool, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr; the yielded function takes a note and the steps made (1). Steps past ``total`` are not
    shown."""
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not enabled,
    )
    task = bar.add_task(what, total=total, completed=done, note="")
    with bar:
        yield lambda note, steps=1: bar.update(task, completed=min(bar.tasks[0].completed + steps, total), note=note)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that a step runs."""
    with Console(stderr=True, markup=False).status(what):
        yield
