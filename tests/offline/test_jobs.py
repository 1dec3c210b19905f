# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Jobs of table lists, and sweeps over machines and batches: made, or refused by file, table and mistake."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_models import table_list
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dreamshard_planner import FeatureStatistics, StatisticsError, TableStatistics, TaskError
from dreamshard_planner.devices import GB, Machine
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec, read_model, read_table_list
from dreamshard_planner.offline.what_if import Point, what_if
from dreamshard_planner.plans.plan_file import SavedPlan

EXAMPLE = Path(__file__).parents[2] / "examples" / "tables.json"


def test_the_example_becomes_collections_with_statistics_constraints_and_optimizers() -> None:
    model = read_model(str(EXAMPLE))
    kinds = {name: type(child) for name, child in model.module.named_children()}
    assert kinds == {
        "pooled": EmbeddingBagCollection,
        "sequences_64": EmbeddingCollection,
        "weighted": EmbeddingBagCollection,
    }
    assert model.module.weighted.is_weighted() and not model.module.pooled.is_weighted()
    (item,) = [config for config in model.module.pooled.embedding_bag_configs() if config.name == "item_id"]
    assert (item.num_embeddings, item.embedding_dim, item.feature_names) == (5_000_000, 64, ["item_id", "last_items"])
    assert model.statistics["last_items"].pooling_factor == 40 and "user_id" not in model.statistics
    assert list(model.constraints) == ["country"]
    weights = {name: parameter for name, parameter in model.module.named_parameters()}
    assert {parameter.device.type for parameter in weights.values()} == {"meta"}
    classes = {name.split(".")[-2]: p._optimizer_classes[0].__name__ for name, p in weights.items()}
    assert (classes["history"], classes["user_id"]) == ("Adam", "RowWiseAdagrad")
    assert str(weights["pooled.embedding_bags.city.weight"].dtype) == "torch.float16"


def test_pools_are_lists_of_tables_too() -> None:
    model = read_model("merlin_tiny")
    configs = model.module.pooled.embedding_bag_configs()
    shared = [config for config in configs if len(config.feature_names) == 2]
    assert len(configs) == 55 and shared[0].feature_names == [f"{shared[0].name}_0", f"{shared[0].name}_1"]
    assert set(shared[0].feature_names) <= set(model.statistics)


def test_statistics_of_data_stand_above_the_list(tmp_path: Path) -> None:
    model = OfflineModel.of_specs(read_table_list(EXAMPLE))
    counted = model.with_statistics(TableStatistics({"brand": FeatureStatistics(7.0)}))
    assert counted.statistics["brand"].pooling_factor == 7 and counted.statistics["category"].pooling_factor == 4
    with pytest.raises(StatisticsError, match="features that no table of the model serves: 'brend'"):
        model.with_statistics(TableStatistics({"brend": FeatureStatistics(7.0)}))


def test_lookups_that_a_list_does_not_tell_are_an_assumption(tmp_path: Path) -> None:
    told = {**GOOD, "name": "b", "pooling_factor": 1}
    model = OfflineModel.of_specs(read_table_list(table_list(tmp_path, GOOD, told)))
    report = Job(model=model, machine=Machine(ranks_per_host=2, gpu="h100"), batch_size=64).plan().report()
    assert report.notes[0].code == "assumption" and "for 1 of 2 features (a)" in report.notes[0].text


GOOD = {"name": "a", "num_embeddings": 10, "embedding_dim": 8}


@pytest.mark.parametrize(
    ("entry", "mistake"),
    [
        ({**GOOD, "num_embedings": 3}, r"tables\[1\] 'a': unknown key 'num_embedings' .did you mean 'num_embeddings'"),
        ({"name": "a", "embedding_dim": 8}, r"tables\[1\] 'a': lacks 'num_embeddings'"),
        ({**GOOD, "embedding_dim": "8"}, r"tables\[1\] 'a': embedding_dim: .* got '8'"),
        ({**GOOD, "num_embeddings": 0}, r"tables\[1\] 'a': num_embeddings: .* 1, got 0"),
        (
            {**GOOD, "embedding_dim": 1e9},
            "embedding_dim must be up to 1,048,576, got 1,000,000,000: perhaps rows and dim have changed places",
        ),
        ({**GOOD, "pooling": "max"}, r"pooling: .*'sum', 'mean' or 'none', got 'max'"),
        ({**GOOD, "optimizer": "sdg"}, r"optimizer: .*rowwise_adagrad.*, got 'sdg'"),
        ({**GOOD, "pooling_factor": -1}, r"pooling_factor: pooling factor must be a finite number >= 0, got -1"),
        ({**GOOD, "pooling_factor": [1, 2]}, r"has 1 feature_names and 2 pooling factors"),
        ({**GOOD, "feature_names": ["f", "f"]}, r"feature_names must differ"),
        ({**GOOD, "sharding_types": ["rowwise"]}, r"sharding_types.0: .*table_wise, .*'rowwise'"),
        ({**GOOD, "weighted": True, "pooling": "none"}, r"sequence tables \(pooling 'none'\) take no weights"),
        ({**GOOD, "name": "first"}, r"tables\[1\] 'first': has the name of tables\[0\]"),
        ("a", r"tables.1: .* got 'a'"),
    ],
)
def test_one_mistake_is_named_with_its_place(tmp_path: Path, entry: Any, mistake: str) -> None:
    path = table_list(tmp_path, {**GOOD, "name": "first"}, entry)
    with pytest.raises(TaskError, match=f"tables.json: .*{mistake}") as raised:
        read_table_list(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ('{"schema": "dreamshard_planner.table_list/1",\n "tables": [}', "line 2 column 13"),
        ('{"tables": []}', "no list of tables"),
        ("[]", 'it must be an object .*"schema": .*got a bare list: put it under tables'),
        ('{"schema": "dreamshard_planner.table_list/1", "table": []}', "unknown key 'table' .did you mean 'tables'"),
        ('{"schema": "dreamshard_planner.table_list/1", "tables": 1, "tables": 2}', "the key 'tables' twice"),
        ('{"schema": "dreamshard_planner.table_list/1", "defaults": {"name": "x"}, "tables": [{}]}', "key 'name'"),
    ],
)
def test_a_list_that_is_none_says_why(tmp_path: Path, text: str, mistake: str) -> None:
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(TaskError, match=f"tables.json: .*{mistake}"):
        read_table_list(path)
    with pytest.raises(TaskError, match=r"gone.json: no such file"):
        read_table_list(tmp_path / "gone.json")


QUICK = {"effort": "quick", "sharding_types": ["table_wise"]}


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


def test_a_value_that_cannot_be_is_a_point_that_says_so() -> None:
    wrong = {
        "ranks": (0, "got 0"),
        "hosts": (-1, "got -1"),
        "batch_size": (0, "batch_size"),
        "intra_bytes_per_s": (0.0, "intra_bytes_per_s"),
        "gpu": ("h20", "h20"),
    }
    sweeps = what_if(job(), {axis: [value] for axis, (value, _) in wrong.items()}).sweeps
    for axis, (value, named) in wrong.items():
        (point,) = sweeps[axis]
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
