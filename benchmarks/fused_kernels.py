# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure the bandwidth of fused kernels, and how far a set of tables is from the sum of its tables.

    python benchmarks/fused_kernels.py --json benchmarks/results/2026-11-21-fused-kernels.json

Around one base set (16 tables, dim 64, 16 lookups per sample, every row that a batch reads read twice), a single
property varies at a time: tables in the set, dim, pooling factor, reuse. Each set is timed as one fused kernel and,
beside it, one of its tables alone.

    GB/s       bytes that the pass has to move at least, over its time; as a share of the copy bandwidth
               measured here: reading and writing count alike
    fusion     time of the fused set over that of its tables one by one: 1 is additive

Forward bytes: indices, one vector per lookup, the output. Backward: indices, the output's gradient, and each distinct
row read and written. Repeated reads that hit a cache can exceed the copy bandwidth.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch

from common.measured_costs import spread
from common.output import provenance, table_of, wide_console, write_result
from dreamshard_planner.measure.kernels import Arena, FusedKernel, time_groups
from dreamshard_planner.measure.sets import REFERENCE_SETS
from dreamshard_planner.support.reproducible import single_thread
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.reuse import NUM_REUSE_BINS, bin_mean_reuse
from dreamshard_planner.workload.tables import INDEX_BYTES, OUTPUT_BYTES, Table, Workload, workloads_of

MIN_ROWS = 1_000_000


@dataclass(frozen=True)
class Shape:
    """Equal tables of one set."""

    tables: int = 16
    dim: int = 64
    pooling: int = 16
    reuse_bin: int = 1
    """Every row that a batch reads is read as often as this bin of the histogram says: 0 once, 1 twice, 2 3-4 times."""

    @property
    def reuse(self) -> float:
        """Reads of a row per batch."""
        return float(bin_mean_reuse()[self.reuse_bin])

    def workloads(self, batch_size: int, optimizer: str) -> list[Workload]:
        """Equal but for their names, so that each has indices of its own."""
        histogram = tuple(float(i == self.reuse_bin) for i in range(NUM_REUSE_BINS))
        features = (FeatureStatistics(self.pooling, histogram, batch_size),)
        rows = max(MIN_ROWS, 2 * self.pooling * batch_size)  # enough for as many distinct rows as the reuse asks for
        tables = [Table(f"{self}.{i}", rows, self.dim, features, optimizer=optimizer) for i in range(self.tables)]
        return workloads_of(tables, batch_size)


BASE = Shape()
SWEEPS: dict[str, tuple[int, ...]] = {
    "tables": (1, 2, 4, 8, 16, 32, 64),
    "dim": (4, 16, 32, 64, 128, 256),
    "pooling": (1, 4, 16, 64),
    "reuse_bin": (0, 1, 3, 5, 7),
}


def moved_bytes(workloads: Sequence[Workload]) -> tuple[float, float]:
    """Least traffic of the forward and of the backward pass."""
    indices = sum(w.lookups for w in workloads) * INDEX_BYTES
    output = sum(w.output_elements for w in workloads) * OUTPUT_BYTES
    looked_up = sum(w.lookups * w.dim * w.weight_bytes for w in workloads)
    updated = sum(w.distinct_rows * w.dim * w.weight_bytes for w in workloads)
    return indices + looked_up + output, indices + output + 2 * updated


def copy_gb_per_s(device: torch.device, repeats: int = 9) -> float:
    """Bytes read and written per second when a tensor far larger than the caches is copied; median."""
    elements = (1 << 28) if device.type == "cuda" else (1 << 26)
    source, target = (torch.ones(elements, device=device) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / sorted(seconds[1:])[repeats // 2] / 1e9


def measure(args: argparse.Namespace, copy: float) -> Iterator[list[dict[str, Any]]]:
    """A row per shape, sweep by sweep."""
    arena = Arena(args.device, seed=args.seed)
    reference = FusedKernel(REFERENCE_SETS[args.device], arena, args.seed)
    for sweep in args.sweeps:
        shapes = [replace(BASE, **{sweep: value}) for value in SWEEPS[sweep]]
        sets = [shape.workloads(args.batch_size, args.optimizer) for shape in shapes]
        kernels = [FusedKernel(part, arena, args.seed) for full in sets for part in (full, full[:1])]
        timed = time_groups(kernels, reference, args.repeats, warmup=3)
        median_X2, spread_X2 = timed.samples_ms.quantile(0.5, dim=1), spread(timed.samples_ms)
        rows = []
        for place, (shape, workloads) in enumerate(zip(shapes, sets, strict=True)):
            fused_2, alone_2, moved = median_X2[2 * place], median_X2[2 * place + 1], moved_bytes(workloads)
            rows.append(
                {
                    "sweep": sweep,
                    "shape": asdict(shape) | {"reuse": shape.reuse},
                    "ms": fused_2.tolist(),
                    "spread": spread_X2[2 * place].tolist(),
                    "gb_per_s": [b / ms / 1e6 for b, ms in zip(moved, fused_2.tolist(), strict=True)],
                    "of_copy": [b / ms / 1e6 / copy for b, ms in zip(moved, fused_2.tolist(), strict=True)],
                    "fusion": (fused_2 / (shape.tables * alone_2)).tolist(),
                    "launch_bound": float(timed.launch_bound_N[2 * place]),
                }
            )
        yield rows


def print_rows(rows: Sequence[dict[str, Any]], copy: float) -> None:
    """For people."""
    title = f"fused kernels, forward / backward; copy bandwidth {copy:.1f} GB/s"
    table = table_of(title, "varied", "value", "ms", "GB/s", "of copy", "fusion")
    for row in rows:
        shape = row["shape"]
        name = "reuse" if row["sweep"] == "reuse_bin" else row["sweep"]
        pairs = (("ms", "{:.2f}"), ("gb_per_s", "{:.1f}"), ("of_copy", "{:.0%}"), ("fusion", "{:.2f}"))
        cells = (" / ".join(form.format(value) for value in row[key]) for key, form in pairs)
        table.add_row(name, f"{shape[name]:g}", *cells)
    wide_console().print(table)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS), help="properties to vary")
    parser.add_argument("--batch-size", type=int, help="default: 512 on CPU, 65,536 on CUDA")
    parser.add_argument("--optimizer", default="rowwise_adagrad", choices=("sgd", "rowwise_adagrad"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no sweep later than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    args.batch_size = args.batch_size or (512 if args.device == "cpu" else 65_536)
    deadline, rows = time.monotonic() + args.seconds, []
    with single_thread():
        copy = copy_gb_per_s(torch.device(args.device))
        origin = provenance(torch.device(args.device)) | {"batch_size": args.batch_size, "copy_gb_per_s": copy}
        for swept in measure(args, copy):
            rows += swept
            write_result(args.json, origin, {"rows": rows})
            if time.monotonic() > deadline:
                break
    print_rows(rows, copy)


if __name__ == "__main__":
    main()
