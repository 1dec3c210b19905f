# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Format numbers, names and progress for people, and check numbers that people give."""

from __future__ import annotations

import difflib
import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

LONGEST_WORD = 100  # that is shown in full
MAX_SHOWN = 300  # characters of foreign content in a message
LINE = 150  # columns of a value of JSON on one line
NAMED = 5
"""Tables, or other names, that one error or note lists."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = MAX_SHOWN


def brief(value: object) -> str:
    """Return an error's text or a value's representation for messages, shortened."""
    if not isinstance(value, Exception):
        return _REPR.repr(value)
    text = str(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def checked(
    what: str,
    value: Any,
    least: float = 1,
    most: float = math.inf,
    kind: Any = Integral,
    error: Callable[[str], Exception] = ValueError,
) -> Any:
    """Return a number between bounds, NumPy's as Python's; raises ``error``, which names it, for other values."""
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        name = "whole number" if kind is Integral else "number"
        upper = "" if most == math.inf else f" to {most:,}"
        raise error(f"{what} must be a {name} from {least:,}{upper}, got {brief(value)}")
    return value.item() if hasattr(value, "item") else value


def short(name: str) -> str:
    """Return a name, or both ends of one longer than :data:`LONGEST_WORD`."""
    return name if len(name) <= LONGEST_WORD else f"{name[:64]}...{name[-33:]}"


def short_words(text: str) -> str:
    """Return a text with its long words :func:`short`."""
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: short(word[0]), text)


def size_in_words(count: int) -> str:
    """Return bytes as ``1.50 GiB``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def memory_in_words(count: int) -> str:
    """Return bytes of memories to compare as ``3,120.00 GiB``: in one unit from a GiB on."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else size_in_words(count)


def seconds_in_words(seconds: float) -> str:
    """Return seconds as ``12.5 s`` or ``3.2 h``."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as ``rank 3`` or ``ranks 0-2, 5``."""
    named = set(ranks)
    return f"rank{'s' * (len(named) > 1)} {ranges(named)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'table_3'?)`` if a known name is close, else nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def first_of(names: Sequence[str], most: int = NAMED) -> str:
    """Return the first names, and dots if there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def some_of(names: Sequence[str], known: Iterable[str]) -> str:
    """Return unknown names, quoted, each with a close known one; the names past :data:`NAMED` are counted."""
    known = list(known)
    shown = ", ".join(f"{name!r}{nearest(name, known)}" for name in names[:NAMED])
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def layout(value: Any, indent: int = 0) -> str:
    """Return JSON for people: values that fit a line, and lists of numbers, on one line; each object of a list on its
    own."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    plain = isinstance(value, list | tuple) and all(isinstance(part, int | float) for part in parts)
    if plain or not parts:
        return json.dumps(value)
    # A cheap bound first: most of a long document takes several lines.
    if indent and 3 * len(parts) <= LINE and sum(isinstance(part, dict) for part in parts) < 2:
        flat = json.dumps(value)
        if len(flat) + indent <= LINE and flat.count("{") < 2:
            return flat
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(key)}: {layout(part, indent + 2)}" for key, part in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(f"{pad}{layout(part, indent + 2)}" for part in value) + "\n" + " " * indent + "]"


def gb_per_s(bytes_per_ms: float) -> str:
    """Return a bandwidth as ``3,350 GB/s``."""
    return f"{bytes_per_ms / 1e6:,.0f} GB/s"


@contextmanager
def progress_bar(what: str, total: int, enabled: bool, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr; the yielded function takes a note and the steps made (1). Steps past ``total`` are not
    shown."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}"))
    bar = Progress(TextColumn(what), *columns, console=Console(stderr=True), disable=not enabled)
    task = bar.add_task(what, total=total, completed=done, note="")
    with bar:
        yield lambda note, steps=1: bar.update(task, completed=min(bar.tasks[0].completed + steps, total), note=note)
