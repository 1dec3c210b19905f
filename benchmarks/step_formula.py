# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Do training steps cost what was predicted for their placements, and by which formula?

    torchrun --standalone --nproc_per_node=2 benchmarks/run_dlrm.py --planners dreamshard,torchrec --skewed 22 \
        --max-rows 30000 --copies 2 --steps 80 --json result.json
    python benchmarks/step_formula.py result.json

For many placements of one model, from balanced to badly skewed, the embedding work that was predicted stands next to
what the kernels took in the steps and to the steps themselves, whose other parts no placement changes. Two formulas
for the compute of a step over devices d with forward f and backward b:

    max(f+b)        max_d (f_d + b_d): between all-to-alls a rank runs one step's backward and the next one's forward
    max f + max b   max_d f_d + max_d b_d: ranks meet between backward and forward too

Writes a PNG beside the result.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import kendalltau

from common.output import table_of, wide_console

FORMULAS = {
    "max(f+b)": lambda forward_ND, backward_ND: (forward_ND + backward_ND).max(-1),
    "max f + max b": lambda forward_ND, backward_ND: forward_ND.max(-1) + backward_ND.max(-1),
}


@dataclass(frozen=True)
class Agreement:
    """How one formula's predictions of N placements stand to what was measured."""

    formula: str
    kernels: float
    """Kendall's tau between predicted and measured kernels, both by the formula."""
    kernels_error: float
    """Median relative error of them."""
    steps: float
    """Kendall's tau between predicted overall cost and measured steps."""
    steps_interval: tuple[float, float]
    """95 % bootstrap interval of it, over placements."""
    slope: float
    """Milliseconds of step per millisecond predicted, least squares; 1 where nothing hides a cost."""


def columns(result: dict[str, Any]) -> dict[str, np.ndarray]:
    """Of a file of run_dlrm.py: predicted and measured milliseconds of its placements."""
    entries = result["planners"]
    if len(entries) < 3:
        raise ValueError(
            f"a rank correlation takes at least 3 placements, the file has {len(entries)}: try --skewed 20"
        )
    predicted = [entry["predicted"] for entry in entries]
    return {
        "forward_ND": np.array([entry["forward_ms"] for entry in predicted]),
        "backward_ND": np.array([entry["backward_ms"] for entry in predicted]),
        "collectives_N": np.array([entry["collectives_ms"] for entry in predicted]),
        "measured_forward_ND": np.array([entry["forward_ms"] for entry in entries]),
        "measured_backward_ND": np.array([entry["backward_ms"] for entry in entries]),
        "step_N": np.array([entry["step_ms"][1] for entry in entries]),
    }


def agreement(formula: str, data: dict[str, np.ndarray], draws: int = 1000) -> Agreement:
    """Of one formula."""
    compute = FORMULAS[formula]
    kernels_N = compute(data["forward_ND"], data["backward_ND"])
    measured_N = compute(data["measured_forward_ND"], data["measured_backward_ND"])
    overall_N, step_N = kernels_N + data["collectives_N"], data["step_N"]
    generator = np.random.default_rng(0)
    resampled = [generator.integers(len(step_N), size=len(step_N)) for _ in range(draws)]
    taus = [kendalltau(overall_N[draw], step_N[draw]).statistic for draw in resampled]
    taus = [tau for tau in taus if not math.isnan(tau)] or [math.nan]  # a draw may hold one placement only
    return Agreement(
        formula=formula,
        kernels=float(kendalltau(kernels_N, measured_N).statistic),
        kernels_error=float(np.median(np.abs(kernels_N / measured_N - 1))),
        steps=float(kendalltau(overall_N, step_N).statistic),
        steps_interval=tuple(np.percentile(taus, (2.5, 97.5)).tolist()),
        slope=float(np.polyfit(overall_N, step_N, 1)[0]),
    )


def print_tables(result: dict[str, Any], data: dict[str, np.ndarray], console: Console) -> None:
    """Placements from cheap to expensive, and how the formulas hold."""
    config, hardware = result["config"], result["provenance"]["hardware"]["name"]
    title = f"{result['world_size']} ranks x {config['batch_size']} samples, {hardware}; milliseconds"
    headings = ("predicted per rank", "measured", "f + b", "measured", "collectives", "overall", "step")
    table = table_of(title, "placement", *headings)
    kernels_ND = data["forward_ND"] + data["backward_ND"]
    measured_ND = data["measured_forward_ND"] + data["measured_backward_ND"]
    overall_N = kernels_ND.max(-1) + data["collectives_N"]
    for index in np.argsort(overall_N):
        table.add_row(
            result["planners"][index]["name"],
            " ".join(f"{value:.1f}" for value in kernels_ND[index]),
            " ".join(f"{value:.1f}" for value in measured_ND[index]),
            f"{kernels_ND[index].max():.1f}",
            f"{measured_ND[index].max():.1f}",
            f"{data['collectives_N'][index]:.1f}",
            f"{overall_N[index]:.1f}",
            f"{data['step_N'][index]:.1f}",
        )
    console.print(table)
    for formula in FORMULAS:
        entry = agreement(formula, data)
        low, high = entry.steps_interval
        console.print(
            f"{formula:14} kernels: tau {entry.kernels:.2f}, {entry.kernels_error:.1%} off in the median; with "
            f"collectives against steps: tau {entry.steps:.2f} ({low:.2f}-{high:.2f}), {entry.slope:.2f} ms of step "
            "per ms predicted"
        )


def draw_figure(data: dict[str, np.ndarray], path: Path) -> None:
    """Steps over predicted overall cost, by both formulas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(FORMULAS), figsize=(8, 3.6), sharey=True)
    for ax, (name, compute) in zip(axes, FORMULAS.items(), strict=True):
        overall_N = compute(data["forward_ND"], data["backward_ND"]) + data["collectives_N"]
        ax.plot(overall_N, data["step_N"], "o")
        ax.set_xlabel(f"predicted: {name} + collectives, ms")
    axes[0].set_ylabel("measured step, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of run_dlrm.py")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    try:
        data = columns(result)
    except ValueError as error:
        parser.error(f"{args.result}: {error}")
    print_tables(result, data, wide_console(140))
    draw_figure(data, args.result.with_suffix(".png"))


if __name__ == "__main__":
    main()
