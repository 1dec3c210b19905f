# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ids that batches read: histograms over their range, and those read most, in bounded memory.

Row-wise sharding cuts a table into contiguous blocks. With ids sorted by frequency, the first block has all hot rows.

Shapes: P = 64 parts, 2 (lookups, distinct rows), R distinct ids, ascending.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.support.documents import STRICT

PARTS = 64
"""Most parts of the range of ids. Their width is a power of two, so that histograms add up exactly."""
MAX_ID = 2**53
"""Ids from here on are hashes, whose rows are unknown."""
LEAST_READS = 0.5
"""Reads per batch of an id that is kept. A replica of a row pays if a rank's batch reads the row about once."""
MOST_IDS = 2**16
"""Most ids kept of a feature; a running count holds twice as many."""
_RARE = 1e-9
"""Mean reads of a row per batch below which it is read once or never."""


@dataclass(frozen=True, slots=True)
class IdHistogram:
    """Shares of a feature's or table's lookups and distinct rows, by equal parts of its range of ids.

    A part has as many ids as the smallest power of two with which 64 parts reach ``end``, where the last one stops.
    All ids of a part count as alike.

    Raises:
        StatisticsError: the numbers are no such shares.
    """

    __pydantic_config__: ClassVar = STRICT
    end: int
    """The highest id plus one."""
    lookups: tuple[float, ...]
    """Share of the lookups in each part."""
    distinct: tuple[float, ...]
    """Share of a batch's distinct rows in each part."""

    def __post_init__(self) -> None:
        if type(self.end) is not int or not 1 <= self.end <= MAX_ID:
            raise StatisticsError(f"ids must end between 1 and 2^53, got {self.end!r}")
        parts = -(-self.end // self.width)
        for name in ("lookups", "distinct"):
            shares = getattr(self, name)
            if len(shares) != parts:
                raise StatisticsError(f"ids up to {self.end:,} have {parts} shares of {name}, got {len(shares)}")
            if not all(share >= 0 for share in shares) or abs(sum(shares) - 1) > 0.02:
                raise StatisticsError(f"shares of {name} by id must be 0 or more and sum to 1, got {shares}")

    @property
    def width(self) -> int:
        """Ids of one part."""
        return _width(self.end)

    @classmethod
    def of_counts(cls, id_R: Tensor, count_R: Tensor) -> IdHistogram | None:
        """Return the histogram of one batch, or None if it has no id or hashes.

        Args:
            id_R: distinct ids, ascending, int64.
            count_R: lookups of each, int64.
        """
        if not len(id_R) or int(id_R[0]) < 0 or int(id_R[-1]) >= MAX_ID:
            return None
        end = int(id_R[-1]) + 1
        part_R = id_R // _width(end)
        both = (part_R.bincount(weights, PARTS) for weights in (count_R.double(), torch.ones(len(id_R)).double()))
        return _of_amounts(end, torch.stack([*both]))

    @classmethod
    def even(cls, rows: int) -> IdHistogram:
        """Return the histogram of a table whose rows are all alike."""
        width = _width(rows)
        shares = tuple(min(width, rows - first) / rows for first in range(0, rows, width))
        return cls(rows, shares, shares)

    def shares(self, first: int, end: int) -> tuple[float, float]:
        """Return the shares of lookups and of distinct rows that ids from ``first`` to ``end`` - 1 have."""
        lookups, distinct = (
            self._below(shares, end) - self._below(shares, first) for shares in (self.lookups, self.distinct)
        )
        return lookups, distinct

    def _below(self, shares: Sequence[float], point: int) -> float:
        if point <= 0 or point >= self.end:
            return float(point > 0)
        part, ids = divmod(point, self.width)
        return sum(shares[:part]) + shares[part] * ids / min(self.width, self.end - part * self.width)

    def rescaled(self, lookups: float, distinct: float | None, factor: float) -> IdHistogram:
        """Return the histogram at another batch size: the same shares of lookups, while distinct rows saturate.

        A batch reads r (1 - exp(-n)) of a part's r rows if each is read n times on average. This n follows from the
        part's distinct rows, and is at most that of its lookups.

        Args:
            lookups: lookups of the batch that the histogram was taken at.
            distinct: distinct rows of that batch; None if unknown.
            factor: new batch size over old.
        """
        if factor == 1:
            return self
        lookups_P, distinct_P = torch.tensor([self.lookups, self.distinct], dtype=torch.float64).unbind()
        reads_P = lookups_P * lookups / self.width
        if distinct is not None:
            read_P = (distinct_P * distinct / self.width).clamp_max(1 - _RARE)
            reads_P = torch.minimum(reads_P, -torch.log1p(-read_P))
        growth_P = torch.expm1(-reads_P * factor) / torch.expm1(-reads_P)
        grown_P = distinct_P * torch.where(reads_P > _RARE, growth_P, factor)
        return IdHistogram(self.end, self.lookups, tuple((grown_P / grown_P.sum()).tolist()))


def merge(parts: Sequence[IdHistogram], lookups: Sequence[float], distinct: Sequence[float]) -> IdHistogram:
    """Return one histogram of several, weighted by their lookups and distinct rows."""
    end = max(part.end for part in parts)
    amount_2P = torch.zeros(2, PARTS, dtype=torch.float64)
    for part, weights in zip(parts, zip(lookups, distinct, strict=True), strict=True):
        shares = torch.tensor([part.lookups, part.distinct], dtype=torch.float64)
        at = torch.arange(shares.shape[1]) * part.width // _width(end)
        amount_2P.index_add_(1, at, shares * torch.tensor(weights, dtype=torch.float64)[:, None])
    return _of_amounts(end, amount_2P)


def _of_amounts(end: int, amount_2P: Tensor) -> IdHistogram:
    share_2P = (amount_2P / amount_2P.sum(-1, keepdim=True))[:, : -(-end // _width(end))]
    return IdHistogram(end, *map(tuple, share_2P.tolist()))


def _width(end: int) -> int:
    """Ids of a part: the smallest power of two with which 64 parts reach ``end``."""
    return 1 << max(0, math.ceil(end / PARTS) - 1).bit_length()


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

    def statistics(self, batches: int) -> HotIds:
        """Return the ids that a batch reads :data:`LEAST_READS` times or more, at most :data:`MOST_IDS`."""
        mean_R = self._reads_R / batches
        kept_R = mean_R.topk(min(MOST_IDS, len(mean_R))).indices.sort().values
        kept_R = kept_R[mean_R[kept_R] >= LEAST_READS]
        # Five digits say all that a sample of batches tells.
        reads = tuple(float(f"{reads:.5g}") for reads in mean_R[kept_R].tolist())
        return HotIds(tuple(self._id_R[kept_R].tolist()), reads)
