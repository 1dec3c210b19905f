# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows are chosen where they lower the predicted cost of the whole plan; plan files, commands and re-planning know
them."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import sequences
from small_models import table as table_of
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, JsonPlanLoader, PlanError, TableStatistics, compare
from dreamshard_planner.devices import Machine
from dreamshard_planner.hot_rows.sharded import hot_rows_of
from dreamshard_planner.plans.plan_file import SavedPlan
from tests.cli.test_commands import run, run_json

ROWS, DIM, SAMPLES, LOOKUPS, NODES = 20_000, 32, 256, 50, 4
BUDGET_BYTES = 2**19
FEATURES = ("t0_f0", "t1_f0")
pytestmark = pytest.mark.filterwarnings("ignore")


def _zipf_batches(exponent: float) -> Iterator[KeyedJaggedTensor]:
    """Batches whose k-th most read row is read as often as k ** -exponent, at a random place of the table."""
    generator = torch.Generator().manual_seed(3)
    place = torch.randperm(ROWS, generator=generator)
    below = (torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent).cumsum(0)
    for _ in range(8):
        number = SAMPLES * LOOKUPS * len(FEATURES)
        at = torch.rand(number, generator=generator, dtype=torch.float64) * below[-1]
        ids = place[torch.searchsorted(below, at).clamp_max(ROWS - 1)]
        yield KeyedJaggedTensor([*FEATURES], ids, lengths=torch.full((SAMPLES * len(FEATURES),), LOOKUPS))


@cache
def _statistics(exponent: float = 1.2, shift: int = 0) -> TableStatistics:
    """Return statistics of batches whose ids are all moved by so many rows."""
    return TableStatistics.from_batches(
        KeyedJaggedTensor([*FEATURES], (batch.values() + shift) % ROWS, lengths=batch.lengths())
        for batch in _zipf_batches(exponent)
    )


@cache
def _planned(
    exponent: float | None = 1.2, dedup: bool = False, **settings: Any
) -> tuple[ShardingPlan, DreamShardPlanner]:
    given = {"hot_rows_bytes": BUDGET_BYTES, "vocabulary": "november", "effort": "quick", "debug": False, **settings}
    planner = DreamShardPlanner(
        Machine(ranks_per_host=4, hosts=NODES, gpu="h100").topology(),
        batch_size=SAMPLES,
        statistics=None if exponent is None else _statistics(exponent),
        **given,
    )
    model = nn.ModuleDict({"ec": sequences(table_of("t0", ROWS, DIM), table_of("t1", ROWS, DIM))})
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1, "eps": 1e-3})
    return planner.plan(model, [EmbeddingCollectionSharder(use_index_dedup=dedup)]), planner


def test_hot_rows_of_skewed_tables_lower_the_step() -> None:
    plan, planner = _planned()
    report, hot = planner.report(), dict(hot_rows_of(plan))
    gain, described = (note for note in report.notes if note.code == "hot_rows")
    told = gain.figures
    assert hot.keys() == {"ec.t0", "ec.t1"}
    assert told["after_ms"] < 0.9 * told["before_ms"] and told["after_bytes"] < 0.7 * told["before_bytes"]
    assert told["after_ms"] == pytest.approx(report.chosen.total_ms, rel=1e-6)
    for name, rows in hot.items():
        known = _statistics()[f"t{name[-1]}_f0"]
        assert known.hot is not None and rows.table_rows == ROWS
        order = sorted(zip(known.hot.reads, known.hot.ids, strict=True), reverse=True)[: len(rows)]
        assert sorted(row for _, row in order) == rows.ids.tolist()
        share = sum(reads for reads, _ in order) / known.lookups
        assert f"{name} {len(rows):,} of {ROWS:,} for {share:.0%} of its lookups" in described.text
    rows = sum(map(len, hot.values()))
    memory_bytes = rows * (DIM * 4 + 4)  # and the state of row-wise Adagrad
    assert described.figures == {"rows": rows, "memory_bytes": memory_bytes}
    whole = _planned(hot_rows_bytes=0)[1].report()
    assert told["before_ms"] == pytest.approx(whole.chosen.total_ms, rel=1e-6)
    taken = [entry.used_bytes[3] for one in (report, whole) for entry in one.memory if entry.kind == "HBM"]
    assert taken[0] - taken[1] == memory_bytes


def test_the_budget_bounds_the_memory_of_each_rank() -> None:
    for budget_bytes in (1000, 2000):
        rows = sum(len(rows) for _, rows in hot_rows_of(_planned(hot_rows_bytes=budget_bytes)[0]))
        assert budget_bytes - 2 * (DIM * 4 + 4) < rows * (DIM * 4 + 4) <= budget_bytes


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
    assert not [*hot_rows_of(plan)]
    assert f"no hot rows: {told}" in [note.text for note in planner.report().notes]


def test_other_lookups_have_the_statistics_of_batches_without_hot_rows() -> None:
    known = _statistics()[FEATURES[0]]
    assert known.hot is not None
    ids = torch.tensor([row for row, reads in zip(known.hot.ids, known.hot.reads, strict=True) if reads >= 2])
    left = []
    for batch in _zipf_batches(1.2):
        of_f0 = batch[FEATURES[0]].values()
        cold = of_f0[~torch.isin(of_f0, ids)]
        lengths = torch.tensor([len(cold), *[0] * (SAMPLES - 1)])
        left.append(KeyedJaggedTensor([FEATURES[0]], cold, lengths=lengths))
    counted, computed = TableStatistics.from_batches(left)[FEATURES[0]], known.without_rows(ids)
    assert computed.pooling_factor == pytest.approx(counted.pooling_factor, rel=1e-4)
    assert computed.distinct_rows == pytest.approx(counted.distinct_rows, rel=0.03)
    assert computed.reuse_histogram == pytest.approx(counted.reuse_histogram, abs=0.03)
    assert computed.ids is not None and counted.ids is not None
    assert computed.ids.shares(0, ROWS // 2) == pytest.approx(counted.ids.shares(0, ROWS // 2), abs=0.02)


def test_index_dedup_is_advised_with_its_gain() -> None:
    planners = [_planned(1.2, dedup)[1] for dedup in (False, True)]
    told, of_dedup = ({note.code: note.figures for note in planner.report().notes} for planner in planners)
    assert "index_dedup" not in of_dedup
    advised = told["index_dedup"]
    assert advised["before_ms"] == pytest.approx(_planned(hot_rows_bytes=0)[1].report().chosen.total_ms)
    # A planner whose sharder dedups ids counts all but the time to find repeated lookups.
    told_ms = planners[1].report().chosen.total_ms
    assert told_ms < advised["dedup_ms"] < 1.5 * told_ms


def test_tables_whose_batches_vary_have_no_hot_rows() -> None:
    """Their replicas would refuse the first batch."""
    half = {"t1": ParameterConstraints(batch_sizes=[SAMPLES // 2])}
    assert not [*hot_rows_of(_planned.__wrapped__(constraints=half)[0])]


@pytest.mark.parametrize("given", [-1, 1.5, True])
def test_impossible_budgets_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"hot_rows_bytes must be a whole number from 0, got {given}"):
        _planned(None, hot_rows_bytes=given)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hot") / "plan.json"
    _planned()[1].save_plan(path)
    return path


def test_a_loaded_plan_has_the_hot_rows_of_its_file(path: Path) -> None:
    saved, planner = SavedPlan.load(path), _planned()[1]
    assert saved == planner.saved_plan(name="plan.json")
    plan, loading = _planned(plan_loader=JsonPlanLoader(path))
    assert {name: tuple(rows.ids.tolist()) for name, rows in hot_rows_of(plan)} == {
        name: table.hot_rows for name, table in saved.tables()
    }
    assert loading.report().chosen.total_ms == pytest.approx(planner.report().chosen.total_ms, rel=1e-6)
    assert loading.predict(saved).total_ms == pytest.approx(planner.report().chosen.total_ms, rel=1e-6)


def test_a_file_of_another_vocabulary_is_refused(path: Path) -> None:
    with pytest.raises(PlannerError, match="hot rows of vocabulary 'november', this job has 'december'. Plan again"):
        _planned(plan_loader=JsonPlanLoader(path), vocabulary="december")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"hot_rows": [ROWS]}, f"'ec.t0': hot rows must lie in a table of 20,000 rows, got ids from {ROWS} to {ROWS}"),
        ({"hot_rows": [3, 3]}, "'ec.t0': hot rows must be different rows, got 1 ids twice"),
        ({"sharding_type": "table_row_wise"}, "'ec.t0' is table_row_wise .*: hot rows need a row_wise table"),
    ],
)
def test_damaged_files_are_refused(path: Path, tmp_path: Path, changed: dict[str, Any], error: str) -> None:
    document = json.loads(path.read_text())
    document["sharding"]["ec"]["t0"].update(changed)
    (tmp_path / "plan.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match=error):
        SavedPlan.load(tmp_path / "plan.json")


def test_replan_proposes_the_hot_rows_of_drifted_data_when_they_pay(path: Path) -> None:
    saved, planner, drifted = SavedPlan.load(path), _planned()[1], _statistics(shift=777)
    found = planner.replan(saved, steps=10**9, statistics=drifted)
    assert not found.stays and found.chosen.bytes_moved == 0 and found.chosen.step_ms < 0.8 * found.now.step_ms
    before, after = (dict(plan.tables()) for plan in (saved, found.plan))
    for name, table in after.items():
        same = len(set(table.hot_rows) & set(before[name].hot_rows))
        assert table.hot_rows and same < 0.5 * len(table.hot_rows)
        assert table.shards == before[name].shards
    told = compare(saved, found.plan)
    assert {change.table for change in told.changes} == set(after) and told.total_bytes == 0
    for change in told.changes:
        assert f"{len(after[change.table].hot_rows):,} hot rows" in change.after
    assert planner.replan(saved, steps=10, statistics=drifted).stays  # a restart takes longer than it gains
    assert planner.replan(saved, steps=10**9, statistics=_statistics()).stays


TABLE = {
    "num_embeddings": ROWS,
    "embedding_dim": DIM,
    "pooling": "none",
    "optimizer": "rowwise_adagrad",
    "sharding_types": ["row_wise"],
}
"""Entry of a table list. Small tables would send even less if they were data-parallel."""


def test_commands_plan_show_vary_and_replan_hot_rows(tmp_path: Path) -> None:
    tables, known, plan = (tmp_path / f"{name}.json" for name in ("tables", "statistics", "plan"))
    listed = [{"name": f"t{i}", "feature_names": [feature], **TABLE} for i, feature in enumerate(FEATURES)]
    tables.write_text(json.dumps({"schema": "dreamshard_planner.table_list/1", "tables": listed}))
    _statistics().to_json(known)
    job = ("--tables", tables, "--gpus-per-node", 4, "--nodes", NODES, "--gpu", "h100", "--batch-size", SAMPLES)
    hot = ("--statistics", known, "--hot-rows", "512KiB", "--vocabulary", "november", "--effort", "quick")
    assert "hot rows lower the predicted step" in run("plan", *job, *hot, "--out", plan).stdout
    told = run_json("info", plan)
    assert told["inputs"]["settings"]["vocabulary"] == "november"
    rows = told["sharding"]["sequences_32"]["t0"]["hot_rows"].removesuffix(" entries")
    assert f"with {rows} hot rows" in run("explain", plan).stdout
    sweep = run_json("what-if", plan, "--vary", "hot-rows=0KB,16KiB,512KiB")
    cost_ms = [point["total_ms"] for point in sweep["sweeps"]["hot_rows_bytes"]]
    assert cost_ms[0] > 1.05 * cost_ms[1] > 1.05 * cost_ms[2] == pytest.approx(1.05 * sweep["base"]["total_ms"])
    _statistics(shift=777).to_json(known)
    run("replan", plan, "--statistics", known, "--steps", "1e9", "--out", tmp_path / "new.json", status=3)
    new, old = (dict(SavedPlan.load(file).tables()) for file in (tmp_path / "new.json", plan))
    assert all(table.hot_rows and table.hot_rows != old[name].hot_rows for name, table in new.items())
