# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Effort of planning: counts of candidates, so that the clock decides no plan, and deadlines."""

from __future__ import annotations

import time

EFFORTS = {"quick": 0.02, "default": 1.0, "thorough": 4.0}
"""Candidates of each part of planning, as multiples of the default's, by the name of the effort."""
DEFAULT_EFFORT = "default"


def portion(count: int, effort: float) -> int:
    """Return the part of the default's candidates that an effort allows, at least one."""
    return max(1, round(effort * count)) if count else 0


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
