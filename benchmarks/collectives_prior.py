# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare predicted collectives between GPUs with published times, and fit the shares of bandwidth to them.

    python benchmarks/collectives_prior.py          # predicted beside published
    python benchmarks/collectives_prior.py --fit    # shares fitted to all rows, and to all sources but one in turn

The rows: ``benchmarks/data/published_collectives.json``. The formula: ``dreamshard_planner/cost/collectives.py``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import least_squares
from scipy.stats import kendalltau

from dreamshard_planner.cost.collectives import NCCL, Interconnect, Reached

PUBLISHED = Path(__file__).parent / "data" / "published_collectives.json"
BOUNDS = Reached(
    inside=(0.3, 1.0), all_to_all=(0.3, 1.0), rings=(0.3, 1.0), inside_ms=(0.002, 0.2), between_ms=(0.002, 0.5)
)


@dataclass(frozen=True)
class Row:
    """One published time."""

    source: str
    card: str
    operation: str
    hosts: int
    ranks_per_host: int
    link_gb_per_s: float
    network_gb_per_s: float
    size_bytes: int
    ms: float

    def predicted_ms(self, reached: Reached) -> float:
        made = Interconnect(
            self.hosts * self.ranks_per_host,
            self.ranks_per_host,
            self.link_gb_per_s * 1e6,
            self.network_gb_per_s * 1e6,
            reached,
        )
        operation = {"all_gather": made.reduce_scatter}.get(self.operation) or getattr(made, self.operation)
        sent_D = torch.full((made.ranks,), self.size_bytes / made.ranks, dtype=torch.float64)
        return float(operation().all_to_all_ms(sent_D))


def published() -> list[Row]:
    rows = json.loads(PUBLISHED.read_text())["rows"]
    names = ("source", "card", "operation", "hosts", "ranks_per_host", "link_gb_per_s", "network_gb_per_s")
    return [Row(*(row[name] for name in names), size_bytes=row["bytes"], ms=row["us"] / 1e3) for row in rows]


def fit(rows: Sequence[Row]) -> Reached:
    """Shares and latencies that explain the rows best, by the log of predicted over published."""
    low, high = np.log(np.array(astuple(BOUNDS)).T)
    residuals = lambda logs: [np.log(row.predicted_ms(Reached(*np.exp(logs))) / row.ms) for row in rows]  # noqa: E731
    found = least_squares(residuals, (low + high) / 2, bounds=(low, high), loss="soft_l1", f_scale=0.3)
    return Reached(*np.exp(found.x).tolist())


def told(rows: Sequence[Row], reached: Reached, each: bool = True) -> None:
    predicted, ms = np.array([(row.predicted_ms(reached), row.ms) for row in rows]).T
    for row, mine in zip(rows, predicted, strict=True) if each else ():
        size = f"{row.hosts} x {row.ranks_per_host} {row.size_bytes:>12,} B"
        print(f"  {row.card:<38} {row.operation:<11} {size} {row.ms:9.3f}  predicted {mine:9.3f}  {row.ms / mine:5.2f}")
    factor = ms / predicted
    tau = kendalltau(predicted, ms).statistic if len(rows) > 2 else float("nan")
    low, median, high = np.quantile(factor, [0.1, 0.5, 0.9])
    print(f"  {len(rows)} rows: published over predicted {median:.2f} ({low:.2f} to {high:.2f}); tau {tau:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    rows = published()
    if not parser.parse_args().fit:
        told(rows, NCCL)
        return
    print(found := fit(rows))
    told(rows, found)
    for source in sorted({row.source for row in rows}):
        print(f"without {source}:", without := fit([row for row in rows if row.source != source]))
        told([row for row in rows if row.source == source], without, each=False)


if __name__ == "__main__":
    main()
