# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What the roofline model says of GPU kernels that others measured and published, and its parameters fitted to them.

    python benchmarks/gpu_prior.py              # predicted beside published
    python benchmarks/gpu_prior.py --fit        # parameters fitted to all rows, and to all sources but one in turn

The rows, with source, card and what was inferred: ``benchmarks/data/published_gpu.json``. Where a source does not name
its card, that card's bandwidth is fitted beside the parameters. The formula and its parameters:
``dreamshard_planner/cost/roofline.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from dreamshard_planner.cost.roofline import AMD_KERNELS, GPU_KERNELS, Kernels, RooflineCost
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.reuse import histogram_of_counts
from dreamshard_planner.workload.tables import FeatureStatistics, Table, workloads_of

PUBLISHED = Path(__file__).parent / "data" / "published_gpu.json"
KERNELS_ALONE_MS = 0.06
"""Launch floor of rows that leave out the sort."""
FITTED = {
    "forward_share": (0.3, 1.0),
    "backward_share": (0.3, 1.0),
    "cache_speedup": (1.5, 6.0),
    "row_bytes": (32.0, 256.0),
    "lane_dims": (32.0, 256.0),
    "state_bytes": (1.0, 6000.0),
    "row_ns": (0.05, 3.0),
    "link_reads": (0.5, 4.0),
    "link_updates": (0.5, 4.0),
    "cache_row_ns": (0.5, 30.0),
}
"""Parameters of the kernels, and bounds that their meaning sets."""


@dataclass(frozen=True)
class Row:
    """One published setting."""

    name: str
    source: str
    features_SF: torch.Tensor
    memory_gb_per_s: float
    l2_mb: float
    inferred: bool
    """Whether the source leaves out which card it was."""
    amd: bool
    without_sort: bool
    """Whether only the kernels were timed that update rows, without what comes before them."""
    forward_ms: float | None
    backward_ms: float | None
    both_ms: float | None
    """Where they were timed as one."""

    def predicted(self, kernels: Kernels, cards: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Predicted and published milliseconds, by direction, with fitted bandwidths of sources that name no card."""
        gb_per_s = cards.get(self.source, self.memory_gb_per_s)
        kernels = replace(kernels, row_ns=(kernels.row_ns or AMD_KERNELS.row_ns) if self.amd else 0.0)
        if self.without_sort:
            kernels = replace(kernels, backward_launch_ms=KERNELS_ALONE_MS)
        cost = RooflineCost(gb_per_s * 1e6, 64e6, kernels, self.l2_mb * 1e6)
        forward, backward = cost.group_cost_ms(cost.encode(self.features_SF).sum(0)).tolist()
        found = {
            "forward": (forward, self.forward_ms),
            "backward": (backward, self.backward_ms),
            "both": (forward + backward, self.both_ms),
        }
        return {name: pair for name, pair in found.items() if pair[1] is not None}


def published() -> list[Row]:
    """All rows whose optimizer the features know."""
    rows = json.loads(PUBLISHED.read_text())["rows"]
    return [_row(row) for row in rows if row["optimizer"] in ("sgd", "rowwise_adagrad")]


def _row(row: dict) -> Row:
    lookups = row["batch"] * row["pooling"]
    drawn = "power_law" in row
    histogram, distinct = _reuse(row["rows"], lookups, row["power_law" if drawn else "zipf"], drawn)
    distinct = min(row.get("distinct_rows", distinct), lookups)
    feature = FeatureStatistics(row["pooling"], tuple(histogram.tolist()), row["batch"], distinct)
    tables = [
        Table(
            f"t{index}",
            row["rows"],
            row["dim"],
            (feature,),
            weight_bytes=row["weight_bytes"],
            pooled=row["pooled"],
            optimizer=row["optimizer"],
            memory=row.get("memory", "device"),
            cache_load_factor=row.get("cache_load_factor", 1.0),
        )
        for index in range(row["tables"])
    ]
    return Row(
        name=row["name"],
        source=row["source"],
        features_SF=feature_matrix(workloads_of(tables, row["batch"])),
        memory_gb_per_s=row["memory_gb_per_s"],
        l2_mb=row["l2_mb"],
        inferred=row.get("card_inferred", False),
        amd=row["card"].startswith("AMD"),
        without_sort=row.get("without_sort", False),
        forward_ms=row.get("forward_ms"),
        backward_ms=row.get("backward_ms"),
        both_ms=row.get("both_ms"),
    )


@cache
def _reuse(rows: int, lookups: float, exponent: float, drawn: bool) -> tuple[torch.Tensor, float]:
    """Histogram of how often rows are read, and how many are: as Zipf's law expects, or drawn from a power law of real
    numbers that are cut to ids."""
    draws = np.random.default_rng(0)
    if drawn:
        ends = rows ** (1 - exponent) - 1
        ids = (draws.random(int(lookups)) * ends + 1) ** (1 / (1 - exponent)) // 1
        counts = np.unique(ids, return_counts=True)[1]
    else:
        read = np.arange(1, rows + 1, dtype=float) ** -exponent
        counts = draws.poisson(read / read.sum() * lookups)
    return histogram_of_counts(torch.from_numpy(counts[counts > 0]))


def fit(rows: Sequence[Row]) -> tuple[Kernels, dict[str, float]]:
    """Parameters that explain the rows best, by the log of predicted over published, and the bandwidths of the cards
    that sources do not name."""
    unnamed = sorted({row.source for row in rows if row.inferred})
    low, high = (
        np.log([*(bounds[side] for bounds in FITTED.values()), *([card] * len(unnamed))])
        for side, card in ((0, 500.0), (1, 8000.0))
    )

    def read(logs: np.ndarray) -> tuple[Kernels, dict[str, float]]:
        values = np.exp(logs).tolist()
        named = dict(zip(FITTED, values, strict=False))
        kernels = replace(GPU_KERNELS, **named, gradient_speedup=named["cache_speedup"])
        return kernels, dict(zip(unnamed, values[len(FITTED) :], strict=True))

    def residuals(logs: np.ndarray) -> list[float]:
        kernels, cards = read(logs)
        return [
            float(np.log(predicted / told))
            for row in rows
            for predicted, told in row.predicted(kernels, cards).values()
        ]

    found = least_squares(residuals, (low + high) / 2, bounds=(low, high), loss="soft_l1", f_scale=0.3)
    return read(found.x)


def by_source(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each source, in the order of their names."""
    return {source: [row for row in rows if row.source == source] for source in sorted({row.source for row in rows})}


def told(rows: Sequence[Row], kernels: Kernels, cards: dict[str, float]) -> None:
    """Predicted beside published, the median factor between them, Kendall's tau, and the error at that scale."""
    pairs = []
    for row in rows:
        for direction, (predicted, ms) in row.predicted(kernels, cards).items():
            pairs.append((predicted, ms))
            print(f"  {row.name:<44} {direction:<9} {ms:8.3f}  predicted {predicted:8.3f}  {ms / predicted:5.2f}")
    predicted, ms = np.array(pairs).T
    factor = float(np.median(ms / predicted))
    error = float(np.mean(np.abs(predicted * factor / ms - 1)))
    tau = kendalltau(predicted, ms).statistic if len(pairs) > 2 else float("nan")
    print(f"  published over predicted: median {factor:.2f}; tau {tau:.2f}; error at that scale {error:.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    rows = published()
    if not arguments.fit:
        for source, some in by_source(rows).items():
            print(f"{source}:")
            told(some, GPU_KERNELS, {})
        return
    kernels, cards = fit(rows)
    print("all rows:", {f.name: round(getattr(kernels, f.name), 3) for f in fields(kernels)}, cards)
    told(rows, kernels, cards)
    for source, some in by_source(rows).items():
        print(f"without {source}:")
        kernels, _ = fit([row for row in rows if row.source != source])
        told(some, kernels, {})


if __name__ == "__main__":
    main()
