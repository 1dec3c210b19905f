# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How far a long step is, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(what: str, total: int | None, enabled: bool, done: int = 0) -> Iterator[Callable[..., None]]:
    """A bar on stderr, ``done`` of ``total`` at first, which may be unknown; call what it yields with a note, and the
    steps made (1); steps past ``total`` are not shown."""
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
        most = float("inf") if total is None else total
        yield lambda note, steps=1: bar.update(task, completed=min(bar.tasks[0].completed + steps, most), note=note)


LONG_SECONDS = 10.0
"""After which a step that takes them is told of in a log as well."""


@contextmanager
def working(what: str) -> Iterator[None]:
    """On stderr: that something is being done. On a terminal for how long already, and nothing stays; elsewhere in one
    line, if it takes long."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn(what), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            bar.add_task("", total=None)
            yield
        return
    late = Timer(LONG_SECONDS, console.print, [f"{what} ..."])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
