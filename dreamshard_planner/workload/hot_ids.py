# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ids that a feature reads most, with their reads per batch, in bounded memory.

Shapes: R distinct ids, ascending.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.support.documents import STRICT

LEAST_READS = 0.5
"""Reads per batch of an id that is kept. A replica of a row pays if a rank's batch reads the row about once."""
MOST_IDS = 2**16
"""Most ids kept of a feature; a running count holds twice as many."""


@dataclass(frozen=True, slots=True)
class HotIds:
    """Ids of a feature that a batch reads most.

    Raises:
        StatisticsError: ids do not ascend from 0, or reads are no positive numbers.
    """

    __pydantic_config__: ClassVar = STRICT
    ids: tuple[int, ...]
    """Ascending."""
    reads: tuple[float, ...]
    """Mean reads of each id per batch."""

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.reads):
            raise StatisticsError(f"hot ids need one number of reads each, got {len(self.reads)} for {len(self.ids)}")
        ids = torch.tensor(self.ids, dtype=torch.int64)
        if len(ids) and (int(ids[0]) < 0 or bool((ids.diff() <= 0).any())):
            raise StatisticsError("hot ids must ascend from 0 or more, each given once")
        if not all(0 < reads < math.inf for reads in self.reads):
            raise StatisticsError("reads of hot ids must be numbers above 0")


class HotCounts:
    """Running reads of the ids that were read most.

    When there are more than twice :data:`MOST_IDS` ids, those read least are dropped. An id that most batches read is
    never among them.
    """

    def __init__(self) -> None:
        self._id_R = torch.empty(0, dtype=torch.int64)
        self._reads_R = torch.empty(0, dtype=torch.float64)

    def add(self, id_R: Tensor, reads_R: Tensor) -> None:
        """Add reads of distinct ids."""
        self._id_R, place = torch.unique(torch.cat([self._id_R, id_R]), return_inverse=True)
        reads = torch.cat([self._reads_R, reads_R.double()])
        self._reads_R = torch.zeros(len(self._id_R), dtype=torch.float64).index_add_(0, place, reads)
        if len(self._id_R) > 2 * MOST_IDS:
            kept_R = self._reads_R.topk(MOST_IDS).indices.sort().values
            self._id_R, self._reads_R = self._id_R[kept_R], self._reads_R[kept_R]

    def add_statistics(self, hot: HotIds, batches: int) -> None:
        """Add what some batches read."""
        self.add(torch.tensor(hot.ids, dtype=torch.int64), torch.tensor(hot.reads, dtype=torch.float64) * batches)

    def statistics(self, batches: int) -> HotIds:
        """Return the ids that a batch reads :data:`LEAST_READS` times or more, at most :data:`MOST_IDS`."""
        mean_R = self._reads_R / batches
        kept_R = mean_R.topk(min(MOST_IDS, len(mean_R))).indices.sort().values
        kept_R = kept_R[mean_R[kept_R] >= LEAST_READS]
        # Five digits say all that a sample of batches tells.
        reads = tuple(float(f"{reads:.5g}") for reads in mean_R[kept_R].tolist())
        return HotIds(tuple(self._id_R[kept_R].tolist()), reads)


def hot_of_document(document: Any) -> Any:
    """Return a file's hot ids with tuples for lists."""
    if not isinstance(document, dict):
        return document
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
