# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms, statistics from batches, table pools, features."""

from __future__ import annotations

import json
import math
from importlib import resources

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import FeatureStatistics, StatisticsError, TableStatistics, TaskError
from dreamshard_planner.workload.features import FEATURE_INDEX, FEATURE_NAMES, PAPER_FEATURES, Scaler, feature_matrix
from dreamshard_planner.workload.pools import meta_like, mlperf_dlrm_dcnv2, named_pool, scale_rows, split_tables
from dreamshard_planner.workload.reuse import (
    NUM_REUSE_BINS,
    bin_mean_reuse,
    default_reuse,
    draw_indices,
    mean_reuse,
    merge_reuse,
    rescale_reuse,
    reuse_histogram,
)
from dreamshard_planner.workload.tables import Table, workloads_of

DATA = resources.files("dreamshard_planner.workload") / "data"


def bins(**shares: float) -> tuple[float, ...]:
    return tuple(shares.get(f"b{k}", 0.0) for k in range(NUM_REUSE_BINS))


def zipf_indices(rows: int, lookups: int, seed: int = 0) -> torch.Tensor:
    popularity = (torch.arange(rows, dtype=torch.float64) + 1) ** -1.05
    return torch.multinomial(popularity, lookups, True, generator=torch.Generator().manual_seed(seed))


def test_histogram_by_hand() -> None:
    # Row 7 once, row 3 twice, row 1 three times, row 0 five times.
    histogram, distinct = reuse_histogram(torch.tensor([7, 3, 3, 1, 1, 1, 0, 0, 0, 0, 0]))
    assert distinct == 4
    assert histogram.tolist() == list(bins(b0=0.25, b1=0.25, b2=0.25, b3=0.25))
    assert reuse_histogram(torch.empty(0, dtype=torch.int64))[1] == 0


@pytest.mark.parametrize("rows, lookups", [(1, 100), (50, 1000), (10_000, 3000), (10**6, 50_000)])
def test_drawn_indices_realise_a_histogram(rows: int, lookups: int) -> None:
    histogram, distinct = reuse_histogram(zipf_indices(rows, lookups))
    drawn = draw_indices(histogram.tolist(), rows, lookups, torch.Generator().manual_seed(1), distinct)
    assert len(drawn) == lookups and 0 <= drawn.min() and drawn.max() < rows
    again, count = reuse_histogram(drawn)
    assert count == distinct
    assert (again - histogram).abs().max() < 0.02


@pytest.mark.parametrize("rows, lookups", [(10**5, 20_000), (10**6, 60_000)])
@pytest.mark.parametrize("factor", [2, 8])
def test_rescaling_matches_batches_really_drawn(rows: int, lookups: int, factor: int) -> None:
    indices = zipf_indices(rows, lookups * factor)
    small, small_distinct = reuse_histogram(indices[:lookups])
    large, large_distinct = reuse_histogram(indices)
    up, up_distinct = rescale_reuse([small.tolist()], [rows], [lookups], [factor])
    down, down_distinct = rescale_reuse([large.tolist()], [rows], [lookups * factor], [1 / factor])
    assert (up[0] - large).abs().max() < 0.1 and (down[0] - small).abs().max() < 0.05
    assert float(up_distinct[0]) == pytest.approx(large_distinct, rel=0.15)
    assert float(down_distinct[0]) == pytest.approx(small_distinct, rel=0.15)


def test_rescaling_by_one_changes_nothing() -> None:
    histogram = bins(b0=0.5, b2=0.5)
    same, distinct = rescale_reuse([histogram], [1000], [400.0], [1.0])
    assert same[0].tolist() == list(histogram)
    assert float(distinct[0]) == pytest.approx(400 / (0.5 * 1 + 0.5 * float(bin_mean_reuse()[2])))


def test_default_reuse_is_bounded_and_near_the_published_average() -> None:
    histogram, distinct = default_reuse([1, 10, 1000, 10**6], [512, 0, 1000, 10**5])
    assert float(distinct[0]) == pytest.approx(1)
    assert histogram[0].argmax() == 9  # 257 to 512 reads of the only row
    assert histogram[1].sum() == 0 and distinct[1] == 0
    assert (distinct <= torch.tensor([1, 10, 1000, 10**6])).all()
    tables = meta_like()
    lookups = [table.pooling_factor * 65_536 for table in tables]
    _, distinct = default_reuse([table.rows for table in tables], lookups)
    assert sum(lookups) / float(distinct.sum()) == pytest.approx(6.9, rel=0.05)


def test_shared_tables_merge_their_features() -> None:
    merged, distinct = merge_reuse([bins(b0=1.0), None, bins(b4=1.0)], [30.0, 0.0, 10.0])
    assert merged == bins(b0=0.75, b4=0.25) and distinct == 40
    assert merge_reuse([None], [0.0]) == (bins(), 0.0)
    shared = Table("t", 1000, 16, (FeatureStatistics(2.0), FeatureStatistics(3.0)))
    alone = [Table(f"t{i}", 1000, 16, (feature,)) for i, feature in enumerate(shared.features)]
    workload, *parts = workloads_of([shared, *alone], 64)
    assert workload.lookups == 5 * 64 and workload.output_elements == 2 * 64 * 16
    assert workload.distinct_rows == pytest.approx(sum(part.distinct_rows for part in parts))


@pytest.mark.parametrize("year, pooling, reuse", [(2021, 15.81, 6.906), (2022, 13.60, 12.744)])
def test_meta_like_pools_match_the_published_statistics(year: int, pooling: float, reuse: float) -> None:
    pool = named_pool(f"meta_like_{year}")
    batch = pool[0].features[0].batch_size
    histogram_TK = torch.tensor([table.features[0].reuse_histogram for table in pool], dtype=torch.float64)
    lookups_T = torch.tensor([table.pooling_factor * batch for table in pool], dtype=torch.float64)
    distinct_T = lookups_T / mean_reuse(histogram_TK)
    published = json.loads((DATA / "meta_dlrm_reuse.json").read_text())[str(year)]
    assert float(lookups_T.mean()) / batch == pytest.approx(pooling, rel=0.02)
    assert float(lookups_T.sum() / distinct_T.sum()) == pytest.approx(reuse, rel=0.05)
    unique_K = (histogram_TK * distinct_T[:, None]).sum(0) / distinct_T.sum()
    share_K = (histogram_TK * distinct_T[:, None] * bin_mean_reuse()).sum(0) / lookups_T.sum()
    assert (unique_K - torch.tensor(published["share_of_unique_rows"])).abs().max() < 0.03
    assert (share_K - torch.tensor(published["share_of_lookups"])).abs().max() < 0.03
    # Drawn for real, a table keeps its histogram.
    for table in pool[:3]:
        feature = table.features[0]
        lookups = round(feature.pooling_factor * batch)
        drawn = draw_indices(feature.reuse_histogram, table.rows, lookups, torch.Generator().manual_seed(0))
        again, distinct = reuse_histogram(drawn)
        assert (again - torch.tensor(feature.reuse_histogram)).abs().max() < 0.03
        assert distinct == pytest.approx(lookups / float(mean_reuse(torch.tensor([feature.reuse_histogram]))), rel=0.02)


def test_pools_are_what_was_published() -> None:
    criteo = mlperf_dlrm_dcnv2()
    assert len(criteo) == 26 and sum(table.rows for table in criteo) == 204_184_588
    assert sum(table.pooling_factor for table in criteo) == 214
    counts = {"tiny": 55, "small": 107, "medium": 311, "large": 612, "jumbo": 1022, "colossal": 2002}
    for model, count in counts.items():
        tables = named_pool(f"merlin_{model}")
        assert len(tables) == count == len({table.name for table in tables})
    assert len(named_pool("merlin_tiny")[0].features) == 2
    assert max(table.rows for table in scale_rows(criteo, 1000)) == 1000
    with pytest.raises(TaskError, match="mlperf_dlrm_dcnv2"):
        named_pool("mlperf")


def test_split_is_disjoint_and_repeatable() -> None:
    tables = mlperf_dlrm_dcnv2()
    train, test = split_tables(tables, seed=3)
    assert len(train) == len(test) == 13
    assert {t.name for t in train} | {t.name for t in test} == {t.name for t in tables}
    assert split_tables(tables, seed=3) == (train, test) != split_tables(tables, seed=4)


def batch(values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths))


def test_statistics_from_batches_by_hand() -> None:
    # Two batches of two samples: a reads [1, 1 | 2] then [3 | ]; b is always empty.
    statistics = TableStatistics.from_batches([batch([1, 1, 2], [2, 1, 0, 0]), batch([3], [1, 0, 0, 0])])
    assert statistics["a"].pooling_factor == 1.0 and statistics["a"].batch_size == 2
    assert statistics["a"].reuse_histogram == pytest.approx(bins(b0=2 / 3, b1=1 / 3))
    assert statistics["b"] == FeatureStatistics(0.0, None, 2)


def test_statistics_refuse_what_cannot_be(tmp_path) -> None:
    with pytest.raises(StatisticsError, match="no batches"):
        TableStatistics.from_batches([])
    other = KeyedJaggedTensor(["a", "c"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
    with pytest.raises(StatisticsError, match="batch 1 .*'b', 'c'"):
        TableStatistics.from_batches([batch([1], [1, 0, 0, 0]), other])
    for value in (math.nan, math.inf, -1.0):
        with pytest.raises(StatisticsError, match="pooling factor"):
            FeatureStatistics(value)
        with pytest.raises(StatisticsError, match="histogram"):
            FeatureStatistics(1.0, (value,) + (0.0,) * 16)
    with pytest.raises(StatisticsError, match="17 bins"):
        FeatureStatistics(1.0, (1.0,))
    with pytest.raises(StatisticsError, match="did you mean 'user_id'"):
        TableStatistics({"user_ids": FeatureStatistics(1.0)}).check_features(["user_id", "item"])
    path = tmp_path / "statistics.json"
    statistics = TableStatistics({"a": FeatureStatistics(1 / 3, bins(b0=1.0), 7), "b": FeatureStatistics(0.0)})
    statistics.to_json(path)
    assert dict(TableStatistics.from_json(path)) == dict(statistics)
    path.write_text(path.read_text().replace("0.3333333333333333", "-1.0"))
    with pytest.raises(StatisticsError, match="statistics.json: feature 'a'"):
        TableStatistics.from_json(path)
    path.write_text(path.read_text()[:40])
    with pytest.raises(StatisticsError, match="truncated"):
        TableStatistics.from_json(path)


def test_features_have_one_order_and_no_nan() -> None:
    tables = [Table("one row", 1, 4, (FeatureStatistics(0.0),)), *mlperf_dlrm_dcnv2()]
    features_SF = feature_matrix(workloads_of(tables, 512))
    assert features_SF.shape == (27, len(FEATURE_NAMES)) and features_SF.isfinite().all()
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES) and len(PAPER_FEATURES) == 21
    assert features_SF[1, FEATURE_INDEX["lookups"]] == 3 * 512
    scaled_SF = Scaler.fit(features_SF)(features_SF)
    assert scaled_SF.isfinite().all()  # constant columns are centred, not divided by zero
    assert scaled_SF[:, FEATURE_INDEX["weight_bytes"]].abs().max() == 0


def test_tables_refuse_what_cannot_be() -> None:
    with pytest.raises(TaskError, match="'t'"):
        Table("t", 0, 4, (FeatureStatistics(1.0),))
    with pytest.raises(TaskError, match="serves no feature"):
        Table("t", 1, 4, ())
    with pytest.raises(TaskError, match="optimizer"):
        Table("t", 1, 4, (FeatureStatistics(1.0),), optimizer="lamb")
