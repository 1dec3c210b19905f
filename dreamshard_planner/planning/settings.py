# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a planner is asked for, checked where it is given, and the memory that it reserves by default."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.planning.cost_sources import COST_SOURCES
from dreamshard_planner.problem.sharding_groups import ShardingGroups
from dreamshard_planner.search.effort import DEFAULT_EFFORT, DEFAULT_SEARCH, EFFORTS, SearchConfig
from dreamshard_planner.search_space.input_checks import checked_seed
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.torchrec_components.compat import dense_tensor_bytes, set_dense_tensor_bytes
from dreamshard_planner.workload.statistics import TableStatistics

RESERVED_SHARE = 0.15
"""Of device memory, as TorchRec's planner keeps by default."""


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """Arguments of :class:`~dreamshard_planner.planner.DreamShardPlanner`, which says what they mean.

    Raises:
        ValueError, TypeError: one cannot be meant; names it.
    """

    given_batch_size: int | None = None
    """Local batch size; None for TorchRec's default."""
    constraints: dict[str, ParameterConstraints] | None = None
    timeout_seconds: float | None = None
    """TorchRec's cap on planning."""
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
        types = {"statistics": TableStatistics, "placement_rules": PlacementRules, "sharding_groups": ShardingGroups}
        for name, kind in types.items():
            if not isinstance(value := getattr(self, name), kind | None):
                raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
        given = self.given_batch_size
        if given is not None and (isinstance(given, bool) or not isinstance(given, Integral) or given < 1):
            raise ValueError(f"batch_size must be a whole number above 0, got {given!r}")
        if self.least_gain is not None and not 0 <= self.least_gain < 1:
            raise ValueError(f"least_gain must be a share from 0 to below 1, or None, got {self.least_gain!r}")
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {self.effort!r}")
        if self.search_seconds is not None and not self.search_seconds > 0:
            raise ValueError(f"search_seconds must be positive, got {self.search_seconds}")
        if self.sharding_types is not None and (
            isinstance(self.sharding_types, str)
            or not self.sharding_types
            or not all(kind in SHARDING_TYPES for kind in self.sharding_types)
        ):
            raise ValueError(f"sharding_types must be some of {', '.join(SHARDING_TYPES)}, got {self.sharding_types!r}")
        if self.cost_source not in COST_SOURCES:
            raise ValueError(f"cost_source must be one of {', '.join(COST_SOURCES)}, got {self.cost_source!r}")
        object.__setattr__(self, "seed", checked_seed(self.seed))

    @property
    def batch_size(self) -> int:
        """Local batch size."""
        return self.given_batch_size or BATCH_SIZE

    @property
    def seconds(self) -> float | None:
        """Cap on the search: the shorter of ours and TorchRec's; None for none."""
        return min(filter(None, (self.search_seconds, self.timeout_seconds)), default=None)

    @property
    def search(self) -> SearchConfig:
        """Counts of candidates of the search."""
        return DEFAULT_SEARCH.times(self.candidates)

    @property
    def candidates(self) -> float:
        """Multiple of the default's candidates that each part of planning may try."""
        return EFFORTS[self.effort]


class DefaultReservation(HeuristicalStorageReservation):
    """TorchRec's default reservation with the size of the dense layers given, as TorchRec's warning asks."""

    def __init__(self, percentage: float = RESERVED_SHARE) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it comes even with a dense_tensor_estimate
            super().__init__(percentage)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: Any = None,
    ) -> Topology:
        """See ``StorageReservation.reserve``."""
        dense_bytes = dense_tensor_bytes(self, module, sharders, batch_size, constraints)
        set_dense_tensor_bytes(self, max(1, dense_bytes))  # 0 would mean none given
        return super().reserve(topology, batch_size, module, sharders, constraints)
