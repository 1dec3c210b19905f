# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics from batches, in files, and refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, StatisticsError, TableStatistics
from dreamshard_planner.workload.statistics import SCHEMA


def batch(values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths))


def test_statistics_from_batches_by_hand() -> None:
    # Two batches of two samples: a reads [1, 1 | 2] then [3 | ]; b is always empty.
    statistics = TableStatistics.from_batches([batch([1, 1, 2], [2, 1, 0, 0]), batch([3], [1, 0, 0, 0])])
    assert statistics["a"].pooling_factor == 1.0 and statistics["a"].batch_size == 2
    assert statistics["a"].distinct_rows == 1.5 and statistics["b"].distinct_rows is None
    assert statistics["a"].reuse_histogram == pytest.approx((2 / 3, 1 / 3) + (0.0,) * 15)
    assert statistics["b"] == FeatureStatistics(0.0, None, 2)


def test_features_of_other_modules_can_be_left_out() -> None:
    batches = [batch([1, 2, 3], [1, 1, 0, 1])]
    assert list(TableStatistics.from_batches(batches, keys=["b"])) == ["b"]
    with pytest.raises(StatisticsError, match=r"the batches lack \['c'\]"):
        TableStatistics.from_batches(batches, keys=["b", "c"])


ONES = (1.0,) + (0.0,) * 16


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("many",), "pooling factor must be a number, got 'many'"),
        ((None,), "pooling factor must be a number, got None"),
        *[((value,), "pooling factor must be a finite number") for value in (math.nan, math.inf, -1.0)],
        *[((1.0, (value,) + (0.0,) * 16), "histogram") for value in (math.nan, math.inf, -1.0)],
        ((1.0, (1.0,)), "17 bins"),
        ((1.0, ONES), "give batch_size"),
        ((2.0, ONES, 4, 9.0), "up to the 8 lookups: 9"),
        *[((2.0, ONES, 4, value), f"above 0, up to the 8 lookups: {value}") for value in (0.0, -1.0, math.nan)],
        ((2.0, None, None, 3.0), "without a reuse histogram"),
    ],
)
def test_statistics_of_a_feature_that_cannot_be_are_refused(values: tuple, reason: str) -> None:
    with pytest.raises(StatisticsError, match=reason):
        FeatureStatistics(*values)


def test_batches_with_weights_and_with_a_stride_per_key() -> None:
    values, lengths = torch.tensor([1, 1, 2, 3, 4]), torch.tensor([2, 1, 2])
    uneven = KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride_per_key_per_rank=[[2], [1]])
    statistics = TableStatistics.from_batches([uneven])
    assert (statistics["a"].pooling_factor, statistics["a"].batch_size) == (1.5, 2)
    assert (statistics["b"].pooling_factor, statistics["b"].batch_size) == (2.0, 1)
    assert statistics["a"].reuse_histogram[:2] == (0.5, 0.5)
    weighted = KeyedJaggedTensor(["a"], values, weights=torch.rand(5), lengths=torch.tensor([2, 3]))
    plain = KeyedJaggedTensor(["a"], values, lengths=torch.tensor([2, 3]))
    (with_weights,), (without,) = (TableStatistics.from_batches([batch]).values() for batch in (weighted, plain))
    assert with_weights.weighted and without == replace(with_weights, weighted=False)


def test_batches_of_torchrec_and_a_single_one() -> None:
    sparse = batch([1, 1, 2], [2, 1, 0, 0])
    expected = dict(TableStatistics.from_batches([sparse]))
    whole = Batch(dense_features=torch.zeros(2, 1), sparse_features=sparse, labels=torch.zeros(2))
    for given in (sparse, whole, [whole], iter([sparse])):
        assert dict(TableStatistics.from_batches(given)) == expected


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (["a"], "batch 0 must be a KeyedJaggedTensor or hold one in sparse_features, got str"),
        ([torch.zeros(3)], "batch 0 must be a KeyedJaggedTensor .* got Tensor"),
        ("a", "batches must be an iterable of KeyedJaggedTensor, got str"),
        (7, "batches must be an iterable of KeyedJaggedTensor, got int"),
        ({"a": batch([1], [1, 0, 0, 0])}, "batches must be an iterable of KeyedJaggedTensor, got dict"),
    ],
)
def test_batches_of_anything_else_are_refused(batches, reason: str) -> None:
    with pytest.raises(StatisticsError, match=reason):
        TableStatistics.from_batches(batches)


def test_keys_are_a_list() -> None:
    with pytest.raises(StatisticsError, match="keys must be a list of feature names, got the string 'ab'"):
        TableStatistics.from_batches([batch([1], [1, 0, 0, 0])], keys="ab")


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({3: FeatureStatistics(1.0)}, "features are named by strings, got 3"),
        ({"a": 1.0}, "feature 'a': expected FeatureStatistics, got float"),
        ([FeatureStatistics(1.0)], "a mapping of feature names to statistics, got list"),
    ],
)
def test_statistics_are_numbers_by_feature_name(features: object, reason: str) -> None:
    with pytest.raises(StatisticsError, match=reason):
        TableStatistics(features)


def test_statistics_refuse_what_cannot_be(tmp_path) -> None:
    with pytest.raises(StatisticsError, match="no batches"):
        TableStatistics.from_batches([])
    other = KeyedJaggedTensor(["a", "c"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
    with pytest.raises(StatisticsError, match="batch 1 .*'b', 'c'"):
        TableStatistics.from_batches([batch([1], [1, 0, 0, 0]), other])
    with pytest.raises(StatisticsError, match="did you mean 'user_id'"):
        TableStatistics({"user_ids": FeatureStatistics(1.0)}).unused(["user_id", "item"])
    path = tmp_path / "statistics.json"
    statistics = TableStatistics(
        {"a": FeatureStatistics(torch.tensor(1 / 3, dtype=torch.float64), ONES, 7, 2.1), "b": FeatureStatistics(0.0)}
    )
    statistics.to_json(path)
    assert dict(TableStatistics.from_json(path)) == dict(statistics)
    path.write_text(path.read_text().replace("0.3333333333333333", "-1.0"))
    with pytest.raises(StatisticsError, match=r"statistics.json: features\.a"):
        TableStatistics.from_json(path)
    path.write_text(path.read_text()[:40])
    with pytest.raises(StatisticsError, match="truncated"):
        TableStatistics.from_json(path)


@pytest.mark.parametrize(
    "document, reason",
    [
        ({"schema": SCHEMA}, "lacks 'features'"),
        ({"schema": SCHEMA, "features": [1]}, r"features: .*got .1."),
        ({"schema": SCHEMA, "features": {"a": 7}}, r"features\.a: .*got 7"),
        ({"schema": SCHEMA, "features": {"a": {"batch_size": 1}}}, r"features\.a: lacks 'pooling_factor'"),
        ({"schema": "dreamshard_planner.statistics/2", "features": {}}, SCHEMA),
        (
            {"schema": SCHEMA, "features": {"a": {"pooling_factor": 1, "reuse_histogram": None, "batch_size": 1.5}}},
            r"features\.a\.batch_size: .* got 1.5",
        ),
        (
            {
                "schema": SCHEMA,
                "features": {"a": {"pooling_factor": float("nan"), "reuse_histogram": None, "batch_size": 1}},
            },
            r"features\.a: pooling factor must be a finite number >= 0, got nan",
        ),
    ],
)
def test_damaged_files_are_refused_with_a_reason(tmp_path, document, reason: str) -> None:
    path = tmp_path / "statistics.json"
    path.write_text(json.dumps(document))
    with pytest.raises(StatisticsError, match=f"statistics.json.*{reason}"):
        TableStatistics.from_json(path)


def test_unreadable_paths_are_refused(tmp_path) -> None:
    with pytest.raises(StatisticsError, match="cannot be read"):
        TableStatistics.from_json(tmp_path)
    with pytest.raises(StatisticsError, match="gone.json: no such file"):
        TableStatistics.from_json(tmp_path / "gone.json")
