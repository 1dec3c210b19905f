# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare the roofline model of GPU kernels with measured and published times, and fit its parameters to
them.

    python benchmarks/gpu_prior.py                   # predicted beside published
    python benchmarks/gpu_prior.py --fit [--json F]  # parameters fitted to all rows, to all sources but one in turn,
                                                     # and to the H100 alone: how well each predicts what it did not see

A fit takes some 15 s of one core, all of them four minutes. The rows, with source, card and what was inferred:
``benchmarks/data/published_gpu.json``. Where a source does not name its card, that card's bandwidth is fitted beside
the parameters. The formula and its parameters: ``dreamshard_planner/cost/roofline.py``.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from common.output import provenance, table_of, wide_console, write_result
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.roofline import AMD_KERNELS, GPU_KERNELS, Kernels, RooflineCost
from dreamshard_planner.devices import GPUS
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.reuse import histogram_of_counts
from dreamshard_planner.workload.tables import Table, costed_optimizer, feature_matrix, workloads_of

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
"""Settings of kernels that an H100 measured; the script is in git, at the commit that the file names."""
TRAIN, TEST = (Path(__file__).parent / "data" / f"cuda-{name}.npz" for name in ("train", "test"))
LEAST_RATIO = 0.1
"""Least predicted over measured that counts: kernels with nothing to do take next to nothing."""
PUBLISHED_WEIGHT, SETTINGS_WEIGHT = 6.0, 3.0
"""Weights of a published time and of a measured setting over that of a measured set, of which there are many."""

DIRECTIONS = ("forward", "backward", "both")
"""Both: where they were timed as one."""


@dataclass(frozen=True)
class Setup:
    """A card, and how it was timed."""

    source: str
    memory_gb_per_s: float
    l2_mb: float
    inferred: bool = False
    """True if the source does not name its card."""
    amd: bool = False
    gpu: str | None = None
    """Name in ``GPUS`` of the card whose multiprocessors it has; None to scale them by bandwidth."""
    without_sort: bool = False
    """True if only the kernels that update rows were timed."""

    def cost(self, kernels: Kernels, cards: Mapping[str, float]) -> RooflineCost:
        """With fitted bandwidths, in GB/s, of sources that name no card. A state's time on AMD counts there alone."""
        gb_per_s = cards.get(self.source, self.memory_gb_per_s)
        if not self.amd:
            kernels = replace(kernels, row_ns=0.0)
        if self.without_sort:
            kernels = replace(kernels, backward_launch_ms=KERNELS_ALONE_MS)
        usual = RooflineCost.of_bandwidths("cuda", gb_per_s * 1e6, 64e6, self.gpu and GPUS[self.gpu].cards[0])
        return replace(usual, kernels=kernels, cache_bytes=self.l2_mb * 1e6)


@dataclass(frozen=True)
class Times:
    """Times of sets of tables, in one setup."""

    setup: Setup
    weight: float
    """Weight of each set in a fit."""
    features_UF: torch.Tensor
    """Features of the distinct shards: half of the H100's recur."""
    shard_S: torch.Tensor
    set_S: torch.Tensor
    told_ms_X3: torch.Tensor
    """By direction; NaN of what was not timed."""
    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, setup: Setup, weight: float, features_SF: torch.Tensor, set_S: torch.Tensor, told_ms_X3: torch.Tensor
    ) -> Times:
        """Make times of the features of all shards, and the set of each."""
        features_UF, shard_S = torch.unique(features_SF, dim=0, return_inverse=True)
        return cls(setup, weight, features_UF, shard_S, set_S, told_ms_X3)

    def predicted_and_told(self, kernels: Kernels, cards: Mapping[str, float]) -> np.ndarray:
        """Milliseconds of all that was timed, set by set, [N, 2]."""
        cost = self.setup.cost(kernels, cards)
        latent_UH = cost.encode(self.features_UF)
        latent_XH = latent_UH.new_zeros(len(self.told_ms_X3), cost.channels)
        ms_X2 = cost.group_cost_ms(latent_XH.index_add_(0, self.set_S, latent_UH[self.shard_S]))
        ms_X3 = torch.cat([ms_X2, ms_X2.sum(1, keepdim=True)], dim=1)
        timed_X3 = ~self.told_ms_X3.isnan()
        return torch.stack([ms_X3[timed_X3], self.told_ms_X3[timed_X3]], dim=1).numpy()

    def labels(self) -> list[str]:
        """Return the labels of the times, in the order of the milliseconds."""
        timed_X3 = (~self.told_ms_X3.isnan()).tolist()
        return [
            f"{name:<44} {direction:<9}"
            for name, timed_3 in zip(self.names, timed_X3, strict=True)
            for direction, timed in zip(DIRECTIONS, timed_3, strict=True)
            if timed
        ]


def published() -> list[Times]:
    """All rows, those of one setup together."""
    by_setup: dict[Setup, list[dict]] = {}
    for row in json.loads(PUBLISHED.read_text())["rows"]:
        by_setup.setdefault(_setup(row), []).append(row)
    return [_times(setup, PUBLISHED_WEIGHT, rows) for setup, rows in by_setup.items()]


MULTIPROCESSORS = {"A100": "a100-40", "H100": "h100", "MI350": "b200"}
"""GPU with the multiprocessors of a published card, by a word of its name; those of MI350 were fitted as a B200's."""


def _setup(row: dict) -> Setup:
    return Setup(
        source=row["source"],
        memory_gb_per_s=row["memory_gb_per_s"],
        l2_mb=row["l2_mb"],
        inferred=row.get("card_inferred", False),
        amd=row["card"].startswith("AMD"),
        gpu=next((gpu for word, gpu in MULTIPROCESSORS.items() if word in row["card"]), None),
        without_sort=row.get("without_sort", False),
    )


def _times(setup: Setup, weight: float, rows: Sequence[dict]) -> Times:
    told = [[row.get(f"{direction}_ms", math.nan) for direction in DIRECTIONS] for row in rows]
    set_S = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([row["tables"] for row in rows]))
    features_SF = torch.cat([_features_SF(row) for row in rows])
    times = Times.of(setup, weight, features_SF, set_S, torch.tensor(told, dtype=torch.float64))
    return replace(times, names=tuple(row["name"] for row in rows))


def _features_SF(row: dict) -> torch.Tensor:
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
    return feature_matrix(workloads_of(tables, row["batch"]))


H100 = Setup("an H100", GPUS["h100"].memory_bytes_per_s / 1e9, GPUS["h100"].l2_bytes / 1e6, gpu="h100")
"""The card that was measured here."""


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


def measured() -> Times:
    """Settings that an H100 measured."""
    return _times(H100, SETTINGS_WEIGHT, json.loads(MEASURED.read_text())["rows"])


def sets_of(path: Path) -> Times:
    """Sets of tables that the same H100 measured."""
    sets = LabelledSets.of_dataset(CostDataset.load(path))
    told_ms_X3 = torch.nn.functional.pad(sets.labels_ms_X2.double(), (0, 1), value=math.nan)
    return Times.of(H100, 1.0, sets.features_SF, sets.set_S, told_ms_X3)


def fit(times: Sequence[Times]) -> tuple[Kernels, dict[str, float]]:
    """Parameters that explain them best, by the log of predicted over measured, and the bandwidths of the cards that
    sources do not name. It starts from the middles of the bounds, since parameters that ship know all sources."""
    unnamed = sorted({part.setup.source for part in times if part.setup.inferred})
    bounds = [*FITTED.values(), *([(500.0, 8000.0)] * len(unnamed))]
    low, high = np.log(np.array(bounds).T)
    fixed = AMD_KERNELS if any(part.setup.amd for part in times) else GPU_KERNELS

    def read(logs: np.ndarray) -> tuple[Kernels, dict[str, float]]:
        values = np.exp(logs).tolist()
        kernels = replace(fixed, **dict(zip(FITTED, values, strict=False)))
        return kernels, dict(zip(unnamed, values[len(FITTED) :], strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        kernels, cards = read(logs)
        return np.concatenate([part.weight * log_ratios(part, kernels, cards) for part in times])

    options = {"loss": "soft_l1", "f_scale": 0.3, "x_scale": 0.1, "ftol": 1e-4}
    return read(least_squares(residuals, (low + high) / 2, bounds=(low, high), **options).x)


def log_ratios(part: Times, kernels: Kernels, cards: Mapping[str, float]) -> np.ndarray:
    """Logs of predicted over measured."""
    predicted, ms = part.predicted_and_told(kernels, cards).T
    return np.log(np.maximum(predicted / ms, LEAST_RATIO))


def by_source(times: Iterable[Times]) -> dict[str, list[Times]]:
    """Return the times of each source, in the order of their names."""
    found: dict[str, list[Times]] = {}
    for part in sorted(times, key=lambda part: part.setup.source):
        found.setdefault(part.setup.source, []).append(part)
    return found


@dataclass(frozen=True)
class Agreement:
    """Agreement of predicted with measured times."""

    times: int
    factor: float
    """Measured over predicted, median."""
    tau: float | None
    """Kendall's; None of less than three."""
    error: float
    """Mean, at that factor."""

    @classmethod
    def of(cls, times: Sequence[Times], kernels: Kernels, cards: Mapping[str, float] | None = None) -> Agreement:
        """Compare the times of one source."""
        predicted, ms = np.concatenate([part.predicted_and_told(kernels, cards or {}) for part in times]).T
        factor = float(np.median(ms / predicted))
        tau = float(kendalltau(predicted, ms).statistic) if len(ms) > 2 else None
        return cls(len(ms), factor, tau, float(np.mean(np.abs(predicted * factor / ms - 1))))

    def __str__(self) -> str:
        return f"{self.factor:.2f}, {'-' if self.tau is None else f'{self.tau:.2f}'}, {self.error:.0%}"


def show(times: Sequence[Times], kernels: Kernels, cards: Mapping[str, float]) -> None:
    """Predicted beside published, source by source."""
    for source, some in by_source(times).items():
        print(f"{source}:")
        for part in some:
            for label, (predicted, ms) in zip(part.labels(), part.predicted_and_told(kernels, cards), strict=True):
                print(f"  {label} {ms:8.3f}  predicted {predicted:8.3f}  {ms / predicted:5.2f}")
        print(f"  measured over predicted, median; tau; error at that scale: {Agreement.of(some, kernels, cards)}")


def errors_2(kernels: Kernels, sets: Times) -> list[float]:
    """Mean errors, forward and backward, on sets of tables that no fit has seen."""
    predicted, ms = sets.predicted_and_told(kernels, {}).T
    return np.abs(predicted / ms - 1).reshape(-1, 2).mean(0).tolist()


def leave_out(times: Sequence[Times], settings: Times, json_file: Path | None) -> tuple[Kernels, dict[str, float]]:
    """Fits to all, to all but each source, and to the H100 alone, compared; the first of them."""
    own = [settings, sets_of(TRAIN)]
    every, cards = fit([*times, *own])
    alone, _ = fit(own)
    columns = ("shipped", "all", "left out", "H100 alone")
    table = table_of("Measured over predicted, tau, error at that scale", "source", "card", "times", *columns)
    sources = {}
    for source, some in by_source(times).items():
        without, _ = fit([*(part for part in times if part.setup.source != source), *own])
        each = [Agreement.of(some, kernels) for kernels in (AMD_KERNELS, every, without, alone)]
        named = not any(part.setup.inferred for part in some)
        table.add_row(source, "named" if named else "not named", str(each[0].times), *map(str, each))
        sources[source] = {"card_named": named, **dict(zip(columns, map(asdict, each), strict=True))}
    wide_console(180).print(table)
    test = sets_of(TEST)
    result = {
        "sources": sources,
        "held_out_sets_of_the_h100": {"shipped": errors_2(AMD_KERNELS, test), "all": errors_2(every, test)}
        | {"H100 alone": errors_2(alone, test)},
        "kernels": {"all": asdict(every), "H100 alone": asdict(alone)},
        "bandwidths_gb_per_s": cards,
    }
    write_result(json_file, provenance(torch.device("cpu")), result)
    return every, cards


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json", type=Path, help="of --fit: also write the comparison here")
    arguments = parser.parse_args()
    times, settings = published(), measured()
    kernels: Kernels = AMD_KERNELS
    cards: dict[str, float] = {}
    if arguments.fit:
        kernels, cards = leave_out(times, settings, arguments.json)
        print({name: float(f"{getattr(kernels, name):.3g}") for name in FITTED}, cards)
    show([*times, settings], kernels, cards)
    forward, backward = errors_2(kernels, sets_of(TEST))
    print(f"sets of held-out tables on an H100: mean error {forward:.0%} forward, {backward:.0%} backward")


if __name__ == "__main__":
    main()
