# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics counted in batches, in parquet files, while a job trains; merged, compared, in files, refused; tables that
can be, the states of their optimizers, and published pools."""

import json
import math
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, StatisticsError, TableStatistics, TaskError
from dreamshard_planner.errors import InputWarning
from dreamshard_planner.workload.counting import BatchSampler
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.statistics import SCHEMA
from dreamshard_planner.workload.tables import (
    OPTIMIZERS,
    Table,
    columns,
    costed_optimizer,
    feature_matrix,
    optimizer_of,
    workloads_of,
)
from tests.counted import batches_of, counted

ONES = (1.0,) + (0.0,) * 16


def batch(values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths))


def uneven(values: list[int], lengths: list[int], samples: list[int]) -> KeyedJaggedTensor:
    """A batch whose size differs by feature."""
    strides = [[count] for count in samples]
    given = torch.tensor(values), torch.tensor(lengths)
    return KeyedJaggedTensor(["a", "b"], given[0], lengths=given[1], stride_per_key_per_rank=strides)


def test_statistics_from_batches_by_hand() -> None:
    # Two batches of two samples: a reads [1, 1 | 2] then [3 | ]; b is always empty.
    statistics = TableStatistics.from_batches([batch([1, 1, 2], [2, 1, 0, 0]), batch([3], [1, 0, 0, 0])])
    assert statistics["a"].pooling_factor == 1.0 and statistics["a"].batch_size == 2
    assert statistics["a"].distinct_rows == 1.5 and statistics["b"].distinct_rows is None
    assert statistics["a"].reuse_histogram == pytest.approx((2 / 3, 1 / 3) + (0.0,) * 15)
    assert statistics["b"] == FeatureStatistics(0.0, None, 2)


def test_batches_with_weights_and_with_a_stride_per_key() -> None:
    statistics = TableStatistics.from_batches([uneven([1, 1, 2, 3, 4], [2, 1, 2], [2, 1])])
    assert (statistics["a"].pooling_factor, statistics["a"].batch_size) == (1.5, 2)
    assert (statistics["b"].pooling_factor, statistics["b"].batch_size) == (2.0, 1)
    assert statistics["a"].reuse_histogram[:2] == (0.5, 0.5)
    values, lengths = torch.tensor([1, 1, 2, 3, 4]), torch.tensor([2, 3])
    weighted = KeyedJaggedTensor(["a"], values, weights=torch.rand(5), lengths=lengths)
    plain = KeyedJaggedTensor(["a"], values, lengths=lengths)
    with_weights, without = (TableStatistics.from_batches([batch])["a"] for batch in (weighted, plain))
    assert with_weights.weighted and without == replace(with_weights, weighted=False)


def test_batches_of_torchrec_and_a_single_one() -> None:
    sparse = batch([1, 1, 2], [2, 1, 0, 0])
    expected = dict(TableStatistics.from_batches([sparse]))
    whole = Batch(dense_features=torch.zeros(2, 1), sparse_features=sparse, labels=torch.zeros(2))
    for given in (sparse, whole, [whole], iter([sparse])):
        assert dict(TableStatistics.from_batches(given)) == expected
    assert list(TableStatistics.from_batches(sparse, keys=["b"])) == ["b"]


ONE, OTHER = batch([1], [1, 0, 0, 0]), KeyedJaggedTensor(["a", "c"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
FRACTIONS = KeyedJaggedTensor(["f"], torch.tensor([0.5, 2.0]), lengths=torch.tensor([1, 1]))


@pytest.mark.parametrize(
    ("batches", "keys", "reason"),
    [
        ([], None, "no batches"),
        (["a"], None, "batch 0 must be a KeyedJaggedTensor or hold one in sparse_features, got str"),
        ("a", None, "batches must be an iterable of KeyedJaggedTensor, got str"),
        ([ONE], "ab", "keys must be a list of feature names, got the string 'ab'"),
        ([ONE], ["b", "c"], r"the batches lack \['c'\]"),
        ([ONE, OTHER], None, "batch 1 .*'b', 'c'"),
        ([batch([], [])], None, "feature 'a': all batches are without samples"),
        (FRACTIONS, None, "feature 'f': ids must be whole numbers, got torch.float32"),
    ],
)
def test_batches_that_cannot_be_counted_are_refused(batches: object, keys: object, reason: str) -> None:
    with pytest.raises(StatisticsError, match=reason):
        TableStatistics.from_batches(batches, keys=keys)


def drawn(samples: int, seed: int = 0, rows: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and ids, the low ids more often."""
    rng = np.random.default_rng(seed)
    lengths = rng.poisson(3, samples)
    return lengths, (rows * rng.random(lengths.sum()) ** 2).astype(np.int64)


def test_unsigned_ids_count_as_signed_ones() -> None:
    lengths, id_N = torch.tensor([2, 1]), torch.tensor([3, 3, 500])
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        one, other = (KeyedJaggedTensor(["f"], ids, lengths=lengths) for ids in (id_N, id_N.to(dtype)))
        assert dict(TableStatistics.from_batches(other)) == dict(TableStatistics.from_batches(one))


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
    batches = batches_of({"f": (lengths, ids)}, 100)
    whole = TableStatistics.from_batches(batches)["f"]
    merged = TableStatistics.merge(map(TableStatistics.from_batches, (batches[:12], batches[12:])))["f"]
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
    # A histogram alone gives its distinct rows. Reuse is known if it is known of all batches.
    alone, unknown = FeatureStatistics(2.0, (0.0, 1.0) + (0.0,) * 15, 8), FeatureStatistics(4.0, None, 8)
    mixed = TableStatistics.merge([one, TableStatistics({"a": alone})])["a"]
    assert mixed.reuse_histogram[:2] == pytest.approx((2 / 3, 1 / 3)) and mixed.distinct_rows == pytest.approx(12)
    mixed = TableStatistics.merge([one, TableStatistics({"a": unknown})])["a"]
    assert mixed == FeatureStatistics(3.0, None, 8) and mixed.batches == 2
    with pytest.raises(StatisticsError, match="'a': statistics of batches of 8 and of 4,096 samples do not merge"):
        TableStatistics.merge([one, TableStatistics({"a": FeatureStatistics(1.0, ONES, 4096, 4096.0)})])


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
    cut = int(lengths[:300].sum())
    (tmp_path / "days").mkdir()
    parquet(tmp_path / "days" / "0.parquet", lengths[:300], ids[:cut])
    parquet(tmp_path / "days" / "1.parquet", lengths[300:], ids[cut:].astype(np.int32))
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
    assert known["h"].pooling_factor == 1.0 and known["h"].ids is known["h"].hot is None


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
    with pytest.raises(StatisticsError, match=r"max_batches must be a whole number from 1, got 1\.5"):
        TableStatistics.from_parquet(path, 5, max_batches=1.5)
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


def test_samplers_count_every_nth_batch_and_leave_out_features_without_samples() -> None:
    given = batches(10)
    found = sampled(given, every=4).statistics()
    expected = TableStatistics.from_batches([given[0], given[4], given[8]])
    assert dict(found) == dict(expected) and found["a"].batches == 3
    assert list(sampled([uneven([1, 1], [2], [1, 0])]).statistics()) == ["a"]
    assert not sampled(batches(2, samples=0)).statistics()
    with pytest.raises(StatisticsError, match="no batches"):
        BatchSampler().statistics()
    for every in (0, -1, True, 2.5, "3"):
        with pytest.raises(StatisticsError, match="every must be a whole number from 1"):
            BatchSampler(every)


def test_batches_of_very_different_sizes_are_warned_of() -> None:
    whole, rest = batches(20), batches(1, samples=3)
    with warnings.catch_warnings(action="error"):
        TableStatistics.from_batches([*whole, *rest])
    with pytest.warns(InputWarning, match=r"sizes of the batches differ.*count batches of about one size for a, b"):
        TableStatistics.from_batches([*whole[:1], *rest])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("many",), "pooling factor must be a number, got 'many'"),
        *[((value,), "pooling factor must be a finite number") for value in (math.nan, math.inf, -1.0)],
        *[((1.0, (value,) + (0.0,) * 16), "histogram") for value in (math.nan, math.inf, -1.0)],
        ((1.0, (1.0,)), "17 bins"),
        ((1.0, ONES), "give batch_size"),
        ((2.0, ONES, 4, 9.0), "up to the 8 lookups: 9"),
        ((2.0, ONES, 4, 0.0), "above 0, up to the 8 lookups: 0"),
        *[
            ((2.0, ONES, 4, value), f"distinct rows must be a finite number >= 0, got {value}")
            for value in (-1.0, math.nan)
        ],
        ((2.0, 7, 4), "a reuse histogram is a list of shares, got 7"),
        ((2.0, (0.5,) + (0.0,) * 16, 4), "must sum to 1, got 0.5"),
        ((2.0, None, None, 3.0), "without a reuse histogram"),
    ],
)
def test_statistics_of_a_feature_that_cannot_be_are_refused(values: tuple, reason: str) -> None:
    with pytest.raises(StatisticsError, match=reason):
        FeatureStatistics(*values)


def test_files_keep_every_digit_and_how_many_batches_were_counted(tmp_path: Path) -> None:
    path = tmp_path / "statistics.json"
    third = FeatureStatistics(torch.tensor(1 / 3, dtype=torch.float64), ONES, 7, 2.1, batches=5)
    statistics = TableStatistics({"a": third, "b": FeatureStatistics(0.0)})
    statistics.to_json(path)
    read = TableStatistics.from_json(path)
    assert dict(read) == dict(statistics) and read["a"].batches == 5
    path.write_text(path.read_text().replace("0.3333333333333333", "-1.0"))
    with pytest.raises(StatisticsError, match=r"statistics.json: features\.a"):
        TableStatistics.from_json(path)
    path.write_text(path.read_text()[:40])
    with pytest.raises(StatisticsError, match="truncated"):
        TableStatistics.from_json(path)
    for gone, reason in ((tmp_path, "cannot be read"), (tmp_path / "gone.json", "gone.json: no such file")):
        with pytest.raises(StatisticsError, match=reason):
            TableStatistics.from_json(gone)


KNOWN = {"pooling_factor": 1, "batch_size": 4}
PARTS = {"end": 2, "lookups": [0.5, 0.5], "distinct": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("feature", "reason"),
    [
        (7, r"features\.a: .*got 7"),
        ({"batch_size": 1}, r"features\.a: lacks 'pooling_factor'"),
        (KNOWN | {"batch_size": 0}, "batch size must be a whole number from 1 .*got 0"),
        (KNOWN | {"reuse_histogram": None, "batch_size": 1.5}, r"features\.a\.batch_size: .* got 1.5"),
        (KNOWN | {"ids": {"lookups": [1.0], "distinct": [1.0]}}, "features.a.ids: lacks 'end'"),
        (KNOWN | {"ids": PARTS | {"lookups": [1.0]}}, "features.a.ids: .*up to 2 have 2 shares of lookups, got 1"),
        (KNOWN | {"ids": PARTS | {"distinct": [1.5, -0.5]}}, "ids: .*distinct by id must be 0 or more and sum to 1"),
        (KNOWN | {"ids": PARTS | {"end": 0}}, "features.a.ids: ids must end between 1 and 2.53, got 0"),
    ],
)
def test_damaged_files_are_refused_with_a_reason(tmp_path: Path, feature: object, reason: str) -> None:
    for document, told in (
        ({"schema": SCHEMA, "features": {"a": feature}}, reason),
        ({"schema": SCHEMA}, "lacks 'features'"),
        ({"schema": "dreamshard_planner.statistics/2", "features": {}}, SCHEMA),
    ):
        (tmp_path / "statistics.json").write_text(json.dumps(document))
        with pytest.raises(StatisticsError, match=f"statistics.json.*{told}"):
            TableStatistics.from_json(tmp_path / "statistics.json")


def test_tables_refuse_what_cannot_be() -> None:
    with pytest.raises(TaskError, match="'t'"):
        Table("t", 0, 4, (FeatureStatistics(1.0),))
    with pytest.raises(TaskError, match="serves no feature"):
        Table("t", 1, 4, ())
    with pytest.raises(TaskError, match="optimizer"):
        Table("t", 1, 4, (FeatureStatistics(1.0),), optimizer="lamb")


@pytest.mark.parametrize("optimizer", EmbOptimType)
def test_optimizers_keep_the_states_that_costs_count(optimizer: EmbOptimType) -> None:
    """As FBGEMM allocates them, for every optimizer that it has GPU kernels of."""
    table = (100, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    try:
        kernel = SplitTableBatchedEmbeddingBagsCodegen([table], optimizer=optimizer, device=torch.device("meta"))
    except AssertionError as error:
        assert "deprecated" in str(error) or "not supported" in str(error)
        return
    kept = [getattr(kernel, f"momentum{which}_dev", torch.empty(0)).numel() for which in (1, 2)]
    costed = costed_optimizer(optimizer.name)
    assert costed != "other" and OPTIMIZERS[costed] == (kept.count(800), kept.count(100))
    workload = replace(workloads_of(named_pool("mlperf_dlrm_dcnv2"), 8)[0], optimizer=costed)
    names = ("weight_states", "row_states", "stateful_optimizer")
    states = feature_matrix([workload])[0, columns(names)].tolist()
    assert states == [*OPTIMIZERS[costed], any(OPTIMIZERS[costed])]
    kind = 2 if costed == "adagrad" else int(any(OPTIMIZERS[costed]))
    assert optimizer_of(feature_matrix([workload])).tolist() == [kind]


def test_pools_are_what_was_published() -> None:
    criteo = named_pool("mlperf_dlrm_dcnv2")
    assert len(criteo) == 26 and sum(table.rows for table in criteo) == 204_184_588
    assert sum(table.pooling_factor for table in criteo) == 214
    counts = {"tiny": 55, "small": 107, "medium": 311, "large": 612, "jumbo": 1022, "colossal": 2002}
    for model, count in counts.items():
        tables = named_pool(f"merlin_{model}")
        assert len(tables) == count == len({table.name for table in tables})
    assert len(named_pool("merlin_tiny")[0].features) == 2 and len(named_pool("meta_like_2022")) == 788
    for model, count, weights in (("t180", 177, 66e9), ("t200", 200, 104e9), ("t510", 510, 115e9), ("t7", 7, 446e9)):
        pool = named_pool(f"embark_{model}")
        assert len(pool) == count == len({table.name for table in pool})
        assert sum(table.rows * table.dim for table in pool) == pytest.approx(weights, rel=0.01)
        busiest = max(pool, key=lambda table: table.pooling_factor)
        assert busiest.features[0].reuse_histogram[0] < 0.9  # a power law: some rows of a batch are read often
    with pytest.raises(TaskError, match="mlperf_dlrm_dcnv2"):
        named_pool("mlperf")
