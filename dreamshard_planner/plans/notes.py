# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes on a plan's cost: a code for programs, and a text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dreamshard_planner.support.documents import STRICT, Finite

CODES = {
    "hardware": "the devices that were read from the driver",
    "assumption": "taken for granted since nobody said, and moves the figures",
    "cost": "the tables are beyond what the costs were learned from",
    "skew": "a block of rows is read more than the others",
    "measurement": "what was measured in training",
    "search": "cut short",
    "source": "where costs come from",
    "optimizer": "costed as another one",
    "table": "of which rows nobody knows how they are read",
    "placement_rule": "where it put tables",
    "beyond_exact_training": "what exact training leaves out",
    "hot_rows": "rows of sequence tables that every rank holds",
    "index_dedup": "what TorchRec's index dedup would gain",
    "forced_out": "in older files: exact training keeps tables out of device memory",
    "training": "trains differently",
    "unused": "named, and not in the model; or in the model, and not in the plan",
    "callbacks": "changed the plan",
    "loaded": "of a plan from a file",
    "stale": "what has changed since that was made",
}
"""Subjects of notes, by code."""


@dataclass(frozen=True)
class Note:
    """One thing to know.

    Raises:
        ValueError: the code is none of :data:`CODES`.
    """

    __pydantic_config__: ClassVar = STRICT
    code: str
    text: str
    """A sentence without its full stop."""
    figures: Mapping[str, Finite] = field(default_factory=dict)
    """Numbers of the text, by names with units."""

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"a note's code is one of {', '.join(CODES)}, got {self.code!r}")

    def __str__(self) -> str:
        return self.text


def noted(code: str, texts: Iterable[str]) -> tuple[Note, ...]:
    """Notes of one code."""
    return tuple(Note(code, text) for text in texts)
