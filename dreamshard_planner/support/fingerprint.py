# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Digests of the inputs of a plan, equal in every process: a stored plan loads for the same inputs only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
MAX_DEPTH = 32


def digest(value: Any) -> str:
    """Return the SHA-256 of :func:`canonical` in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def canonical(value: Any, depth: int = MAX_DEPTH) -> str:
    """Return a text that is equal for equal values in every process.

    It has no addresses and no order of sets and dictionaries; tensors count by their bytes, other objects by type and
    attributes. Raises ValueError for values that hold themselves, or nest deeper than :data:`MAX_DEPTH`.
    """
    if depth == 0:
        raise ValueError(f"values nest deeper than {MAX_DEPTH} levels, or hold themselves: {type(value).__name__}")
    if value is None or isinstance(value, (str, bytes, bool, int, float)) and not isinstance(value, Enum):
        return repr(value)
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"tensor({value.dtype}, {tuple(value.shape)}, {hashlib.sha256(data).hexdigest()})"

    def inner(part: Any) -> str:
        return canonical(part, depth - 1)

    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{inner(key)}: {inner(part)}" for key, part in value.items())) + "}"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(map(inner, value))) + "}"
    if isinstance(value, Sequence):
        numbers = (int, float)  # hundreds of them, in histograms of ids
        return "[" + ", ".join(repr(part) if type(part) in numbers else inner(part) for part in value) + "]"
    if hasattr(value, "__qualname__"):  # classes and functions
        return _name(value)
    if is_dataclass(value):
        return f"{_name(type(value))}({inner({field.name: getattr(value, field.name) for field in fields(value)})})"
    if hasattr(value, "__dict__"):
        return f"{_name(type(value))}({inner(vars(value))})"
    return _ADDRESS.sub("", repr(value))


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
