# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Several ranks measure one collection: each its share, one result, and what a rank recorded outlives it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.collect import collect, remove_blocks
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.ranks import Ranks, local_ranks
from dreamshard_planner.measure.sets import draw_sets
from dreamshard_planner.workload.tables import FeatureStatistics, Table
from tests.faults import ended, start

TABLES = [Table(f"t{i}", 100 * (i + 1), (8, 16)[i % 2], (FeatureStatistics(float(i % 5 + 1)),)) for i in range(20)]
SETS = draw_sets(TABLES, 21, seed=1, batch_sizes=(4, 8), max_tables=4)
SETS += SETS[:2]  # asked for twice


def _measure(path: Path, ranks: Ranks | None = None, **options) -> CostDataset:
    options = {"repeats": 2, "progress": False, "block": 2} | options
    return collect(SETS, path, arena=Arena("cpu", size_bytes=1 << 20), ranks=ranks, **options)


def _held(folder: Path) -> int:
    return sum(len(CostDataset.load(path)) for path in folder.glob("block-*.npz"))


def _on_two_ranks(function: Callable[[Ranks, Path], None], path: Path) -> list[int]:
    """Exit statuses."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return ended(*[start(_rank, rank, store.port, function, path) for rank in range(2)])


def _rank(rank: int, port: int, function: Callable[[Ranks, Path], None], path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    function(Ranks(rank, 2), path)
    dist.destroy_process_group()


def _together(ranks: Ranks, path: Path) -> None:
    """Check what ranks agree on, and save the dataset that they end with."""
    assert (ranks.from_first(os.getpid) == os.getpid()) == ranks.leads
    wrong = (DreamShardError, "rank 1 failed: ValueError: wrong") if ranks.leads else (ValueError, "^wrong")
    with pytest.raises(wrong[0], match=wrong[1]):
        ranks.gather(lambda: None if ranks.leads else _fail())
    _measure(path, ranks).save(path.with_suffix(f".{ranks.rank}.npz"))


def _fail() -> None:
    raise ValueError("wrong")


def test_ranks_share_the_sets_and_agree_on_the_result(tmp_path: Path) -> None:
    path = tmp_path / "sets.blocks"
    assert _on_two_ranks(_together, path) == [0, 0]
    first, second = (CostDataset.load(tmp_path / f"sets.{rank}.npz") for rank in range(2))
    assert first.digest == second.digest
    assert first.sets == SETS
    assert _held(path) == len(SETS) == 23
    alone = _measure(path)  # one process finds everything measured
    assert np.array_equal(alone.samples_ms, first.samples_ms)
    remove_blocks(path, Ranks())
    assert not path.exists()


def _until_one_dies(ranks: Ranks, path: Path) -> None:
    """The second of two ranks is killed behind its first block; the first finds that out when it has measured all."""
    if not ranks.leads:
        save, CostDataset.save = CostDataset.save, lambda made, file: (save(made, file), os.kill(os.getpid(), 9))
    with pytest.raises(DreamShardError, match="another rank has ended"):
        _measure(path, ranks)


def test_a_rank_that_dies_takes_nothing_with_it_that_was_recorded(tmp_path: Path) -> None:
    path = tmp_path / "sets.blocks"
    assert _on_two_ranks(_until_one_dies, path) == [0, -signal.SIGKILL]
    assert _held(path) == 12 + 2
    data = _measure(path)  # goes on alone with what both have recorded
    assert data.sets == SETS


def test_starting_without_torchrun_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(DreamShardError, match="torchrun has to start this.*--nproc_per_node"):
        local_ranks()
    with Ranks.joined() as ranks:
        assert (ranks.rank, ranks.size, ranks.leads) == (0, 1, True)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    with pytest.raises(DreamShardError, match="99 ranks on a host with"), Ranks.joined("cuda"):
        pass
