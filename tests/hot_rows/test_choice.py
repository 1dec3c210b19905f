# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows are chosen where they lower the predicted cost of the whole plan."""

from functools import cache
from typing import Any

import pytest
import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, TableStatistics
from dreamshard_planner.devices import Machine
from dreamshard_planner.hot_rows.choice import HotRowsChoice, choose_hot_rows
from dreamshard_planner.hot_rows.hot_set import hot_rows_of
from dreamshard_planner.workload.hot_rows import without_rows
from tests.hot_rows.zipf import FEATURES, sequence_model, zipf_batches

ROWS, DIM, SAMPLES, LOOKUPS = 50_000, 64, 512, 50
BUDGET_BYTES = 2**20
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def _statistics(exponent: float) -> TableStatistics:
    return TableStatistics.from_batches(zipf_batches(exponent, ROWS, SAMPLES, LOOKUPS, 10))


@cache
def _planned(exponent: float | None, dedup: bool = False, **settings: Any) -> tuple[ShardingPlan, DreamShardPlanner]:
    settings = {"hot_rows_bytes": BUDGET_BYTES, **settings}
    planner = DreamShardPlanner(
        Machine(ranks_per_host=4, hosts=4, gpu="h100").topology(),
        batch_size=SAMPLES,
        statistics=None if exponent is None else _statistics(exponent),
        effort="quick",
        debug=False,
        **settings,
    )
    return planner.plan(sequence_model(ROWS, DIM), [EmbeddingCollectionSharder(use_index_dedup=dedup)]), planner


def _choice(planner: DreamShardPlanner) -> HotRowsChoice:
    model = planner._model()
    return choose_hot_rows(model, planner.options, model.settings.hot_rows_bytes)


def test_hot_rows_of_skewed_tables_lower_the_step() -> None:
    plan, planner = _planned(1.2)
    choice, hot = _choice(planner), dict(hot_rows_of(plan))
    report = planner.report()
    gain, described = (note for note in report.notes if note.code == "hot_rows")
    assert hot.keys() == {"ec.t0", "ec.t1"}
    assert choice.after_ms < 0.9 * choice.before_ms and choice.after_bytes < 0.7 * choice.before_bytes
    assert choice.after_ms == pytest.approx(report.chosen.total_ms, rel=1e-6)
    for name, rows in hot.items():
        known = _statistics(1.2)[f"t{name[-1]}_f0"]
        assert known.hot is not None and rows.table_rows == ROWS
        order = sorted(zip(known.hot.reads, known.hot.ids, strict=True), reverse=True)[: len(rows)]
        assert sorted(row for _, row in order) == rows.ids.tolist()
        share = sum(reads for reads, _ in order) / known.lookups
        assert f"{name} {len(rows):,} of {ROWS:,} for {share:.0%} of its lookups" in described.text
    rows = sum(map(len, hot.values()))
    memory_bytes = rows * (DIM * 4 + 4)  # and the state of row-wise Adagrad
    assert described.figures == {"rows": rows, "memory_bytes": memory_bytes}
    assert gain.figures["after_ms"] == choice.after_ms
    whole = _planned(1.2, hot_rows_bytes=0)[1].report()
    assert choice.before_ms == pytest.approx(whole.chosen.total_ms, rel=1e-6)
    taken = [entry.used_bytes[3] for one in (report, whole) for entry in one.memory if entry.kind == "HBM"]
    assert taken[0] - taken[1] == memory_bytes


def test_the_budget_bounds_the_memory_of_each_rank() -> None:
    for budget_bytes in (1000, 20_000):
        choice = _choice(_planned(1.2, hot_rows_bytes=budget_bytes)[1])
        assert budget_bytes - 2 * (DIM * 4 + 4) < choice.hot_rows * (DIM * 4 + 4) <= budget_bytes


@pytest.mark.parametrize(
    ("exponent", "dedup", "told"),
    [
        (None, False, "no statistics tell which rows are hot"),
        (0.0, False, "they would not lower the predicted cost of a step by 2%"),
        (1.2, True, "they would not lower the predicted cost of a step by 2%"),
    ],
)
def test_tables_stay_whole_where_hot_rows_gain_nothing(exponent: float | None, dedup: bool, told: str) -> None:
    """Statistics are lacking, all rows are read alike, or index dedup sends each row once already."""
    plan, planner = _planned(exponent, dedup)
    assert not [*hot_rows_of(plan)] and not _choice(planner).hot_rows
    assert f"no hot rows: {told}" in [note.text for note in planner.report().notes]


def test_other_lookups_have_the_statistics_of_batches_without_hot_rows() -> None:
    known = _statistics(1.2)[FEATURES[0]]
    assert known.hot is not None
    ids = torch.tensor([row for row, reads in zip(known.hot.ids, known.hot.reads, strict=True) if reads >= 2])
    left = []
    for batch in zipf_batches(1.2, ROWS, SAMPLES, LOOKUPS, 10):
        of_f0 = batch[FEATURES[0]].values()
        cold = of_f0[~torch.isin(of_f0, ids)]
        lengths = torch.tensor([len(cold), *[0] * (SAMPLES - 1)])
        left.append(KeyedJaggedTensor([FEATURES[0]], cold, lengths=lengths))
    counted, computed = TableStatistics.from_batches(left)[FEATURES[0]], without_rows(known, ids)
    assert computed.pooling_factor == pytest.approx(counted.pooling_factor, rel=1e-4)
    assert computed.distinct_rows == pytest.approx(counted.distinct_rows, rel=0.03)
    assert computed.reuse_histogram == pytest.approx(counted.reuse_histogram, abs=0.03)
    assert computed.ids is not None and counted.ids is not None
    assert computed.ids.shares(0, ROWS // 2) == pytest.approx(counted.ids.shares(0, ROWS // 2), abs=0.02)


def test_index_dedup_is_advised_with_its_gain() -> None:
    planners = {dedup: _planned(1.2, dedup)[1] for dedup in (False, True)}
    figures = {
        dedup: [note.figures for note in planner.report().notes if note.code == "index_dedup"]
        for dedup, planner in planners.items()
    }
    assert not figures[True]
    (advised,) = figures[False]
    assert advised["before_ms"] == pytest.approx(_choice(planners[False]).before_ms)
    # A planner whose sharder dedups ids counts all but the time to find repeated lookups.
    told_ms = planners[True].report().chosen.total_ms
    assert told_ms < advised["dedup_ms"] < 1.5 * told_ms


def test_tables_whose_batches_vary_have_no_hot_rows() -> None:
    """Their replicas would refuse the first batch."""
    half = {"t1": ParameterConstraints(batch_sizes=[SAMPLES // 2])}
    _, planner = _planned.__wrapped__(1.2, constraints=half)
    assert not _choice(planner).hot_rows


@pytest.mark.parametrize("given", [-1, 1.5, True])
def test_impossible_budgets_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"hot_rows_bytes must be a whole number from 0, got {given}"):
        _planned(None, hot_rows_bytes=given)
