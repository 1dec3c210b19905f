# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What TorchRec's ``DistributedModelParallel.reshard`` does with a running job; prints a table.

    PYTHONPATH=.:benchmarks:tests/distributed python tests/distributed/try_reshard.py

On two gloo ranks, one of four pooled tables changes its sharding in the midst of training; the next losses and the
weights are compared with those of a plain torch model by the rules of moving.
"""

from __future__ import annotations

import sys

import ranks
from mixed import TableSpec, whole_weights
from moves import AFTER, BEFORE, OPTIMIZERS, Job, Moving, Result, Sharding, check, sharding_plan
from torch.multiprocessing import ProcessRaisedException

STAYING = {
    "bag1": Sharding("table_wise", (1,)),
    "bag2": Sharding("column_wise", (1, 0), (8, 8)),
    "bag3": Sharding("row_wise"),
}
"""Without a table of each type, before and after, ``reshard`` ends with an IndexError."""
TABLES = {"bags": {name: TableSpec(24, 16) for name in ("bag0", *STAYING)}}
WAYS = {
    "table_wise": Sharding("table_wise", (0,)),
    "table_wise, other rank": Sharding("table_wise", (1,)),
    "column_wise": Sharding("column_wise", (0, 1), (8, 8)),
    "column_wise, other ranks": Sharding("column_wise", (1, 0), (8, 8)),
    "row_wise": Sharding("row_wise"),
    "data_parallel": Sharding("data_parallel"),
}
PAIRS = [(one, other) for one in WAYS for other in WAYS if one != other and "other" not in one]


def resharded(rank: ranks.Rank, before: Moving, after: Moving) -> Result:
    """Train, reshard, go on."""
    job = Job(before, rank)
    losses = job.train(0, BEFORE)
    changed = {"bag0": sharding_plan(after, rank.world_size).plan["bags"]["bag0"]}
    job.model.reshard({"bags": (0.0, changed)}, "bags")
    losses += job.train(BEFORE, AFTER)
    return Result(losses, whole_weights(job.model, rank.world_size))


def tried(one: str, other: str, optimizer: str) -> str:
    """In a word or two."""
    before, after = (Moving(TABLES, {"bag0": WAYS[way], **STAYING}, optimizer) for way in (one, other))
    try:
        result = ranks.run_on_ranks(resharded, before, after, world_size=2)[0]
    except TimeoutError:
        return "hangs"
    except ProcessRaisedException as error:
        said = [line for line in str(error).splitlines() if "Error" in line.partition(":")[0]]
        return f"error: {said[-1][:80] if said else 'unknown'}"
    try:
        check(result, before, after)
    except AssertionError as error:
        return f"wrong: {str(error).splitlines()[0]}"
    return "equal"


if __name__ == "__main__":
    ranks.TIMEOUT_SECONDS = 60
    chosen = [pair for pair in PAIRS if not sys.argv[1:] or pair[1] in sys.argv[1:]]
    print("| from | to |", *(f"{optimizer} |" for optimizer in OPTIMIZERS), flush=True)
    for one, other in chosen:
        print(f"| {one} | {other} |", *(f"{tried(one, other, kind)} |" for kind in OPTIMIZERS), flush=True)
