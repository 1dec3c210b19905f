# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Workload statistics per feature, taken from data or kept in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.support.documents import STRICT, parsed
from dreamshard_planner.support.files import read_json, write_whole
from dreamshard_planner.support.formatting import some_of
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.counting import BatchCounts, merge_features
from dreamshard_planner.workload.id_histogram import IdHistogram
from dreamshard_planner.workload.tables import FeatureStatistics

if TYPE_CHECKING:
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SCHEMA = "dreamshard_planner.statistics/1"
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
    """Changes between two statistics."""

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


class TableStatistics(Mapping[str, FeatureStatistics]):
    """How each feature reads its table: pooling factor, reuse histogram, and the batch size of both.

    Args:
        features: by feature name.

    Raises:
        StatisticsError: for values that cannot be (see :class:`FeatureStatistics`).
    """

    def __init__(self, features: Mapping[str, FeatureStatistics]) -> None:
        if not isinstance(features, Mapping):
            raise StatisticsError(f"expected a mapping of feature names to statistics, got {type(features).__name__}")
        for name, value in features.items():
            if not isinstance(name, str):
                raise StatisticsError(f"features are named by strings, got {name!r}")
            if not isinstance(value, FeatureStatistics):
                raise StatisticsError(f"feature {name!r}: expected FeatureStatistics, got {type(value).__name__}")
        self._features = dict(features)

    def __getitem__(self, name: str) -> FeatureStatistics:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __repr__(self) -> str:
        return f"TableStatistics({len(self)} features)"

    @classmethod
    def from_batches(
        cls,
        batches: Iterable[KeyedJaggedTensor | Batch] | KeyedJaggedTensor | Batch,
        keys: Sequence[str] | None = None,
    ) -> TableStatistics:
        """Statistics over batches, each of about the local batch size.

        Pooling factors are lookups over samples, distinct rows are averaged over batches, and so are histograms,
        weighted by these. Features whose ids are hashes (negative, or 2^53 and more) have no histogram of ids. Memory
        does not grow with the number of batches.

        Args:
            batches: ``torchrec.sparse.jagged_tensor.KeyedJaggedTensor``, or what holds one in ``sparse_features`` as
                ``torchrec.datasets.utils.Batch`` does; all with the same keys. A single one counts as one batch.
            keys: features to look at; the others belong to modules that are not planned. Default: all.

        Raises:
            StatisticsError: where there is no batch, the keys differ between batches, ``keys`` has others, or a batch
                is something else or has no data (meta and fake tensors).
        """
        if isinstance(keys, str):
            raise StatisticsError(f"keys must be a list of feature names, got the string {keys!r}")
        counts = BatchCounts(keys)
        for position, element in enumerate(_elements(batches)):
            with neutral():  # not around the loop: batches are made in the caller's state, random numbers and all
                counts.add(_sparse_features(element, position))
        return cls(counts.statistics())

    @classmethod
    def from_parquet(
        cls,
        paths: str | Path | Sequence[str | Path],
        batch_size: int,
        features: Sequence[str] | Mapping[str, str] | None = None,
        max_batches: int | None = None,
        progress: bool = False,
    ) -> TableStatistics:
        """Statistics of parquet files, of which one batch is in memory at a time; needs pyarrow
        (``pip install dreamshard_planner[parquet]``).

        Args:
            paths: files, or folders of ``.parquet`` files; taken in this order as one.
            batch_size: samples (rows of a file) of a local batch. What fills none at the end is left out, unless it is
                all there is.
            features: columns to count, or columns by feature name where these differ: lists of whole numbers, or whole
                numbers for one lookup per sample. Default: all that are lists of whole numbers.
            max_batches: stop after so many.
            progress: a bar on stderr.

        Raises:
            StatisticsError: names the file, or the column, that can't be read as such.
        """
        from dreamshard_planner.workload.parquet import count_parquet

        return cls(count_parquet(paths, batch_size, features, max_batches, progress))

    @classmethod
    def merge(cls, statistics: Iterable[TableStatistics]) -> TableStatistics:
        """One of several, of other days or other ranks. Each feature is averaged over those that have it, by the
        batches that each has counted.

        Raises:
            StatisticsError: where batch sizes differ by more than a quarter, since reuse belongs to one.
        """
        parts: dict[str, list[FeatureStatistics]] = {}
        for one in statistics:
            for name, feature in one.items():
                parts.setdefault(name, []).append(feature)
        return cls({name: merge_features(name, features) for name, features in parts.items()})

    def all_gather(self, group: dist.ProcessGroup | None = None) -> TableStatistics:
        """The statistics of all ranks merged, the same on each; a collective call. Ranks without data give
        ``TableStatistics({})``.

        Args:
            group: default: all ranks.

        Raises:
            StatisticsError: on every rank, where they do not merge.
        """
        gathered: list[Any] = [None] * dist.get_world_size(group)
        with neutral():
            dist.all_gather_object(gathered, self, group=group)
        return TableStatistics.merge(gathered)

    def diff(self, after: TableStatistics) -> Drift:
        """Return what changed since these statistics were taken, feature by feature."""
        both = [_drift(name, known, after[name]) for name, known in self.items() if name in after]
        return Drift(
            features=tuple(sorted(both, key=lambda feature: -feature.largest)),
            only_before=tuple(name for name in self if name not in after),
            only_after=tuple(name for name in after if name not in self),
        )

    def unused(self, known: Iterable[str]) -> str | None:
        """Features that are not among ``known``, in words with close matches; None where there are none.

        Raises:
            StatisticsError: none is; statistics of one file may serve several models, but not no model.
        """
        known = list(dict.fromkeys(known))
        unknown = [name for name in self if name not in set(known)]
        if not unknown:
            return None
        text = f"statistics for features that no table of the model serves: {some_of(unknown, known)}"
        if len(unknown) == len(self):
            raise StatisticsError(text)
        return text

    def to_json(self, path: str | Path) -> None:
        """Write a file that :meth:`from_json` reads back without loss; FileError says why not."""
        features = {name: asdict(feature) for name, feature in self.items()}
        write_whole(path, json.dumps({"schema": SCHEMA, "features": features}, indent=1))

    @classmethod
    def from_json(cls, path: str | Path) -> TableStatistics:
        """Read a file; StatisticsError names the file, the feature and the reason."""
        document = read_json(path, StatisticsError)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise StatisticsError(f"{path}: not a statistics file of schema {SCHEMA!r}")
        return cls(parsed(_Document, document, path, StatisticsError).features)


@dataclass
class _Document:
    """Of a file."""

    __pydantic_config__: ClassVar = STRICT
    features: dict[str, FeatureStatistics]


def _elements(batches: Any) -> Iterable[Any]:
    """The batches, of which a single one is one; it can be indexed by feature, and would iterate as nonsense."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if isinstance(batches, KeyedJaggedTensor) or hasattr(batches, "sparse_features"):
        return [batches]
    if isinstance(batches, (str, Mapping)) or not isinstance(batches, Iterable):
        raise StatisticsError(f"batches must be an iterable of KeyedJaggedTensor, got {type(batches).__name__}")
    return batches


def _sparse_features(element: Any, position: int) -> KeyedJaggedTensor:
    """The sparse features of one batch."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    batch = getattr(element, "sparse_features", element)
    if not isinstance(batch, KeyedJaggedTensor):
        raise StatisticsError(
            f"batch {position} must be a KeyedJaggedTensor or hold one in sparse_features, got "
            f"{type(element).__name__}: give what holds one, such as (features for features, label in batches)"
        )
    if batch.values().is_meta or isinstance(batch.values(), FakeTensor):
        raise StatisticsError(
            f"batch {position}, of features {batch.keys()}, has no data: its values are a meta or fake tensor"
        )
    return batch


def _drift(name: str, before: FeatureStatistics, after: FeatureStatistics) -> FeatureDrift:
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
