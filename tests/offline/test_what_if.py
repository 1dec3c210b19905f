# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What other machines and tables would cost: each answer is a plan that fits, or says why there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from dreamshard_planner import FeatureStatistics, ShardingGroups, TableStatistics, TaskError
from dreamshard_planner.devices import GB, Machine
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.offline.jobs import Job, OfflineModel, PlannedJob, read_model
from dreamshard_planner.offline.table_list import TableSpec
from dreamshard_planner.offline.what_if import (
    Plans,
    replanning,
    resized,
    smallest_that_fits,
    sweep,
    what_if,
    worst_table,
)
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
    (tight,) = sweep(base, "memory_bytes", [GB // 100])
    assert not tight.fits and "do not fit" in tight.reason and tight.machine == points[1].machine


def test_sharding_groups_vary_and_the_smallest_machine_is_of_whole_groups() -> None:
    grouped = replace(job(), settings={**QUICK, "sharding_groups": ShardingGroups(size=2, sync_interval=4)})
    two, four = sweep(grouped, "sharding_group", [2, 4])
    assert two.fits and four.fits and two.ranks == four.ranks == 4
    assert two.total_ms == pytest.approx(grouped.plan().report.chosen.total_ms, rel=1e-6)
    (often,) = sweep(job(), "sharding_group", [2])  # averaged with every batch
    assert often.total_ms > two.total_ms
    tight = replace(grouped, machine=Machine(ranks_per_host=8, memory_bytes=6 * GB, host_memory_bytes=GB))
    found, _ = smallest_that_fits(tight)
    assert found is not None and found.ranks == 2  # one group, and no rank alone


@pytest.mark.parametrize(
    ("axis", "value", "named"),
    [
        ("sharding_group", 3, "sharding groups of 3"),
        ("sharding_group", 0, "got 0"),
        ("ranks", 0, "got 0"),
        ("hosts", -1, "got -1"),
        ("batch_size", 0, "batch_size"),
        ("memory_bytes", 0, "memory_bytes"),
        ("intra_bytes_per_s", 0.0, "intra_bytes_per_s"),
        ("gpu", "h20", "h20"),
    ],
)
def test_a_value_that_cannot_be_is_a_point_that_says_so(axis: str, value: Any, named: str) -> None:
    (point,) = sweep(job(), axis, [value])
    assert not point.fits and named in point.reason and point.value == value


def test_the_smallest_machine_is_the_first_that_fits() -> None:
    steps = []
    machine = Machine(ranks_per_host=8, memory_bytes=3 * GB, host_memory_bytes=GB)
    found, on_device = smallest_that_fits(job(machine), Plans(steps.append))
    # 8.2 GB of weights, and buffers, on ranks of 3 GB: two are too few.
    assert found is not None and found.ranks in (3, 4) and found.fits and on_device == found
    (fewer,) = sweep(job(machine), "ranks", [found.ranks - 1])
    assert not fewer.fits
    assert 2 < len(steps) <= 5
    hosts, _ = smallest_that_fits(job(Machine(ranks_per_host=2, memory_bytes=3 * GB, host_memory_bytes=GB)))
    assert hosts is not None and hosts.ranks == 4 and "on each of 2 hosts" in hosts.machine
    none = smallest_that_fits(job(Machine(ranks_per_host=1, gpu="l4", memory_bytes=GB, host_memory_bytes=GB)))
    assert none == (None, None)


def test_the_smallest_machine_with_host_memory_and_the_one_without() -> None:
    """As the rows of a sweep have it: what fits there with tables in host memory is the smallest that fits."""
    machine = Machine(ranks_per_host=4, memory_bytes=3 * GB, host_memory_bytes=100 * GB)
    found, on_device = smallest_that_fits(job(machine))
    rows = sweep(job(machine), "ranks", [1, 2, 3, 4])
    assert found.ranks == min(point.ranks for point in rows if point.fits) == 1 and found.outside > 0
    assert on_device.ranks == min(point.ranks for point in rows if not point.outside) > 1 and on_device.outside == 0


def test_the_table_that_hurts_most_and_what_helps() -> None:
    planned = job().plan()
    worst = worst_table(planned)
    assert worst.table == "pooled.t0" and worst.without_ms < planned.report.chosen.total_ms
    by_what = {remedy.what: remedy for remedy in worst.remedies}
    assert {"cached in unified memory", "half the rows", "half the dim", "fp16 weights"} <= by_what.keys()
    assert by_what["half the dim"].gain_ms > 0
    assert by_what["cached in unified memory"].gain_ms < 0
    totals = [remedy.total_ms for remedy in worst.remedies]
    assert totals == sorted(totals)
    config = planned.job.model.module.pooled.embedding_bag_configs()[0]
    assert (config.num_embeddings, config.embedding_dim, config.data_type) == (2_000_000, 128, DataType.FP32)


def test_a_model_with_a_smaller_table_is_itself_afterwards() -> None:
    module = read_model(str(Path(__file__).parents[2] / "examples" / "tables.json")).module
    before = {name: (parameter, parameter.shape) for name, parameter in module.named_parameters()}
    with resized(module, "pooled.user_id", dim=0.5, data_type=DataType.FP16) as possible:
        assert possible
        weight = module.pooled.embedding_bags["user_id"].weight
        assert weight.shape == (20_000_000, 64) and weight.dtype == torch.float16 and weight.device.type == "meta"
        assert weight._optimizer_classes[0].__name__ == "RowWiseAdagrad"
    with resized(module, "sequences_64.history", dim=0.5) as possible:
        assert not possible  # its collection has one dim
    with resized(module, "pooled.city", data_type=DataType.FP16) as possible:
        assert not possible  # it is already
    with resized(module, "pooled.absent", rows=0.5) as possible:
        assert not possible
    assert {name: (parameter, parameter.shape) for name, parameter in module.named_parameters()} == before


def test_all_together_and_unknown_axes() -> None:
    steps = []
    varied = {"hosts": [2, 1], "ranks": [4], "memory_bytes": [GB // 100, GB // 100]}
    ready: list[Any] = []
    found = what_if(job(), varied, smallest=False, worst=False, step=steps.append, ready=ready.append)
    assert found.base.fits and found.sweeps["hosts"][0].ranks == 8
    assert steps == ["as it is", "hosts 2", "memory_bytes 10,000,000"]  # what comes again is not planned again
    assert ready[0] == found.base and [point.axis for point in ready] == ["", "hosts", "memory_bytes"]
    assert found.sweeps["ranks"][0].total_ms == found.sweeps["hosts"][1].total_ms == found.base.total_ms
    assert not any(point.fits for point in found.sweeps["memory_bytes"])
    assert found.to_dict()["worst"] is None and "roofline" in found.cost_source
    with pytest.raises(TaskError, match="nothing called 'colour' varies; ranks"):
        what_if(job(), {"colour": [1]})


def test_no_point_is_dearer_than_the_present_plan_where_that_fits() -> None:
    good = job().plan()
    paper = replace(good.job, settings={"recipe": "paper"})  # one policy roll-out, without a search
    present = PlannedJob(paper, good.planner, good.plan, 0.0)
    slower = replace(paper, machine=replace(paper.machine, intra_bytes_per_s=200 * GB))
    kept_ms = slower.read().predict(good.plan).total_ms
    assert slower.plan().report.chosen.total_ms > kept_ms
    assert Plans(present=present).point("", 0, slower).total_ms == pytest.approx(kept_ms)
    tight = replace(paper, machine=replace(paper.machine, memory_bytes=GB // 100))
    assert not Plans(present=present).point("", 0, tight).fits


def test_a_plan_file_is_the_present_plan(tmp_path: Path) -> None:
    made = replace(job(), settings={"recipe": "paper"}).plan()
    made.planner.save_plan(path := tmp_path / "plan.json")
    searched = replace(job_of(SavedPlan.load(path)), settings=QUICK)
    found = what_if(searched, {"batch_size": [1024]}, smallest=False, worst=False, plan_file=path)
    assert found.base.total_ms == pytest.approx(made.report.chosen.total_ms, rel=1e-6)
    assert found.sweeps["batch_size"][0].total_ms == found.base.total_ms
    assert "since the plan was made" not in " ".join(note.text for note in found.notes)
    other = what_if(replace(searched, batch_size=64), smallest=False, worst=False, plan_file=path)
    assert other.base.total_ms < found.base.total_ms and "plan.json is not the plan of" in other.notes[0].text


def test_a_table_that_no_rank_waits_for_gets_no_remedies() -> None:
    found = worst_table(job(hot=2.0).plan())
    assert found.without_ms > 0 and found.remedies == ()


def test_planning_again_gains_where_another_table_became_hot() -> None:
    base = job(hot=2.0)
    before = TableStatistics({f"f{index}": FeatureStatistics(2.0) for index in range(8)})
    hot = {**before, "f0": FeatureStatistics(80.0), "f1": FeatureStatistics(80.0)}
    gain = replanning(base, before, TableStatistics(hot))
    assert gain.again_ms <= gain.keep_ms and 0 <= gain.gain < 1
    assert replanning(base, before, before).gain < 0.01
