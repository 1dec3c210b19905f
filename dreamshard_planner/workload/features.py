# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Workloads as numbers: the one table of feature names, and the scaler fitted once on training tables.

Shapes: S shards, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, cache_hits
from dreamshard_planner.workload.tables import Workload

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
"""What a shard looks like; inputs of the networks."""

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
"""How much a shard asks for, in plain units; these add up over the shards of a fused group."""

PAPER_FEATURES = ("dim", "rows", "pooling_factor", "size", *REUSE_FEATURES)
"""The 21 features of the DreamShard paper (section 2 and its appendix; size in bytes)."""

MEMORY_FEATURES = ("uvm_caching", "uvm", "cache_misses", "cache_prefetched")
"""One where the weights live outside the device's own memory; the share of a batch's distinct rows that the cache does
not hold; and one where they are fetched while the batch before is computed. No network reads these, so that a
checkpoint made before some of them were known is as good as ever."""

FEATURE_NAMES = (*DESCRIPTORS, *WORK, *(name for name in PAPER_FEATURES if name not in DESCRIPTORS), *MEMORY_FEATURES)
FEATURE_INDEX = {name: column for column, name in enumerate(FEATURE_NAMES)}


def covers(names: Sequence[str]) -> bool:
    """Whether columns of these names are those that networks read here, in the same order: :data:`FEATURE_NAMES`, but
    for the last of :data:`MEMORY_FEATURES`."""
    needed = len(FEATURE_NAMES) - len(MEMORY_FEATURES)
    return len(names) >= needed and list(names) == list(FEATURE_NAMES[: len(names)])


def columns(names: Sequence[str]) -> list[int]:
    """Columns of ``names`` in a feature matrix."""
    return [FEATURE_INDEX[name] for name in names]


def feature_matrix(workloads: Sequence[Workload]) -> Tensor:
    """Features of shards, [S, F] float32, columns in the order of :data:`FEATURE_NAMES`."""
    if not workloads:
        return torch.zeros(0, len(FEATURE_NAMES))
    rows = zip(workloads, _cache_misses(workloads), strict=True)
    return torch.tensor([_row(workload, misses) for workload, misses in rows], dtype=torch.float64).float()


def _cache_misses(workloads: Sequence[Workload]) -> list[float]:
    """Shares of their distinct rows that miss the cache, [S]; zero without one. Every table is taken to have its own
    share of the cache that a fused group has."""

    def key(w: Workload) -> tuple:  # blocks of a table that are alike, whatever their size, miss alike
        return w.reuse_histogram, f"{w.lookups / w.rows:.9g}", f"{w.distinct_rows / w.rows:.9g}", w.cache_load_factor

    of_key = {key(w): w for w in workloads if w.memory == "uvm_caching"}
    if not of_key:
        return [0.0] * len(workloads)
    asked = [
        (w.reuse_histogram, w.rows, w.lookups, w.distinct_rows, w.cache_load_factor * w.rows) for w in of_key.values()
    ]
    _, hit_T = cache_hits(*zip(*asked, strict=True))
    misses = dict(zip(of_key, (1 - hit_T).tolist(), strict=True))
    return [misses[key(w)] if w.memory == "uvm_caching" else 0.0 for w in workloads]


def _row(w: Workload, misses: float) -> list[float]:
    lookups, elements = w.lookups, w.lookups * w.dim
    values = {
        "log2_rows": math.log2(w.rows),
        "log2_dim": math.log2(w.dim),
        "log2_pooling_factor": math.log2(1 + w.pooling_factor / w.num_features),
        "log2_lookups": math.log2(1 + lookups),
        "log2_distinct_rows": math.log2(1 + w.distinct_rows),
        "log2_batch_size": math.log2(w.batch_size),
        "log2_num_features": math.log2(w.num_features),
        "log2_mean_reuse": math.log2(max(1.0, lookups / max(1.0, w.distinct_rows))),
        "log2_distinct_bytes": math.log2(1 + w.distinct_rows * w.dim * w.weight_bytes),
        "weight_bytes": w.weight_bytes,
        "sequence": not w.pooled,
        "weighted": w.weighted,
        "stateful_optimizer": w.optimizer != "sgd",
        "tables": 1,
        "samples": w.pooled_vectors,
        "lookups": lookups,
        "lookup_elements": elements,
        "lookup_bytes": elements * w.weight_bytes,
        "distinct_rows": w.distinct_rows,
        "distinct_elements": w.distinct_rows * w.dim,
        "output_elements": w.output_elements,
        "dim": w.dim,
        "rows": w.rows,
        "pooling_factor": w.pooling_factor,
        "size": w.rows * w.dim * w.weight_bytes,
        "uvm_caching": w.memory == "uvm_caching",
        "uvm": w.memory == "uvm",
        "cache_misses": misses,
        "cache_prefetched": w.prefetched,
        **dict(zip(REUSE_FEATURES, w.reuse_histogram, strict=True)),
    }
    return [float(values[name]) for name in FEATURE_NAMES]


@dataclass(frozen=True)
class Scaler:
    """Normalises features with constants fitted once, on training tables, and stored in the checkpoint.

    A column that was constant in training is only centred, so that nothing is divided by zero.
    """

    mean_F: Tensor
    scale_F: Tensor

    @classmethod
    def fit(cls, features_SF: Tensor) -> Scaler:
        """Mean and standard deviation of each column of [S, F]."""
        std_F = features_SF.double().std(dim=0, unbiased=False)
        scale_F = torch.where(std_F > 1e-6, std_F, torch.ones_like(std_F))
        return cls(features_SF.double().mean(dim=0).float(), scale_F.float())

    def __call__(self, features_SF: Tensor) -> Tensor:
        """Scaled features, same shape."""
        return (features_SF - self.mean_F) / self.scale_F
