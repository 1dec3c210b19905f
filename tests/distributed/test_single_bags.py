# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Single ``nn.EmbeddingBag`` modules: what TorchRec cannot run of them is not planned, and what is planned runs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, run_on_ranks
from torch import nn
from torch.nn.functional import embedding_bag
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.search_space.sharding_types import BAGS_OF_MEANS, CW, DP, SLICES_OF_BAGS, TW, WHOLE_BAGS

ROWS, DIM = 50, 8
CASES: dict[str, tuple[str, ParameterConstraints, str]] = {
    "whole": ("sum", ParameterConstraints(sharding_types=[TW]), WHOLE_BAGS.text),
    "slices": ("sum", ParameterConstraints(sharding_types=[CW], min_partition=4), SLICES_OF_BAGS.text),
    "means": ("mean", ParameterConstraints(sharding_types=[DP]), BAGS_OF_MEANS.text),
}
"""Mode, constraint, and why not."""


class Bag(nn.Module):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode=mode, include_last_offset=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(indices, offsets))


def planner(kind: type[EmbeddingShardingPlanner], given: ParameterConstraints | None, **arguments: Any):
    constraints = None if given is None else {"weight": given}
    return kind(Topology(2, "cpu"), batch_size=64, constraints=constraints, stats=[], debug=False, **arguments)


def _run(rank: Rank, kind: type[EmbeddingShardingPlanner], mode: str, given: ParameterConstraints | None) -> str:
    """Return the bag's sharding if its outputs are right, else the error."""
    torch.manual_seed(0)
    plan = planner(kind, given).collective_plan(Bag(mode), [EmbeddingBagSharder()], dist.group.WORLD)
    try:
        model = DistributedModelParallel(Bag(mode), device=rank.device, sharders=[EmbeddingBagSharder()], plan=plan)
        weights = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            if rank.rank in plan.plan["bag"]["weight"].ranks:  # the other one has no such name
                model.state_dict()["bag.weight"].local_shards()[0].tensor.copy_(weights)
        indices, offsets = torch.arange(6 * (rank.rank + 1)), torch.tensor([0, 2, 6 * (rank.rank + 1)])
        pooled = model.module.bag(indices, offsets).wait()
        torch.testing.assert_close(
            pooled, embedding_bag(indices, weights, offsets, include_last_offset=True, mode="sum")
        )
        model(indices, offsets).sum().backward()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return plan.plan["bag"]["weight"].sharding_type


def _all(rank: Rank) -> dict[str, str]:
    found = {name: _run(rank, EmbeddingShardingPlanner, mode, given) for name, (mode, given, _) in CASES.items()}
    return found | {"ours": _run(rank, DreamShardPlanner, "sum", None)}


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    """By rank: its error or sharding type in each case, and for our plan."""
    return run_on_ranks(_all, world_size=2)


@pytest.mark.parametrize("name", CASES)
def test_what_torchrec_cannot_run_is_refused(name: str, told: list[dict[str, str]]) -> None:
    mode, given, reason = CASES[name]
    assert all("Error" in of_rank[name] for of_rank in told)
    with pytest.raises(PlannerError) as refused:
        planner(DreamShardPlanner, given, exact_training=False).plan(Bag(mode), [EmbeddingBagSharder()])
    assert reason in str(refused.value) and "'bag.weight'" in str(refused.value)


def test_one_slice_is_the_whole_bag(told: list[dict[str, str]]) -> None:
    assert [of_rank["ours"] for of_rank in told] == [CW, CW]
    hot = ParameterConstraints(pooling_factors=[500.0])  # worth halving
    made = planner(DreamShardPlanner, hot)
    wide = nn.Sequential(nn.EmbeddingBag(10_000, 64, mode="sum"), nn.Linear(64, 1))
    assert made.plan(wide, [EmbeddingBagSharder()]).plan["0"]["weight"].ranks in ([0], [1])
    assert all(entry.split is None for entry in made.explain().tables)
