# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Numbers and names as texts for people have them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

LONGEST_WORD = 100
"""Shown as it is."""
LINE = 150
"""Columns up to which a value of JSON is written on one line."""


def short(name: str) -> str:
    """A name as lines show it: both ends of one longer than :data:`LONGEST_WORD`."""
    return name if len(name) <= LONGEST_WORD else f"{name[:64]}...{name[-33:]}"


def short_words(text: str) -> str:
    """A text with the names in it :func:`short`."""
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: short(word[0]), text)


def size_in_words(count: int) -> str:
    """Bytes, such as ``1.50 GiB``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"


def memory_in_words(count: int) -> str:
    """Bytes of memories to compare, such as ``3,120.00 GiB``: in one unit from a GiB on."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else size_in_words(count)


def seconds_in_words(seconds: float) -> str:
    """Such as ``12.5 s`` or ``3.2 h``."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s"


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """First and last of those that follow on each other."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Such as ``0-2, 5``."""
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs(numbers))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Such as ``rank 3`` or ``ranks 0-2, 5``."""
    named = set(ranks)
    return f"rank{'s' * (len(named) > 1)} {ranges(named)}"


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean 'table_3'?)`` for a name that is close to a known one, else nothing."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


NAMED = 5
"""Tables, or other names, that one error or note lists."""


def first_of(names: Sequence[str], most: int = NAMED) -> str:
    """The first so many names, and dots where there are more."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def some_of(names: Sequence[str], known: Iterable[str]) -> str:
    """Unknown names, quoted, each with the known one that it is close to; past the fifth they are counted."""
    known = list(known)
    shown = ", ".join(f"{name!r}{nearest(name, known)}" for name in names[:NAMED])
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def layout(value: Any, indent: int = 0) -> str:
    """JSON with what fits into a line, or holds numbers alone, on one line, and everything else indented; of several
    objects in a list each has a line of its own."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    plain = isinstance(value, list | tuple) and all(isinstance(part, int | float) for part in parts)
    if plain or not parts:
        return json.dumps(value)
    # Most of a long document is seen to take several lines before it is written as one.
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
