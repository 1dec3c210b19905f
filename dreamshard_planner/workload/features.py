# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Features of workloads: names, values and scaling.

Shapes: S shards, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, cache_hits
from dreamshard_planner.workload.tables import OPTIMIZERS, Workload

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
