# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What changed between two statistics of the same features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dreamshard_planner.workload.id_histogram import IdHistogram
from dreamshard_planner.workload.tables import FeatureStatistics

DRIFTED = 0.1
"""A feature drifted where any of its changes is larger."""


@dataclass(frozen=True)
class FeatureDrift:
    """How one feature changed. Each change is from 0 (none) up; None where it cannot be told."""

    name: str
    pooling_before: float
    pooling_after: float
    pooling_change: float
    """Relative: 0.25 for a quarter more, or for as much less (from 5 to 4)."""
    reuse_change: float | None
    """Share of the distinct rows that would have to change their bin, 0 to 1; None without histograms at one batch
    size."""
    ids_change: float | None
    """Largest difference between the shares of lookups that fall below any id, 0 to 1; None if unknown."""

    @property
    def largest(self) -> float:
        """Of the changes."""
        return max(self.pooling_change, self.reuse_change or 0.0, self.ids_change or 0.0)

    @property
    def drifted(self) -> bool:
        return self.largest > DRIFTED


@dataclass(frozen=True)
class Drift:
    """What :func:`drift` found."""

    features: tuple[FeatureDrift, ...]
    """Of both; most drifted first."""
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def drifted(self) -> tuple[FeatureDrift, ...]:
        """Features that changed by more than :data:`DRIFTED` in any way."""
        return tuple(feature for feature in self.features if feature.drifted)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "drifted": [feature.name for feature in self.drifted]}

    def __str__(self) -> str:
        lines = [f"{len(self.drifted)} of {len(self.features)} features drifted (some change above {DRIFTED:.0%})."]
        lines += [f"Only before: {', '.join(self.only_before)}."] if self.only_before else []
        lines += [f"Only after: {', '.join(self.only_after)}."] if self.only_after else []
        lines += [
            f"{feature.name}: {feature.pooling_before:.3g} -> {feature.pooling_after:.3g} lookups per sample"
            + ("" if feature.reuse_change is None else f", reuse {feature.reuse_change:.0%}")
            + ("" if feature.ids_change is None else f", ids {feature.ids_change:.0%}")
            for feature in self.drifted
        ]
        return "\n".join(lines)


def drift(before: Mapping[str, FeatureStatistics], after: Mapping[str, FeatureStatistics]) -> Drift:
    """Compare two statistics, feature by feature."""
    both = [_feature(name, before[name], after[name]) for name in before if name in after]
    return Drift(
        features=tuple(sorted(both, key=lambda feature: -feature.largest)),
        only_before=tuple(name for name in before if name not in after),
        only_after=tuple(name for name in after if name not in before),
    )


def _feature(name: str, before: FeatureStatistics, after: FeatureStatistics) -> FeatureDrift:
    reuse = None
    if before.reuse_histogram and after.reuse_histogram and before.batch_size == after.batch_size:
        pairs = zip(before.reuse_histogram, after.reuse_histogram, strict=True)
        reuse = sum(abs(one - other) for one, other in pairs) / 2
    return FeatureDrift(
        name=name,
        pooling_before=before.pooling_factor,
        pooling_after=after.pooling_factor,
        pooling_change=_relative(before.pooling_factor, after.pooling_factor),
        reuse_change=reuse,
        ids_change=None if before.ids is None or after.ids is None else _ids_change(before.ids, after.ids),
    )


def _relative(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return 0.0 if low == high else math.inf if low == 0 else high / low - 1


def _ids_change(before: IdHistogram, after: IdHistogram) -> float:
    """Kolmogorov's distance: at the ends of both histograms' parts, since the shares are linear between them."""
    points = {*range(0, before.end, before.width), before.end, *range(0, after.end, after.width), after.end}
    return max(abs(before.shares(0, point)[0] - after.shares(0, point)[0]) for point in points)
