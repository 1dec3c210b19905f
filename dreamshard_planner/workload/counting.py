# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Count how features read their tables, in memory that does not grow with the number of batches.

Shapes: N lookups, K = 17 reuse bins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.support.formatting import checked
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.workload.lookups import FeatureStatistics, HotIds, IdHistogram, merge
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, histogram_of_counts

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

EVERY = 100
"""Batches per counted batch. Counting takes a fifth to half of a CPU's step (20 ms for 110,000 lookups)."""
SAME_BATCH = 1.25
"""Largest ratio of batch sizes whose statistics may be merged."""
LEAST_READS = 0.5
"""Reads per batch of an id that is kept. A replica of a row pays if a rank's batch reads the row about once."""
MOST_IDS = 2**16
"""Most ids kept of a feature; a running count holds twice as many."""


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


class FeatureCounts:
    """Sums over the batches of one feature. Reuse, ids and hot ids are known if they are known of all lookups."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = self.largest = self.batches = 0
        self._lookups = self._distinct = 0.0
        self._count_K: Tensor | None = torch.zeros(NUM_REUSE_BINS, dtype=torch.float64)
        self._ids: IdHistogram | None = None
        self._hot: HotCounts | None = HotCounts()
        self._weighted = False

    def add(self, id_N: Tensor, samples: int, weighted: bool = False) -> None:
        """Count one batch by all ids that its samples look up; skip a batch without samples."""
        if not samples:
            return
        if len(id_N) and id_N.is_floating_point():
            raise StatisticsError(f"feature {self.name!r}: ids must be whole numbers, got {id_N.dtype}")
        self.largest = max(self.largest, samples)
        id_R, count_R = torch.unique(id_N.long().cpu(), return_counts=True)
        histogram_K, distinct = histogram_of_counts(count_R)
        reuse = tuple(histogram_K.tolist()), samples, distinct
        ids = IdHistogram.of_counts(id_R, count_R)
        self.add_statistics(FeatureStatistics(len(id_N) / samples, *reuse, ids, weighted=weighted), (id_R, count_R))

    def add_statistics(self, part: FeatureStatistics, hot: tuple[Tensor, Tensor] | None) -> None:
        """Count all batches that some statistics were taken from, with ids and their reads per batch."""
        lookups, distinct = part.batches * part.lookups, part.batches * part.rows_read
        self.batches += part.batches
        self.samples += part.batches * part.samples
        self._weighted = self._weighted or part.weighted
        if not lookups:
            return
        if not self._lookups:
            self._ids = part.ids
        elif self._ids is not None and part.ids is not None:
            self._ids = merge([self._ids, part.ids], [self._lookups, lookups], [self._distinct, distinct])
        else:
            self._ids = None
        self._lookups += lookups
        self._distinct += distinct
        if part.reuse_histogram is None:
            self._count_K = None
        elif self._count_K is not None:
            self._count_K += torch.tensor(part.reuse_histogram, dtype=torch.float64) * distinct
        if hot is None:
            self._hot = None
        elif self._hot is not None:
            self._hot.add(hot[0], hot[1] * part.batches)

    def statistics(self) -> FeatureStatistics:
        """Return the statistics of all batches so far; StatisticsError if none has a sample."""
        if not self.samples:
            raise StatisticsError(f"feature {self.name!r}: all batches are without samples")
        pooling_factor, batch_size = self._lookups / self.samples, max(1, round(self.samples / self.batches))
        histogram = distinct = None
        if self._lookups and self._count_K is not None:
            histogram = tuple((self._count_K / self._distinct).tolist())
            # The mean batch size is rounded: distinct rows must not exceed its lookups.
            distinct = min(self._distinct / self.batches, pooling_factor * batch_size)
        hot = None if self._hot is None or self._ids is None else self._hot.statistics(self.batches)
        return FeatureStatistics(
            pooling_factor, histogram, batch_size, distinct, self._ids, self.batches, self._weighted, hot
        )


class BatchCounts:
    """Sums over batches, by feature.

    Args:
        keys: features to count; None for all of the first batch.
    """

    def __init__(self, keys: Sequence[str] | None = None) -> None:
        self._keys = keys
        self._given: set[str] = set()
        self._features: dict[str, FeatureCounts] = {}
        self.batches = 0

    @neutral()
    def add(self, batch: KeyedJaggedTensor) -> None:
        """Count one batch; StatisticsError if its keys differ from the first one's."""
        if not self.batches:
            self._given = set(batch.keys())
            wanted = list(batch.keys()) if self._keys is None else list(self._keys)
            if missing := [key for key in wanted if key not in self._given]:
                raise StatisticsError(f"the batches lack {missing}; their keys are {sorted(self._given)}")
            self._features = {key: FeatureCounts(key) for key in wanted}
        elif changed := sorted(set(batch.keys()) ^ self._given):
            raise StatisticsError(
                f"batch {self.batches} has other keys than the first one: {changed}; count batches of several modules "
                "apart, and put them together with TableStatistics.merge"
            )
        for key, count in self._features.items():
            jagged = batch[key]
            count.add(jagged.values(), jagged.lengths().numel(), jagged.weights_or_none() is not None)
        self.batches += 1

    @property
    def uneven(self) -> list[str]:
        """Features whose batches are much smaller in the mean than the largest, so that their reuse is of no size."""
        return [
            key for key, count in self._features.items() if count.largest * count.batches > SAME_BATCH * count.samples
        ]

    @neutral()
    def statistics(self, with_samples: bool = False) -> dict[str, FeatureStatistics]:
        """Return the statistics of all batches so far; StatisticsError if there are none, or none with samples.

        Args:
            with_samples: leave out features without samples.
        """
        if not self.batches:
            raise StatisticsError("no batches: cannot take statistics of nothing")
        return {key: count.statistics() for key, count in self._features.items() if count.samples or not with_samples}


class BatchSampler:
    """A counter of every n-th batch of one rank, without collectives.

    A batch on a CUDA device is copied to the host asynchronously and counted once the copy is complete. Batches that
    come while a copy is under way are skipped.

    Args:
        every: counts the first batch of each group of so many.

    Raises:
        StatisticsError: ``every`` is no whole number from 1.
    """

    def __init__(self, every: int = EVERY) -> None:
        self.every, self.seen = checked("every", every, error=StatisticsError), 0
        self._counts = BatchCounts()
        self._copy: tuple[KeyedJaggedTensor, torch.cuda.Event] | None = None

    def add(self, batch: KeyedJaggedTensor) -> None:
        """Count one batch if it is its turn, on the stream that may read it; StatisticsError if its keys differ."""
        self.seen += 1
        if self._copy is not None and self._copy[1].query():
            self._count_copy()
        if (self.seen - 1) % self.every or self._copy is not None:
            return
        if not batch.values().is_cuda:
            self._counts.add(batch)
            return
        copy, done = batch.to(torch.device("cpu"), non_blocking=True), torch.cuda.Event()
        done.record()
        self._copy = copy, done

    def _count_copy(self) -> None:
        if self._copy is not None:
            copy, done = self._copy
            done.synchronize()
            self._copy = None
            self._counts.add(copy)

    def statistics(self) -> dict[str, FeatureStatistics]:
        """Return statistics by feature, without features that have no sample; waits for a copy under way.

        Raises:
            StatisticsError: there was no batch.
        """
        self._count_copy()
        return self._counts.statistics(with_samples=True)


def in_smaller_batches(features: Mapping[str, FeatureStatistics]) -> list[str]:
    """Return features counted in batches smaller than the largest by more than :data:`SAME_BATCH`."""
    # Statistics that are a pooling factor alone have batch size 1, which says nothing.
    sizes = {name: one.samples for name, one in features.items() if one.samples > 1 or one.reuse_histogram is not None}
    largest = max(sizes.values(), default=0)
    return [name for name, size in sizes.items() if largest > SAME_BATCH * size]


def by_feature(statistics: Iterable[Mapping[str, FeatureStatistics]]) -> dict[str, list[FeatureStatistics]]:
    """Return the statistics of each feature from several sources."""
    parts: dict[str, list[FeatureStatistics]] = {}
    for one in statistics:
        for name, feature in one.items():
            parts.setdefault(name, []).append(feature)
    return parts


def of_like_batches(parts: Sequence[FeatureStatistics]) -> list[FeatureStatistics]:
    """Return the largest group of one feature's statistics that :func:`merge_features` merges; of equal groups, the one
    with the largest batches."""
    sizes = Counter(part.samples for part in parts)
    least = max(
        sorted(sizes, reverse=True),
        key=lambda size: sum(count for other, count in sizes.items() if size <= other <= SAME_BATCH * size),
    )
    return [part for part in parts if least <= part.samples <= SAME_BATCH * least]


def same_batch(samples: int, others: int) -> bool:
    """Return whether statistics and times of batches of these sizes compare, see :data:`SAME_BATCH`."""
    return max(samples, others) <= SAME_BATCH * min(samples, others)


@neutral()
def merge_features(name: str, parts: Sequence[FeatureStatistics]) -> FeatureStatistics:
    """Return one feature's statistics over several sources, weighted by their batches.

    Raises:
        StatisticsError: batch sizes differ by more than :data:`SAME_BATCH`.
    """
    sizes = sorted({part.samples for part in parts})
    if not same_batch(sizes[0], sizes[-1]):
        raise StatisticsError(
            f"feature {name!r}: statistics of batches of {sizes[0]:,} and of {sizes[-1]:,} samples do not merge, since "
            "reuse belongs to a batch size; take all with the same"
        )
    if len(parts) == 1:
        return parts[0]
    counts = FeatureCounts(name)
    for part in parts:
        counts.add_statistics(part, part.hot.tensors() if part.hot else None)
    return counts.statistics()
