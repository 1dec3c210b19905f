# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Effort of planning: counts of candidates, so that the clock decides no plan, within seconds if the user wants."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

EFFORTS = {"quick": 0.02, "default": 1.0, "thorough": 4.0}
"""Candidates of each part of planning, as multiples of the default's, by the name of the effort."""
DEFAULT_EFFORT = "default"


@dataclass(frozen=True)
class SearchSettings:
    """Bounds and seed of a search."""

    effort: float = 1.0
    """Share of the default's starts, candidates and patience."""
    seed: int = 0
    """Seed of perturbations."""
    seconds: float = math.inf
    """Cap on the search, its starts included, on top of its counts of candidates."""


DEFAULT_SETTINGS = SearchSettings()


def portion(count: int, effort: float) -> int:
    """Return the part of the default's candidates that an effort allows, at least one."""
    return max(1, round(effort * count)) if count else 0


class Budget:
    """Candidates that a search may try, until a moment of :func:`time.monotonic`."""

    def __init__(self, candidates: int, until: float = math.inf) -> None:
        self.limit, self.until = candidates, until
        self.used = 0
        self.cut_short = False
        """True once time was over while candidates were left."""

    def left(self) -> bool:
        """Return whether the search may go on."""
        if self.used >= self.limit:
            return False
        self.cut_short = self.cut_short or time.monotonic() >= self.until
        return not self.cut_short
