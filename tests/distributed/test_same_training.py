# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where tables lie must not change what a model learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Rank
from tiny import LOCAL_BATCH, make_planner, shard, train

PLANNERS = ("dreamshard", "torchrec", "lookup_greedy")
STEPS = 20


def _train_under(rank: Rank, planners: tuple[str, ...], samples: int | None = None) -> dict[str, list[float]]:
    samples = samples or LOCAL_BATCH * rank.world_size
    return {name: train(shard(make_planner(name, rank), rank), rank, STEPS, samples) for name in planners}


def test_losses_do_not_depend_on_the_placement(launch: Callable[..., list[Any]]) -> None:
    results = launch(_train_under, PLANNERS)
    (alone,) = launch(_train_under, ("torchrec",), LOCAL_BATCH * len(results), world_size=1)
    expected = torch.tensor(alone["torchrec"])
    assert expected[-5:].mean() < 0.9 * expected[:5].mean()  # it learns, so that equal losses mean something
    for name in PLANNERS:
        losses = torch.tensor([result[name] for result in results]).mean(0)
        assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-5), name
