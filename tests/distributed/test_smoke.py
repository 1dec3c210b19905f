# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plan, shard and train two steps; also run with other releases of TorchRec (``make test-matrix``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ranks import Rank
from tiny import LOCAL_BATCH, SHAPES, make_planner, shard, train


def _plan_and_train(rank: Rank) -> tuple[dict[str, list[int]], list[float], list[float] | None]:
    planner = make_planner("dreamshard", rank)
    model = shard(planner, rank)
    losses = train(model, rank, steps=2, samples=LOCAL_BATCH * rank.world_size)
    (sharding,) = model.plan.plan.values()
    ranks = {table: parameter.ranks for table, parameter in sharding.items()}
    assert {parameter.sharding_type for parameter in sharding.values()} == {"table_wise"}
    return ranks, losses, list(planner.report().chosen.rank_ms) if rank.rank == 0 else None


def test_plans_and_trains(launch_any: Callable[..., list[Any]]) -> None:
    results = launch_any(_plan_and_train)
    placements, losses, predictions = zip(*results, strict=True)
    assert all(placement == placements[0] for placement in placements)
    assert set(placements[0]) == {f"t{index}" for index in range(len(SHAPES))}
    assert {rank for ranks in placements[0].values() for rank in ranks} == set(range(len(results)))
    assert all(math.isfinite(loss) for rank_losses in losses for loss in rank_losses)
    assert len(predictions[0]) == len(results) and all(cost_ms > 0 for cost_ms in predictions[0])
    assert predictions[1:] == (None,) * (len(results) - 1)
