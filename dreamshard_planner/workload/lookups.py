# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics of a feature's lookups: their number, reuse, ids over their range, and ids read most; and hot rows.

Row-wise sharding cuts a table into contiguous blocks. With ids sorted by frequency, the first block has all hot rows.

Shapes: P = 64 parts, 2 (lookups, distinct rows), R distinct ids, ascending, K hot rows, B reuse bins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from dreamshard_planner.errors import PlanError, StatisticsError
from dreamshard_planner.support.documents import STRICT
from dreamshard_planner.support.formatting import brief, checked
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, bin_mean_reuse, bin_probabilities

PARTS = 64
"""Most parts of the range of ids. Their width is a power of two, so that histograms add up exactly."""
MAX_ID = 2**53
"""Ids from here on are hashes, whose rows are unknown."""
_RARE = 1e-9
"""Mean reads of a row per batch below which it is read once or never."""
MAX_BATCHES = 2**53
MAX_BATCH_SIZE = 2**40
"""Largest batch size; its lookups are still whole numbers in fp64."""


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
        return _of_amounts(end, torch.stack([part_R.bincount(count_R, PARTS), part_R.bincount(minlength=PARTS)]))

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

    def rescaled(self, lookups: float, distinct: float, factor: float) -> IdHistogram:
        """Return the histogram at another batch size: the same shares of lookups, while distinct rows saturate.

        A batch reads r (1 - exp(-n)) of a part's r rows if each is read n times on average. This n follows from the
        part's distinct rows, and is at most that of its lookups.

        Args:
            lookups: lookups of the batch that the histogram was taken at.
            distinct: distinct rows of that batch.
            factor: new batch size over old.
        """
        if factor == 1:
            return self
        lookups_P, distinct_P = torch.tensor([self.lookups, self.distinct], dtype=torch.float64).unbind()
        read_P = (distinct_P * distinct / self.width).clamp_max(1 - _RARE)
        reads_P = torch.minimum(lookups_P * lookups / self.width, -torch.log1p(-read_P))
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
        if (self.ids and self.ids[0] < 0) or any(one >= following for one, following in pairwise(self.ids)):
            raise StatisticsError("hot ids must ascend from 0 or more, each given once")
        if not all(0 < reads < math.inf for reads in self.reads):
            raise StatisticsError("reads of hot ids must be numbers above 0")

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return ids, int64, and reads, float64."""
        return torch.tensor(self.ids, dtype=torch.int64), torch.tensor(self.reads, dtype=torch.float64)


@dataclass(frozen=True, slots=True)
class FeatureStatistics:
    """Lookups of one sparse feature, averaged over batches of ``batch_size`` samples."""

    __pydantic_config__: ClassVar = STRICT
    pooling_factor: float
    """Lookups per sample; 0 if the feature is always empty."""

    reuse_histogram: tuple[float, ...] | None = None
    """Shares of a batch's distinct rows by how often the batch reads them, in the 17 bins (0,1], (1,2], (2,4] ...
    (32768,inf). None: derived from rows and lookups."""

    batch_size: int | None = None
    """Samples per batch; required with a histogram."""

    distinct_rows: float | None = None
    """Distinct rows per batch. None: derived from lookups and histogram, a few percent off."""

    ids: IdHistogram | None = None
    """Shares of lookups and distinct rows over the table's range of ids. None: even."""

    batches: int = field(default=1, compare=False)
    """Number of batches counted: the weight of these statistics in a merge."""

    weighted: bool = False
    """True if batches carry weights of lookups, even if the module asks for none."""

    hot: HotIds | None = None
    """Ids that a batch reads most. None: unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pooling_factor", _number("pooling factor", self.pooling_factor))
        object.__setattr__(self, "batches", checked("batches", self.batches, 1, MAX_BATCHES, error=StatisticsError))
        if self.distinct_rows is not None:
            object.__setattr__(self, "distinct_rows", _number("distinct rows", self.distinct_rows))
        if self.reuse_histogram is None:
            if self.distinct_rows is not None:
                raise StatisticsError(f"distinct rows ({self.distinct_rows}) tell nothing without a reuse histogram")
        else:
            object.__setattr__(self, "reuse_histogram", _bins(self.reuse_histogram))
            if self.pooling_factor > 0 and abs(sum(self.reuse_histogram) - 1.0) > 0.02:
                raise StatisticsError(f"reuse histogram shares must sum to 1, got {sum(self.reuse_histogram):.4f}")
        if self.batch_size is None and (self.reuse_histogram or self.ids or self.hot):
            raise StatisticsError("histograms of reuse and ids, and hot ids, belong to a batch size: give batch_size")
        size = 1 if self.batch_size is None else self.batch_size
        size = checked("batch size", size, 1, MAX_BATCH_SIZE, error=StatisticsError)
        object.__setattr__(self, "batch_size", size)
        most = self.lookups * (1 + 1e-6)
        if self.distinct_rows is not None and self.lookups and not 0 < self.distinct_rows <= most:
            raise StatisticsError(
                f"distinct rows must be above 0, up to the {self.lookups:g} lookups: {self.distinct_rows}"
            )

    @property
    def samples(self) -> int:
        """Samples per batch; 1 if unknown."""
        return self.batch_size or 1

    @property
    def lookups(self) -> float:
        """Lookups per batch."""
        return self.pooling_factor * self.samples

    @property
    def rows_read(self) -> float:
        """Distinct rows per batch: counted, or derived; as many as lookups without a histogram."""
        if self.distinct_rows is not None:
            return self.distinct_rows
        bins_B = torch.tensor(self.reuse_histogram or (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1), dtype=torch.float64)
        return self.lookups / max(1.0, float(bins_B @ bin_mean_reuse()))

    def without_rows(self, ids: Tensor) -> FeatureStatistics:
        """Return the statistics of all lookups but those of some hot ids."""
        if self.hot is None:
            return self
        at = torch.isin(self.hot.tensors()[0], ids)
        id_K, reads_K = (values[at] for values in self.hot.tensors())
        lookups = max(0.0, self.lookups - float(reads_K.sum()))
        factor = lookups / self.samples
        others = replace(self, pooling_factor=factor, reuse_histogram=None, distinct_rows=None, hot=None)
        if self.reuse_histogram is None or not lookups:
            return others
        # A batch reads a row by chance; a Poisson count is right for rows that are read independently.
        bins_B = torch.tensor(self.reuse_histogram, dtype=torch.float64) * self.rows_read
        bins_B = (bins_B - bin_probabilities(reads_K).sum(0)).clamp_min(0)
        if not (distinct := float(bins_B.sum())):
            return others
        ids_left = self.ids
        if ids_left is not None:
            given_2P = torch.tensor([ids_left.lookups, ids_left.distinct], dtype=torch.float64)
            given_2P *= torch.tensor([[self.lookups], [self.rows_read]])
            part_K, parts = id_K // ids_left.width, len(ids_left.lookups)
            gone = torch.stack([part_K.bincount(w, parts) for w in (reads_K, -torch.expm1(-reads_K))])
            left_2P = (given_2P - gone).clamp_min(0)
            ids_left = _of_amounts(ids_left.end, left_2P) if bool((left_2P.sum(1) > 0).all()) else None
        histogram = tuple((bins_B / distinct).tolist())
        return replace(others, reuse_histogram=histogram, distinct_rows=min(distinct, lookups), ids=ids_left)


def _number(what: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise StatisticsError(f"{what} must be a number, got {brief(value)}") from error
    if not 0 <= number < math.inf:
        raise StatisticsError(f"{what} must be a finite number >= 0, got {number}")
    return number


def _bins(shares: Any) -> tuple[float, ...]:
    try:
        bins = tuple(_number("a share of a reuse histogram", share) for share in shares)
    except TypeError as error:
        raise StatisticsError(f"a reuse histogram is a list of shares, got {brief(shares)}") from error
    if len(bins) != NUM_REUSE_BINS:
        raise StatisticsError(f"a reuse histogram has {NUM_REUSE_BINS} bins, got {len(bins)}")
    return bins


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
