# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Rows of a table that every rank holds, and statistics of the lookups of all other rows.

Shapes: K hot rows of a table, P parts of a histogram of ids, 2 (lookups, distinct rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dreamshard_planner.errors import PlanError
from dreamshard_planner.workload.reuse import bin_mean_reuse, bin_probabilities
from dreamshard_planner.workload.tables import FeatureStatistics


@dataclass(frozen=True, eq=False)
class HotRows:
    """Ids of the rows of one table that every rank holds.

    Raises:
        PlanError: an id is given twice or lies outside the table.
    """

    ids: Tensor
    """Ascending, int64, on the CPU."""
    table_rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", self.ids.detach().to("cpu", torch.int64).sort().values)
        if self.ids.dim() != 1 or not len(self.ids):
            raise PlanError(f"hot rows must be a list of at least one id, got shape {tuple(self.ids.shape)}.")
        if self.ids[0] < 0 or self.ids[-1] >= self.table_rows:
            raise PlanError(
                f"hot rows must lie in a table of {self.table_rows:,} rows, got ids from {self.ids[0]} to "
                f"{self.ids[-1]}. Take the hot rows from statistics of this table."
            )
        if twice := int((self.ids.diff() == 0).sum()):
            raise PlanError(f"hot rows must be different rows, got {twice} ids twice.")

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HotRows) and self.table_rows == other.table_rows and torch.equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.table_rows, len(self.ids)))

    def __deepcopy__(self, memo: dict[int, Any]) -> HotRows:
        return self

    def __repr__(self) -> str:
        return f"<{len(self):,} hot rows of {self.table_rows:,}>"


def without_rows(feature: FeatureStatistics, ids: Tensor) -> FeatureStatistics:
    """Return the statistics of a feature's other lookups."""
    if feature.hot is None:
        return feature
    known, reads = torch.tensor(feature.hot.ids), torch.tensor(feature.hot.reads, dtype=torch.float64)
    at = torch.isin(known, ids)
    id_K, reads_K = known[at], reads[at]
    lookups = max(0.0, feature.lookups - float(reads_K.sum()))
    histogram, distinct = feature.reuse_histogram, feature.distinct_rows
    if histogram is not None and lookups > 0:
        bins = torch.tensor(histogram, dtype=torch.float64)
        if distinct is None:
            distinct = feature.lookups / float(bins @ bin_mean_reuse())
        # A batch reads a row by chance; a Poisson count is right for rows that are read independently.
        bins = (bins * distinct - bin_probabilities(reads_K).sum(0)).clamp_min(0)
        distinct = min(max(float(bins.sum()), 1e-9), lookups)
        histogram = tuple((bins / bins.sum().clamp_min(1e-9)).tolist()) if float(bins.sum()) > 0 else None
    ids_left = feature.ids
    if ids_left is not None and histogram is not None and lookups > 0:
        part_K, parts = id_K // ids_left.width, len(ids_left.lookups)
        given = torch.tensor([ids_left.lookups, ids_left.distinct], dtype=torch.float64)
        given *= torch.tensor([[feature.lookups], [feature.distinct_rows or feature.lookups]])
        gone = torch.stack([part_K.bincount(w, parts) for w in (reads_K, -torch.expm1(-reads_K))])
        left_2P = (given - gone).clamp_min(0)
        sums = left_2P.sum(1, keepdim=True)
        lookups_P, distinct_P = (tuple(shares) for shares in (left_2P / sums).tolist())
        ids_left = None if bool((sums <= 0).any()) else replace(ids_left, lookups=lookups_P, distinct=distinct_P)
    return replace(
        feature,
        pooling_factor=lookups / feature.samples,
        reuse_histogram=histogram if lookups > 0 else None,
        distinct_rows=distinct if histogram is not None and lookups > 0 else None,
        ids=ids_left,
        hot=None,
    )
