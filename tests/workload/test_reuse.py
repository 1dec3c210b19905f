# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms of indices, drawn from, merged, by default, and at other batch sizes.

Shapes: R rows, N indices.
"""

import math

import pytest
import torch
from torch import Tensor

from dreamshard_planner import FeatureStatistics
from dreamshard_planner.measure.kernels import draw_indices
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.reuse import (
    NUM_REUSE_BINS,
    bin_mean_reuse,
    cache_hits,
    default_reuse,
    mean_reuse,
    merge_reuse,
    rescale_reuse,
    reuse_histogram,
    shift_reuse,
)
from dreamshard_planner.workload.tables import Table, workloads_of

ONE_READ = (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)


def popularity(shape: str, rows: int) -> Tensor:
    """Chances of rows, hot first where it matters to nobody, [R]."""
    if shape.startswith("zipf"):
        return (torch.arange(rows, dtype=torch.float64) + 1) ** -float(shape.removeprefix("zipf"))
    if shape == "two levels":
        return torch.where(torch.arange(rows) < rows // 100, 200.0, 1.0).double()
    return torch.exp(2 * torch.randn(rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def drawn_rows(edge_R: Tensor, lookups: int, generator: torch.Generator) -> Tensor:
    """Rows of as many lookups, [N], by the cumulated chances of rows."""
    uniform_N = torch.rand(lookups, dtype=torch.float64, generator=generator) * edge_R[-1]
    return torch.searchsorted(edge_R, uniform_N).clamp_max(len(edge_R) - 1)


def zipf_indices(rows: int, exponent: float, lookups: int) -> Tensor:
    return drawn_rows(popularity(f"zipf{exponent}", rows).cumsum(0), lookups, torch.Generator().manual_seed(1))


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
    merged, distinct = merge_reuse([bins(b0=1.0), bins(), bins(b4=1.0)], [30.0, 0.0, 10.0])
    assert merged == bins(b0=0.75, b4=0.25) and distinct == 40
    assert merge_reuse([bins()], [0.0]) == (bins(), 0.0)
    shared = Table("t", 1000, 16, (FeatureStatistics(2.0), FeatureStatistics(3.0)))
    alone = [Table(f"t{i}", 1000, 16, (feature,)) for i, feature in enumerate(shared.features)]
    workload, *parts = workloads_of([shared, *alone], 64)
    assert workload.lookups == 5 * 64 and workload.output_elements == 2 * 64 * 16
    assert workload.distinct_rows == pytest.approx(sum(part.distinct_rows for part in parts))


@pytest.mark.parametrize(
    ("rows", "exponent", "lookups", "factor"),
    [
        *[(rows, exponent, 20_000, n) for rows in (10**5, 10**6) for exponent in (0.8, 1.05, 1.3) for n in (2, 8, 64)],
        *[(50_000, exponent, 40_000, n) for exponent in (0.6, 1.0, 1.35) for n in (2, 8)],  # few rows take many lookups
    ],
)
def test_other_batch_sizes_of_zipf_tables(rows: int, exponent: float, lookups: int, factor: int) -> None:
    indices = zipf_indices(rows, exponent, lookups * factor)
    for old, new in ((lookups, lookups * factor), (lookups * factor, lookups)):
        bin_error, distinct_error = errors(indices, rows, old, new)
        assert bin_error < 0.05 and distinct_error < 0.05


def test_rescaling_keeps_to_what_is_possible() -> None:
    rows, lookups, factor = [10, 10**9, 7, 1000], [9.0, 3.0, 0.0, 500.0], [1000.0, 64.0, 8.0, 0.5]
    bins, distinct = rescale_reuse([ONE_READ] * 4, rows, lookups, factor)
    assert bins.isfinite().all() and distinct.isfinite().all()
    assert bins.sum(1).tolist() == pytest.approx([1, 1, 0, 1])
    assert float(distinct[0]) <= 10 and float(distinct[1]) <= 192 and float(distinct[2]) == 0
    assert bins[3].tolist() == pytest.approx(ONE_READ)  # a row that is read once is read once or not at all
    again, _ = rescale_reuse([ONE_READ] * 4, rows, lookups, factor)
    assert torch.equal(bins, again)


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("rows", [5000, 50_000, 10**6])
def test_a_larger_batch_reads_no_fewer_rows_where_all_are_read_as_often(times: int, rows: int) -> None:
    """As where an epoch's users come in random order, each once: no mixture of Poisson rates has such counts."""
    histogram, distinct = reuse_histogram(torch.arange(2000).repeat(times))
    lookups = 2000.0 * times
    _, rescaled = rescale_reuse([histogram.tolist()] * 2, [rows] * 2, [lookups] * 2, [2.0, 8.0], [distinct] * 2)
    least, twice, most = 2000, *rescaled.tolist()
    assert least <= twice <= most <= min(rows, 8 * lookups)


def test_drawing_nothing_and_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    assert draw_indices(ONE_READ, 10, 0, generator, 0).shape == (0,)
    assert sorted(draw_indices(ONE_READ, 10, 10, generator, 10).tolist()) == list(range(10))
    # A histogram that these lookups can't have gives way to the number of lookups.
    assert len(draw_indices(ONE_READ, 3, 100, generator, distinct_rows=50)) == 100
    # More lookups than the counts of the last bin, by millions: as fast as any other.
    only_row = [0.0] * 16 + [1.0]
    assert len(draw_indices(only_row, 1, 2_000_000, generator, distinct_rows=1)) == 2_000_000


@pytest.mark.parametrize("histogram", [bins(b0=1.0), bins(b0=0.6, b1=0.3, b7=0.1), bins(b3=0.5, b15=0.5)])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.9, 1.0, 1.1, 7.0, 1e6])
def test_shifted_histograms_have_the_mean_that_was_asked(histogram: tuple[float, ...], ratio: float) -> None:
    shifted = shift_reuse(histogram, ratio)
    before, after = mean_reuse(torch.tensor([histogram, shifted], dtype=torch.float64)).tolist()
    assert after == pytest.approx(min(max(1.0, before * ratio), float(bin_mean_reuse()[-1])))
    assert sum(shifted) == pytest.approx(1) and min(shifted) >= 0
    if ratio == 1:
        assert shifted == pytest.approx(histogram)


@pytest.mark.parametrize(
    ("shape", "rows", "lookups"),
    [
        ("zipf0", 50_000, 20_000),
        ("zipf0.6", 50_000, 20_000),
        ("zipf1.05", 50_000, 40_000),
        ("zipf1.3", 20_000, 40_000),
        ("two levels", 50_000, 30_000),
        ("log-normal", 60_000, 30_000),
    ],
)
@pytest.mark.parametrize("load_factor", [0.02, 0.3])
def test_cache_hits_are_those_of_a_simulated_cache(shape: str, rows: int, lookups: int, load_factor: float) -> None:
    generator = torch.Generator().manual_seed(2)
    edge_R = popularity(shape, rows).cumsum(0)
    batches = [drawn_rows(edge_R, lookups, generator) for _ in range(30)]
    simulated = simulated_hits(batches, rows, load_factor)
    histogram, distinct = reuse_histogram(batches[-1])
    hits = cache_hits([histogram.tolist()], [rows], [lookups], [distinct], [load_factor * rows])
    assert float(hits) == pytest.approx(simulated, abs=0.05)


def simulated_hits(batches: list[Tensor], rows: int, load_factor: float, ways: int = 32) -> float:
    """The share of distinct rows of the last batches that a cache as FBGEMM's holds: sets of 32 rows by a hash of their
    ids, of which each replaces the one whose last read is longest ago, but none of the same batch."""
    sets = max(1, math.ceil(rows * load_factor / ways))
    tag_SW, read_SW = torch.full((sets, ways), -1), torch.full((sets, ways), -1)
    hits = asked = 0
    for step, row_N in enumerate(batches):
        row_R = torch.unique(row_N)
        set_R = (row_R * 2_654_435_761 % 2**32) % sets
        found_RW = tag_SW[set_R] == row_R[:, None]
        hit_R = found_RW.any(1)
        read_SW[set_R[hit_R], found_RW[hit_R].int().argmax(1)] = step
        if step >= len(batches) - 10:
            hits, asked = hits + int(hit_R.sum()), asked + len(row_R)
        row_M, set_M = row_R[~hit_R], set_R[~hit_R]
        for _ in range(ways):  # one row of each set at a time; later ones find it full of this batch
            first = torch.full((sets,), len(row_M)).scatter_reduce(0, set_M, torch.arange(len(row_M)), "amin")[set_M]
            here_M = first == torch.arange(len(row_M))
            row, at = row_M[here_M], set_M[here_M]
            oldest = read_SW[at].argmin(1)
            free = read_SW[at, oldest] < step
            tag_SW[at[free], oldest[free]], read_SW[at[free], oldest[free]] = row[free], step
            row_M, set_M = row_M[~here_M], set_M[~here_M]
    return hits / asked


def test_caches_of_everything_and_of_tables_that_nobody_reads() -> None:
    given = [ONE_READ] * 3, [100, 100, 100], [50.0, 0.0, 50.0], [50.0, 0.0, 50.0]
    hits = cache_hits(*given, [100.0, 10.0, 1e-3])
    assert hits.tolist()[:2] == [1.0, 1.0] and float(hits[2]) < 1e-3
