# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Workload statistics per feature, taken from batches or kept in a file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from dreamshard_planner.ambient import neutral
from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.files import brief, read_json, write_whole
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, histogram_of_counts
from dreamshard_planner.workload.sketch import IdSketch, merge
from dreamshard_planner.workload.tables import FeatureStatistics

if TYPE_CHECKING:
    from torchrec.datasets.utils import Batch
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SCHEMA = "dreamshard_planner.statistics/1"


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
        cls, batches: Iterable[KeyedJaggedTensor | Batch] | KeyedJaggedTensor | Batch, keys: Sequence[str] | None = None
    ) -> TableStatistics:
        """Statistics over batches, each of about the local batch size.

        Pooling factors are lookups over samples, distinct rows are averaged over batches, and so are histograms,
        weighted by these. Features whose ids are hashes (negative, or 2^53 and more) have no sketch of ids.

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
        given, wanted = None, keys
        lookups: dict[str, int] = {}
        samples: dict[str, int] = {}
        counts: dict[str, torch.Tensor] = {}
        sketches: dict[str, list[tuple[IdSketch | None, int, float]]] = {}
        num_batches = 0
        for element in _elements(batches):
            # Not around the loop: the batches are made in the caller's state, random numbers and all.
            with neutral():
                batch = _sparse_features(element, num_batches)
                if given is None:
                    given = set(batch.keys())
                    keys = list(batch.keys()) if wanted is None else list(wanted)
                    missing = [key for key in keys if key not in given]
                    if missing:
                        raise StatisticsError(f"the batches lack {missing}; their keys are {sorted(given)}")
                    lookups, samples = dict.fromkeys(keys, 0), dict.fromkeys(keys, 0)
                    counts = {key: torch.zeros(NUM_REUSE_BINS, dtype=torch.float64) for key in keys}
                    sketches = {key: [] for key in keys}
                elif set(batch.keys()) != given:
                    changed = sorted(set(batch.keys()) ^ given)
                    raise StatisticsError(f"batch {num_batches} has other keys than the first one: {changed}")
                for key in keys:
                    jagged = batch[key]
                    id_R, count_R = torch.unique(jagged.values().cpu(), return_counts=True)
                    histogram, distinct = histogram_of_counts(count_R)
                    if len(id_R):
                        sketches[key].append((IdSketch.of_counts(id_R, count_R), jagged.values().numel(), distinct))
                    lookups[key] += jagged.values().numel()
                    samples[key] += jagged.lengths().numel()
                    counts[key] += histogram * distinct
            num_batches += 1
        if given is None:
            raise StatisticsError("no batches: cannot take statistics of nothing")
        features = {}
        for key in keys:
            if samples[key] == 0:
                raise StatisticsError(f"feature {key!r}: all batches are without samples")
            with neutral():
                distinct = float(counts[key].sum())
                shares = tuple((counts[key] / distinct).tolist()) if lookups[key] else None
            features[key] = FeatureStatistics(
                pooling_factor=lookups[key] / samples[key],
                reuse_histogram=shares,
                batch_size=max(1, round(samples[key] / num_batches)),
                distinct_rows=distinct / num_batches if lookups[key] else None,
                ids=_merged(sketches[key]),
            )
        return cls(features)

    def check_features(self, known: Iterable[str]) -> None:
        """Raise StatisticsError naming every feature that is not among ``known``, with close matches."""
        known = list(dict.fromkeys(known))
        unknown = [name for name in self if name not in set(known)]
        if not unknown:
            return
        hints = {name: difflib.get_close_matches(name, known, n=1) for name in unknown[:10]}
        named = [f"{name!r} (did you mean {match[0]!r}?)" if match else repr(name) for name, match in hints.items()]
        rest = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise StatisticsError(f"statistics for features that no table of the model serves: {', '.join(named)}{rest}")

    def to_json(self, path: str | Path) -> None:
        """Write a file that :meth:`from_json` reads back without loss; FileError says why not."""
        features = {
            name: {
                "pooling_factor": feature.pooling_factor,
                "reuse_histogram": feature.reuse_histogram,
                "batch_size": feature.batch_size,
                "distinct_rows": feature.distinct_rows,
                "ids": None if feature.ids is None else asdict(feature.ids),
            }
            for name, feature in self.items()
        }
        write_whole(path, json.dumps({"schema": SCHEMA, "features": features}, indent=1))

    @classmethod
    def from_json(cls, path: str | Path) -> TableStatistics:
        """Read a file; StatisticsError names the file, the feature and the reason."""
        document = read_json(path, StatisticsError)
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise StatisticsError(f"{path}: not a statistics file of schema {SCHEMA!r}")
        entries = document.get("features")
        if not isinstance(entries, dict):
            raise StatisticsError(f"{path}: 'features' must map feature names to statistics")
        features = {}
        for name, entry in entries.items():
            if not isinstance(entry, dict) or not entry.keys() >= {"pooling_factor", "reuse_histogram", "batch_size"}:
                raise StatisticsError(
                    f"{path}: feature {brief(name)} needs pooling_factor, reuse_histogram and batch_size, "
                    f"got {brief(entry)}"
                )
            if type(entry["batch_size"]) is not int:
                raise StatisticsError(
                    f"{path}: feature {brief(name)}: batch_size must be whole, got {brief(entry['batch_size'])}"
                )
            try:
                features[name] = FeatureStatistics(
                    pooling_factor=entry["pooling_factor"],
                    reuse_histogram=entry["reuse_histogram"],
                    batch_size=entry["batch_size"],
                    distinct_rows=entry.get("distinct_rows"),
                    ids=entry.get("ids"),
                )
            except (TypeError, ValueError) as error:
                raise StatisticsError(f"{path}: feature {brief(name)}: {brief(error)}") from error
        return cls(features)


@neutral()
def _merged(sketches: Sequence[tuple[IdSketch | None, int, float]]) -> IdSketch | None:
    """Of all batches, from each one's sketch, lookups and distinct rows."""
    if not sketches or any(sketch is None for sketch, _, _ in sketches):
        return None
    return merge(*zip(*sketches, strict=True))


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
            f"batch {position} must be a KeyedJaggedTensor or hold one in sparse_features, got {type(element).__name__}"
        )
    if batch.values().is_meta or isinstance(batch.values(), FakeTensor):
        raise StatisticsError(
            f"batch {position}, of features {batch.keys()}, has no data: its values are a meta or fake tensor"
        )
    return batch
