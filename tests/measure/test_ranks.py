# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ranks agree on results; if one fails or ends, the others say so."""

import os
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.ranks import Ranks, local_ranks
from tests.faults import ended, start


def _on_two_ranks(function: Callable[[Ranks], None]) -> list[int]:
    """Exit statuses."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return ended(*[start(_rank, rank, store.port, function) for rank in range(2)])


def _rank(rank: int, port: int, function: Callable[[Ranks], None]) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    function(Ranks(rank, 2))
    dist.destroy_process_group()


def _together(ranks: Ranks) -> None:
    first = ranks.rank == 0
    assert (ranks.from_first(os.getpid) == os.getpid()) == first
    wrong = (DreamShardError, "rank 1 failed: ValueError: wrong") if first else (ValueError, "^wrong")
    with pytest.raises(wrong[0], match=wrong[1]):
        ranks.gather(lambda: None if first else _fail())
    assert ranks.gather(lambda: ranks.rank) == [0, 1]


def _fail() -> None:
    raise ValueError("wrong")


def _until_one_dies(ranks: Ranks) -> None:
    if ranks.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(DreamShardError, match="another rank has ended"):
        ranks.gather(lambda: None)


@pytest.mark.parametrize(("function", "statuses"), [(_together, [0, 0]), (_until_one_dies, [0, -signal.SIGKILL])])
def test_ranks_agree_or_say_why_not(function: Callable[[Ranks], None], statuses: list[int]) -> None:
    assert _on_two_ranks(function) == statuses


def test_starting_without_torchrun_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(DreamShardError, match="torchrun has to start this.*--nproc_per_node"):
        local_ranks()
