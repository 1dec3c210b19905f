# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The application that commands are registered on, its help panels, and the text of its errors."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from dreamshard_planner import __version__
from dreamshard_planner.environment import explained
from dreamshard_planner.errors import DreamShardError, InputWarning


class Panel(StrEnum):
    """Groups of commands in the help."""

    plan = "Plan"
    understand = "Understand"
    data = "Data"
    costs = "Costs"
    advanced = "Costs from your own measurements (advanced)"


def is_expected(error: Exception) -> bool:
    """Return whether an error is about the user's input, so that its text suffices."""
    planner_types = sys.modules.get("torchrec.distributed.planner.types")  # it raises nothing before it is loaded
    planner_error = () if planner_types is None else (planner_types.PlannerError,)
    return isinstance(error, (DreamShardError, OSError, *planner_error)) and not isinstance(error, BrokenPipeError)


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute TorchRec's messages about itself, and its message on the root logger that replicas have no spec. Inputs that
    are hardly meant are notes on stderr."""

    def worth_telling(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Sharding spec not found")

    def told(message: Any, category: Any, *where: Any, **named: Any) -> None:
        if not issubclass(category, InputWarning):
            usual(message, category, *where, **named)
        elif str(message) not in noted:  # by an earlier plan
            noted.add(str(message))
            typer.echo(f"note: {message}", err=True)

    noted: set[str] = set()
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
        panels = [panel.value for panel in Panel]
        shown = dict[str, Any](self.commands)
        return sorted(shown, key=lambda name: panels.index(shown[name].rich_help_panel or panels[0]))

    def invoke(self, ctx: Any) -> Any:
        try:
            with _quiet():
                return super().invoke(ctx)
        except Exception as error:
            said = explained(error) or error
            if not is_expected(said):
                raise
            typer.echo(f"error: {' '.join(str(said).split())}", err=True)
            raise typer.Exit(1) from error


Command = TypeVar("Command", bound=Callable[..., Any])

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Learned sharding of embedding tables.",
)


def command(
    example: str, panel: Panel | None = None, name: str | None = None, of: typer.Typer = app
) -> Callable[[Command], Command]:
    """Register a command. The tests run or parse its example."""
    return of.command(name, epilog=f"Example: {example}", rich_help_panel=panel and panel.value)


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
