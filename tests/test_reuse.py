# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms of indices, drawn from, merged, by default, and at other batch sizes.

Shapes: R rows, N indices.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dreamshard_planner import FeatureStatistics
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.reuse import (
    NUM_REUSE_BINS,
    bin_mean_reuse,
    default_reuse,
    draw_indices,
    merge_reuse,
    rescale_reuse,
    reuse_histogram,
)
from dreamshard_planner.workload.tables import Table, workloads_of

ONE_READ = (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)


def zipf_indices(rows: int, exponent: float, lookups: int) -> Tensor:
    chance_R = (torch.arange(rows, dtype=torch.float64) + 1) ** -exponent
    edge_R = chance_R.cumsum(0) / chance_R.sum()
    uniform_N = torch.rand(lookups, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return torch.searchsorted(edge_R, uniform_N).clamp_max(rows - 1)


def errors(indices: Tensor, rows: int, old: int, new: int) -> tuple[float, float]:
    """Largest error of a bin, and relative error of the distinct rows, from the first ``old`` to ``new`` indices."""
    given, counted = reuse_histogram(indices[:old])
    truth, true_distinct = reuse_histogram(indices[:new])
    bins, distinct = rescale_reuse([given.tolist()], [rows], [old], [new / old], [counted])
    return float((bins[0] - truth).abs().max()), abs(float(distinct[0]) / true_distinct - 1)


def bins(**shares: float) -> tuple[float, ...]:
    return tuple(shares.get(f"b{k}", 0.0) for k in range(NUM_REUSE_BINS))


def test_histogram_by_hand() -> None:
    # Row 7 once, row 3 twice, row 1 three times, row 0 five times.
    histogram, distinct = reuse_histogram(torch.tensor([7, 3, 3, 1, 1, 1, 0, 0, 0, 0, 0]))
    assert distinct == 4
    assert histogram.tolist() == list(bins(b0=0.25, b1=0.25, b2=0.25, b3=0.25))
    assert reuse_histogram(torch.empty(0, dtype=torch.int64))[1] == 0


@pytest.mark.parametrize("rows, lookups", [(1, 100), (50, 1000), (10_000, 3000), (10**6, 50_000)])
def test_drawn_indices_realise_a_histogram(rows: int, lookups: int) -> None:
    histogram, distinct = reuse_histogram(zipf_indices(rows, 1.05, lookups))
    drawn = draw_indices(histogram.tolist(), rows, lookups, torch.Generator().manual_seed(1), distinct)
    assert len(drawn) == lookups and 0 <= drawn.min() and drawn.max() < rows
    again, count = reuse_histogram(drawn)
    assert count == distinct
    assert (again - histogram).abs().max() < 0.02


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


def test_rescaling_by_one_changes_nothing() -> None:
    histogram = bins(b0=0.5, b2=0.5)
    same, distinct = rescale_reuse([histogram], [1000], [400.0], [1.0])
    assert same[0].tolist() == list(histogram)
    assert float(distinct[0]) == pytest.approx(400 / (0.5 * 1 + 0.5 * float(bin_mean_reuse()[2])))


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.3])
@pytest.mark.parametrize("rows", [10**5, 10**6])
@pytest.mark.parametrize("factor", [2, 8, 64])
def test_a_larger_batch_of_a_zipf_table(exponent: float, rows: int, factor: int) -> None:
    indices = zipf_indices(rows, exponent, 20_000 * factor)
    bin_error, distinct_error = errors(indices, rows, 20_000, 20_000 * factor)
    assert bin_error < 0.05 and distinct_error < 0.05


@pytest.mark.parametrize("exponent, rows", [(0.8, 10**5), (1.05, 10**6), (1.3, 10**6)])
@pytest.mark.parametrize("factor", [2, 8, 64])
def test_a_smaller_batch_of_a_zipf_table(exponent: float, rows: int, factor: int) -> None:
    indices = zipf_indices(rows, exponent, 20_000 * factor)
    bin_error, distinct_error = errors(indices, rows, 20_000 * factor, 20_000)
    assert bin_error < 0.05 and distinct_error < 0.05


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.35])
@pytest.mark.parametrize("factor", [2, 8])
def test_tables_of_which_few_rows_take_many_lookups(exponent: float, factor: int) -> None:
    indices = zipf_indices(50_000, exponent, 40_000 * factor)
    for old, new in ((40_000, 40_000 * factor), (40_000 * factor, 40_000)):
        bin_error, distinct_error = errors(indices, 50_000, old, new)
        assert bin_error < 0.05 and distinct_error < 0.05


def test_a_workload_keeps_counted_distinct_rows() -> None:
    feature = FeatureStatistics(2.0, bins(b0=0.5, b4=0.5), 64, 17.0)
    assert workloads_of([Table("t", 1000, 16, (feature,))], 64)[0].distinct_rows == 17


@pytest.mark.parametrize("index", [40, 100, 200])
def test_meta_like_tables(index: int) -> None:
    table = meta_like()[index]
    feature = table.features[0]
    lookups = round(feature.pooling_factor * feature.batch_size)
    indices = draw_indices(feature.reuse_histogram, table.rows, lookups, torch.Generator().manual_seed(0))
    for factor in (2, 8, 64):
        bin_error, distinct_error = errors(indices, table.rows, lookups, lookups // factor)
        assert bin_error < 0.05 and distinct_error < 0.05
    for factor in (2, 8):
        bin_error, distinct_error = errors(indices, table.rows, lookups // factor, lookups)
        assert bin_error < 0.05 and distinct_error < 0.05
    # One in 64 samples says little of rows that it does not read: less is promised.
    bin_error, distinct_error = errors(indices, table.rows, lookups // 64, lookups)
    assert bin_error < 0.1 and distinct_error < 0.2


def test_the_only_row_takes_every_lookup() -> None:
    for bins, distinct in (default_reuse([1], [512.0]), rescale_reuse([ONE_READ], [1], [1.0], [512.0])):
        assert bins[0].tolist() == [float(k == 9) for k in range(NUM_REUSE_BINS)]  # (256,512]
        assert distinct.tolist() == [1.0]


def test_rescaling_keeps_to_what_is_possible() -> None:
    rows, lookups, factor = [10, 10**9, 7, 1000], [9.0, 3.0, 0.0, 500.0], [1000.0, 64.0, 8.0, 0.5]
    bins, distinct = rescale_reuse([ONE_READ] * 4, rows, lookups, factor)
    assert bins.isfinite().all() and distinct.isfinite().all()
    assert bins.sum(1).tolist() == pytest.approx([1, 1, 0, 1])
    assert float(distinct[0]) <= 10 and float(distinct[1]) <= 192 and float(distinct[2]) == 0
    assert bins[3].tolist() == pytest.approx(ONE_READ)  # a row that is read once is read once or not at all
    again, _ = rescale_reuse([ONE_READ] * 4, rows, lookups, factor)
    assert torch.equal(bins, again)


def test_a_table_does_not_depend_on_its_neighbours() -> None:
    pool = meta_like()[:600]  # more than are solved at once
    given = [
        ([t.features[0].reuse_histogram] * 1, [t.rows], [t.pooling_factor * 65_536], [1 / (2 + i % 3)])
        for i, t in enumerate(pool)
    ]
    together, _ = rescale_reuse(*([values[0] for values in column] for column in zip(*given, strict=True)))
    for index in (0, 511, 512, 599):
        assert torch.allclose(rescale_reuse(*given[index])[0][0], together[index])


def test_drawing_nothing_and_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    assert draw_indices(ONE_READ, 10, 0, generator).shape == (0,)
    assert sorted(draw_indices(ONE_READ, 10, 10, generator).tolist()) == list(range(10))
    # A histogram that these lookups can't have gives way to the number of lookups.
    assert len(draw_indices(ONE_READ, 3, 100, generator, distinct_rows=50)) == 100
    # More lookups than the counts of the last bin, by millions: as fast as any other.
    only_row = [0.0] * 16 + [1.0]
    assert len(draw_indices(only_row, 1, 20_000_000, generator, distinct_rows=1)) == 20_000_000
