# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics of how features read their tables: from data, merged, compared, in files."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from dreamshard_planner.errors import InputWarning, StatisticsError
from dreamshard_planner.support.documents import STRICT, document_of, parsed
from dreamshard_planner.support.files import read_json, write_whole
from dreamshard_planner.support.formatting import first_of, some_of
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.workload.counting import BatchCounts, by_feature, merge_features
from dreamshard_planner.workload.lookups import FeatureStatistics

if TYPE_CHECKING:
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SCHEMA = "dreamshard_planner.statistics/1"
DRIFTED = 0.1
"""Change above which a feature drifted."""


@dataclass(frozen=True)
class FeatureDrift:
    """Changes of one feature, from 0 (none) up; None if unknown."""

    name: str
    pooling_before: float
    pooling_after: float
    pooling_change: float
    """Ratio of the larger to the smaller pooling factor, less 1: 0.25 from 4 to 5 and from 5 to 4."""
    reuse_change: float | None
    """Share of the distinct rows that change their bin, 0 to 1; None unless both have a histogram at one batch size."""
    ids_change: float | None
    """Kolmogorov-Smirnov distance of the lookups over the range of ids, 0 to 1."""

    @classmethod
    def of(cls, name: str, before: FeatureStatistics, after: FeatureStatistics) -> FeatureDrift:
        """Compare two statistics of one feature."""
        low, high = sorted((before.pooling_factor, after.pooling_factor))
        reuse = ids = None
        if before.reuse_histogram and after.reuse_histogram and before.batch_size == after.batch_size:
            pairs = zip(before.reuse_histogram, after.reuse_histogram, strict=True)
            reuse = sum(abs(one - other) for one, other in pairs) / 2
        if before.ids and after.ids:
            # Shares are linear between the ends of parts.
            ends = {end for one in (before.ids, after.ids) for end in (*range(0, one.end, one.width), one.end)}
            ids = max(abs(before.ids.shares(0, end)[0] - after.ids.shares(0, end)[0]) for end in ends)
        pooling = 0.0 if low == high else math.inf if low == 0 else high / low - 1
        return cls(name, before.pooling_factor, after.pooling_factor, pooling, reuse, ids)

    @property
    def largest(self) -> float:
        """Largest of the changes."""
        return max(self.pooling_change, self.reuse_change or 0.0, self.ids_change or 0.0)


@dataclass(frozen=True)
class Drift:
    """Changes between two statistics."""

    features: tuple[FeatureDrift, ...]
    """Features of both, most drifted first."""
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def drifted(self) -> tuple[FeatureDrift, ...]:
        """Features with a change above :data:`DRIFTED`."""
        return tuple(feature for feature in self.features if feature.largest > DRIFTED)

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "drifted": [feature.name for feature in self.drifted]}

    def __str__(self) -> str:
        lines = [f"{len(self.drifted)} of {len(self.features)} features drifted (some change above {DRIFTED:.0%})."]
        lines += [f"Only before: {', '.join(self.only_before)}."] if self.only_before else []
        lines += [f"Only after: {', '.join(self.only_after)}."] if self.only_after else []
        for feature in self.drifted:
            changes = [("reuse", feature.reuse_change), ("ids", feature.ids_change)]
            lines.append(
                f"{feature.name}: {feature.pooling_before:.3g} -> {feature.pooling_after:.3g} lookups per sample"
                + "".join(f", {kind} {change:.0%}" for kind, change in changes if change is not None)
            )
        return "\n".join(lines)


class TableStatistics(dict[str, FeatureStatistics]):
    """Pooling factor, reuse and ids of each feature, by feature name.

    Args:
        features: by feature name.

    Raises:
        StatisticsError: a name is no string, or a value no :class:`FeatureStatistics`.
    """

    def __init__(self, features: Mapping[str, FeatureStatistics]) -> None:
        if not isinstance(features, Mapping):
            raise StatisticsError(f"expected a mapping of feature names to statistics, got {type(features).__name__}")
        for name, value in features.items():
            if not isinstance(name, str):
                raise StatisticsError(f"features are named by strings, got {name!r}")
            if not isinstance(value, FeatureStatistics):
                raise StatisticsError(f"feature {name!r}: expected FeatureStatistics, got {type(value).__name__}")
        super().__init__(features)

    def __repr__(self) -> str:
        return f"TableStatistics({len(self)} features)"

    @classmethod
    def from_batches(
        cls, batches: Iterable[KeyedJaggedTensor | Batch] | KeyedJaggedTensor | Batch, keys: Sequence[str] | None = None
    ) -> TableStatistics:
        """Count batches, each of about the local batch size, in memory that does not grow with their number.

        Pooling factors are lookups over samples. Distinct rows are averaged over batches, and histograms weighted by
        them. Features whose ids are hashes (negative, or 2^53 and more) have no histogram of ids.

        Args:
            batches: ``torchrec.sparse.jagged_tensor.KeyedJaggedTensor``, or objects with one in ``sparse_features``
                such as ``torchrec.datasets.utils.Batch``; all with the same keys. A single one counts as one batch.
            keys: features to count, without those of modules that are not planned. Default: all.

        Warns:
            InputWarning: batches are much smaller in the mean than the largest one.

        Raises:
            StatisticsError: there is no batch, the keys differ between batches, ``keys`` has others, or a batch is
                something else or has no data (meta and fake tensors).
        """
        if isinstance(keys, str):
            raise StatisticsError(f"keys must be a list of feature names, got the string {keys!r}")
        counts = BatchCounts(keys)
        for batch in _sparse_features(batches):
            counts.add(batch)
        if uneven := counts.uneven:
            text = "sizes of the batches differ, and reuse belongs to a size: count batches of about one size for"
            warnings.warn(f"{text} {first_of(uneven)}", InputWarning, stacklevel=2)
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
        """Count parquet files, one batch in memory at a time; needs pyarrow (``dreamshard_planner[parquet]``).

        Args:
            paths: files, or folders of ``.parquet`` files; read in this order as one.
            batch_size: samples (rows of a file) of a local batch. An incomplete batch at the end is left out, unless
                it is the only one.
            features: columns to count, or columns by feature name where these differ. A column holds lists of whole
                numbers, or one whole number per sample. Default: all columns of lists of whole numbers.
            max_batches: stop after so many.
            progress: show a bar on stderr.

        Raises:
            StatisticsError: a file or column cannot be read; names it.
        """
        from dreamshard_planner.workload.parquet import count_parquet

        return cls(count_parquet(paths, batch_size, features, max_batches, progress))

    @classmethod
    def merge(cls, statistics: Iterable[TableStatistics]) -> TableStatistics:
        """Merge statistics of several days or ranks; each feature is averaged over its counted batches.

        Raises:
            StatisticsError: batch sizes differ by more than a quarter, since reuse belongs to a batch size.
        """
        return cls({name: merge_features(name, features) for name, features in by_feature(statistics).items()})

    def all_gather(self, group: dist.ProcessGroup | None = None) -> TableStatistics:
        """Merge the statistics of all ranks, on each of them; a collective call.

        Ranks without data call it on ``TableStatistics({})``.

        Args:
            group: default: all ranks.

        Raises:
            StatisticsError: on every rank, if they do not merge.
        """
        gathered: list[Any] = [None] * dist.get_world_size(group)
        with neutral():
            dist.all_gather_object(gathered, self, group=group)
        return TableStatistics.merge(gathered)

    def diff(self, after: TableStatistics) -> Drift:
        """Compare with later statistics, feature by feature."""
        both = [FeatureDrift.of(name, known, after[name]) for name, known in self.items() if name in after]
        return Drift(
            features=tuple(sorted(both, key=lambda feature: -feature.largest)),
            only_before=tuple(name for name in self if name not in after),
            only_after=tuple(name for name in after if name not in self),
        )

    def unused(self, known: Iterable[str]) -> str | None:
        """Tell which features are not among ``known``, with close matches; None if all are.

        Raises:
            StatisticsError: none is: statistics of one file may serve several models, but must serve this one.
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
        """Write a file that :meth:`from_json` reads back without loss; FileError if it cannot be written."""
        write_whole(path, json.dumps({"schema": SCHEMA, "features": document_of(dict(self))}, indent=1))

    @classmethod
    def from_json(cls, path: str | Path) -> TableStatistics:
        """Read a file; StatisticsError names the file, the feature and the mistake."""
        document = read_json(path, StatisticsError)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise StatisticsError(f"{path}: not a statistics file of schema {SCHEMA!r}")
        return cls(parsed(_Document, document, path, StatisticsError).features)


@dataclass
class _Document:
    __pydantic_config__: ClassVar = STRICT
    features: dict[str, FeatureStatistics]


def _sparse_features(batches: Any) -> Iterator[KeyedJaggedTensor]:
    """Yield the sparse features of each batch; a single batch, which would iterate by feature, is one."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if isinstance(batches, KeyedJaggedTensor) or hasattr(batches, "sparse_features"):
        batches = [batches]
    if isinstance(batches, (str, Mapping)) or not isinstance(batches, Iterable):
        raise StatisticsError(f"batches must be an iterable of KeyedJaggedTensor, got {type(batches).__name__}")
    for position, element in enumerate(batches):
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
        yield batch
