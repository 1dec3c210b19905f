# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Format numbers and names for people."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_WORD = 100  # that is shown in full
LINE = 150  # columns of a value of JSON on one line
NAMED = 5
"""Tables, or other names, that one error or note lists."""


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


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Return first and last of each run of consecutive numbers."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ``0-2, 5``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers))


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
