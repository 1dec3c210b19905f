# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fused kernels of observed training steps beside what costs say of them now, whatever the plan was made by.

    python benchmarks/observed_kernels.py --card "NVIDIA H100 80GB HBM3" results/2026-11-26-h100-observed*.json

Observations are those of ``with observe(...)`` or of ``run_dlrm.py --observe``; costs are the checkpoint's that
planning takes for the card, and the roofline model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch

from common.output import table_of, wide_console
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.observing.observation import Observation, ObservedRun
from dreamshard_planner.workload.features import feature_matrix


def predicted_ms(run: ObservedRun, cost: ComputeCost) -> torch.Tensor:
    """Forward and backward of all of a run's kernels, on all ranks, [2]."""
    sets = [kernel.workloads(run.statistics) for rank in run.ranks for kernel in rank.kernels]
    latents = [cost.encode(feature_matrix(workloads)).sum(0, keepdim=True) for workloads in sets]
    return cost.group_cost_ms(torch.cat(latents)).sum(0)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--card", required=True, help="what the driver calls the GPU")
    args = parser.parse_args()
    roofline = RooflineCost.of_card(args.card)
    network = resolve("auto", "cuda", card=args.card).cost or roofline
    table = table_of("fused kernels, forward and backward, ms", "file", "optimizer", "observed", "network", "roofline")
    for path in args.files:
        for run in Observation.load_all([path]).runs:
            observed = [sum(rank.kernel_ms(way) for rank in run.ranks) for way in ("forward", "backward")]
            optimizers = {kernel.optimizer for rank in run.ranks for kernel in rank.kernels}
            both = (observed, predicted_ms(run, network).tolist(), predicted_ms(run, roofline).tolist())
            cells = (f"{forward:.3f} {backward:.3f}, {forward + backward:.3f}" for forward, backward in both)
            table.add_row(path.name, ", ".join(sorted(optimizers)), *cells)
    wide_console().print(table)


if __name__ == "__main__":
    main()
