# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Data on stdout: a table for people, or JSON for programs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dreamshard_planner.cli.options import ADVANCED
from dreamshard_planner.support.formatting import layout, ranges, short

if TYPE_CHECKING:
    from pathlib import Path

    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.plans.replan import Replan
    from dreamshard_planner.plans.report import Report

PIPE_COLUMNS = 200
"""Width of tables if stdout is no terminal."""
TABLES_SHOWN = 20


class Format(StrEnum):
    """Format of data on stdout."""

    table = "table"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="A table for people, or JSON for programs.", **ADVANCED)]


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


def show(document: Any, format: Format, *tables: RenderableType) -> None:
    """Show a document, dataclasses among it, or the result of its maker, as JSON; or the tables, texts as they are."""
    with written():
        if format is Format.json:
            from dreamshard_planner.support.documents import document_of

            typer.echo(layout(document_of(document() if callable(document) else document)))
            return
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False)
        for table in tables:
            if isinstance(table, str):
                typer.echo(table)
            else:
                console.print(table)


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on a terminal's stderr that a step runs."""
    with Console(stderr=True, markup=False).status(what):
        yield


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


def costliest(report: Report) -> RenderableType:
    """Return the costliest tables and their ranks."""
    by_cost = sorted(report.tables, key=lambda table: -table.most_ms)
    shown = by_cost[:TABLES_SHOWN]
    rows = [(short(table.name), table.label, ranges(table.ranks), table.most_ms) for table in shown]
    more = f", the {len(shown)} costliest of {len(by_cost)}" if len(shown) < len(by_cost) else ""
    return grid(("table", "sharding", "ranks", "ms on a rank, by itself"), rows, f"Tables{more}")


def save_page(subject: Report | SavedPlan | Replan, html: Path | None, title: str | None = None) -> None:
    """Write the HTML page if one was asked for."""
    if html is not None:
        from dreamshard_planner.plans.page import save_html

        save_html(subject, html, title)
        typer.echo(f"written to {html}", err=True)
