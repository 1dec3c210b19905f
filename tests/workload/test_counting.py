# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics of data at hand, of parquet files, of several sources, sampled while a job trains; drift."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, StatisticsError, TableStatistics
from dreamshard_planner.workload.counting import BatchSampler, _on_host
from tests.counted import batches_of, counted

ONES = (1.0,) + (0.0,) * 16


def drawn(samples: int, seed: int = 0, rows: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and ids, the low ids more often."""
    rng = np.random.default_rng(seed)
    lengths = rng.poisson(3, samples)
    return lengths, (rows * rng.random(lengths.sum()) ** 2).astype(np.int64)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_unsigned_ids_count_as_signed_ones(dtype: torch.dtype) -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor([3, 3, 500]), lengths=torch.tensor([2, 1]))
    unsigned = KeyedJaggedTensor(["f"], batch.values().to(dtype), lengths=torch.tensor([2, 1]))
    assert dict(TableStatistics.from_batches(unsigned)) == dict(TableStatistics.from_batches(batch))


def test_batches_of_values_that_are_no_ids_are_refused() -> None:
    batch = KeyedJaggedTensor(["f"], torch.tensor([0.5, 2.0]), lengths=torch.tensor([1, 1]))
    with pytest.raises(StatisticsError, match="feature 'f': ids must be whole numbers, got torch.float32"):
        TableStatistics.from_batches([batch])


@pytest.mark.parametrize(("samples", "batch_size"), [((16, 16, 16, 16, 3), 13), ((16, 0, 16), 16)])
def test_batches_of_several_sizes_count_as_their_mean_and_empty_ones_not_at_all(
    samples: tuple[int, ...], batch_size: int
) -> None:
    lookups = [np.full(count, 2) for count in samples]  # each row once in a batch
    batches = [batches_of({"f": (length, np.arange(length.sum()))}, len(length) or 1) for length in lookups]
    empty = KeyedJaggedTensor(["f"], torch.zeros(0, dtype=torch.long), lengths=torch.zeros(0, dtype=torch.long))
    known = TableStatistics.from_batches([(batch or [empty])[0] for batch in batches])["f"]
    assert (known.pooling_factor, known.batch_size) == (2.0, batch_size)
    assert known.distinct_rows == 2.0 * batch_size and known.batches == sum(map(bool, samples))


def test_parts_merge_to_the_whole() -> None:
    lengths, ids = drawn(1600)
    whole = TableStatistics.from_batches(batches_of({"f": (lengths, ids)}, 100))["f"]
    cut = int(lengths[:1200].sum())
    parts = [
        TableStatistics.from_batches(batches_of({"f": (lengths[:1200], ids[:cut])}, 100)),
        TableStatistics.from_batches(batches_of({"f": (lengths[1200:], ids[cut:])}, 100)),
    ]
    merged = TableStatistics.merge(parts)["f"]
    assert merged.pooling_factor == pytest.approx(whole.pooling_factor)
    assert merged.distinct_rows == pytest.approx(whole.distinct_rows)
    assert merged.reuse_histogram == pytest.approx(whole.reuse_histogram)
    assert (merged.batch_size, merged.batches) == (100, 16)
    for point in (10, 100, 500):
        assert merged.ids.shares(0, point) == pytest.approx(whole.ids.shares(0, point))


def test_features_merge_over_those_that_have_them() -> None:
    one = TableStatistics({"a": FeatureStatistics(2.0, ONES, 8, 16.0), "b": FeatureStatistics(0.0, None, 8)})
    other = TableStatistics({"a": FeatureStatistics(0.0, None, 8), "c": FeatureStatistics(1.0, ONES, 8, 8.0)})
    merged = TableStatistics.merge([one, other])
    assert merged["a"].pooling_factor == 1.0 and merged["a"].distinct_rows == 8.0
    assert merged["b"] == one["b"] and merged["c"] == other["c"]
    with pytest.raises(StatisticsError, match="'a': statistics of batches of 8 and of 4,096 samples do not merge"):
        TableStatistics.merge([one, TableStatistics({"a": FeatureStatistics(1.0, ONES, 4096, 4096.0)})])


def test_files_keep_how_many_batches_were_counted(tmp_path: Path) -> None:
    lengths, ids = drawn(500)
    known = counted({"f": (lengths, ids)}, 100)
    known.to_json(tmp_path / "s.json")
    assert TableStatistics.from_json(tmp_path / "s.json")["f"].batches == known["f"].batches == 5


def parquet(path: Path, lengths: np.ndarray, ids: np.ndarray, row_group_size: int = 130) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    offsets = pa.array(np.concatenate([[0], lengths.cumsum()]).astype(np.int32))
    columns = {
        "f": pa.ListArray.from_arrays(offsets, pa.array(ids)),
        "user": pa.array(np.arange(len(lengths)) % 7),
        "name": pa.array(["x"] * len(lengths)),
        "score": pa.array(np.zeros(len(lengths))),
    }
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def test_parquet_gives_what_its_batches_give_across_row_groups_and_files(tmp_path: Path) -> None:
    lengths, ids = drawn(1050)
    expected = dict(counted({"f": (lengths, ids)}, 100))
    assert dict(TableStatistics.from_parquet(parquet(tmp_path / "all.parquet", lengths, ids), 100)) == expected
    cut = int(lengths[:333].sum())
    (tmp_path / "days").mkdir()
    parquet(tmp_path / "days" / "0.parquet", lengths[:333], ids[:cut])
    parquet(tmp_path / "days" / "1.parquet", lengths[333:], ids[cut:])
    assert dict(TableStatistics.from_parquet(tmp_path / "days", 100)) == expected
    few = TableStatistics.from_parquet(tmp_path / "days", 100, features={"g": "f", "user": "user"}, max_batches=2)
    assert few["g"].batches == 2 and few["user"].pooling_factor == 1.0 and few["user"].distinct_rows == 7
    assert TableStatistics.from_parquet(tmp_path / "days", 5000)["f"].batch_size == 1050


def test_missing_values_look_nothing_up_and_hashes_are_no_rows(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    hashes = pa.array([[2**64 - 1]] * 3, type=pa.list_(pa.uint64()))
    table = {"l": pa.array([[1, None, 1], None, []]), "n": pa.array([4, None, 4]), "h": hashes}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    known = TableStatistics.from_parquet(tmp_path / "x.parquet", 3, features=["l", "n", "h"])
    assert known["l"].pooling_factor == known["n"].pooling_factor == pytest.approx(2 / 3)
    assert known["l"].distinct_rows == known["n"].distinct_rows == 1
    assert known["h"].pooling_factor == 1.0 and known["h"].ids is None


def test_parquet_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "x.parquet", *drawn(10))
    for features, reason in (
        (["g"], "x.parquet: has no column 'g'"),
        (["name"], "column 'name' holds string"),
        ("f", "some names of columns, got 'f'"),
    ):
        with pytest.raises(StatisticsError, match=reason):
            TableStatistics.from_parquet(path, 5, features=features)
    with pytest.raises(StatisticsError, match="no .parquet file in"):
        TableStatistics.from_parquet([], 5)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StatisticsError, match="x.parquet: no parquet file that can be read"):
        TableStatistics.from_parquet(path, 5)


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "dreamshard_planner.workload.parquet", raising=False)
    with pytest.raises(StatisticsError, match=r"pip install 'dreamshard_planner\[parquet\]'"):
        TableStatistics.from_parquet("x.parquet", 5)


def test_drift_is_told_by_feature() -> None:
    lengths, ids = drawn(1000)
    before = counted({"f": (lengths, ids), "g": (lengths, ids), "h": (lengths, ids)}, 100)
    after = counted({"f": (lengths, 999 - ids), "g": (lengths, ids), "i": (lengths, ids)}, 100)
    found = before.diff(after)
    assert [feature.name for feature in found.drifted] == ["f"] and found.features[1].largest == 0.0
    drifted = found.features[0]
    # Ids 1000 u^2 and what is left of 999: shares sqrt(x) and 1 - sqrt(1 - x) differ most in the middle.
    assert drifted.ids_change == pytest.approx(2**0.5 - 1, abs=0.02) and drifted.pooling_change == 0
    assert drifted.reuse_change == 0
    assert (found.only_before, found.only_after) == (("h",), ("i",))
    assert "1 of 2 features drifted" in str(found) and "f:" in str(found)
    doubled = TableStatistics({"f": FeatureStatistics(2 * before["f"].pooling_factor)})
    (change,) = before.diff(doubled).features
    assert change.pooling_change == pytest.approx(1.0) and change.reuse_change is None and change.ids_change is None


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
