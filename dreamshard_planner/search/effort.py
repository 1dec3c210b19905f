# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Effort of planning: counts of candidates, so that the clock decides no plan, and deadlines."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace

EFFORTS = {"quick": 0.02, "default": 1.0, "thorough": 4.0}
"""Candidates of each part of planning, as multiples of the default's, by the name of the effort."""
DEFAULT_EFFORT = "default"


def portion(count: int, effort: float) -> int:
    """Return the part of the default's candidates that an effort allows, at least one."""
    return max(1, round(effort * count)) if count else 0


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Effort of one search.

    Raises:
        ValueError: a setting is not positive.
    """

    starts: int = 4
    """Starting shardings to descend from: the cheapest."""
    reshards: int = 20_000
    """Re-shards that the whole search may try, besides :attr:`reshards_per_table`."""
    reshards_per_table: int = 10
    """Re-shards that it may try more for each table of the model."""
    moves: int = 6_000
    """Moves, and swaps rated exactly, of one descent between re-shards."""
    patience: int = 8
    """Perturbations without a gain worth having, one after the other, at which re-sharding ends."""
    last_moves: int = 40_000
    """Moves and swaps of the last descents, from copies of the best plan with shards moved at random."""
    last_patience: int = 24
    """Fruitless copies, one after the other, at which the search ends."""
    effort: float = 1.0
    """Share of the level starts and group moves to make; all of them from 1 on."""

    def __post_init__(self) -> None:
        if any(value <= 0 for value in asdict(self).values()):
            raise ValueError(f"search settings must be positive, got {asdict(self)}")

    def times(self, effort: float) -> SearchConfig:
        """Return the same settings with this multiple of starts, re-shards, moves and patience."""
        counts = {name: portion(value, effort) for name, value in asdict(self).items() if name != "effort"}
        return replace(self, effort=self.effort * effort, **counts)


DEFAULT_SEARCH = SearchConfig()


class Deadline:
    """The end of some seconds, from now on; None for no end."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds that are left; None without an end."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


NO_DEADLINE = Deadline(None)


class Budget:
    """Candidates that a search may try, within a deadline."""

    def __init__(self, candidates: int, deadline: Deadline) -> None:
        self.limit = candidates
        self.used = 0
        self.cut_short = False
        """True once the deadline has passed while candidates were left."""
        self.deadline = deadline

    def left(self) -> bool:
        """Return whether the search may go on."""
        if self.used >= self.limit:
            return False
        self.cut_short = self.cut_short or self.deadline.left() == 0.0
        return not self.cut_short

    def spend(self, candidates: int) -> None:
        """Count candidates as tried."""
        self.used += candidates
