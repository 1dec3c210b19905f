# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What the roofline model says of GPU kernels that an H100 measured and others published, and its parameters fitted to
them.

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

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import LabelledSets, mape_2, predict_ms
from dreamshard_planner.cost.roofline import AMD_KERNELS, GPU_KERNELS, Kernels, RooflineCost
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.reuse import histogram_of_counts
from dreamshard_planner.workload.tables import FeatureStatistics, Table, costed_optimizer, workloads_of

PUBLISHED = Path(__file__).parent / "data" / "published_gpu.json"
KERNELS_ALONE_MS = 0.06
"""Launch floor of rows that leave out the sort."""
FITTED = {
    "forward_share": (0.5, 1.0),
    "backward_share": (0.5, 1.0),
    "gradient_speedup": (1.5, 50.0),
    "rows_held": (0.05, 1.0),
    "gradients_held": (0.05, 1.0),
    "row_bytes": (32.0, 512.0),
    "far_row_bytes": (1.0, 512.0),
    "far_table_bytes": (1e7, 1e11),
    "update_bytes": (32.0, 512.0),
    "lane_dims": (4.0, 256.0),
    "state_bytes": (1.0, 2000.0),
    "lookup_ns": (1e-4, 1.0),
    "lookup_lane_ns": (1e-6, 0.01),
    "step_ns": (1.0, 2000.0),
    "bag_ns": (1e-3, 10.0),
    "bag_lane_ns": (1e-6, 0.1),
    "sequence_bytes": (1.0, 3000.0),
    "table_ns": (1.0, 1e4),
    "update_lookup_ns": (1e-4, 1.0),
    "update_lane_ns": (1e-6, 0.01),
    "update_row_ns": (1e-4, 10.0),
    "update_table_ns": (1.0, 1e4),
    "weighted_lookup_ns": (1e-3, 10.0),
    "link_reads": (0.5, 4.0),
    "link_repeats": (0.05, 1.0),
    "link_updates": (0.5, 4.0),
    "link_exchanges": (0.5, 4.0),
    "cache_row_ns": (0.5, 30.0),
    "forward_launch_ms": (0.005, 0.1),
    "backward_launch_ms": (0.02, 0.2),
    "sort_launch_ms": (0.01, 0.2),
    "sort_lookups": (100.0, 1e5),
}
"""Parameters of the kernels, and bounds that their meaning sets."""
MEASURED = Path(__file__).parent / "data" / "h100_settings.json"
"""What ``kernel_settings.py`` measured."""
TRAIN, TEST = (Path(__file__).parent / "data" / f"cuda-{name}.npz" for name in ("train", "test"))
LEAST_RATIO = 0.1
"""Of predicted over measured, that counts: kernels with nothing to do take next to nothing."""
PUBLISHED_WEIGHT, SETTINGS_WEIGHT = 6.0, 3.0
"""Of a published time, and of a measured setting, over that of a measured set of tables: there are many of these."""


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
        usual = RooflineCost.of_bandwidths("cuda", gb_per_s * 1e6, 64e6)
        cost = replace(usual, kernels=kernels, cache_bytes=self.l2_mb * 1e6)
        forward, backward = cost.group_cost_ms(cost.encode(self.features_SF).sum(0)).tolist()
        found = {
            "forward": (forward, self.forward_ms),
            "backward": (backward, self.backward_ms),
            "both": (forward + backward, self.both_ms),
        }
        return {name: pair for name, pair in found.items() if pair[1] is not None}


def published() -> list[Row]:
    """All rows."""
    return [_row(row) for row in json.loads(PUBLISHED.read_text())["rows"]]


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
            optimizer=costed_optimizer(row["optimizer"]),
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


def measured() -> list[Row]:
    """Settings that an H100 measured."""
    known = json.loads(MEASURED.read_text())
    card = {"source": "an H100", "card": known["card"]["card"], "memory_gb_per_s": 3350, "l2_mb": 50}
    return [_row(row | card) for row in known["rows"]]


def sets_of(path: Path) -> LabelledSets:
    """Sets of tables that an H100 measured."""
    return LabelledSets.of_dataset(CostDataset.load(path))


def h100(kernels: Kernels) -> RooflineCost:
    """The card that measured them."""
    return replace(RooflineCost.of_gpu("h100"), kernels=kernels)


def fit(rows: Sequence[Row], settings: Sequence[Row], sets: LabelledSets) -> tuple[Kernels, dict[str, float]]:
    """Parameters that explain published rows, measured settings and measured sets best, by the log of predicted over
    measured, and the bandwidths of the cards that sources do not name."""
    unnamed = sorted({row.source for row in rows if row.inferred})
    bounds = [*FITTED.values(), *([(500.0, 8000.0)] * len(unnamed))]
    low, high = np.log(np.array(bounds).T)
    start = np.log([*(getattr(GPU_KERNELS, name) for name in FITTED), *([1555.0] * len(unnamed))]).clip(low, high)

    def read(logs: np.ndarray) -> tuple[Kernels, dict[str, float]]:
        values = np.exp(logs).tolist()
        kernels = replace(GPU_KERNELS, **dict(zip(FITTED, values, strict=False)))
        return kernels, dict(zip(unnamed, values[len(FITTED) :], strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        kernels, cards = read(logs)
        log_X2 = (predict_ms(h100(kernels), sets) / sets.labels_ms_X2).clamp_min(LEAST_RATIO).log()
        of_rows = [
            weight * float(np.log(predicted / told))
            for some, weight in ((rows, PUBLISHED_WEIGHT), (settings, SETTINGS_WEIGHT))
            for row in some
            for predicted, told in row.predicted(kernels, cards).values()
        ]
        return np.concatenate([log_X2.flatten().numpy(), of_rows])

    found = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.3, x_scale=0.1, max_nfev=60)
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
    print(f"  measured over predicted: median {factor:.2f}; tau {tau:.2f}; error at that scale {error:.0%}")


def tell_sets(kernels: Kernels) -> None:
    """Errors on sets of tables that no fit has seen."""
    sets = sets_of(TEST)
    predicted_X2 = predict_ms(h100(kernels), sets)
    forward, backward = mape_2(predicted_X2, sets.labels_ms_X2).tolist()
    factors = (predicted_X2 / sets.labels_ms_X2).median(0).values.tolist()
    print(f"{len(sets)} sets of held-out tables on an H100: mean error {forward:.0%} forward, {backward:.0%} backward")
    print(f"  predicted over measured, median: {factors[0]:.2f}, {factors[1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    rows, settings = published(), measured()
    kernels: Kernels = GPU_KERNELS
    cards: dict[str, float] = {}
    if arguments.fit:
        sets = sets_of(TRAIN)
        for source, some in by_source(rows).items():
            without, _ = fit([row for row in rows if row.source != source], settings, sets)
            print(f"without {source}:")
            told(some, without, {})
        kernels, cards = fit(rows, settings, sets)
        print("all:", {f.name: float(f"{getattr(kernels, f.name):.3g}") for f in fields(kernels)}, cards)
    for source, some in by_source([*rows, *settings]).items():
        print(f"{source}:")
        told(some, kernels, cards)
    tell_sets(kernels)


if __name__ == "__main__":
    main()
