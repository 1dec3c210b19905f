# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compare the roofline model of CPU kernels with one kind of CPU, and fit its parameters to it.

    python benchmarks/cpu_prior.py [FILE.test.npz ...]   # errors of the parameters that ship, on test data and on yours
    python benchmarks/cpu_prior.py --fit                 # and fitted anew to the training data

Errors are those at the best scale of each optimizer and direction: the level is the topology's bandwidth, and only the
shape is fitted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import minimize

from common.output import table_of, wide_console
from dreamshard_planner.cost.correction import DIRECTIONS, OPTIMIZERS
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import predict_ms
from dreamshard_planner.cost.roofline import CPU_KERNELS, Kernels, RooflineCost
from dreamshard_planner.workload.tables import optimizer_of

DATA = Path(__file__).parent / "data"
TRAIN = [DATA / f"cpu-train-{name}.npz" for name in ("broad", "wide", "shards")]
TEST = [DATA / f"cpu-test-{name}.npz" for name in ("broad", "wide", "shards")]
BY_BANDWIDTH = Kernels()
"""Bytes over bandwidth, and a launch."""
FITTED = (
    "cache_speedup", "gradient_speedup", "row_bytes", "update_bytes", "lookup_bytes", "table_bytes", "lane_dims",
    "forward_launch_ms", "backward_launch_ms",
)  # fmt: skip
FROM = replace(CPU_KERNELS, table_bytes=3e4)
"""Start of the fit; each parameter's first step doubles it."""
MEMORY_BYTES_PER_MS = 51.2e6
"""TorchRec's for CPUs. Launches are the only times that do not follow it."""
SETS = 400
"""Random sets of each file: each parameter is in all of them."""


def read(path: Path, count: int | None = None) -> LabelledSets:
    """Sets of a file, all or so many."""
    sets = LabelledSets.of_dataset(CostDataset.load(path))
    if count is None or len(sets) <= count:
        return sets
    return sets.select(torch.randperm(len(sets), generator=torch.Generator().manual_seed(0))[:count].sort().values)


def logs(sets: LabelledSets, kernels: Kernels) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Optimizer, direction, and logs of predicted over measured, less their median."""
    cost = RooflineCost(MEMORY_BYTES_PER_MS, MEMORY_BYTES_PER_MS, kernels)
    log_X2 = (predict_ms(cost, sets).double() / sets.labels_ms_X2.double()).log()
    optimizer_X = optimizer_of(sets.features_SF[sets.offsets_X1[:-1]])
    for index, name in enumerate(OPTIMIZERS):
        for direction in range(2):
            log_X = log_X2[optimizer_X == index, direction]
            if len(log_X):
                yield name, direction, log_X - log_X.median()


def fit(files: Sequence[LabelledSets]) -> Kernels:
    """The parameters with the least mean of these logs' sizes; outliers count as a factor of e."""

    def kernels(shares: np.ndarray) -> Kernels:
        return replace(
            FROM, **{name: getattr(FROM, name) * 2**share for name, share in zip(FITTED, shares, strict=True)}
        )

    def loss(shares: np.ndarray) -> float:
        each = [log_X.abs().clamp_max(1).mean() for sets in files for _, _, log_X in logs(sets, kernels(shares))]
        return float(torch.stack(each).mean())

    corners = np.vstack([np.zeros(len(FITTED)), np.eye(len(FITTED))])
    options = {"initial_simplex": corners, "maxiter": 1000, "xatol": 0.02, "fatol": 1e-4}
    return kernels(minimize(loss, corners[0], method="Nelder-Mead", options=options).x)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="cost datasets beside the test data")
    parser.add_argument("--fit", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways = {"bandwidth": BY_BANDWIDTH, "ships": CPU_KERNELS}
    if arguments.fit:
        ways["fitted"] = fit([read(path, SETS) for path in TRAIN])
        print({name: round(getattr(ways["fitted"], name), 3) for name in FITTED})
    table = table_of("Mean error at the best scale", "file", "optimizer", "direction", *ways)
    for path in (*TEST, *arguments.files):
        told = [list(logs(read(path), kernels)) for kernels in ways.values()]
        for rows in zip(*told, strict=True):
            errors = [float((log_X.exp() - 1).abs().mean()) for *_, log_X in rows]
            name, direction, _ = rows[0]
            table.add_row(path.name, OPTIMIZERS[name], DIRECTIONS[direction], *(f"{error:.0%}" for error in errors))
    wide_console().print(table)


if __name__ == "__main__":
    main()
