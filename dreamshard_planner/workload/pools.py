# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Table pools: published collections, and generators of pools.

Shapes: T tables, K = 17 reuse bins.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from dreamshard_planner.errors import TaskError
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.reuse import TOP_COUNT, bin_mean_reuse, default_reuse
from dreamshard_planner.workload.tables import Table

META_DIMS = (4, 8, 16, 32, 64, 96, 128, 192, 256)
"""Dims that production models use, drawn uniformly; the real ones are not published."""
META_MAX_ROWS = 10_000_000
"""Most rows of a table, unless a batch reads more."""


@cache
def _data(name: str) -> dict[str, Any]:
    return json.loads(resources.files("dreamshard_planner.workload").joinpath("data", name).read_text())


MODELS: dict[str, Any] = _data("published_models.json")["models"]


def published(name: str) -> list[Table]:
    """Return a published model, one of :data:`MODELS`.

    ``mlperf_dlrm_dcnv2`` has the 26 Criteo tables of MLPerf's DLRM-DCNv2, with their multi-hot sizes. Models of NVIDIA
    Merlin's distributed-embeddings have 55 tables (``merlin_tiny``) to 2,002 (``merlin_colossal``). Those of EMBark
    (``embark_t180``, ``embark_t7``) read rows by a power law.
    """
    model, batch_size = MODELS[name], 4096
    tables = [
        Table(model["table_name"].format(group=group, index=index), rows, dim, tuple(map(FeatureStatistics, factors)))
        for group, (num_tables, rows, dim, factors) in enumerate(model["groups"])
        for index in range(num_tables)
    ]
    if "exponent" not in model:
        return tables
    lookups = [table.pooling_factor * batch_size for table in tables]
    histogram_TK, _ = default_reuse([table.rows for table in tables], lookups, model["exponent"])
    return [
        replace(table, features=(FeatureStatistics(table.pooling_factor, tuple(histogram), batch_size),))
        for table, histogram in zip(tables, histogram_TK.tolist(), strict=True)
    ]


def meta_like(seed: int = 0, num_tables: int = 856, year: int = 2021) -> list[Table]:
    """Draw random tables with the pooled statistics published for Meta's dlrm_datasets.

    Pooling factors are log-normal with the published mean. Iterative proportional fitting spreads lookups over tables
    and reuse bins. It starts with a random tilt of the published histogram for each table.

    Args:
        seed: random seed.
        num_tables: any number; the published pools have 856 (2021) and 788 (2022) tables.
        year: 2021 (batch 65,536) or 2022 (batch 131,072).
    """
    published = _data("meta_dlrm_reuse.json")[str(year)]
    batch_size = published["batch_size"]
    generator = torch.Generator().manual_seed(seed)
    mean_pooling = published["num_indices"] / published["tables"] / batch_size
    normal_T = torch.randn(num_tables, generator=generator, dtype=torch.float64)
    pooling_T = (1.5 * normal_T).exp().clamp(max=40)
    pooling_T = (pooling_T / pooling_T.mean() * mean_pooling).clamp_min(0.02)
    lookups_T = pooling_T * batch_size
    lookups_TK = _spread_lookups(lookups_T, torch.tensor(published["share_of_lookups"]).double(), generator)
    distinct_TK = lookups_TK / bin_mean_reuse()
    distinct_T = distinct_TK.sum(-1)
    histogram_TK = distinct_TK / distinct_T[:, None]
    # Rows are not published: 1.2 to 60 times the distinct rows of a batch, log-uniform.
    growth_T = (torch.rand(num_tables, generator=generator, dtype=torch.float64) * 3.9 + 0.2).exp()
    rows_T = torch.maximum((distinct_T * growth_T).clamp(max=META_MAX_ROWS), distinct_T * 1.05).ceil().long()
    dim_T = torch.tensor(META_DIMS)[torch.randint(len(META_DIMS), (num_tables,), generator=generator)]
    return _drawn(f"meta{year}", batch_size, rows_T, dim_T, pooling_T, histogram_TK)


def broad(seed: int = 0, num_tables: int = 800) -> list[Table]:
    """Draw random tables with a wide, independent range of each quantity, for cost networks to learn their bounds.

    Rows are log-uniform from 1 to 10^7, dims log-uniform multiples of 4 from 4 to 256. A third of the tables is read
    once per sample, one in twenty never, the others log-uniform from 0.05 to 300 times. Row popularity is a power law
    with an exponent from 0 to 1.6.
    """
    batch_size = 4096
    generator = torch.Generator().manual_seed(seed)
    uniform_5T = torch.rand(5, num_tables, generator=generator, dtype=torch.float64)
    rows_T = (uniform_5T[0] * math.log(1e7)).exp().long()
    dim_T = 4 * (4 ** (uniform_5T[1] * 3)).round().long()
    pooling_T = (math.log(0.05) + uniform_5T[2] * math.log(300 / 0.05)).exp()
    pooling_T = torch.where(uniform_5T[3] < 1 / 3, 1.0, pooling_T)
    pooling_T = torch.where(uniform_5T[3] > 0.95, 0.0, pooling_T)
    histogram_TK, _ = default_reuse(rows_T, pooling_T * batch_size, 1.6 * uniform_5T[4])
    return _drawn("broad", batch_size, rows_T, dim_T, pooling_T, histogram_TK)


def _drawn(
    name: str, batch_size: int, rows_T: Tensor, dim_T: Tensor, pooling_T: Tensor, histogram_TK: Tensor
) -> list[Table]:
    columns = (column.tolist() for column in (rows_T, dim_T, pooling_T, histogram_TK))
    return [
        Table(f"{name}_{i}", rows, dim, (FeatureStatistics(pooling, tuple(bins) if pooling else None, batch_size),))
        for i, (rows, dim, pooling, bins) in enumerate(zip(*columns, strict=True))
    ]


def _spread_lookups(lookups_T: Tensor, share_K: Tensor, generator: torch.Generator) -> Tensor:
    """Return lookups by table and reuse bin, [T, K], with the given table sums and proportion of bin sums."""
    bins = torch.linspace(-1, 1, len(share_K), dtype=torch.float64)
    tilt_T = 2.0 * torch.randn(len(lookups_T), generator=generator, dtype=torch.float64)
    spread_TK = share_K * (tilt_T[:, None] * bins).exp()
    # A bin of high reuse needs at least one row's lookups.
    spread_TK[bin_mean_reuse().clamp(max=TOP_COUNT) > lookups_T[:, None]] = 0
    target_K = share_K / share_K.sum() * lookups_T.sum()
    for _ in range(200):
        spread_TK *= (target_K / spread_TK.sum(0).clamp_min(1e-9))[None]
        spread_TK *= (lookups_T / spread_TK.sum(-1))[:, None]
    return spread_TK


POOLS: dict[str, Callable[[], list[Table]]] = {
    **{name: partial(published, name) for name in MODELS},
    "meta_like_2021": lambda: meta_like(num_tables=856, year=2021),
    "meta_like_2022": lambda: meta_like(num_tables=788, year=2022),
    "broad": broad,
}


def named_pool(name: str) -> list[Table]:
    """Return a pool by name; raises TaskError for others."""
    if name not in POOLS:
        raise TaskError(f"unknown table pool {name!r}; known are {', '.join(POOLS)}")
    return POOLS[name]()


def pool_tables(pools: Sequence[str]) -> tuple[list[Table], list[Table]]:
    """Return training and held-out tables of named pools.

    Halves are always the same, so that a table that one training holds out never teaches another.
    """
    train_tables, test_tables = [], []
    for name in pools:
        train_part, test_part = split_tables(named_pool(name), seed=0)
        train_tables += train_part
        test_tables += test_part
    return train_tables, test_tables


def split_tables(tables: Sequence[Table], seed: int) -> tuple[list[Table], list[Table]]:
    """Split into training and test tables, a half each."""
    order = torch.randperm(len(tables), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = round(len(tables) / 2)
    return [tables[index] for index in sorted(order[:cut])], [tables[index] for index in sorted(order[cut:])]
