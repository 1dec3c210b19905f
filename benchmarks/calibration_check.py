# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Whether calibration can harm: errors of costs before and after it, on sets that have nothing to do with its own.

    python benchmarks/calibration_check.py --runs 3 --seconds 60
    python benchmarks/calibration_check.py --runs 3 --seconds 60 --force --json calibration.json

Each run draws ten sets per optimizer (SGD, row-wise Adagrad, Adagrad) of random tables: dims 4 to 256, 1e3 to 1e6 rows,
1 to 100 lookups per sample, batches of 256 to 8,192; times them as fused kernels by processor time; calibrates the
checkpoint for ``--seconds``; and times them again. Predictions before and after are held against both timings together.
A calibration that refuses leaves its checkpoint as it was. ``harm`` counts errors that grew by more than two points,
``broken`` those above 20 % where calibration says "good".
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
from torch import Tensor

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.checkpoints.checkpoint import Checkpoint, resolve
from dreamshard_planner.cost.correction import OPTIMIZERS
from dreamshard_planner.cost.fit import LabelledSets, mape_2, predict_ms
from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.timing import pinned, processor_time, time_groups
from dreamshard_planner.training import calibrate
from dreamshard_planner.workload.tables import FeatureStatistics, Table, Workload, workloads_of

SETS, REPEATS = 10, 3
MAX_LOOKUP_ELEMENTS = 150e6
"""Of a set, so that a run takes no hour."""


def draw(rng: random.Random, optimizer: str) -> list[list[Workload]]:
    """Ten random sets."""
    sets: list[list[Workload]] = []
    while len(sets) < SETS:
        batch_size = int(2 ** rng.uniform(8, 13))
        tables = [
            Table(
                name=f"{optimizer} {len(sets)} {index}",
                rows=int(10 ** rng.uniform(3, 6)),
                dim=4 * rng.randint(1, 64),
                features=(FeatureStatistics(rng.uniform(1, 100)),),
                optimizer=optimizer,
            )
            for index in range(int(math.exp(rng.uniform(0, math.log(16)))))
        ]
        group = workloads_of(tables, batch_size)
        if sum(workload.lookups * workload.dim for workload in group) <= MAX_LOOKUP_ELEMENTS:
            sets.append(group)
    return sets


def timed_ms(sets: list[list[Workload]], seed: int) -> Tensor:
    """All samples of each set, [X, R, 2]."""
    arena, samples = Arena("cpu", 1 << 30, seed=seed), []
    with pinned(1), processor_time():
        for group in sets:  # one at a time: interleaved they would need the memory of all
            samples += time_groups([FusedKernel(group, "cpu", seed, arena)], REPEATS)
    arena.release()
    return torch.stack([one.samples_ms for one in samples])


def errors(checkpoint: Checkpoint, sets: LabelledSets) -> dict[str, list[float]]:
    """Mean errors, forward and backward, by optimizer."""
    compute = checkpoint.compute_cost(Machine(ranks_per_host=1, device="cpu").topology())
    predicted_X2 = predict_ms(compute, sets)
    parts = zip(predicted_X2.split(SETS), sets.labels_ms_X2.split(SETS), strict=True)
    return {name: mape_2(*values).tolist() for name, values in zip(OPTIMIZERS, parts, strict=True)}


def run(start: Checkpoint, seed: int, seconds: float, force: bool) -> dict[str, Any]:
    """One calibration between two timings of the same sets."""
    rng = random.Random(seed)
    sets = [group for optimizer in OPTIMIZERS for group in draw(rng, optimizer)]
    first = timed_ms(sets, seed)
    refused, made, told = "", start, {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = calibrate(
                start, Path(folder) / "c.safetensors", seconds=seconds, seed=seed, force=force, progress=False
            )
            told = made.metadata["calibration"]
        except CalibrationRefused as error:
            refused = str(error)
    labels_ms_X2 = torch.cat([first, timed_ms(sets, seed)], dim=1).quantile(0.5, dim=1)
    labelled = LabelledSets.of(sets, labels_ms_X2)
    before, after = errors(start, labelled), errors(made, labelled)
    good = {(check["optimizer"], check["direction"]) for check in told.get("checks", ()) if check["good"]}
    stages = [(name, k, direction) for name in OPTIMIZERS for k, direction in enumerate(("forward", "backward"))]
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "sets": [told.get("sets"), told.get("check_sets")],
        "others_share": told.get("others_share"),
        "refused": refused,
        "good": sorted(map(" ".join, good)),
        "harm": sum(after[name][k] > before[name][k] + 0.02 for name, k, _ in stages),
        "broken": sum(after[name][k] > 0.20 for name, k, direction in stages if (name, direction) in good),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each calibration")
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--force", action="store_true", help="as of dreamshard calibrate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    start, runs = resolve(args.checkpoint, "cpu"), []
    stages = [f"{name} {way}" for name in OPTIMIZERS.values() for way in ("fwd", "bwd")]
    table = table_of("errors before and after, %", "seed", *stages, "good", "harm", "broken", "others", "refused")
    for seed in range(args.seed, args.seed + args.runs):
        runs.append(one := run(start, seed, args.seconds, args.force))
        pairs = zip(*(sum(one[when].values(), []) for when in ("before", "after")), strict=True)
        cells = [f"{100 * before:.0f} > {100 * after:.0f}" for before, after in pairs]
        share = one["others_share"]
        told = (
            len(one["good"]),
            one["harm"],
            one["broken"],
            "-" if share is None else f"{share:.0%}",
            bool(one["refused"]),
        )
        table.add_row(str(seed), *cells, *map(str, told))
    wide_console().print(table)
    write_result(
        args.json, provenance(torch.device("cpu")), {"seconds": args.seconds, "force": args.force}, {"runs": runs}
    )


if __name__ == "__main__":
    main()
