# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The application: it registers commands, shows their results, and tells errors in one line."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from dreamshard_planner import __version__
from dreamshard_planner.environment import explained
from dreamshard_planner.errors import DreamShardError, InputWarning
from dreamshard_planner.support.formatting import layout

ADVANCED: dict[str, Any] = {"rich_help_panel": "Advanced"}
"""For options beyond a help's first screen."""
PIPE_COLUMNS = 200
"""Width of tables if stdout is no terminal."""
FORMAT = inspect.Parameter(
    "format",
    inspect.Parameter.KEYWORD_ONLY,
    default="table",
    annotation=Annotated[
        Literal["table", "json"], typer.Option(help="A table for people, or JSON for programs.", **ADVANCED)
    ],
)
"""Option of every command."""


class Panel(StrEnum):
    """Groups of commands in the help."""

    plan = "Plan"
    understand = "Understand"
    data = "Data"
    costs = "Costs"
    advanced = "Costs from your own measurements (advanced)"


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute TorchRec's messages about itself, and its message on the root logger that replicas have no spec. Inputs that
    are hardly meant are notes on stderr."""

    def worth_telling(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Sharding spec not found")

    @cache  # several plans of one command have the same
    def note(text: str) -> None:
        typer.echo(f"note: {text}", err=True)

    def told(message: Any, category: Any, *where: Any, **named: Any) -> None:
        if issubclass(category, InputWarning):
            note(str(message))
        else:
            usual(message, category, *where, **named)

    root, torchrec, usual = logging.getLogger(), logging.getLogger("torchrec"), warnings.showwarning
    level = torchrec.level
    torchrec.setLevel(logging.ERROR)
    root.addFilter(worth_telling)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = told
            yield
    finally:
        root.removeFilter(worth_telling)
        torchrec.setLevel(level)


class Commands(TyperGroup):
    """Commands whose expected errors become one line on stderr and exit status 1; the help shows them by panel."""

    def list_commands(self, ctx: Any) -> list[str]:
        panels, shown = [*Panel], dict[str, Any](self.commands)
        return sorted(shown, key=lambda name: panels.index(shown[name].rich_help_panel or Panel.plan))

    def invoke(self, ctx: Any) -> Any:
        try:
            with _quiet():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except Exception as error:
            said = explained(error) or error
            torchrec = sys.modules.get("torchrec.distributed.planner.types")  # raises nothing before it is loaded
            if not isinstance(said, (DreamShardError, OSError, getattr(torchrec, "PlannerError", ()))):
                raise
            typer.echo(f"error: {' '.join(str(said).split())}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Learned sharding of embedding tables.",
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dreamshard {__version__}")
        raise typer.Exit()


@app.callback()
def _dreamshard(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    document: Any
    """JSON for programs, dataclasses among it; or a function that makes it."""
    shown: Sequence[Any]
    """Texts and tables for people."""
    status: int = 0
    """Exit status."""


def command(
    example: str, panel: Panel | None = None, name: str | None = None, of: typer.Typer = app
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Register a command, and show its result in the format that the user asks for.

    The fields of a parameter ``options``, a dataclass, become options of their own. The tests run or parse the example.
    """

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        takes = own.pop("options").annotation if "options" in own else None
        shared = {} if takes is None else inspect.signature(takes, eval_str=True).parameters

        @wraps(function)
        def run(format: str, **given: Any) -> None:
            if takes is not None:
                given["options"] = takes(**{name: given.pop(name) for name in shared})
            result = function(**given)
            show(result, format)
            if result.status:
                raise typer.Exit(result.status)

        parameters = [*own.values(), FORMAT, *shared.values()]
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        of.command(name, epilog=f"Example: {example}", rich_help_panel=panel)(run)
        return function

    return register


def keep_stdout_for_data() -> None:
    """Send to stderr all that libraries print past Python, as scipy's solver does at times."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = open(os.devnull, "w", errors="backslashreplace")  # noqa: SIM115 (for the rest of this process)
        return
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="backslashreplace")
    os.dup2(2, 1)


@contextmanager
def written() -> Iterator[None]:
    """Write to stdout inside; if that fails, say so in one line on stderr and exit with status 1."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left, which goes there at exit
        if not isinstance(error, BrokenPipeError):  # whoever reads has enough
            typer.echo(f"error: standard output cannot be written: {error.strerror}", err=True)
        raise SystemExit(1) from error


def show(result: Result, format: str) -> None:
    """Write a result to stdout."""
    with written():
        if format == "json":
            from dreamshard_planner.support.documents import document_of

            document = result.document
            typer.echo(layout(document_of(document() if callable(document) else document)))
            return
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
        for part in result.shown:
            if isinstance(part, str):
                typer.echo(part)
            else:
                console.print(part)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that a step runs."""
    with Console(stderr=True, markup=False).status(what):
        yield


def save(path: Path | None, write: Callable[[Path], object]) -> None:
    """Write a file if it was asked for, and say so on stderr."""
    if path is not None:
        write(path)
        typer.echo(f"written to {path}", err=True)


def grid(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> Table:
    """Return rows under the names of columns, numbers flush right."""
    rows = [list(row) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", show_edge=False, pad_edge=False)
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], (int, float, type(None))) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def facts(document: dict[str, Any], title: str) -> RenderableType:
    """Return names and values, with nested names joined by dots."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _flat(document):
        table.add_row(name, _cell(value))
    return Group(Text(title, style="italic"), table)  # a title of the table's own would be as narrow as that


def _flat(document: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return "-" if not math.isfinite(value) else f"{value:.4g}" if abs(value) < 0.1 else f"{value:,.3f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_cell, value))
    return str(value).replace("[", r"\[")
