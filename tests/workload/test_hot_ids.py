# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The ids read most: exact for those that most batches read, in bounded memory, merged like one count."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, TableStatistics
from dreamshard_planner.errors import StatisticsError
from dreamshard_planner.workload.hot_ids import LEAST_READS, MOST_IDS, HotCounts, HotIds

HOT_READS = {7: 40, 1_000_000: 20, 3: 10, 90: 2}


def _batch(step: int, samples: int = 64) -> KeyedJaggedTensor:
    """Every batch reads the hot ids as often as they say, and each other id once."""
    hot = [id for id, reads in HOT_READS.items() for _ in range(reads)]
    other = torch.arange(1000) + 2_000_000 + 1000 * step
    ids = torch.cat([torch.tensor(hot), other])
    lengths = torch.zeros(samples, dtype=torch.int64)
    lengths[0] = len(ids)
    return KeyedJaggedTensor(["f"], ids, lengths=lengths)


def test_hot_ids_are_counted_exactly() -> None:
    statistics = TableStatistics.from_batches(_batch(step) for step in range(5))
    hot = statistics["f"].hot
    assert hot is not None
    assert dict(zip(hot.ids, hot.reads, strict=True)) == HOT_READS
    assert list(hot.ids) == sorted(hot.ids)


def test_parts_merge_to_the_count_of_the_whole(tmp_path: Path) -> None:
    """Statistics of ranks or days merge, also from files."""
    parts = [TableStatistics.from_batches(map(_batch, steps)) for steps in (range(3), range(3, 5))]
    parts[0].to_json(tmp_path / "part.json")
    merged = TableStatistics.merge([TableStatistics.from_json(tmp_path / "part.json"), parts[1]])
    assert merged["f"].hot == TableStatistics.from_batches(map(_batch, range(5)))["f"].hot
    unknown = dataclasses.replace(parts[1]["f"], hot=None)
    assert TableStatistics.merge([parts[0], TableStatistics({"f": unknown})])["f"].hot is None


def test_memory_is_bounded() -> None:
    """Ten times as many ids as fit pass by; those read in each batch stay."""
    counts, hot_R = HotCounts(), torch.tensor([5, 6])
    for step in range(20):
        id_R = torch.cat([hot_R, 10 + step * MOST_IDS + torch.arange(MOST_IDS)])
        counts.add(id_R, torch.ones(len(id_R), dtype=torch.int64))
        assert len(counts._id_R) <= 3 * MOST_IDS
    found = counts.statistics(batches=20)
    assert found == HotIds((5, 6), (1.0, 1.0)) and LEAST_READS > 1 / 20


def test_hashes_have_no_hot_ids() -> None:
    hashes = KeyedJaggedTensor(["f"], torch.tensor([-5, -5, 2**60]), lengths=torch.tensor([3]))
    assert TableStatistics.from_batches(hashes)["f"].hot is None


@pytest.mark.parametrize(
    ("ids", "reads", "named"),
    [((3, 3), (1.0, 1.0), "each given once"), ((-1,), (1.0,), "from 0"), ((1,), (0.0,), "above 0"), ((1,), (), "one")],
)
def test_impossible_hot_ids_are_refused(ids: tuple[int, ...], reads: tuple[float, ...], named: str) -> None:
    with pytest.raises(StatisticsError, match=named):
        HotIds(ids, reads)
    with pytest.raises(StatisticsError, match="batch_size"):
        FeatureStatistics(1.0, hot=HotIds((1,), (1.0,)))
