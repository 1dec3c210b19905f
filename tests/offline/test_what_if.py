# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sweeps over GPUs, batch sizes and bandwidths: each point is a plan that fits, or says why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamshard_planner import FeatureStatistics, TableStatistics, TaskError
from dreamshard_planner.devices import GB, Machine
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.offline.jobs import Job, OfflineModel, PlannedJob
from dreamshard_planner.offline.table_list import TableSpec
from dreamshard_planner.offline.what_if import Point, _point, replanning, what_if
from dreamshard_planner.plans.plan_file import SavedPlan

QUICK = {"effort": "quick", "sharding_types": ["table_wise", "row_wise", "column_wise"]}


def job(machine: Machine | None = None, hot: float = 60.0) -> Job:
    """Eight tables of 1 GB, the first of them read most."""
    specs = [
        TableSpec(
            name=f"t{index}",
            num_embeddings=2_000_000,
            embedding_dim=128,
            features={f"f{index}": FeatureStatistics(hot if index == 0 else 2.0)},
        )
        for index in range(8)
    ]
    machine = machine or Machine(ranks_per_host=4, gpu="a100-40", host_memory_bytes=GB)
    return Job(model=OfflineModel.of_specs(specs), machine=machine, batch_size=1024, reserve=0.0, settings=QUICK)


def sweep(job: Job, axis: str, values: list[Any]) -> tuple[Point, ...]:
    return what_if(job, {axis: values}).sweeps[axis]


def test_sweeps_cost_what_the_plans_themselves_cost() -> None:
    base = job()
    points = sweep(base, "ranks", [2, 4])
    assert [point.ranks for point in points] == [2, 4] and all(point.fits for point in points)
    assert points[1].total_ms == pytest.approx(base.plan().report.chosen.total_ms, rel=0.05)
    assert points[0].us_per_sample == pytest.approx(points[0].total_ms * 1e3 / 2048)
    (slow,) = sweep(base, "intra_bytes_per_s", [1e9])
    assert slow.total_ms > points[1].total_ms and slow.collectives_ms > 10 * points[1].collectives_ms
    (large,) = sweep(base, "batch_size", [8192])
    assert large.total_ms > 2 * points[1].total_ms
    other = sweep(job(Machine(ranks_per_host=4, gpu="a100-40", memory_bytes=9 * GB)), "gpu", ["l4", "H200"])
    assert [point.value for point in other] == ["l4", "H200"] and "H200" in other[1].machine
    assert other[1].total_ms < points[1].total_ms < other[0].total_ms and other[1].fullest < points[1].fullest
    (tight,) = sweep(job(Machine(ranks_per_host=4, memory_bytes=3 * GB, host_memory_bytes=GB)), "ranks", [1])
    assert not tight.fits and "do not fit" in tight.reason and tight.ranks == 1


@pytest.mark.parametrize(
    ("axis", "value", "named"),
    [
        ("ranks", 0, "got 0"),
        ("hosts", -1, "got -1"),
        ("batch_size", 0, "batch_size"),
        ("intra_bytes_per_s", 0.0, "intra_bytes_per_s"),
        ("gpu", "h20", "h20"),
    ],
)
def test_a_value_that_cannot_be_is_a_point_that_says_so(axis: str, value: Any, named: str) -> None:
    (point,) = sweep(job(), axis, [value])
    assert not point.fits and named in point.reason and point.value == value


def test_a_job_that_comes_again_is_planned_once_and_unknown_axes_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Job] = []
    plan = Job.plan
    monkeypatch.setattr(Job, "plan", lambda one: planned.append(one) or plan(one))
    found = what_if(job(), {"hosts": [2, 1, 2], "ranks": [4]})
    assert found.base.fits and found.sweeps["hosts"][0].ranks == 8 and len(planned) == 2
    assert found.sweeps["ranks"][0].total_ms == found.sweeps["hosts"][1].total_ms == found.base.total_ms
    assert found.to_dict()["base"]["ranks"] == 4 and "roofline" in found.cost_source
    with pytest.raises(TaskError, match="nothing called 'colour' varies; ranks"):
        what_if(job(), {"colour": [1]})


def test_no_point_is_dearer_than_the_present_plan_where_that_fits() -> None:
    good = job().plan()
    whole = replace(good.job, settings=QUICK | {"sharding_types": ["table_wise"]})
    present = PlannedJob(whole, good.planner, good.plan, 0.0)
    slower = replace(whole, machine=replace(whole.machine, intra_bytes_per_s=200 * GB))
    kept_ms = slower.read().predict(good.plan).total_ms
    assert slower.plan().report.chosen.total_ms > kept_ms
    assert _point("intra_bytes_per_s", 200 * GB, present, []).total_ms == pytest.approx(kept_ms)
    assert not _point("batch_size", 100_000_000, present, []).fits


def test_a_plan_file_is_the_present_plan(tmp_path: Path) -> None:
    made = replace(job(), settings=QUICK | {"sharding_types": ["table_wise"]}).plan()
    made.planner.save_plan(path := tmp_path / "plan.json")
    searched = replace(job_of(SavedPlan.load(path)), settings=QUICK)
    found = what_if(searched, {"batch_size": [1024]}, plan_file=path)
    assert found.base.total_ms == pytest.approx(made.report.chosen.total_ms, rel=1e-6)
    assert found.sweeps["batch_size"][0].total_ms == found.base.total_ms
    assert "since the plan was made" not in " ".join(note.text for note in found.notes)
    other = what_if(replace(searched, batch_size=64), {}, plan_file=path)
    assert other.base.total_ms < found.base.total_ms and "plan.json is not the plan of" in other.notes[0].text


def test_planning_again_gains_where_another_table_became_hot() -> None:
    base = job(hot=2.0)
    before = TableStatistics({f"f{index}": FeatureStatistics(2.0) for index in range(8)})
    hot = {**before, "f0": FeatureStatistics(80.0), "f1": FeatureStatistics(80.0)}
    gain = replanning(base, before, TableStatistics(hot))
    assert gain.again_ms <= gain.keep_ms and 0 <= gain.gain < 1
    assert replanning(base, before, before).gain < 0.01
