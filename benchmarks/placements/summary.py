# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Records of the referee as ratios: geometric means over tasks that both sides place, with bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from common.output import mean_interval, table_of

ANCHOR = "torchrec"
"""Base of the ratios: TorchRec's plan with true pooling factors."""


def summarize(records: Sequence[dict], pool: str | None = None, anchor: str = ANCHOR) -> list[dict[str, Any]]:
    """One row per placer: ratio to the anchor with its 95 % bootstrap interval, wins, infeasible."""
    chosen = [record for record in records if pool in (None, record["pool"])]
    names = list(dict.fromkeys(name for record in chosen for name in [*record["compute_ms"], *record["infeasible"]]))
    rng = np.random.default_rng(0)
    rows = []
    for name in names:
        both = [r for r in chosen if name in r["compute_ms"] and anchor in r["compute_ms"]]
        logs = np.array([math.log(r["compute_ms"][name] / r["compute_ms"][anchor]) for r in both])
        overall = np.array([math.log(r["overall_ms"][name] / r["overall_ms"][anchor]) for r in both])
        rows.append(
            {
                "placer": name,
                "tasks": len(both),
                "infeasible": sum(name in r["infeasible"] for r in chosen),
                "compute": math.exp(logs.mean()) if len(logs) else math.nan,
                "interval": np.exp(mean_interval(logs, rng)).tolist(),
                "overall": math.exp(overall.mean()) if len(logs) else math.nan,
                "wins": float((logs < 0).mean()) if len(logs) else math.nan,
            }
        )
    return sorted(rows, key=lambda row: row["compute"])


def print_table(title: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Rows of :func:`summarize`."""
    table = table_of(title, "placer", "compute", "95 %", "overall", "wins", "infeasible")
    for row in rows:
        low, high = row["interval"]
        table.add_row(
            row["placer"], f"{row['compute']:.3f}", f"{low:.3f}-{high:.3f}", f"{row['overall']:.3f}",
            f"{row['wins']:.0%}", str(row["infeasible"]),
        )  # fmt: skip
    console.print(table)


def print_summary(records: Sequence[dict], console: Console) -> None:
    """A table per pool, and one of all tasks."""
    for pool in [*dict.fromkeys(record["pool"] for record in records), None]:
        count = sum(pool in (None, record["pool"]) for record in records)
        title = f"{pool or 'all pools'}: {count} tasks, measured cost over that of {ANCHOR}"
        print_table(title, summarize(records, pool), console)
    alone = sum(record["one_table_is_the_bottleneck"] for record in records)
    console.print(f"In {alone} of {len(records)} tasks one table alone is the bottleneck: no table-wise room there.")


def draw_figure(records: Sequence[dict], path: Path) -> None:
    """Ratios to the anchor with their intervals, PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [row for row in summarize(records) if not math.isnan(row["compute"])][::-1]
    figure, axes = plt.subplots(figsize=(7, 0.32 * len(rows) + 1.2))
    for position, row in enumerate(rows):
        axes.plot(row["interval"], [position] * 2, color="0.6", linewidth=2)
        axes.plot(row["compute"], position, "o", color="tab:red" if row["placer"] == "dreamshard" else "tab:blue")
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["placer"] for row in rows])
    axes.set_xlabel(f"measured compute over that of {ANCHOR}, {len(records)} tasks, 95 % intervals")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
