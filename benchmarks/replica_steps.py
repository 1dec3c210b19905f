# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What data-parallel tables add to a step on a GPU beside fused ones, and what the planner takes them to.

    torchrun --standalone --nproc_per_node=1 benchmarks/replica_steps.py --json replicas.json

Four tables of dim 64 in one module, replicated and whole in turn, a forward and a backward of the module alone, timed
by events of the device. One rank: gradients pass through DDP's bucket and the optimizer, but over no link.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import common.fast_kernels  # noqa: F401 (before torch)

# isort: split
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dlrm.node import Node
from dlrm.options import OPTIMIZERS
from dreamshard_planner import DistributedModelParallel
from dreamshard_planner.cost.roofline import DENSE_PASSES, dense_ms

ROWS = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
TABLES, DIM, BATCH, POOLING = 4, 64, 4096, 10
WARM_UP = 10


def step_ms(rows: int, optimizer: str, kind: str, device: torch.device, steps: int) -> tuple[float, float]:
    """Median of forward and backward."""
    names = [f"t{index}" for index in range(TABLES)]
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name]) for name in names
    ]
    bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], bags.parameters(), {"lr": 0.01})
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], compute_kernels=["fused", "dense"]) for name in names
    }
    topology = Topology(1, device.type, hbm_cap=64 << 30, ddr_cap=64 << 30)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, stats=[], debug=False)
    model = DistributedModelParallel(bags, device=device, plan=planner.collective_plan(bags, None, dist.group.WORLD))
    generator = torch.Generator(device).manual_seed(0)
    lengths_B = torch.full((TABLES * BATCH,), POOLING, dtype=torch.int32, device=device)
    times = []
    for step in range(steps + WARM_UP):
        ids_N = torch.randint(rows, (TABLES * BATCH * POOLING,), generator=generator, device=device)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        gradient_BE = torch.rand(BATCH, TABLES * DIM, generator=generator, device=device)
        torch.cuda.synchronize()
        marks[0].record()
        pooled_BE = model(KeyedJaggedTensor(names, ids_N, lengths=lengths_B)).values()
        marks[1].record()
        pooled_BE.backward(gradient_BE)
        marks[2].record()
        torch.cuda.synchronize()
        if step >= WARM_UP:
            times.append((marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])))
    forward_ms, backward_ms = map(statistics.median, zip(*times, strict=True))
    return forward_ms, backward_ms


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    device = Node.join().device
    rows: list[dict[str, Any]] = []
    origin = provenance(device) | {"tables": TABLES, "dim": DIM, "batch": BATCH, "pooling": POOLING}
    table = table_of("forward / backward, ms", "tables", "whole", "replicated", "more in the backward", "predicted")
    for optimizer, count in product(OPTIMIZERS, ROWS):
        whole, replicated = (
            step_ms(count, optimizer, kind, device, args.steps) for kind in ("table_wise", "data_parallel")
        )
        elements = torch.tensor([float(TABLES * count * DIM)])
        predicted = dense_ms(elements, DENSE_PASSES[optimizer], Topology(1, "cuda", hbm_mem_bw=3350e9 / 1e3)).item()
        rows.append({"optimizer": optimizer, "rows": count, "whole_ms": whole, "replicated_ms": replicated})
        rows[-1] |= {"predicted_more_ms": predicted}
        write_result(args.json, origin, {"rows": rows})
        pairs = (f"{forward:.3f} / {backward:.3f}" for forward, backward in (whole, replicated))
        table.add_row(f"{optimizer}, {count:,}", *pairs, f"{replicated[1] - whole[1]:.3f}", f"{predicted:.3f}")
    wide_console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
