# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a planner is asked for beside what TorchRec's planner takes, checked where it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dreamshard_planner.planning.cost_sources import COST_SOURCES
from dreamshard_planner.problem.sharding_groups import ShardingGroups
from dreamshard_planner.search.effort import DEFAULT_EFFORT, DEFAULT_SEARCH, EFFORTS, SearchConfig
from dreamshard_planner.search_space.input_checks import checked_seed
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.workload.statistics import TableStatistics


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """Arguments of :class:`~dreamshard_planner.planner.DreamShardPlanner`, which says what they mean.

    Raises:
        ValueError, TypeError: one cannot be meant; names it.
    """

    statistics: TableStatistics | None = None
    seed: int = 0
    effort: str = DEFAULT_EFFORT
    search_seconds: float | None = None
    sharding_types: Sequence[str] | None = None
    exact_training: bool = True
    optimizers_attached: bool = False
    cost_source: str = "auto"
    placement_rules: PlacementRules | None = None
    sharding_groups: ShardingGroups | None = None
    least_gain: float | None = None

    def __post_init__(self) -> None:
        if self.least_gain is not None and not 0 <= self.least_gain < 1:
            raise ValueError(f"least_gain must be a share from 0 to below 1, or None, got {self.least_gain!r}")
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {self.effort!r}")
        if self.search_seconds is not None and not self.search_seconds > 0:
            raise ValueError(f"search_seconds must be positive, got {self.search_seconds}")
        if not isinstance(self.statistics, TableStatistics | None):
            raise TypeError(f"statistics must be TableStatistics, got {type(self.statistics).__name__}")
        if self.sharding_types is not None and (
            isinstance(self.sharding_types, str)
            or not self.sharding_types
            or not all(kind in SHARDING_TYPES for kind in self.sharding_types)
        ):
            raise ValueError(f"sharding_types must be some of {', '.join(SHARDING_TYPES)}, got {self.sharding_types!r}")
        if self.cost_source not in COST_SOURCES:
            raise ValueError(f"cost_source must be one of {', '.join(COST_SOURCES)}, got {self.cost_source!r}")
        if not isinstance(self.placement_rules, PlacementRules | None):
            raise TypeError(f"placement_rules must be PlacementRules, got {type(self.placement_rules).__name__}")
        if not isinstance(self.sharding_groups, ShardingGroups | None):
            raise TypeError(f"sharding_groups must be ShardingGroups, got {type(self.sharding_groups).__name__}")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def search(self) -> SearchConfig:
        """Counts of candidates of the search."""
        return DEFAULT_SEARCH.times(self.candidates)

    @property
    def candidates(self) -> float:
        """Multiple of the default's candidates that each part of planning may try."""
        return EFFORTS[self.effort]
