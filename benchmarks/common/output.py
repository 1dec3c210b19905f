# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Results of benchmarks: where they come from, intervals by resampling, for people, and in files."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dreamshard_planner.measure.hardware import describe_hardware

ROOT = Path(__file__).parents[2]


def provenance(device: torch.device) -> dict[str, Any]:
    """For the first lines of a result file."""
    return {
        "command": command(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": describe_hardware(device, torch.get_num_threads()),
    }


def command() -> str:
    """Return the command that runs this again from the project's folder."""
    script = os.path.relpath(sys.argv[0], ROOT)
    ranks = os.environ.get("WORLD_SIZE")
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks else "python"
    return f"{launcher} {shlex.join([script, *sys.argv[1:]])}"


def commit() -> str:
    """Return the commit of the working tree: ``-dirty`` after changes, ``unknown`` outside of git."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def mean_interval(values_N: np.ndarray, generator: np.random.Generator, draws: int = 4000) -> np.ndarray:
    """Bounds [2, ...] of the 95 % bootstrap interval of the mean over the first dimension of [N, ...]; NaN of none."""
    if len(values_N) == 0:
        return np.full((2, *values_N.shape[1:]), np.nan)
    means = values_N[generator.integers(len(values_N), size=(draws, len(values_N)))].mean(1)
    return np.percentile(means, (2.5, 97.5), axis=0)


def interval(statistic: Callable[[np.ndarray], np.ndarray], count: int, draws: int = 4000) -> list[float]:
    """A statistic of ``count`` things between the bounds of its 95 % bootstrap interval over them.

    Args:
        statistic: of things by their indices [draws, count]; one number of each draw.
        count: how many things there are, at least one.
        draws: of the bootstrap.
    """
    some = np.random.default_rng(0).integers(count, size=(draws, count))
    low, high = np.percentile(statistic(some), (2.5, 97.5))
    return [float(low), float(statistic(np.arange(count)[None])[0]), float(high)]


def wide_console(columns: int = 120) -> Console:
    """Return a console of stdout, of this many columns if it is no terminal, which rich takes to be narrow."""
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
    return lines_of(path)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a record; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a JSON line to a record."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
