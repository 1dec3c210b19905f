# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables, how features read them, and workloads: the value types of every other layer, and their features.

A :class:`Table` is declared by a model. A :class:`Workload` is one shard's work on one device in one training step.

Shapes: S shards, F features, K = 17 reuse bins; T tables that are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.errors import TaskError
from dreamshard_planner.workload.lookups import FeatureStatistics, IdHistogram, merge
from dreamshard_planner.workload.reuse import (
    NUM_REUSE_BINS,
    cache_hits,
    default_reuse,
    merge_reuse,
    rescale_reuse,
    shift_reuse,
)


class States(NamedTuple):
    """Number of fp32 states that a fused optimizer keeps."""

    per_weight: int
    per_row: int


OPTIMIZERS = {
    "sgd": States(0, 0),
    "rowwise_adagrad": States(0, 1),
    "adagrad": States(1, 0),
    "partial_rowwise_adam": States(1, 1),
    "adam": States(2, 0),
    "other": States(0, 1),
}
"""Fused optimizers that the cost models tell apart; ``other`` is costed like row-wise Adagrad."""
STATE_BYTES = 4
"""Bytes of one optimizer state: fp32 beside weights of any type."""
NO_OPTIMIZER = "none"
_ALIKE = {
    NO_OPTIMIZER: "sgd",
    "emainplace_rowwise_adagrad": "rowwise_adagrad",
    "lars_sgd": "adagrad",
    "ensemble_rowwise_adagrad": "partial_rowwise_adam",
    "partial_rowwise_lamb": "partial_rowwise_adam",
    "lamb": "adam",
}
"""FBGEMM's other optimizers, each with one of as many states."""


def costed_optimizer(name: str) -> str:
    """Return the key of :data:`OPTIMIZERS` for TorchRec's or FBGEMM's name: the same, or one of as many states."""
    known = name.lower().removeprefix("exact_")
    known = _ALIKE.get(known, known)
    return known if known in OPTIMIZERS else "other"


MEMORIES = ("device", "uvm_caching", "uvm", "ssd")
"""Memory of the weights: the device's own, unified memory behind a cache on the device, unified memory alone, or an SSD
of the host (TorchRec's compute kernels ``fused``, ``fused_uvm_caching``, ``fused_uvm``, ``key_value``)."""
INDEX_BYTES = 8
"""Bytes of one id: TorchRec's are int64."""
LENGTH_BYTES = 4
"""Bytes of the number of lookups of one bag: int32."""
LOOKUP_WEIGHT_BYTES = 4
"""Bytes of a lookup's weight: fp32."""
OUTPUT_BYTES = 4
"""Bytes of one output element: TorchRec's kernels put out fp32 by default."""
CACHE_LOAD_FACTOR = 0.2
"""FBGEMM's and TorchRec's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties that a table's shards have as the whole table has them. ``measured=False``: not in datasets."""

    weight_bytes: float = 4
    """Bytes of one weight; a quantized one includes its share of the row's scale and bias."""
    pooled: bool = True
    """True for EmbeddingBag tables, False for sequence (EmbeddingCollection) tables."""
    weighted: bool = False
    """True if lookups carry per-sample weights."""
    optimizer: str = "sgd"
    memory: str = "device"
    output_share: float = field(default=1.0, metadata={"measured": False})
    """Pooled vectors per sample and feature: not 1 if features have own batch sizes or several poolings."""
    cache_load_factor: float = field(default=CACHE_LOAD_FACTOR, metadata={"measured": False})
    """Share of the rows that the device's cache holds, if ``memory`` is ``uvm_caching``."""
    prefetched: bool = field(default=False, metadata={"measured": False})
    """True if the cache is filled during the batch before (TorchRec's prefetch pipeline)."""
    served: bool = field(default=False, metadata={"measured": False})
    """True for a quantized table: it has no backward."""


@dataclass(frozen=True, slots=True)
class Table(Traits):
    """An embedding table, and statistics of its features."""

    name: str
    rows: int
    dim: int
    features: tuple[FeatureStatistics, ...]
    """One entry per feature that the table serves; a shared table has several. Without lookups of hot rows."""
    hot_lookups: float = 0.0
    """Lookups of hot rows per sample, which each rank answers itself."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1:
            raise TaskError(f"table {self.name!r}: rows and dim must be at least 1, got {self.rows} x {self.dim}")
        if not self.features:
            raise TaskError(f"table {self.name!r} serves no feature")
        if self.optimizer not in OPTIMIZERS:
            known = tuple(OPTIMIZERS)
            raise TaskError(f"table {self.name!r}: optimizer must be one of {known}, got {self.optimizer!r}")

    @property
    def pooling_factor(self) -> float:
        """Lookups per sample, summed over the features."""
        return sum(feature.pooling_factor for feature in self.features)


@dataclass(frozen=True, slots=True)
class Workload(Traits):
    """Work of one shard on one device in one training step."""

    name: str
    rows: int
    dim: int
    batch_size: int
    """Samples that the kernel sees: local batch x world size for a table-wise shard."""
    pooling_factor: float
    """Lookups per sample, summed over the features of the shard."""
    distinct_rows: float
    """Distinct rows read by one batch."""
    reuse_histogram: tuple[float, ...] = field(repr=False)
    """Shares of distinct rows at ``batch_size``; all zero without lookups."""
    num_features: int = 1
    ids: IdHistogram | None = field(default=None, repr=False, metadata={"measured": False})
    """Shares over the range of ids of a whole table; None: even. A block of rows has none."""

    def part(self, rows: int, dim: int, first_row: int = 0) -> Workload:
        """Return the workload of a block of rows and columns of this table.

        Columns repeat every lookup. Rows have the share of lookups and distinct rows of their ids, or an even one.
        """
        if (rows, dim) == (self.rows, self.dim):
            return self
        share = rows / self.rows
        if self.ids is not None and rows < self.rows:
            return self.block(rows, dim, *self.ids.shares(first_row, first_row + rows))
        return replace(
            self,
            rows=max(1, rows),
            dim=max(1, dim),
            pooling_factor=self.pooling_factor * share,
            distinct_rows=self.distinct_rows * share,
        )

    def block(self, rows: int, dim: int, lookup_share: float, distinct_share: float) -> Workload:
        """Return a block with these shares; its reuse changes by as much as its lookups per distinct row."""
        lookups = self.lookups * lookup_share
        distinct = max(self.distinct_rows * distinct_share, min(1.0, lookups))
        distinct = min(distinct, lookups, rows * self.num_features)  # a row counts once per feature
        histogram = (0.0,) * NUM_REUSE_BINS
        if distinct > 0:
            ratio = lookups / distinct / (self.lookups / self.distinct_rows)
            histogram = shift_reuse(self.reuse_histogram, ratio)
        return replace(
            self,
            rows=max(1, rows),
            dim=max(1, dim),
            pooling_factor=lookups / self.batch_size,
            distinct_rows=distinct,
            reuse_histogram=histogram,
            ids=None,
        )

    def deduped(self, of_rank: Workload, ranks: int) -> Workload:
        """Return the workload if each rank looks up the distinct rows of its own batch, ``of_rank``, once.

        Rows that several features of a shared table read count once for each.
        """
        if not self.lookups:
            return self
        lookups = min(max(ranks * of_rank.distinct_rows, self.distinct_rows), self.lookups)
        return replace(
            self,
            pooling_factor=lookups / self.batch_size,
            reuse_histogram=shift_reuse(self.reuse_histogram, lookups / self.lookups),
            ids=None if of_rank.ids is None or self.ids is None else replace(self.ids, lookups=of_rank.ids.distinct),
        )

    @property
    def lookups(self) -> float:
        """Lookups of one batch."""
        return self.pooling_factor * self.batch_size

    @property
    def lookup_bytes(self) -> float:
        """Bytes of ids, weights and bag lengths of one batch, as TorchRec sends them to a shard."""
        return lookup_bytes(self.lookups, self.pooled_vectors, self.weighted)

    @property
    def output_elements(self) -> float:
        """Elements that the kernel writes in the forward pass: a vector per bag, or per lookup of a sequence table."""
        return (self.pooled_vectors if self.pooled else self.lookups) * self.dim

    @property
    def pooled_vectors(self) -> float:
        """Bags of one batch, each pooled to a vector."""
        return self.num_features * self.batch_size * self.output_share


def lookup_bytes(lookups: float, bags: float, weighted: bool) -> float:
    """Return bytes of ids, of their weights if any, and of bag lengths."""
    return lookups * (INDEX_BYTES + LOOKUP_WEIGHT_BYTES * weighted) + bags * LENGTH_BYTES


def workloads_of(tables: Sequence[Table], batch_size: int) -> list[Workload]:
    """Return the workloads of whole tables (table-wise shards) whose kernel sees ``batch_size`` samples.

    Histograms of another batch size are rescaled; missing ones are derived from rows and lookups. The features of a
    shared table are merged: lookups add up, and rows count once per feature that reads them, as in the kernel.
    """
    if batch_size < 1:
        raise TaskError(f"batch size must be at least 1, got {batch_size}")
    features = [feature for table in tables for feature in table.features]
    reuse = iter(_reuse_at(batch_size, features, [table.rows for table in tables for _ in table.features]))
    workloads = []
    for table in tables:
        histograms, distinct = zip(*islice(reuse, len(table.features)), strict=True)
        bins, count = merge_reuse(histograms, distinct)
        workloads.append(
            Workload(
                name=table.name,
                rows=table.rows,
                dim=table.dim,
                batch_size=batch_size,
                pooling_factor=table.pooling_factor,
                distinct_rows=count,
                reuse_histogram=bins,
                num_features=len(table.features),
                ids=_ids_of(table, batch_size, distinct),
                **{name: getattr(table, name) for name in _TRAITS},
            )
        )
    return workloads


_TRAITS = tuple(entry.name for entry in fields(Traits))


def _reuse_at(
    batch_size: int, features: Sequence[FeatureStatistics], rows: Sequence[int]
) -> list[tuple[tuple[float, ...], float]]:
    """Return each feature's reuse histogram and distinct rows at a batch size: rescaled, or derived without one."""
    histogram_FK = torch.zeros(len(features), NUM_REUSE_BINS, dtype=torch.float64)
    distinct_F = torch.zeros(len(features), dtype=torch.float64)
    known = [i for i, feature in enumerate(features) if feature.reuse_histogram is not None]
    unknown = [i for i, feature in enumerate(features) if feature.reuse_histogram is None]
    if known:
        given = [features[i] for i in known]
        histogram_FK[known], distinct_F[known] = rescale_reuse(
            [feature.reuse_histogram or () for feature in given],
            [rows[i] for i in known],
            [feature.lookups for feature in given],
            [batch_size / feature.samples for feature in given],
            [feature.distinct_rows for feature in given],
        )
    if unknown:
        lookups = [features[i].pooling_factor * batch_size for i in unknown]
        histogram_FK[unknown], distinct_F[unknown] = default_reuse([rows[i] for i in unknown], lookups)
    return list(zip(map(tuple, histogram_FK.tolist()), distinct_F.tolist(), strict=True))


def _ids_of(table: Table, batch_size: int, distinct: Sequence[float]) -> IdHistogram | None:
    """Return the histogram of a table's ids, or None if all its features read evenly.

    Args:
        distinct: rows that each feature reads at this batch size.
    """
    read = [(feature, count) for feature, count in zip(table.features, distinct, strict=True) if count > 0]
    if all(feature.ids is None for feature, _ in read):
        return None
    histograms = [
        IdHistogram.even(table.rows)
        if feature.ids is None
        else feature.ids.rescaled(feature.lookups, feature.rows_read, batch_size / feature.samples)
        for feature, _ in read
    ]
    if len(histograms) == 1:
        return histograms[0]
    return merge(histograms, [feature.pooling_factor for feature, _ in read], [count for _, count in read])


REUSE_FEATURES = tuple(f"reuse_{bin_index}" for bin_index in range(NUM_REUSE_BINS))

_Formulas = Mapping[str, Callable[[Any], np.ndarray]]
"""Features by name, from arrays [S]: the fields of :class:`Workload`, lookups, samples, optimizer's states."""

_DESCRIPTION: _Formulas = {
    "log2_rows": lambda w: np.log2(w.rows),
    "log2_dim": lambda w: np.log2(w.dim),
    "log2_pooling_factor": lambda w: np.log2(1 + w.pooling_factor / w.num_features),
    "log2_lookups": lambda w: np.log2(1 + w.lookups),
    "log2_distinct_rows": lambda w: np.log2(1 + w.distinct_rows),
    "log2_batch_size": lambda w: np.log2(w.batch_size),
    "log2_num_features": lambda w: np.log2(w.num_features),
    "log2_mean_reuse": lambda w: np.log2(np.maximum(1.0, w.lookups / np.maximum(1.0, w.distinct_rows))),
    "log2_distinct_bytes": lambda w: np.log2(1 + w.distinct_rows * w.dim * w.weight_bytes),
    "weight_bytes": lambda w: w.weight_bytes,
    "sequence": lambda w: ~w.pooled,
    "weighted": lambda w: w.weighted,
    "stateful_optimizer": lambda w: w.weight_states + w.row_states > 0,
}
DESCRIPTORS = (*_DESCRIPTION, *REUSE_FEATURES)
"""Description of a shard; inputs of the networks."""

_WORK: _Formulas = {
    "tables": lambda w: np.ones(len(w.rows)),
    "samples": lambda w: w.samples,
    "lookups": lambda w: w.lookups,
    "lookup_elements": lambda w: w.lookups * w.dim,
    "lookup_bytes": lambda w: w.lookups * w.dim * w.weight_bytes,
    "distinct_rows": lambda w: w.distinct_rows,
    "distinct_elements": lambda w: w.distinct_rows * w.dim,
    "output_elements": lambda w: np.where(w.pooled, w.samples, w.lookups) * w.dim,
}
WORK = tuple(_WORK)
"""Amounts of one step in plain units, which add up over the shards of a fused group."""

_PAPER: _Formulas = {
    "dim": lambda w: w.dim,
    "rows": lambda w: w.rows,
    "pooling_factor": lambda w: w.pooling_factor,
    "size": lambda w: w.rows * w.dim * w.weight_bytes,
}
PAPER_FEATURES = (*_PAPER, *REUSE_FEATURES)
"""The 21 features of the DreamShard paper (section 2 and its appendix; size in bytes)."""

NETWORK_FEATURES = (*DESCRIPTORS, *_WORK, *_PAPER)
"""Features that networks read. Cost networks replace ``stateful_optimizer`` by :func:`optimizer_of`."""

_PRIOR: _Formulas = {
    "uvm_caching": lambda w: w.memory == "uvm_caching",
    "uvm": lambda w: w.memory == "uvm",
    "cache_misses": lambda w: _cache_misses(w),
    "cache_prefetched": lambda w: w.prefetched,
    "served": lambda w: w.served,
    "weight_states": lambda w: w.weight_states,
    "row_states": lambda w: w.row_states,
}
"""Features that only the roofline and corrections read, so that checkpoints made before some of them stay valid.

``uvm_caching`` and ``uvm`` are 1 for weights outside the device's memory. ``cache_misses`` is the share of a batch's
distinct rows that the cache lacks, ``cache_prefetched`` 1 if they are fetched during the batch before. ``served`` is 1
for quantized tables. The last two count the optimizer's states."""

FEATURE_NAMES = (*NETWORK_FEATURES, *_PRIOR)
FEATURE_INDEX = {name: column for column, name in enumerate(FEATURE_NAMES)}


def optimizer_of(features_SF: Tensor) -> Tensor:
    """Return the kind of each shard's optimizer, [S]: 0 without state, 2 like Adagrad (one per weight), else 1."""
    of_weights_S, of_rows_S = features_SF[:, columns(("weight_states", "row_states"))].unbind(-1)
    stateful_S, adagrad_S = of_weights_S + of_rows_S > 0, (of_weights_S == 1) & (of_rows_S == 0)
    return stateful_S.long() + adagrad_S.long()


def columns(names: Sequence[str]) -> list[int]:
    """Return the columns of ``names`` in a feature matrix."""
    return [FEATURE_INDEX[name] for name in names]


_FIELDS = tuple(entry.name for entry in fields(Workload) if entry.name not in ("name", "ids"))


def feature_matrix(workloads: Sequence[Workload]) -> Tensor:
    """Return features of shards, [S, F] float32, columns in the order of :data:`FEATURE_NAMES`."""
    if not workloads:
        return torch.zeros(0, len(FEATURE_NAMES))
    values_of_field = zip(*map(attrgetter(*_FIELDS), workloads), strict=True)
    columns = {name: np.array(values) for name, values in zip(_FIELDS, values_of_field, strict=True)}
    # Float64 holds whole numbers of any size.
    columns = {name: value.astype(float) if value.dtype.kind in "iuO" else value for name, value in columns.items()}
    w = SimpleNamespace(**columns)
    w.lookups = w.pooling_factor * w.batch_size
    w.samples = w.num_features * w.batch_size * w.output_share
    w.weight_states, w.row_states = _states(w.optimizer)
    values = {name: formula(w) for name, formula in {**_DESCRIPTION, **_WORK, **_PAPER, **_PRIOR}.items()}
    values.update(zip(REUSE_FEATURES, w.reuse_histogram.T, strict=True))
    return torch.from_numpy(np.stack([values[name].astype(np.float32) for name in FEATURE_NAMES], axis=1))


def _states(optimizer_S: np.ndarray) -> np.ndarray:
    """Return states per weight and per row, [2, S]."""
    states_2S = np.zeros((2, len(optimizer_S)))
    for name in set(optimizer_S.tolist()):
        states_2S[:, optimizer_S == name] = np.array(OPTIMIZERS[name])[:, None]
    return states_2S


def _cache_misses(w: SimpleNamespace) -> np.ndarray:
    """Return shares of distinct rows that miss the cache, [S]; zero without one.

    Each table has its own share of the cache of its fused group.
    """
    misses_S = np.zeros(len(w.rows))
    cached = (w.memory == "uvm_caching").nonzero()[0]
    if len(cached):
        rows_T, lookups_T, distinct_T = w.rows[cached], w.lookups[cached], w.distinct_rows[cached]
        load_T, histograms_TK = w.cache_load_factor[cached], w.reuse_histogram[cached]
        # Blocks of any size miss alike if these ratios are equal.
        alike = np.column_stack([histograms_TK, lookups_T / rows_T, distinct_T / rows_T, load_T]).astype(np.float32)
        _, first, which_T = np.unique(alike, axis=0, return_index=True, return_inverse=True)
        given = (histograms_TK, rows_T, lookups_T, distinct_T, load_T * rows_T)
        hits = cache_hits(*(values[first] for values in given))
        misses_S[cached] = (1 - hits.numpy())[which_T.ravel()]
    return misses_S


def scaling(features_SF: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of columns, [F] each; 1 for constant columns, which are only centred."""
    std_F = features_SF.double().std(dim=0, unbiased=False)
    return features_SF.double().mean(dim=0).float(), torch.where(std_F > 1e-6, std_F, 1.0).float()
