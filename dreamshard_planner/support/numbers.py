# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Check numbers that users give."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

from dreamshard_planner.support.files import brief


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
