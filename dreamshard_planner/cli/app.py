# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The application that commands are registered on, and how their errors end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from dreamshard_planner import __version__
from dreamshard_planner.environment import explained
from dreamshard_planner.errors import DreamShardError


def is_users(error: Exception) -> bool:
    """Whether an error is about what the user gave, and its text says all there is to say."""
    planner_types = sys.modules.get("torchrec.distributed.planner.types")  # none of its errors before it is loaded
    planner_error = () if planner_types is None else (planner_types.PlannerError,)
    return isinstance(error, (DreamShardError, OSError, *planner_error)) and not isinstance(error, BrokenPipeError)


@contextmanager
def _quiet() -> Iterator[None]:
    """Mute TorchRec's messages about itself, and its message on the root logger that replicas have no spec."""

    def worth_telling(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("Sharding spec not found")

    root, torchrec = logging.getLogger(), logging.getLogger("torchrec")
    level = torchrec.level
    torchrec.setLevel(logging.ERROR)
    root.addFilter(worth_telling)
    try:
        yield
    finally:
        root.removeFilter(worth_telling)
        torchrec.setLevel(level)


class Commands(TyperGroup):
    """Commands whose expected errors become one line on stderr and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _quiet():
                return super().invoke(ctx)
        except Exception as error:
            said = explained(error) or error
            if not is_users(said):
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


def command(example: str, name: str | None = None, of: typer.Typer = app) -> Callable[[Command], Command]:
    """Registers a command, with one example for its help, which the tests run or parse."""
    return of.command(name, epilog=f"Example: {example}")


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
