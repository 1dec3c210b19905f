# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Results of benchmarks for people, and in files."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common.provenance import provenance


def wide_console(columns: int = 120) -> Console:
    """Of stdout; so many columns wide where that is no terminal, which rich takes to be narrow."""
    console = Console()
    return console if console.is_terminal else Console(width=columns)


def table_of(title: str, first: str, *others: str) -> Table:
    """An empty table: names in its first column, numbers flush right in the others."""
    table = Table(title=title)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def write_result(path: Path | None, *parts: dict[str, Any]) -> None:
    """The parts as one JSON object, a line for each key, if a file is wanted; of keys in several, the last counts."""
    if path is not None:
        result: dict[str, Any] = {}
        for part in parts:
            result |= part
        lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items())
        path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")


def named(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name for name in text.split(",") if name)


def quiet() -> None:
    """Use one thread, and hide warnings of libraries that a benchmark's user cannot act on."""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def opened(path: Path) -> list[dict[str, Any]]:
    """Start a record with where it comes from, or continue it: return its lines."""
    if not path.exists():
        append(path, provenance(torch.device("cpu")))
    return [json.loads(line) for line in path.read_text().splitlines()]


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a JSON line to a record."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
