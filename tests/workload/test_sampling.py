# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics sampled while a job trains."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import StatisticsError, TableStatistics
from dreamshard_planner.workload.sampling import BatchSampler, _on_host


def batches(count: int, seed: int = 0, samples: int = 64, lookups: int = 5) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((2 * samples,), lookups)
    ids = (torch.rand(count, 2 * samples * lookups, generator=generator) ** 3 * 2000).long()
    return [KeyedJaggedTensor(["a", "b"], values, lengths=lengths) for values in ids]


def sampled(given: list[KeyedJaggedTensor], **settings: object) -> BatchSampler:
    sampler = BatchSampler(**settings)
    for batch in given:
        sampler.add(batch)
    return sampler


def test_every_nth_batch_is_counted_as_from_batches_counts() -> None:
    given = batches(10)
    sampler = sampled(given, every=4)
    assert (sampler.seen, sampler.counted) == (10, 3)
    expected = TableStatistics.from_batches([given[0], given[4], given[8]])
    assert dict(sampler.statistics()) == dict(expected) and sampler.statistics()["a"].batches == 3


def test_samples_of_ranks_merge_into_those_of_all_batches() -> None:
    ranks = [batches(6, seed) for seed in range(2)]
    merged = TableStatistics.merge(sampled(given, every=1).statistics() for given in ranks)
    whole = TableStatistics.from_batches(ranks[0] + ranks[1])
    for name in "ab":
        assert merged[name].batches == whole[name].batches == 12
        assert merged[name].pooling_factor == whole[name].pooling_factor == 5
        assert merged[name].distinct_rows == pytest.approx(whole[name].distinct_rows)
        assert merged[name].reuse_histogram == pytest.approx(whole[name].reuse_histogram)
        for block in ((0, 50), (50, 600), (600, 2000)):
            assert merged[name].ids.shares(*block) == pytest.approx(whole[name].ids.shares(*block), abs=0.01)


def test_only_the_features_of_a_module_are_counted() -> None:
    assert list(sampled(batches(1), keys=["b"]).statistics()) == ["b"]
    with pytest.raises(StatisticsError, match=r"the batches lack \['c'\]"):
        sampled(batches(1), keys=["c"])


def test_a_job_goes_on_where_nothing_was_read() -> None:
    with pytest.raises(StatisticsError, match="no batches"):
        BatchSampler().statistics()
    for every in (0, -1, True, 2.5, "3"):
        with pytest.raises(StatisticsError, match="every must be a whole number of batches from 1"):
            BatchSampler(every)


def test_features_without_samples_are_left_out() -> None:
    uneven = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 1]), lengths=torch.tensor([2]), stride_per_key_per_rank=[[1], [0]]
    )
    assert list(sampled([uneven]).statistics()) == ["a"]
    assert not sampled(batches(2, samples=0)).statistics()


def test_a_copy_keeps_batch_sizes_of_its_own_for_each_key() -> None:
    uneven = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 1, 2, 3, 4]), lengths=torch.tensor([2, 1, 2]), stride_per_key_per_rank=[[2], [1]]
    )
    expected = TableStatistics.from_batches([uneven])
    assert dict(TableStatistics.from_batches([_on_host(uneven)])) == dict(expected)
    assert dict(sampled([uneven]).statistics()) == dict(expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_a_device_are_counted_without_waiting() -> None:
    given = batches(6)
    sampler = BatchSampler(every=2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in [batch.to(torch.device("cuda"), non_blocking=True) for batch in given]:
            sampler.add(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    statistics = sampler.statistics()
    assert 1 <= sampler.counted <= 3 and statistics["a"].pooling_factor == 5
