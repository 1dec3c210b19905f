# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a data-parallel table costs beside what a fused one would: FBGEMM's dense kernels, measured.

    python benchmarks/dense_kernels.py --json benchmarks/results/2026-11-22-dense-kernels.json

TorchRec computes the data-parallel tables of a module by one dense kernel: its backward makes a gradient as large as
the tables, and an optimizer outside of it reads that and writes every weight. Random sets of tables that a rank might
replicate are timed so (SGD), each run beside one of a fixed reference set, by the processor time of one thread. Of
each set, the first run is not counted.

    fit         milliseconds per element that gradient and optimizer add to the fused backward pass as predicted, for
                gradients up to 32 MiB and beyond: above, glibc's malloc gives memory back, and each gradient's pages
                are new ones
    shipped     errors of forward, and of backward with optimizer, as the planner predicts them
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from rich.console import Console
from scipy.optimize import nnls
from torch import Tensor
from torchrec.distributed.planner import Topology

from common.output import write_result
from common.provenance import provenance
from cost_accuracy import STAGES, errors
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.fit import LabelledSets, predict_ms
from dreamshard_planner.cost.roofline import CPU_DENSE_PASSES, FRESH_BYTES, dense_ms
from dreamshard_planner.measure.collect import REFERENCE_SETS, draw_sets
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.training import pool_tables
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Workload

POOLS = ("meta_like_2021", "merlin_small", "wide")
BATCH_SIZES = (64, 256, 1024, 4096)
"""Local: a replica sees the batch of its rank alone."""
MAX_TABLE_BYTES, MAX_SET_BYTES = 1 << 27, 1 << 29
MAX_WORK = 20e6


def replicated_sets(count: int, seed: int) -> list[list[Workload]]:
    """Sets of held-out tables as replicas, small enough that their gradients fit."""
    tables = [table for table in pool_tables(POOLS)[1] if table.size_bytes <= MAX_TABLE_BYTES]
    plain = {"pooled": True, "weighted": False, "weight_bytes": 4, "optimizer": "sgd"}
    drawn = draw_sets(tables, count, seed, BATCH_SIZES, max_tables=20, max_work=MAX_WORK)
    sets = [[replace(workload, **plain) for workload in workloads] for workloads in drawn]
    return [workloads for workloads in sets if elements(workloads) * OUTPUT_BYTES <= MAX_SET_BYTES]


def elements(workloads: Sequence[Workload]) -> int:
    """Of a set's tables, and of its gradient."""
    return sum(workload.rows * workload.dim for workload in workloads)


def measure(sets: Sequence[Sequence[Workload]], repeats: int) -> tuple[Tensor, Tensor]:
    """Forward, and backward with optimizer, of each set, and the reference set's time beside it; medians, [X, 2] and
    [X] milliseconds of processor time."""
    arena = Arena("cpu")
    reference = FusedKernel(REFERENCE_SETS["cpu"], "cpu", arena=arena)
    timed = [_runs(workloads, reference, arena, repeats) for workloads in sets]
    times_XR3 = torch.tensor(timed, dtype=torch.float64) / 1e6
    median_X3 = times_XR3[:, 1:].quantile(0.5, dim=1)
    return median_X3[:, :2], median_X3[:, 2]


def _runs(workloads: Sequence[Workload], reference: FusedKernel, arena: Arena, repeats: int) -> list[list[int]]:
    inputs = FusedKernel(workloads, "cpu", arena=arena)  # the same indices and gradients as a fused kernel has
    dense = DenseTableBatchedEmbeddingBagsCodegen(
        [(workload.rows, workload.dim) for workload in workloads],
        feature_table_map=[t for t, workload in enumerate(workloads) for _ in range(workload.num_features)],
        use_cpu=True,
    )
    optimizer = torch.optim.SGD(dense.parameters(), lr=1e-3)
    weights_N, count = arena.weights(torch.float32), dense.weights.numel()
    runs = []
    for _ in range(1 + repeats):
        (start,) = arena.windows([count], weights_N.numel())
        dense.weights.data = weights_N[start : start + count]  # cold rows, as fused kernels find them
        reference.move()
        marks = [time.thread_time_ns()]
        reference.forward()
        reference.backward()
        marks.append(time.thread_time_ns())
        output = dense(inputs.indices_L, inputs.offsets_FB)
        marks.append(time.thread_time_ns())
        output.backward(inputs.grad_O)
        optimizer.step()
        marks.append(time.thread_time_ns())
        optimizer.zero_grad()
        del output
        runs.append([marks[2] - marks[1], marks[3] - marks[2], marks[1] - marks[0]])
    return runs


def fit(elements_X: Tensor, added_ms_X: Tensor, measured_ms_X: Tensor) -> dict[str, float]:
    """Relative least squares of what was added to the fused backward."""
    fresh_X = elements_X * (elements_X * OUTPUT_BYTES >= FRESH_BYTES)
    design_X2 = (torch.stack([elements_X, fresh_X], dim=-1) / measured_ms_X[:, None]).numpy()
    scale_2 = np.linalg.norm(design_X2, axis=0)
    solution_2, _ = nnls(design_X2 / scale_2, (added_ms_X / measured_ms_X).numpy())
    return dict(zip(("ms_per_element", "fresh_ms_per_element"), (solution_2 / scale_2).tolist(), strict=True))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    checkpoint = resolve("auto", "cpu")
    sets = replicated_sets(args.sets, args.seed)
    with pinned(1):
        result: dict[str, Any] = provenance(torch.device("cpu")) | {"sets": len(sets)}
        measured_X2, reference_X = measure(sets, args.repeats)
    measured_X2 *= (checkpoint.metadata["reference_ms"] / reference_X)[:, None]
    fused_X2 = predict_ms(checkpoint.cost, LabelledSets.of(sets, measured_X2)).double()
    elements_X = torch.tensor([elements(workloads) for workloads in sets], dtype=torch.float64)
    topology = Topology(world_size=2, compute_device="cpu")
    predicted_X2 = fused_X2 + torch.stack(
        [torch.zeros_like(elements_X), dense_ms(elements_X, CPU_DENSE_PASSES, topology)], dim=-1
    )
    result["fit"] = fit(elements_X, measured_X2[:, 1] - fused_X2[:, 1], measured_X2[:, 1])
    large_X = elements_X * OUTPUT_BYTES >= FRESH_BYTES
    kinds = {"all": large_X | ~large_X, "gradient to 32 MiB": ~large_X, "above": large_X}
    result["shipped"] = {
        kind: errors(predicted_X2[chosen_X], measured_X2[chosen_X]) | {"sets": int(chosen_X.sum())}
        for kind, chosen_X in kinds.items()
    }
    result["samples"] = torch.cat([elements_X[:, None], fused_X2, measured_X2], dim=-1).tolist()
    console = Console()
    console.print(result["fit"])
    for kind, of_kind in result["shipped"].items():
        shares = ", ".join(f"{stage} {of_kind[stage]['mape']:.1%}" for stage in STAGES)
        console.print(f"{kind} ({of_kind['sets']} sets): {shares}")
    write_result(args.json, result)


if __name__ == "__main__":
    main()
