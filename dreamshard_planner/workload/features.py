# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Features of workloads: names, values and scaling.

Shapes: S shards, F features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, cache_hits
from dreamshard_planner.workload.tables import OPTIMIZERS, Workload

REUSE_FEATURES = tuple(f"reuse_{bin_index}" for bin_index in range(NUM_REUSE_BINS))

DESCRIPTORS = (
    "log2_rows",
    "log2_dim",
    "log2_pooling_factor",  # of 1 + pooling factor per feature
    "log2_lookups",
    "log2_distinct_rows",
    "log2_batch_size",
    "log2_num_features",
    "log2_mean_reuse",
    "log2_distinct_bytes",
    "weight_bytes",
    "sequence",
    "weighted",
    "stateful_optimizer",
    *REUSE_FEATURES,
)
"""Description of a shard; inputs of the networks."""

WORK = (
    "tables",
    "samples",
    "lookups",
    "lookup_elements",
    "lookup_bytes",
    "distinct_rows",
    "distinct_elements",
    "output_elements",
)
"""Amounts of one step in plain units, which add up over the shards of a fused group."""

PAPER_FEATURES = ("dim", "rows", "pooling_factor", "size", *REUSE_FEATURES)
"""The 21 features of the DreamShard paper (section 2 and its appendix; size in bytes)."""

NETWORK_FEATURES = (*DESCRIPTORS, *WORK, *(name for name in PAPER_FEATURES if name not in DESCRIPTORS))
"""Features that networks read. Cost networks replace ``stateful_optimizer`` by :func:`optimizer_of`."""

PRIOR_FEATURES = ("uvm_caching", "uvm", "cache_misses", "cache_prefetched", "served", "weight_states", "row_states")
"""Features that only the roofline and corrections read, so that checkpoints made before some of them stay valid.

``uvm_caching`` and ``uvm`` are 1 for weights outside the device's memory. ``cache_misses`` is the share of a batch's
distinct rows that the cache lacks, ``cache_prefetched`` 1 if they are fetched during the batch before. ``served`` is 1
for quantized tables. The last two count the optimizer's states."""

FEATURE_NAMES = (*NETWORK_FEATURES, *PRIOR_FEATURES)
FEATURE_INDEX = {name: column for column, name in enumerate(FEATURE_NAMES)}


def optimizer_of(features_SF: Tensor) -> Tensor:
    """Return the kind of each shard's optimizer, [S]: 0 without state, 2 like Adagrad (one per weight), else 1."""
    of_weights_S, of_rows_S = features_SF[:, columns(("weight_states", "row_states"))].unbind(-1)
    stateful_S, adagrad_S = of_weights_S + of_rows_S > 0, (of_weights_S == 1) & (of_rows_S == 0)
    return stateful_S.long() + adagrad_S.long()


def columns(names: Sequence[str]) -> list[int]:
    """Return the columns of ``names`` in a feature matrix."""
    return [FEATURE_INDEX[name] for name in names]


def feature_matrix(workloads: Sequence[Workload]) -> Tensor:
    """Return features of shards, [S, F] float32, columns in the order of :data:`FEATURE_NAMES`."""
    if not workloads:
        return torch.zeros(0, len(FEATURE_NAMES))
    values_of_field = zip(*map(attrgetter(*_FIELDS), workloads), strict=True)
    return features_of({name: np.array(values) for name, values in zip(_FIELDS, values_of_field, strict=True)})


_FIELDS = tuple(entry.name for entry in fields(Workload) if entry.name not in ("name", "ids"))


def features_of(columns: Mapping[str, np.ndarray]) -> Tensor:
    """Return features of shards given as one array [S] per field of :class:`Workload` (``reuse_histogram``: [S, 17]).

    Fields that are left out have their defaults.
    """
    shards = len(columns["rows"])
    w = {
        entry.name: columns[entry.name] if entry.name in columns else np.full(shards, entry.default)
        for entry in fields(Workload)
        if entry.name in _FIELDS
    }
    # Float64 holds whole numbers of any size.
    w = {name: column.astype(float) if column.dtype.kind in "iuO" else column for name, column in w.items()}
    rows, dim, weight_bytes, distinct_rows = w["rows"], w["dim"], w["weight_bytes"], w["distinct_rows"]
    lookups = w["pooling_factor"] * w["batch_size"]
    weight_states, row_states = _states(w["optimizer"])
    samples = w["num_features"] * w["batch_size"] * w["output_share"]
    values = {
        "log2_rows": np.log2(rows),
        "log2_dim": np.log2(dim),
        "log2_pooling_factor": np.log2(1 + w["pooling_factor"] / w["num_features"]),
        "log2_lookups": np.log2(1 + lookups),
        "log2_distinct_rows": np.log2(1 + distinct_rows),
        "log2_batch_size": np.log2(w["batch_size"]),
        "log2_num_features": np.log2(w["num_features"]),
        "log2_mean_reuse": np.log2(np.maximum(1.0, lookups / np.maximum(1.0, distinct_rows))),
        "log2_distinct_bytes": np.log2(1 + distinct_rows * dim * weight_bytes),
        "weight_bytes": weight_bytes,
        "sequence": ~w["pooled"],
        "weighted": w["weighted"],
        "stateful_optimizer": weight_states + row_states > 0,
        "tables": np.ones(shards),
        "samples": samples,
        "lookups": lookups,
        "lookup_elements": lookups * dim,
        "lookup_bytes": lookups * dim * weight_bytes,
        "distinct_rows": distinct_rows,
        "distinct_elements": distinct_rows * dim,
        "output_elements": np.where(w["pooled"], samples, lookups) * dim,
        "dim": dim,
        "rows": rows,
        "pooling_factor": w["pooling_factor"],
        "size": rows * dim * weight_bytes,
        "uvm_caching": w["memory"] == "uvm_caching",
        "uvm": w["memory"] == "uvm",
        "cache_misses": _cache_misses(w, lookups),
        "cache_prefetched": w["prefetched"],
        "served": w["served"],
        "weight_states": weight_states,
        "row_states": row_states,
        **dict(zip(REUSE_FEATURES, w["reuse_histogram"].T, strict=True)),
    }
    return torch.from_numpy(np.stack([values[name].astype(np.float32) for name in FEATURE_NAMES], axis=1))


def _states(optimizer_S: np.ndarray) -> np.ndarray:
    """Return states per weight and per row, [2, S]."""
    states_2S = np.zeros((2, len(optimizer_S)))
    for name in set(optimizer_S.tolist()):
        states_2S[:, optimizer_S == name] = np.array(OPTIMIZERS[name])[:, None]
    return states_2S


def _cache_misses(w: Mapping[str, np.ndarray], lookups_S: np.ndarray) -> np.ndarray:
    """Return shares of distinct rows that miss the cache, [S]; zero without one.

    Each table has its own share of the cache of its fused group.
    """
    misses_S = np.zeros(len(lookups_S))
    cached = (w["memory"] == "uvm_caching").nonzero()[0]
    if len(cached):
        rows_T, lookups_T, distinct_T = w["rows"][cached], lookups_S[cached], w["distinct_rows"][cached]
        load_T, histograms_TK = w["cache_load_factor"][cached], w["reuse_histogram"][cached]
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
