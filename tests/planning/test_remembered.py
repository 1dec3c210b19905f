# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics and plans that trainings of the same tables observed, as the next start takes them."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from small_models import SHARDERS, collection, table, topology

from dreamshard_planner import DreamShardPlanner, Observation, SavedPlan
from dreamshard_planner.background import RUNS, TABLES, learn_from
from dreamshard_planner.checkpoints import choice
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.observing.observation import ObservedRun, rank_file
from dreamshard_planner.planning.settings import Remembered, sharding_key
from tests.logged import warned
from tests.observing.runs import rank_steps
from tests.planning.test_context import statistics

BATCH = 48
STATISTICS = statistics(factor=30.0, batch_size=BATCH)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home."""
    monkeypatch.setenv("DREAMSHARD_HOME", str(tmp_path))
    return tmp_path


def model() -> Any:
    return collection(*(table(f"t{i}", 100_000 * (i + 1), 64) for i in range(4)))


def started(**arguments: Any) -> DreamShardPlanner:
    """A planner after the start of a job, on rank 0."""
    planner = small_models.planner(**({"sharding_types": ["table_wise"], "batch_size": None} | arguments))
    planner._settings = remembered().completed(planner._settings)  # as collective_plan does
    planner.plan(model(), SHARDERS)
    return planner


@cache
def first() -> SavedPlan:
    """The plan of a start that remembers nothing; a test asks for it before anything is remembered."""
    return started().saved_plan()


def remembered() -> Remembered:
    return Remembered.of_module(model(), SHARDERS, topology())


def placed(plan: SavedPlan, rank_of: Callable[[int], int]) -> SavedPlan:
    """The plan with each shard on another rank."""
    moved = {
        name: replace(one, shards=tuple(replace(shard, rank=rank_of(shard.rank)) for shard in one.shards))
        for name, one in plan.sharding[""].items()
    }
    return replace(plan, sharding={"": moved})


def on_one_rank(plan: SavedPlan) -> SavedPlan:
    """The plan with all tables on rank 1."""
    return placed(plan, lambda _: 1)


def test_statistics_and_batch_size_serve_a_start_without_any() -> None:
    plain = first().inputs
    remembered().remember(STATISTICS, {})
    after = started()
    assert after.saved_plan().inputs.batch_size == BATCH != plain.batch_size
    assert after.lookups_per_sample()["t0_f0"] == 30.0
    assert "statistics are those of the last training of these tables" in str(after.report())
    own = started(statistics=statistics(factor=7.0), batch_size=64)
    assert own.lookups_per_sample()["t0_f0"] == 7.0 and own.saved_plan().inputs.batch_size == 64
    offline = DreamShardPlanner(topology=topology(), effort="quick", sharding_types=["table_wise"])
    offline.plan(model(), SHARDERS)
    assert offline.saved_plan().inputs == plain


def test_damaged_files_are_left_out() -> None:
    plan, known = first(), remembered()
    known.remember(STATISTICS, {sharding_key(plan.sharding): 1.0}, plan)
    plan.save(known.better_file)
    assert known.better() is not None
    for damage in ("{}", '{"schema": 0}', "[1]", "no JSON"):
        for file in known.folder.rglob("*.json"):
            file.write_text(damage)
        after = started()
        assert after.lookups_per_sample()["t0_f0"] == 1.0 and after.best_known() is None


@pytest.mark.parametrize(("slow_ms", "replaced"), [(110.0, True), (104.0, False)])
def test_a_plan_that_was_observed_to_be_slower_is_replaced(slow_ms: float, replaced: bool) -> None:
    planned = first()
    faster = on_one_rank(planned)
    steps_ms = {sharding_key(planned.sharding): slow_ms, sharding_key(faster.sharding): 100.0}
    remembered().remember(None, steps_ms, faster)
    after = started()
    assert after.saved_plan().sharding == (faster if replaced else planned).sharding
    assert ("observed to be slower: 110.0 ms a step, and 100.0 before" in str(after.report())) == replaced


@pytest.mark.parametrize(("all_on_one", "kept"), [(False, True), (True, False)])
def test_an_observed_plan_stays_unless_another_is_predicted_to_gain(all_on_one: bool, kept: bool) -> None:
    planned = first()
    trained = on_one_rank(planned) if all_on_one else placed(planned, lambda rank: 1 - rank)  # which costs the same
    remembered().remember(None, {sharding_key(trained.sharding): 100.0}, trained)
    after = started()
    assert after.saved_plan().sharding == (trained if kept else planned).sharding
    assert ("is predicted to gain 0.0 %, less than the 3 % by which costs may be off" in str(after.report())) == kept


def _observe(plan: SavedPlan, name: str, step_ms: float, world_size: int = 2, batch_size: int = BATCH):
    """Write the files of a run whose kernels teach nothing; its plan has the first two ranks."""
    counted = dict(statistics(factor=30.0, batch_size=batch_size))
    ranks = tuple(rank_steps(0, rank, counted, step=(step_ms,) * 8) for rank in range(2))
    run = ObservedRun(name, f"2026-11-2{name}", world_size, 1, "gloo", plan, {}, ranks)
    hardware = describe_hardware("cpu", torch.get_num_threads())
    folder = choice.home() / "runs" / choice.place(hardware, world_size)
    folder.mkdir(parents=True, exist_ok=True)
    for rank in ranks:
        kept = Observation(hardware, (replace(run, ranks=(rank,), plan=None if rank.rank else plan),))
        kept.save(rank_file(folder / f"{name}.json", rank.rank))
    return folder, name


def test_a_better_plan_is_known_after_a_run_and_not_told_once_observed() -> None:
    planner = started(batch_size=BATCH)
    planned = planner.saved_plan()
    slow = on_one_rank(planned)
    told = learn_from(*_observe(slow, "1", planner.predict(slow).total_ms, world_size=4))
    assert told["better"].startswith("a plan ") and str(choice.home()) in told["better"]
    better = planner.best_known()
    assert better is not None and planner.predict(better).total_ms < planner.predict(slow).total_ms
    assert started(batch_size=BATCH).saved_plan().sharding == better.sharding  # with the counted statistics
    told = learn_from(*_observe(better, "2", 2 * planner.predict(slow).total_ms, world_size=4))
    assert "better" not in told and planner.best_known() is None
    assert started(batch_size=BATCH).saved_plan().sharding == slow.sharding  # which was observed to be faster


def test_steps_of_other_batch_sizes_do_not_compare() -> None:
    planned = started(batch_size=BATCH).saved_plan()
    learn_from(*_observe(on_one_rank(planned), "1", 10.0, batch_size=BATCH // 4))
    learn_from(*_observe(planned, "2", 100.0))
    assert started(batch_size=BATCH).saved_plan().sharding == planned.sharding


def test_a_run_that_cannot_be_planned_again_still_teaches() -> None:
    planned = started(batch_size=BATCH).saved_plan()
    none = {kind: (1, 1) for kind in planned.inputs.topology.memory_bytes}
    full = replace(planned.inputs, topology=replace(planned.inputs.topology, memory_bytes=none))
    with warned("background") as told:
        assert learn_from(*_observe(replace(planned, inputs=full), "1", 100.0)) == {"learned": ""}
    assert "no better plan is looked for: " in told[-1] and remembered().statistics() is not None


def test_old_runs_are_removed_and_damaged_ones_left_out(home: Path) -> None:
    plan = started(batch_size=BATCH).saved_plan()
    for name in "123456789":
        folder, _ = _observe(plan, name, 100.0)
    (folder / "5.0.json").write_text("{}")
    old, new = (folder / f".{name}.part" for name in ("old", "new"))
    for part in (old, new):
        part.touch()
    os.utime(old, (0, 0))
    for index in range(TABLES + 3):
        (home / "tables" / f"old{index}").mkdir(parents=True)
    learn_from(folder, "9")
    assert len(list((home / "tables").iterdir())) == TABLES
    assert len({path.name[0] for path in folder.glob("*.json")}) == RUNS
    assert (remembered().folder / "statistics.json").exists()
    assert new.exists() and not old.exists()


@pytest.mark.usefixtures("group")
def test_statistics_with_which_tables_do_not_fit_are_left_out() -> None:
    """The plan method of a subclass makes both plans."""
    batch_sizes = []

    class Own(DreamShardPlanner):
        def plan(self, *given: Any) -> Any:
            batch_sizes.append(self._settings.batch_size)
            return super().plan(*given)

    small = topology(1, memory=2**28)
    known = Remembered.of_module(model(), SHARDERS, small)
    known.remember(statistics(factor=30.0, batch_size=100_000), {})
    planner = Own(topology=small, effort="quick", stats=[], debug=False)
    with warned("planner") as told:
        planner.collective_plan(model(), SHARDERS)
    assert len(told) == 1 and "planned without what earlier trainings observed" in told[0]
    assert planner.saved_plan().inputs.statistics is None and batch_sizes == [100_000, 512]
