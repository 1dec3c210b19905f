# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plan files, commands and re-planning know hot rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner.types import PlannerError
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DreamShardPlanner, JsonPlanLoader, PlanError, TableStatistics, compare
from dreamshard_planner.devices import Machine
from dreamshard_planner.hot_rows.hot_set import hot_rows_of
from dreamshard_planner.plans.plan_file import SavedPlan
from tests.cli.test_commands import run, run_json
from tests.hot_rows.zipf import FEATURES, sequence_model, zipf_batches

ROWS, DIM, SAMPLES, LOOKUPS, NODES = 20_000, 32, 256, 50, 4
BUDGET_BYTES = 2**19
TABLE = {
    "num_embeddings": ROWS,
    "embedding_dim": DIM,
    "pooling": "none",
    "optimizer": "rowwise_adagrad",
    "sharding_types": ["row_wise"],
}
"""Entry of a table list. Small tables would send even less if they were data-parallel."""
pytestmark = pytest.mark.filterwarnings("ignore")


def _statistics(shift: int = 0) -> TableStatistics:
    """Return statistics of batches whose ids are all moved by so many rows."""
    batches = zipf_batches(1.2, ROWS, SAMPLES, LOOKUPS, 5)
    return TableStatistics.from_batches(
        KeyedJaggedTensor([*FEATURES], (batch.values() + shift) % ROWS, lengths=batch.lengths()) for batch in batches
    )


def _planner(**settings: Any) -> DreamShardPlanner:
    machine = Machine(ranks_per_host=4, hosts=NODES, gpu="h100")
    given = {"hot_rows_bytes": BUDGET_BYTES, "vocabulary": "november", "effort": "quick", "debug": False, **settings}
    return DreamShardPlanner(machine.topology(), batch_size=SAMPLES, **given)


def _planned(planner: DreamShardPlanner) -> dict[str, Any]:
    return dict(hot_rows_of(planner.plan(sequence_model(ROWS, DIM), [EmbeddingCollectionSharder()])))


@pytest.fixture(scope="module")
def planner() -> DreamShardPlanner:
    made = _planner(statistics=_statistics())
    assert len(_planned(made)) == 2
    return made


@pytest.fixture(scope="module")
def path(planner: DreamShardPlanner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hot") / "plan.json"
    planner.save_plan(path)
    return path


def test_a_loaded_plan_has_the_hot_rows_of_its_file(planner: DreamShardPlanner, path: Path) -> None:
    saved, loading = SavedPlan.load(path), _planner(plan_loader=JsonPlanLoader(path), statistics=_statistics())
    assert saved == planner.saved_plan(name="plan.json")
    hot = _planned(loading)
    assert {name: tuple(rows.ids.tolist()) for name, rows in hot.items()} == {
        name: table.hot_rows for name, table in saved.tables()
    }
    assert loading.report().chosen.total_ms == pytest.approx(planner.report().chosen.total_ms, rel=1e-6)
    assert loading.predict(saved).total_ms == pytest.approx(planner.report().chosen.total_ms, rel=1e-6)


def test_a_file_of_another_vocabulary_is_refused(path: Path) -> None:
    loading = _planner(plan_loader=JsonPlanLoader(path), statistics=_statistics(), vocabulary="december")
    with pytest.raises(PlannerError, match="hot rows of vocabulary 'november', this job has 'december'. Plan again"):
        _planned(loading)


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


def test_replan_proposes_the_hot_rows_of_drifted_data_when_they_pay(planner: DreamShardPlanner, path: Path) -> None:
    saved, drifted = SavedPlan.load(path), _statistics(shift=777)
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
