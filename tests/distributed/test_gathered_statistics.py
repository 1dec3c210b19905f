# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every rank's data counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import Rank

from dreamshard_planner import StatisticsError, TableStatistics
from tests.counted import counted


def _data(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.randint(100 * (rank + 1), (40 * (rank + 1),), generator=torch.Generator().manual_seed(rank))
    return {"f": (torch.full((40,), rank + 1), ids)}


def _gathered(rank: Rank) -> tuple[Any, str]:
    own = counted(_data(rank.rank), batch_size=20)
    everyone = own.all_gather()
    one_alone = (own if rank.rank == 0 else TableStatistics({})).all_gather()
    assert dict(one_alone) == dict(counted(_data(0), batch_size=20))
    other = counted(_data(rank.rank), batch_size=20 if rank.rank else 5)
    try:
        other.all_gather()
    except StatisticsError as error:
        return dict(everyone), str(error)
    return dict(everyone), ""


def test_statistics_of_all_ranks_are_those_of_all_data(launch: Callable[..., list[Any]]) -> None:
    ranks = launch(_gathered)
    parts = [counted(_data(rank), batch_size=20) for rank in range(len(ranks))]
    expected = dict(TableStatistics.merge(parts))
    for gathered, error in ranks:
        assert gathered == expected and "do not merge" in error
    if len(ranks) == 2:
        assert expected["f"].pooling_factor == 1.5
