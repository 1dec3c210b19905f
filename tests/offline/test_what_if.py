# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sweeps over GPUs, batch sizes and bandwidths: each point is a plan that fits, or says why there is none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import TaskError
from dreamshard_planner.devices import GB, Machine
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec
from dreamshard_planner.offline.what_if import Point, what_if
from dreamshard_planner.plans.plan_file import SavedPlan

QUICK = {"effort": "quick", "sharding_types": ["table_wise", "row_wise", "column_wise"]}


def job(machine: Machine | None = None, hot: float = 60.0) -> Job:
    """Eight tables of 1 GB, the first of them read most."""
    specs = [
        TableSpec(
            name=f"t{index}",
            num_embeddings=2_000_000,
            embedding_dim=128,
            feature_names=(f"f{index}",),
            pooling_factor=hot if index == 0 else 2.0,
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
    assert points[1].total_ms == pytest.approx(base.plan().report().chosen.total_ms, rel=0.05)
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


def test_an_unknown_axis_is_an_error() -> None:
    with pytest.raises(TaskError, match="nothing called 'colour' varies; ranks"):
        what_if(job(), {"colour": [1]})


def test_a_plan_file_is_the_present_plan_and_stays_where_a_new_one_is_no_cheaper(tmp_path: Path) -> None:
    made = replace(job(), settings={**QUICK, "least_gain": 0.99}).plan()  # keeps TorchRec's plan
    made.save_plan(path := tmp_path / "plan.json")
    present = job_of(saved := SavedPlan.load(path))
    slower = replace(present.machine, intra_bytes_per_s=200 * GB)
    kept_ms = replace(present, machine=slower).read().predict(made.options).total_ms
    axes = {"batch_size": [1024, 100_000_000], "hosts": [2], "intra_bytes_per_s": [200 * GB]}
    found = what_if(present, axes, saved)
    assert found.base.total_ms == pytest.approx(made.report().chosen.total_ms, rel=1e-6)
    same, huge = found.sweeps["batch_size"]
    assert same.total_ms <= found.base.total_ms and not huge.fits and "do not fit" in huge.reason
    assert found.sweeps["hosts"][0].ranks == 8
    assert found.sweeps["intra_bytes_per_s"][0].total_ms <= kept_ms
    assert found.base.ranks == 4 and "roofline" in found.cost_source
    other = replace(present, machine=replace(present.machine, ranks_per_host=2))
    with pytest.raises(PlannerError):
        what_if(other, {}, saved)
