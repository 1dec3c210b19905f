# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Effort: how many candidates each part of planning may try. It is a count, so the clock decides no plan."""

from __future__ import annotations

EFFORTS = {"quick": 0.02, "default": 1.0, "thorough": 4.0}
"""Candidates of each part of planning, as multiples of the default's, by the name of the effort."""
DEFAULT_EFFORT = "default"


def portion(count: int, effort: float) -> int:
    """Return the part of the default's candidates that an effort allows, at least one."""
    return max(1, round(effort * count)) if count else 0
