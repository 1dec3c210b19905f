# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What TorchRec's ``DistributedModelParallel.reshard`` does with a running job: python tests/distributed/try_reshard.py

On two gloo ranks, one of four pooled tables changes its sharding in the midst of training; the next losses and the weights
are compared with those of a plain torch model by the rules of moving. Prints the table of docs/replanning.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "distributed")]

import ranks
import torch
from mixed import TableSpec, whole_weights
from moves import OPTIMIZERS, STEPS, Job, Moving, Result, Sharding, reference, sharding_plan
from torch.multiprocessing import ProcessRaisedException

from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

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
    "row_wise": Sharding("row_wise"),
    "data_parallel": Sharding("data_parallel"),
}
PAIRS = [(one, other) for one in list(WAYS)[0:1] + list(WAYS)[2:] for other in WAYS if one != other]


def resharded(rank: ranks.Rank, before: Moving, after: Moving) -> Result:
    """Train, reshard, go on."""
    job = Job(before, rank)
    losses = job.train(0, STEPS)
    changed = {"bag0": sharding_plan(after, rank.world_size).plan["bags"]["bag0"]}
    job.model.reshard({"bags": (0.0, changed)}, "bags")
    losses += job.train(STEPS, STEPS)
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
    expected = reference(before, after)
    same = torch.allclose(torch.tensor(result.losses), torch.tensor(expected.losses), rtol=1e-5)
    weights = all(torch.allclose(result.weights[name], own, 1e-4, 1e-5) for name, own in expected.weights.items())
    return "equal" if same and weights else "wrong" if same else "wrong losses"


if __name__ == "__main__":
    assert set(SHARDING_TYPES) >= {sharding.kind for sharding in WAYS.values()}
    ranks.TIMEOUT_SECONDS = 60
    print("| from | to |", *(f"{optimizer} |" for optimizer in sys.argv[1:] or OPTIMIZERS), flush=True)
    for one, other in sorted(PAIRS, key=lambda pair: "data_parallel" in pair):
        cells = [tried(one, other, optimizer) for optimizer in sys.argv[1:] or OPTIMIZERS]
        print(f"| {one} | {other} | {' | '.join(cells)} |", flush=True)
