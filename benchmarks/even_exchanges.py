# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What an exchange of outputs and one of gradients take on two gloo ranks, by how many tables of each size lie where.

    torchrun --standalone --nproc_per_node=2 benchmarks/even_exchanges.py --json even.json

Whole tables of 128 columns, 512 samples per rank: the two all-to-alls of a step, nothing beside them. With ``--pin``
each rank keeps to one core, as in the benchmarks of steps.

Shapes: S splits, N exchanges, 3 (milliseconds by the wall clock, of processor time, of those in the system).
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common.output import table_of, wide_console, write_result
from common.provenance import provenance
from dreamshard_planner.measure.ranks import local_ranks
from dreamshard_planner.measure.timing import pinned, rank_cores

SAMPLES, COLUMNS = 512, 128
SPLITS = ((5, 11), (6, 10), (7, 9), (8, 8), (9, 7), (10, 6))
"""Tables of both ranks."""
WARMUP = 10


def exchange(split: tuple[int, int], rank: int) -> tuple[float, float, float]:
    """One of outputs and one of gradients: milliseconds that passed, computed, and of these in the system."""
    sizes = [SAMPLES * COLUMNS * tables for tables in split]
    mine = [sizes[rank]] * len(sizes)
    outputs, gathered = torch.ones(sum(mine)), torch.empty(sum(sizes))
    gradients, returned = torch.ones(sum(sizes)), torch.empty(sum(mine))
    dist.barrier()
    system = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    start, computed = time.perf_counter(), time.process_time()
    dist.all_to_all_single(gathered, outputs, sizes, mine)
    dist.all_to_all_single(returned, gradients, mine, sizes)
    passed_s, computed_s = time.perf_counter() - start, time.process_time() - computed
    return 1e3 * passed_s, 1e3 * computed_s, 1e3 * (resource.getrusage(resource.RUSAGE_SELF).ru_stime - system)


def measured(exchanges: int, rank: int) -> np.ndarray:
    """Of each split, in shuffled turns [S, N, 3]."""
    order, times = random.Random(0), {split: [] for split in SPLITS}
    for _ in range(exchanges + WARMUP):
        for split in order.sample(SPLITS, len(SPLITS)):
            times[split].append(exchange(split, rank))
    return np.array([times[split][WARMUP:] for split in SPLITS])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exchanges", type=int, default=400, help="of each split")
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    local_rank, local_world_size = local_ranks()
    with pinned(1, rank_cores(local_rank, local_world_size)) if given.pin else nullcontext():
        dist.init_process_group("gloo")
        times_SN3 = measured(given.exchanges, dist.get_rank())
    by_rank: list[np.ndarray] = [times_SN3] * dist.get_world_size()
    dist.all_gather_object(by_rank, times_SN3)
    if dist.get_rank() == 0:
        wall_SN = np.stack(by_rank)[..., 0].max(0)
        quartiles_S3 = np.quantile(wall_SN, (0.25, 0.5, 0.75), axis=1).T.round(2).tolist()
        used_S2 = np.stack(by_rank)[..., 1:].sum(0).mean(1).round(2).tolist()
        table = table_of("Both exchanges of a step, ms", "tables", "quartiles, slower rank", "processor time", "system")
        for split, quartiles, used in zip(SPLITS, quartiles_S3, used_S2, strict=True):
            table.add_row("{} + {}".format(*split), str(quartiles), *map(str, used))
        wide_console().print(table)
        rows = [
            {"tables": split, "quartiles_ms": quartiles, "processor_ms": used[0], "system_ms": used[1]}
            for split, quartiles, used in zip(SPLITS, quartiles_S3, used_S2, strict=True)
        ]
        write_result(given.json, provenance(torch.device("cpu")), {"pinned": given.pin, "splits": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
