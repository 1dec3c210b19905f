# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Count how features read their tables, batch by batch, in memory that does not grow with the batches.

Shapes: N lookups, B samples, K = 17 reuse bins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.id_histogram import IdHistogram, merge
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, histogram_of_counts, mean_reuse
from dreamshard_planner.workload.tables import FeatureStatistics

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

EVERY = 100
"""Counting a batch takes a fifth to half of a CPU's step on it (20 ms for 110,000 lookups): 0.5 % of them all."""
SAME_BATCH = 1.25
"""How far batch sizes may be apart, as a ratio, for statistics to be merged."""


class FeatureCounts:
    """Running sums of one feature."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._batches, self._samples, self._lookups = 0, 0, 0
        self._weighted = False
        self._count_K = torch.zeros(NUM_REUSE_BINS, dtype=torch.float64)
        self._ids: IdHistogram | None = None
        self._ids_are_rows = True

    def add(self, id_N: Tensor, samples: int, weighted: bool = False) -> None:
        """Count one batch: its samples, all ids that they look up, and whether it carries weights of these lookups. A
        batch without samples is passed over."""
        if not samples:
            return
        self._weighted = self._weighted or weighted
        self._batches += 1
        self._samples += samples
        if not len(id_N):
            return
        if id_N.is_floating_point():
            raise StatisticsError(f"feature {self.name!r}: ids must be whole numbers, got {id_N.dtype}")
        id_R, count_R = torch.unique(id_N.long().cpu(), return_counts=True)
        histogram_K, distinct = histogram_of_counts(count_R)
        ids = IdHistogram.of_counts(id_R, count_R)
        self._ids_are_rows = self._ids_are_rows and ids is not None
        if ids is not None and self._ids is not None:
            weights = (self._lookups, len(id_N)), (float(self._count_K.sum()), distinct)
            ids = merge([self._ids, ids], *weights)
        self._ids = ids
        self._lookups += len(id_N)
        self._count_K += histogram_K * distinct

    @property
    def has_samples(self) -> bool:
        """Whether any batch so far has one."""
        return self._samples > 0

    def statistics(self) -> FeatureStatistics:
        """Of all batches so far; StatisticsError where they have no sample."""
        if not self.has_samples:
            raise StatisticsError(f"feature {self.name!r}: all batches are without samples")
        distinct = float(self._count_K.sum())
        pooling_factor, batch_size = self._lookups / self._samples, max(1, round(self._samples / self._batches))
        return FeatureStatistics(
            pooling_factor=pooling_factor,
            reuse_histogram=tuple((self._count_K / distinct).tolist()) if self._lookups else None,
            batch_size=batch_size,
            # Of batches of several sizes, whose mean was rounded down, they may be more than its lookups.
            distinct_rows=min(distinct / self._batches, pooling_factor * batch_size) if self._lookups else None,
            ids=self._ids if self._ids_are_rows else None,
            batches=self._batches,
            weighted=self._weighted,
        )


class BatchCounts:
    """Running sums of the features of batches.

    Args:
        keys: features to look at; None for all of the first batch.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self._keys = keys
        self._given: set[str] | None = None
        self._features: dict[str, FeatureCounts] = {}
        self.batches = 0

    @neutral()
    def add(self, batch: KeyedJaggedTensor) -> None:
        """One batch; StatisticsError where it has other keys than the first one."""
        if self._given is None:
            self._given = set(batch.keys())
            wanted = list(batch.keys()) if self._keys is None else list(self._keys)
            if missing := [key for key in wanted if key not in self._given]:
                raise StatisticsError(f"the batches lack {missing}; their keys are {sorted(self._given)}")
            self._features = {key: FeatureCounts(key) for key in wanted}
        elif set(batch.keys()) != self._given:
            changed = sorted(set(batch.keys()) ^ self._given)
            raise StatisticsError(
                f"batch {self.batches} has other keys than the first one: {changed}; count batches of several modules "
                "apart, and put them together with TableStatistics.merge"
            )
        for key, count in self._features.items():
            jagged = batch[key]
            count.add(jagged.values(), jagged.lengths().numel(), jagged.weights_or_none() is not None)
        self.batches += 1

    @neutral()
    def statistics(self, with_samples: bool = False) -> dict[str, FeatureStatistics]:
        """Of all batches so far; StatisticsError where there are none, or where a feature has no sample in them.

        Args:
            with_samples: of the features alone that have one.
        """
        if not self.batches:
            raise StatisticsError("no batches: cannot take statistics of nothing")
        wanted = {key: count for key, count in self._features.items() if count.has_samples or not with_samples}
        return {key: count.statistics() for key, count in wanted.items()}


class BatchSampler:
    """Counts every n-th batch of one rank, in memory that does not grow with the batches, without any collective.
    Batches on a CUDA device are copied beside what runs there, and counted once the copy has come.

    Args:
        every: batches from one that is counted to the next; the first one is.

    Raises:
        StatisticsError: ``every`` is no whole number from 1.
    """

    def __init__(self, every: int = EVERY) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise StatisticsError(f"every must be a whole number of batches from 1, got {every!r}")
        self.every, self.seen = every, 0
        self._counts = BatchCounts()
        self._coming: deque[tuple[KeyedJaggedTensor, torch.cuda.Event]] = deque()

    @property
    def counted(self) -> int:
        """Batches counted, without copies on their way."""
        return self._counts.batches

    def add(self, batch: KeyedJaggedTensor) -> None:
        """Count one batch of this rank if it is its turn, on the stream that may read it.

        Raises:
            StatisticsError: it has other keys than the batches before.
        """
        self.seen += 1
        if self._coming and self._coming[0][1].query():
            self._counts.add(self._coming.popleft()[0])
        if (self.seen - 1) % self.every or self._coming:  # the memory of one copy bounds that of all
            return
        if not batch.values().is_cuda:
            self._counts.add(batch)
            return
        copy, done = _on_host(batch), torch.cuda.Event()
        done.record()
        self._coming.append((copy, done))

    def statistics(self) -> dict[str, FeatureStatistics]:
        """Return statistics of the batches counted so far, by feature; waits for copies on their way. Features that
        have no sample in them, as on a rank without data, are left out.

        Raises:
            StatisticsError: there was no batch.
        """
        while self._coming:
            copy, done = self._coming.popleft()
            done.synchronize()
            self._counts.add(copy)
        return self._counts.statistics(with_samples=True)


def _on_host(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A copy in pinned memory, which is there once the stream has come so far; reads nothing of it."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    strides = batch.stride_per_key_per_rank() if batch.variable_stride_per_key() else None
    values, lengths = (tensor.to("cpu", non_blocking=True) for tensor in (batch.values(), batch.lengths()))
    return KeyedJaggedTensor(batch.keys(), values, lengths=lengths, stride_per_key_per_rank=strides)


def in_smaller_batches(features: Mapping[str, FeatureStatistics]) -> list[str]:
    """Those that were counted in clearly smaller batches than others of them, as where batches vary by feature."""
    # A size of 1 is also that of pooling factors that nobody gave one with.
    sizes = {name: one.samples for name, one in features.items() if one.samples > 1 or one.reuse_histogram is not None}
    largest = max(sizes.values(), default=0)
    return [name for name, size in sizes.items() if largest > SAME_BATCH * size]


@neutral()
def merge_features(name: str, parts: Sequence[FeatureStatistics]) -> FeatureStatistics:
    """One feature's statistics of several sources, each counting by its batches.

    Raises:
        StatisticsError: where their batch sizes differ: reuse belongs to one.
    """
    sizes = sorted({part.samples for part in parts})
    if sizes[-1] > SAME_BATCH * sizes[0]:
        raise StatisticsError(
            f"feature {name!r}: statistics of batches of {sizes[0]:,} and of {sizes[-1]:,} samples do not merge, since "
            "reuse belongs to a batch size; take all with the same"
        )
    if len(parts) == 1:
        return parts[0]
    samples = [part.batches * part.samples for part in parts]
    lookups = [part.pooling_factor * count for part, count in zip(parts, samples, strict=True)]
    counted = [
        (part.reuse_histogram, part.batches * _distinct(part))
        for part, read in zip(parts, lookups, strict=True)
        if part.reuse_histogram is not None and read > 0
    ]
    histogram = distinct = None
    if counted:
        total = sum(rows for _, rows in counted)
        histogram = tuple(sum(bins[k] * rows for bins, rows in counted) / total for k in range(NUM_REUSE_BINS))
        # Batches without a lookup have no distinct row; those that nothing is known of are like the others.
        known = sum(part.batches for part, read in zip(parts, lookups, strict=True) if part.reuse_histogram or not read)
        distinct = total / known
    placed = [
        (part.ids, read, part.batches * _distinct(part)) for part, read in zip(parts, lookups, strict=True) if read
    ]
    known_ids = [ids for ids, *_ in placed if ids is not None]
    ids = None
    if placed and len(known_ids) == len(placed):
        ids = merge(known_ids, [read for _, read, _ in placed], [rows for *_, rows in placed])
    batches = sum(part.batches for part in parts)
    pooling_factor, batch_size = sum(lookups) / sum(samples), max(1, round(sum(samples) / batches))
    if distinct is not None:
        distinct = min(distinct, pooling_factor * batch_size)
    weighted = any(part.weighted for part in parts)
    return FeatureStatistics(pooling_factor, histogram, batch_size, distinct, ids, batches, weighted)


def _distinct(part: FeatureStatistics) -> float:
    """Distinct rows of one batch."""
    lookups = part.lookups
    if part.distinct_rows is not None:
        return part.distinct_rows
    if part.reuse_histogram is None or not lookups:
        return lookups
    return lookups / float(mean_reuse(torch.tensor([part.reuse_histogram])).clamp_min(1.0))
