# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Lookups over the range of ids, the workloads of blocks of rows, and the ids read most.

Shapes: R rows, N indices, B blocks.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import small_models
import torch
from small_models import collection, managed, table
from torch import Tensor, nn
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, StatisticsError, TableStatistics
from dreamshard_planner.workload.ids import HotIds, IdHistogram, merge
from dreamshard_planner.workload.reuse import mean_reuse
from dreamshard_planner.workload.tables import Table, workloads_of

ROWS, SAMPLES, POOLING, RANKS = 100_000, 256, 16, 8


class PowerLaw:
    """Random lookups of a table whose row popularity is a power law, with ids sorted by it, or shuffled."""

    def __init__(self, rows: int = ROWS, exponent: float = 1.05, shuffled: bool = False, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        chance_R = (torch.arange(rows, dtype=torch.float64) + 1) ** -exponent
        self.edge_R = chance_R.cumsum(0) / chance_R.sum()
        self.id_R = torch.randperm(rows, generator=self.generator) if shuffled else torch.arange(rows)

    def draw(self, lookups: int) -> Tensor:
        uniform_N = torch.rand(lookups, dtype=torch.float64, generator=self.generator)
        return self.id_R[torch.searchsorted(self.edge_R, uniform_N).clamp_max(len(self.id_R) - 1)]

    def statistics(self, name: str = "f", pooling: int = POOLING) -> TableStatistics:
        lengths = torch.full((SAMPLES,), pooling)
        return TableStatistics.from_batches(
            KeyedJaggedTensor([name], self.draw(SAMPLES * pooling), lengths=lengths) for _ in range(10)
        )


def block_shares(read_N: Tensor, rows: int, blocks: int = RANKS) -> Tensor:
    """Shares of each of equal blocks, [B]."""
    return torch.bincount(read_N // (rows // blocks), minlength=blocks)[:blocks] / len(read_N)


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


@pytest.mark.parametrize("exponent", [0.8, 1.05, 1.2])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_blocks_have_what_fresh_batches_bring_them(exponent: float, shuffled: bool, ranks: int) -> None:
    data = PowerLaw(exponent=exponent, shuffled=shuffled)
    table = Table("t", ROWS, 16, (data.statistics()["f"],))
    whole = workloads_of([table], SAMPLES * ranks)[0]
    blocks = [whole.part(ROWS // RANKS, 16, first) for first in range(0, ROWS, ROWS // RANKS)]
    fresh = [data.draw(SAMPLES * POOLING * ranks) for _ in range(10)]
    lookups_B = torch.stack([block_shares(read_N, ROWS) for read_N in fresh]).mean(0)
    distinct_B = torch.stack([block_shares(read_N.unique(), ROWS) for read_N in fresh]).mean(0)
    assert [block.lookups / whole.lookups for block in blocks] == pytest.approx(lookups_B.tolist(), abs=0.02)
    assert [block.distinct_rows / whole.distinct_rows for block in blocks] == pytest.approx(
        distinct_B.tolist(), abs=0.03
    )
    assert sum(block.lookups for block in blocks) == pytest.approx(whole.lookups)
    assert sum(block.distinct_rows for block in blocks) == pytest.approx(whole.distinct_rows, rel=0.01)
    if shuffled:
        assert max(block.lookups for block in blocks) < 3 * whole.lookups / RANKS
    else:
        assert blocks[0].lookups > 4 * whole.lookups / RANKS
    # Their histograms say what their lookups and distinct rows say, as nearly as the whole table's does.
    (bins,) = mean_reuse(torch.tensor([whole.reuse_histogram])).tolist()
    off = bins / (whole.lookups / whole.distinct_rows)
    for block in blocks:
        (bins,) = mean_reuse(torch.tensor([block.reuse_histogram])).tolist()
        assert sum(block.reuse_histogram) == pytest.approx(1)
        assert bins == pytest.approx(max(1, off * block.lookups / block.distinct_rows), rel=1e-6)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ({"lookups": [1.0], "distinct": [1.0]}, "lacks 'end'"),
        ({"end": 2, "lookups": [1.0], "distinct": [0.5, 0.5]}, "ids up to 2 have 2 shares of lookups, got 1"),
        ({"end": 2, "lookups": [0.5, 0.5], "distinct": [0.5, -0.5]}, "distinct by id must be 0 or more and sum to 1"),
        ({"end": 0, "lookups": [], "distinct": []}, "ids must end between 1 and 2.53, got 0"),
    ],
)
def test_damaged_histograms_name_their_feature(tmp_path: Path, ids: object, reason: str) -> None:
    TableStatistics({"a": FeatureStatistics(1.0, None, 4)}).to_json(path := tmp_path / "statistics.json")
    document = json.loads(path.read_text())
    document["features"]["a"]["ids"] = ids
    path.write_text(json.dumps(document))
    with pytest.raises(StatisticsError, match=f"features.a.ids.*{reason}"):
        TableStatistics.from_json(path)


def model(rows: int, tables: int = 1) -> nn.Module:
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", rows, 128) for i in range(tables)))})


def planner(statistics: TableStatistics, **arguments) -> DreamShardPlanner:
    arguments.setdefault("topology", Topology(RANKS, "cuda", hbm_cap=2**34, local_world_size=RANKS))
    given = {"batch_size": 4096, "cost_source": "roofline"}
    return small_models.planner(statistics=statistics, **given, **arguments)


def test_tables_are_split_by_rows_only_where_rows_are_read_evenly() -> None:
    """One hot table among others: split, it costs kernels and collectives of its own, and must gain more."""
    chosen = {}
    for shuffled in (True, False):
        statistics = PowerLaw(exponent=1.3, shuffled=shuffled).statistics("t0_f0", pooling=32)
        made = planner(statistics, sharding_types=("table_wise", "row_wise"))
        plan = made.plan(model(ROWS, tables=5), small_models.SHARDERS)
        chosen[shuffled] = plan.plan["sparse"]["t0"].sharding_type
    assert chosen == {True: "row_wise", False: "table_wise"}


def test_the_report_says_which_block_is_heavy() -> None:
    for shuffled in (True, False):
        made = planner(PowerLaw(shuffled=shuffled).statistics("t0_f0"), sharding_types=("row_wise",))
        made.plan(model(ROWS), small_models.SHARDERS)
        notes = [note for note in made.report().notes if "of the lookups" in note.text]
        assert len(notes) == (0 if shuffled else 1)
        ranks = made.report().chosen.rank_ms
        assert (max(ranks) > 2 * min(ranks)) != shuffled
    assert notes[0].text.startswith("sparse.t0, row_wise: rank 0 has 8") and "with 12% of the rows" in notes[0].text
    made = planner(PowerLaw().statistics("t0_f0"), sharding_types=("row_wise",), topology=Topology(2, "cuda"))
    made.plan(model(ROWS), small_models.SHARDERS)
    (note,) = [note.text for note in made.report().notes if note.code == "skew"]
    assert note.startswith("sparse.t0, row_wise: rank 0 has 9") and "with 50% of the rows" in note


def test_ids_past_the_rows_place_nothing_and_the_report_says_so() -> None:
    made = planner(PowerLaw().statistics("t0_f0"), sharding_types=("row_wise",))
    made.plan(model(ROWS // 2), small_models.SHARDERS)
    (note,) = [note.text for note in made.report().notes if "row blocks" in note.text]
    assert "sparse.t0" in note and "the table has 50,000 rows" in note
    assert len(set(made.report().chosen.rank_ms)) == 1


def test_managed_collisions_hide_the_rows() -> None:
    # TorchRec splits such a table over several ranks only in buckets, which this module has one of.
    made = planner(PowerLaw().statistics("t0_f0"), topology=Topology(1, "cuda", hbm_cap=2**34))
    hidden = nn.ModuleDict({"sparse": managed(model(ROWS)["sparse"], ROWS)})
    made.plan(hidden, [ManagedCollisionEmbeddingBagCollectionSharder()])
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
    read = TableStatistics.from_json(tmp_path / "part.json")
    assert dict(read) == dict(parts[0]) and read["f"].ids is not None
    merged = TableStatistics.merge([read, parts[1]])
    assert merged["f"].hot == TableStatistics.from_batches(map(_batch, range(5)))["f"].hot
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
