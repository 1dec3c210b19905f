# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How far a long step is, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

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
    console = _stderr()
    if console.is_terminal:
        with _spinner(what, console):
            yield
        return
    late = Timer(LONG_SECONDS, console.print, [f"{what} ..."])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


@contextmanager
def steps_told(what: str) -> Iterator[tuple[Callable[[str], Any], Callable[[str], Any]]]:
    """On stderr: each step of what is being done, as it begins, for which call the first of what this yields; and what
    they came to, as soon as that is known, in lines that stay, for which call the second."""
    console = _stderr()
    with _spinner(f"{what} {{task.fields[note]}}", console) as bar:

        def begin(note: str) -> None:
            if console.is_terminal:
                bar.update(bar.task_ids[0], note=note)
            else:
                console.print(f"{what} {note} ...")

        yield begin, console.print


def _stderr() -> Console:
    """For lines that are not broken, coloured or read as markup."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _spinner(text: str, console: Console) -> Iterator[Progress]:
    """On a terminal, with the time since it began; nothing stays."""
    columns = (SpinnerColumn(), TextColumn(text), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task("", total=None, note="")
        yield bar
