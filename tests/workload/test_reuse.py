# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse of rows: histograms of it, drawn, merged, at other batch sizes; lookups over the range of ids, and hot ids.

Shapes: R rows, N indices, B blocks.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import small_models
import torch
from small_models import SHARDERS, collection, managed, table
from torch import Tensor, nn
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, StatisticsError, TableStatistics
from dreamshard_planner.measure.kernels import draw_indices
from dreamshard_planner.workload.lookups import HotIds, IdHistogram, merge
from dreamshard_planner.workload.pools import meta_like
from dreamshard_planner.workload.reuse import (
    NUM_REUSE_BINS,
    bin_mean_reuse,
    cache_hits,
    default_reuse,
    histogram_of_counts,
    merge_reuse,
    rescale_reuse,
    shift_reuse,
)
from dreamshard_planner.workload.tables import Table, workloads_of

ONE_READ = (1.0,) + (0.0,) * (NUM_REUSE_BINS - 1)


def reuse_histogram(index_N: Tensor) -> tuple[Tensor, float]:
    return histogram_of_counts(torch.unique(index_N, return_counts=True)[1])


ROWS, SAMPLES, POOLING, RANKS = 100_000, 256, 16, 8


class PowerLaw:
    """Random lookups of a table whose row popularity is a power law, with ids sorted by it, or shuffled."""

    def __init__(self, rows: int = ROWS, exponent: float = 1.05, shuffled: bool = False, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.edge_R = ((torch.arange(rows, dtype=torch.float64) + 1) ** -exponent).cumsum(0)
        self.id_R = torch.randperm(rows, generator=self.generator) if shuffled else torch.arange(rows)

    def draw(self, lookups: int) -> Tensor:
        uniform_N = torch.rand(lookups, dtype=torch.float64, generator=self.generator) * self.edge_R[-1]
        return self.id_R[torch.searchsorted(self.edge_R, uniform_N).clamp_max(len(self.id_R) - 1)]

    def statistics(self, name: str = "f", pooling: int = POOLING) -> TableStatistics:
        lengths = torch.full((SAMPLES,), pooling)
        return TableStatistics.from_batches(
            KeyedJaggedTensor([name], self.draw(SAMPLES * pooling), lengths=lengths) for _ in range(10)
        )


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
    histogram, distinct = reuse_histogram(PowerLaw(rows, seed=1).draw(lookups))
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
        *[(rows, exponent, 20_000, n) for rows in (10**5, 10**6) for exponent in (0.8, 1.3) for n in (2, 64)],
        *[(50_000, exponent, 40_000, n) for exponent in (0.6, 1.35) for n in (2, 8)],  # few rows take many lookups
    ],
)
def test_other_batch_sizes_of_zipf_tables(rows: int, exponent: float, lookups: int, factor: int) -> None:
    indices = PowerLaw(rows, exponent, seed=1).draw(lookups * factor)
    for old, new in ((lookups, lookups * factor), (lookups * factor, lookups)):
        given, counted = reuse_histogram(indices[:old])
        truth, true_distinct = reuse_histogram(indices[:new])
        bins, distinct = rescale_reuse([given.tolist()], [rows], [old], [new / old], [counted])
        assert (bins[0] - truth).abs().max() < 0.05 and float(distinct[0]) == pytest.approx(true_distinct, rel=0.05)


def test_rescaling_keeps_to_what_is_possible() -> None:
    rows, lookups, factor = [10, 10**9, 7, 1000], [9.0, 3.0, 0.0, 500.0], [1000.0, 64.0, 8.0, 0.5]
    bins, distinct = rescale_reuse([ONE_READ] * 4, rows, lookups, factor, [None] * 4)
    assert bins.isfinite().all() and distinct.isfinite().all()
    assert bins.sum(1).tolist() == pytest.approx([1, 1, 0, 1])
    assert float(distinct[0]) <= 10 and float(distinct[1]) <= 192 and float(distinct[2]) == 0
    assert bins[3].tolist() == pytest.approx(ONE_READ, abs=0.05)  # a row that is read once stays so, or is not read


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
    before, after = (torch.tensor([histogram, shifted], dtype=torch.float64) @ bin_mean_reuse()).tolist()
    assert after == pytest.approx(min(max(1.0, before * ratio), float(bin_mean_reuse()[-1])))
    assert sum(shifted) == pytest.approx(1) and min(shifted) >= 0
    if ratio == 1:
        assert shifted == pytest.approx(histogram)


@pytest.mark.parametrize(("exponent", "rows", "lookups"), [(0.0, 50_000, 20_000), (1.05, 50_000, 40_000)])
@pytest.mark.parametrize("load_factor", [0.02, 0.3])
def test_cache_hits_are_those_of_a_simulation(exponent: float, rows: int, lookups: int, load_factor: float) -> None:
    data = PowerLaw(rows, exponent, seed=2)
    batches = [data.draw(lookups) for _ in range(30)]
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


def test_a_histogram_by_hand() -> None:
    # Ids 0, 2 and 1000: three quarters of the lookups, an eighth, an eighth; each a third of the distinct rows.
    ids = IdHistogram.of_counts(torch.tensor([0, 2, 1000]), torch.tensor([6, 1, 1]))
    assert (ids.end, ids.width, len(ids.lookups)) == (1001, 16, 63)
    assert ids.shares(0, 16) == pytest.approx((7 / 8, 2 / 3)) and ids.shares(0, 8) == pytest.approx((7 / 16, 1 / 3))
    assert ids.shares(0, 1001) == ids.shares(-5, 10**6) == (1.0, 1.0)
    assert ids.shares(992, 1001) == pytest.approx((1 / 8, 1 / 3)) and ids.shares(1001, 2000) == (0.0, 0.0)
    assert IdHistogram.even(1024).shares(256, 512) == (0.25, 0.25)
    for row in range(7):
        assert IdHistogram.even(7).shares(row, row + 1) == pytest.approx((1 / 7, 1 / 7))


def test_histograms_merge_by_weight() -> None:
    """Exactly, at all ends of the wider parts."""
    low, high = IdHistogram.even(128), IdHistogram.of_counts(torch.arange(896, 1024), torch.full((128,), 2))
    merged = merge([low, high], [3.0, 1.0], [1.0, 1.0])
    assert merged.end == 1024 and merged.shares(0, 512) == (0.75, 0.5)
    assert merged.shares(896, 960) == (0.125, 0.25) and merged.shares(0, 64) == (0.375, 0.25)
    hot = IdHistogram.of_counts(torch.tensor([5]), torch.tensor([8]))
    assert merge([hot, hot], [1.0, 2.0], [1.0, 1.0]) == hot


@pytest.mark.parametrize("exponent", [0.8, 1.2])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_blocks_have_what_fresh_batches_bring_them(exponent: float, shuffled: bool, ranks: int) -> None:
    data = PowerLaw(exponent=exponent, shuffled=shuffled)
    table = Table("t", ROWS, 16, (data.statistics()["f"],))
    whole = workloads_of([table], SAMPLES * ranks)[0]
    blocks = [whole.part(ROWS // RANKS, 16, first) for first in range(0, ROWS, ROWS // RANKS)]
    fresh = [data.draw(SAMPLES * POOLING * ranks) for _ in range(10)]
    lookups_B, distinct_B = (
        torch.stack([torch.bincount(id_N // (ROWS // RANKS), minlength=RANKS) / len(id_N) for id_N in ids]).mean(0)
        for ids in (fresh, [id_N.unique() for id_N in fresh])
    )
    assert [block.lookups / whole.lookups for block in blocks] == pytest.approx(lookups_B.tolist(), abs=0.02)
    distinct = [block.distinct_rows / whole.distinct_rows for block in blocks]
    assert distinct == pytest.approx(distinct_B.tolist(), abs=0.03)
    assert sum(block.lookups for block in blocks) == pytest.approx(whole.lookups)
    assert sum(block.distinct_rows for block in blocks) == pytest.approx(whole.distinct_rows, rel=0.01)
    if shuffled:
        assert max(block.lookups for block in blocks) < 3 * whole.lookups / RANKS
    else:
        assert blocks[0].lookups > 4 * whole.lookups / RANKS


def model(rows: int, tables: int = 1) -> nn.Module:
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", rows, 128) for i in range(tables)))})


def planned(statistics: TableStatistics, model: nn.Module, sharders=SHARDERS, **arguments) -> DreamShardPlanner:
    arguments.setdefault("topology", Topology(RANKS, "cuda", hbm_cap=2**34, local_world_size=RANKS))
    given = {"batch_size": 4096, "cost_source": "roofline", "statistics": statistics}
    return small_models.planned(model, sharders, **given, **arguments)


def test_tables_are_split_by_rows_only_where_rows_are_read_evenly() -> None:
    """One hot table among others: split, it costs kernels and collectives of its own, and must gain more."""
    chosen = {}
    for shuffled in (True, False):
        statistics = PowerLaw(exponent=1.3, shuffled=shuffled).statistics("t0_f0", pooling=32)
        made = planned(statistics, model(ROWS, tables=5), sharding_types=("table_wise", "row_wise"))
        chosen[shuffled] = {option.name: option.sharding_type for option in made.options}["t0"]
    assert chosen == {True: "row_wise", False: "table_wise"}


def test_the_report_says_which_block_is_heavy() -> None:
    for shuffled in (True, False):
        made = planned(PowerLaw(shuffled=shuffled).statistics("t0_f0"), model(ROWS), sharding_types=("row_wise",))
        notes = [note for note in made.report().notes if "of the lookups" in note.text]
        assert len(notes) == (0 if shuffled else 1)
        ranks = made.report().chosen.rank_ms
        assert (max(ranks) > 2 * min(ranks)) != shuffled
    assert notes[0].text.startswith("sparse.t0, row_wise: rank 0 has 8") and "with 12% of the rows" in notes[0].text
    two = {"sharding_types": ("row_wise",), "topology": Topology(2, "cuda")}
    made = planned(PowerLaw().statistics("t0_f0"), model(ROWS), **two)
    (note,) = [note.text for note in made.report().notes if note.code == "skew"]
    assert note.startswith("sparse.t0, row_wise: rank 0 has 9") and "with 50% of the rows" in note


def test_ids_past_the_rows_place_nothing_and_the_report_says_so() -> None:
    made = planned(PowerLaw().statistics("t0_f0"), model(ROWS // 2), sharding_types=("row_wise",))
    (note,) = [note.text for note in made.report().notes if "row blocks" in note.text]
    assert "sparse.t0" in note and "the table has 50,000 rows" in note
    assert len(set(made.report().chosen.rank_ms)) == 1


def test_managed_collisions_hide_the_rows() -> None:
    # TorchRec splits such a table over several ranks only in buckets, which this module has one of.
    hidden = nn.ModuleDict({"sparse": managed(model(ROWS)["sparse"], ROWS)})
    one = {"topology": Topology(1, "cuda", hbm_cap=2**34)}
    made = planned(PowerLaw().statistics("t0_f0"), hidden, [ManagedCollisionEmbeddingBagCollectionSharder()], **one)
    assert made.report().sharding_types == {"row_wise": 1}
    assert any("managed collisions" in note.text for note in made.report().notes)


HOT_READS = {7: 40, 1_000_000: 20, 3: 10, 90: 2}


def _batch(step: int, samples: int = 64) -> KeyedJaggedTensor:
    """Every batch reads the hot ids as often as they say, and each other id once."""
    hot = [id for id, reads in HOT_READS.items() for _ in range(reads)]
    other = torch.arange(1000) + 2_000_000 + 1000 * step
    ids = torch.cat([torch.tensor(hot), other])
    lengths = torch.zeros(samples, dtype=torch.int64)
    lengths[0] = len(ids)
    return KeyedJaggedTensor(["f"], ids, lengths=lengths)


def test_hot_ids_are_counted_exactly_and_parts_merge_to_the_count_of_the_whole(tmp_path: Path) -> None:
    """Statistics of ranks or days merge, also from files."""
    hot = TableStatistics.from_batches(map(_batch, range(5)))["f"].hot
    assert hot is not None and list(hot.ids) == sorted(hot.ids)
    assert dict(zip(hot.ids, hot.reads, strict=True)) == HOT_READS
    parts = [TableStatistics.from_batches(map(_batch, steps)) for steps in (range(3), range(3, 5))]
    parts[0].to_json(tmp_path / "part.json")
    read = TableStatistics.from_json(tmp_path / "part.json")
    assert dict(read) == dict(parts[0]) and read["f"].ids is not None
    merged = TableStatistics.merge([read, parts[1]])
    assert merged["f"].hot == hot
    unknown = replace(parts[1]["f"], hot=None)
    assert TableStatistics.merge([parts[0], TableStatistics({"f": unknown})])["f"].hot is None


@pytest.mark.parametrize(
    ("ids", "reads", "named"),
    [((3, 3), (1.0, 1.0), "each given once"), ((-1,), (1.0,), "from 0"), ((1,), (0.0,), "above 0"), ((1,), (), "one")],
)
def test_impossible_hot_ids_are_refused(ids: tuple[int, ...], reads: tuple[float, ...], named: str) -> None:
    with pytest.raises(StatisticsError, match=named):
        HotIds(ids, reads)
    with pytest.raises(StatisticsError, match="batch_size"):
        FeatureStatistics(1.0, hot=HotIds((1,), (1.0,)))
