# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms rescaled to other batch sizes, against batches really drawn there.

Batches of tables are drawn at one size, and a random part of each is its batch at a size 2, 8 or 64 times smaller. The
histogram of either is rescaled to the size of the other: the error is the largest of a bin, and the relative one of the
distinct rows. Statistics are those that ``TableStatistics.from_batches`` takes: the distinct rows are counted. Tables
are random ones of the Meta-like pool, and of power laws with exponents from 0.6 to 1.4.

    python benchmarks/batch_rescaling.py --json benchmarks/results/DATE-batch-rescaling.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from torch import Tensor

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.reuse import draw_indices, rescale_reuse, reuse_histogram

FACTORS = (2, 8, 64)
MOST_LOOKUPS = 3_000_000
QUANTILES = (0.5, 0.9, 1.0)


def meta_like_batches(count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, int]]:
    """Indices, and rows of their table."""
    tables = [table for table in meta_like() if 2000 < table.pooling_factor * 65_536 < MOST_LOOKUPS]
    for index in torch.randperm(len(tables), generator=generator)[:count].tolist():
        rows, feature = tables[index].rows, tables[index].features[0]
        lookups = round(feature.pooling_factor * feature.batch_size)
        yield draw_indices(feature.reuse_histogram, rows, lookups, generator), rows


def power_law_batches(count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, int]]:
    """The same, of tables whose row popularity falls as rank to a power."""
    for _ in range(count):
        for_rows, for_lookups, for_exponent = torch.rand(3, generator=generator).tolist()
        rows, lookups = round(10 ** (3 + 3 * for_rows)), round(10 ** (4 + 2 * for_lookups))
        edge_R = ((torch.arange(rows, dtype=torch.float64) + 1) ** -(0.6 + 0.8 * for_exponent)).cumsum(0)
        draw_N = torch.rand(lookups, dtype=torch.float64, generator=generator) * edge_R[-1]
        yield torch.searchsorted(edge_R, draw_N).clamp_max(rows - 1), rows


def error(given: Tensor, wanted: Tensor, rows: int, counted: bool = True) -> tuple[float, float]:
    """Largest of a bin, and relative in the distinct rows, from one batch of indices to the other."""
    true_K, true_distinct = reuse_histogram(wanted)
    histogram_K, distinct = reuse_histogram(given)
    scaled_TK, distinct_T = rescale_reuse(
        [histogram_K.tolist()], [rows], [len(given)], [len(wanted) / len(given)], [distinct if counted else None]
    )
    return float((scaled_TK[0] - true_K).abs().max()), abs(float(distinct_T[0]) / true_distinct - 1)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=150, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--derived", action="store_true", help="let the histogram alone tell the distinct rows")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    title = f"{args.tables} tables of each kind: median, 90th percentile and largest error"
    shown = table_of(title, "tables", "batch", "a bin", "distinct rows", "within 0.05 and 5 %")
    result: dict[str, dict[str, dict[str, list[float] | float]]] = {}
    for kind, batches in (("meta_like", meta_like_batches), ("power_law", power_law_batches)):
        errors: dict[str, list[tuple[float, float]]] = {}
        for indices, rows in batches(args.tables, torch.Generator().manual_seed(args.seed)):
            for factor in FACTORS:
                part = indices[: len(indices) // factor]
                errors.setdefault(f"1/{factor}", []).append(error(indices, part, rows, not args.derived))
                errors.setdefault(f"x{factor}", []).append(error(part, indices, rows, not args.derived))
        result[kind] = {}
        for change, pairs in sorted(errors.items()):
            error_T2 = torch.tensor(pairs, dtype=torch.float64)
            bins, distinct = error_T2.quantile(torch.tensor(QUANTILES, dtype=torch.float64), dim=0).T.tolist()
            within = float((error_T2 < 0.05).all(1).double().mean())
            result[kind][change] = {"bin": bins, "distinct": distinct, "within": within}
            cells = (" ".join(f"{value:.3f}" for value in values) for values in (bins, distinct))
            shown.add_row(kind, change, *cells, f"{within:.0%}")
    wide_console().print(shown)
    write_result(args.json, provenance(torch.device("cpu")), result)


if __name__ == "__main__":
    main()
