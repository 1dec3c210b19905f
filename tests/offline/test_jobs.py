# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Jobs of table lists, and of plans with all that these were made from; sweeps over machines and batches."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from small_models import collection, sequences, table, table_list
from torch import nn
from torchrec.distributed.planner.types import (
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
    ParameterConstraints,
    PlannerError,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, KeyValueParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dreamshard_planner import (
    DreamShardPlanner,
    FeatureStatistics,
    PlacementRules,
    PlanError,
    ShardingGroups,
    StatisticsError,
    TableStatistics,
    TaskError,
)
from dreamshard_planner.devices import GB, Machine
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.offline.jobs import OPTIMIZERS, Job, OfflineModel, TableSpec, read_model, read_table_list
from dreamshard_planner.offline.what_if import Point, what_if
from dreamshard_planner.planning.plan_inputs import topology_inputs
from dreamshard_planner.plans.comparison import machine_differences, stale_differences
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.workload.lookups import HotIds, IdHistogram
from tests.cli.test_commands import run, run_json

EXAMPLE = Path(__file__).parents[2] / "examples" / "tables.json"


def test_the_example_becomes_collections_with_statistics_constraints_and_optimizers() -> None:
    model = read_model(str(EXAMPLE))
    kinds = {name: type(child) for name, child in model.module.named_children()}
    bags = EmbeddingBagCollection
    assert kinds == {"pooled": bags, "sequences_64": EmbeddingCollection, "weighted": bags}
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


def test_lookups_that_a_list_does_not_tell_are_an_assumption(tmp_path: Path) -> None:
    told = {**GOOD, "name": "b", "pooling_factor": 1}
    model = OfflineModel.of_specs(read_table_list(table_list(tmp_path, GOOD, told)))
    machine = Machine(ranks_per_host=2, gpu="h100")
    report = Job(model=model, machine=machine, batch_size=64, settings=QUICK).plan().report()
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
        ({**GOOD, "pooling_factor": -1}, r"pooling factor must be a finite number >= 0, got -1"),
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


def spec(name: str, optimizer: str = "sgd", factor: float | None = 20.0, feature: str | None = None, **sizes):
    sizes = {"num_embeddings": 500_000, "embedding_dim": 32} | sizes
    return TableSpec(name=name, feature_names=(feature or name,), pooling_factor=factor, optimizer=optimizer, **sizes)


def job(machine: Machine | None = None) -> Job:
    """Eight tables of 1 GB, the first of them read most."""
    sizes = {"num_embeddings": 2_000_000, "embedding_dim": 128}
    specs = [spec(f"t{index}", "sgd", 2.0 if index else 60.0, **sizes) for index in range(8)]
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
    wrong = {"ranks": (0, "got 0"), "hosts": (-1, "got -1"), "batch_size": (0, "batch_size"), "gpu": ("h20", "h20")}
    wrong |= {"intra_bytes_per_s": (0.0, "intra_bytes_per_s"), "hot_rows_bytes": (-1, "got -1")}
    sweeps = what_if(job(), {axis: [value] for axis, (value, _) in wrong.items()}).sweeps
    for axis, (value, named) in wrong.items():
        (point,) = sweeps[axis]
        assert not point.fits and named in point.reason and point.value == value
    for impossible in ({"reserve": 1.5}, {"batch_size": 2**50}):
        with pytest.raises(TaskError, match=f"{next(iter(impossible))} must be"):
            replace(job(), **impossible)
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


def model() -> nn.Module:
    """Pooled tables of two types and a sequence table, two modules deep, beside a dense layer."""
    tables = table("a", 5000, features=2), table("b", 90, 32, data_type=DataType.FP16, pooling=PoolingType.MEAN)
    pooled = collection(*tables, weighted=True, optimizer=torch.optim.Adam)
    sparse = nn.ModuleDict({"pooled": pooled, "sequences": sequences(table("a", 700, 8))})
    return nn.ModuleDict({"sparse": sparse, "dense": nn.Linear(4, 4, device="meta")})


def saved_of(module: nn.Module, statistics: TableStatistics | None, topology: Topology, **given) -> SavedPlan:
    planner = DreamShardPlanner(topology=topology, batch_size=64, statistics=statistics, effort="quick", **given)
    planner.plan(module, get_default_sharders())
    return planner.saved_plan()


STATISTICS = TableStatistics(
    {"a_f0": FeatureStatistics(20.0), "b_f0": FeatureStatistics(3.0, ids=IdHistogram.even(90), batch_size=64)}
)
CUDA = Machine(ranks_per_host=2, hosts=2, gpu="h100").topology()


class SlowRings(GeneralizedCommsBandwidth):
    """Bandwidths that differ between collectives."""

    intra_host_bw = 400e6
    inter_host_bw = 20e6

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        fast = self.intra_host_bw if world_size <= local_world_size else self.inter_host_bw
        return fast if collective_type is CollectiveType.ALL_TO_ALL else fast / world_size


POD = Topology(8, "cuda", local_world_size=2, pod_size=4, hbm_cap=10**9)
OTHER = {
    **dict.fromkeys(("hbm_cap", "ddr_cap", "ssd_cap"), 2 * 10**9),
    **dict.fromkeys(("local_world_size", "pod_size"), 2),
    "hbm_mem_bw": 2e9,
    **dict.fromkeys(("ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw"), 2e6),
    "bwd_compute_multiplier": 3.5,
    "custom_topology_data": CustomTopologyData(
        {"hbm_cap": [10**9] * 7 + [2 * 10**9], "ssd_cap": [10**12] * 7 + [10**9]}, 8
    ),
    "weighted_feature_bwd_compute_multiplier": 2.5,
    "uneven_sharding_perf_multiplier": 1.5,
    "generalized_comms_bandwidths": SlowRings(),
}
"""Another value of each argument of TorchRec's topology that a plan or its cost depends on."""
BASE = {"world_size": 8, "compute_device": "cuda", "local_world_size": 4, "hbm_cap": 10**9}


def test_no_argument_of_a_topology_is_forgotten() -> None:
    arguments = inspect.signature(Topology.__init__).parameters.keys()
    assert arguments - OTHER.keys() - {"created_by_factory"} == {"self", "world_size", "compute_device"}


WHOLE: dict[str, Any] = {"cost_source": "torchrec", "sharding_types": ["table_wise"]}


def reader_on(topology: Topology) -> DreamShardPlanner:
    """Return a planner that has read the model."""
    planner = DreamShardPlanner(topology=topology, batch_size=64, effort="quick", **WHOLE)
    planner.read(model(), get_default_sharders())
    return planner


@pytest.fixture(scope="module")
def base() -> SavedPlan:
    return saved_of(model(), None, Topology(**BASE), **WHOLE)


@pytest.mark.parametrize("argument", OTHER)
def test_each_argument_of_a_topology_comes_back_from_a_plan(argument: str, base: SavedPlan) -> None:
    made = reader_on(Topology(**(BASE | {argument: OTHER[argument]})))
    saved = made.saved_plan(base)
    assert machine_differences(base.inputs, saved.inputs)
    job = job_of(saved)
    again = job.machine.topology()
    assert topology_inputs(again) == saved.inputs.topology
    assert job.read().predict(saved).total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-4)
    assert reader_on(again).hash_planner_context_inputs_str() == made.hash_planner_context_inputs_str()


def test_collectives_of_other_ranks_than_the_file_tells_are_refused() -> None:
    topology = Topology(**BASE, generalized_comms_bandwidths=SlowRings())
    job = job_of(saved_of(model(), None, topology))
    with pytest.raises(PlanError, match="no bandwidth of .* of . ranks, 1 on a host: its own are of 8 cuda"):
        replace(job, machine=replace(job.machine, ranks_per_host=1, hosts=3)).plan()
    told = replace(job.machine, ranks_per_host=1, hosts=3, inter_bytes_per_s=3e11)
    assert replace(job, machine=told).plan().report().chosen.total_ms > 0


def test_pods_count_in_what_a_plan_costs_and_in_what_it_fits() -> None:
    saved, in_groups = (
        saved_of(model(), STATISTICS, POD, sharding_groups=groups) for groups in (None, ShardingGroups(size=4))
    )
    for each in (saved, in_groups):
        read = job_of(each, STATISTICS).read()
        assert read.predict(each).total_ms == pytest.approx(each.predicted.chosen.total_ms, rel=1e-4)
    assert in_groups.inputs.topology.pod_size == 4 and in_groups.inputs.topology.pod_ranks == 4
    hosts = Topology(8, "cuda", local_world_size=2, hbm_cap=10**9)
    other = replace(saved.inputs, topology=topology_inputs(hosts))
    assert list(stale_differences(saved.inputs, other)) == ["hosts of a pod 4 -> 1"]


@pytest.mark.parametrize("topology", [CUDA, Topology(2, "cpu")], ids=["named", "cpu"])
def test_what_a_plan_was_made_from_comes_back(topology: Topology) -> None:
    cache = CacheParams(CacheAlgorithm.LFU, load_factor=0.5)
    constraints = {
        "a": ParameterConstraints(pooling_factors=[4.0, 2.0], min_partition=8, cache_params=cache),
        "b": ParameterConstraints(
            sharding_types=["table_wise", "row_wise"],
            bounds_check_mode=BoundsCheckMode.FATAL,
            output_dtype=DataType.FP32,
            key_value_params=KeyValueParams(ssd_rocksdb_shards=2, ps_hosts=(("localhost", 1),)),
        ),
    }
    rules = PlacementRules(on_ranks={"b": [0, 1]})
    saved = saved_of(model(), STATISTICS, topology, constraints=constraints, placement_rules=rules)
    planned = job_of(saved, STATISTICS).plan()
    again = planned.saved_plan()
    assert list(stale_differences(saved.inputs, again.inputs)) == [] and again.inputs.tables == saved.inputs.tables
    assert again.inputs.constraints == saved.inputs.constraints
    assert again.inputs.placement_rules == saved.inputs.placement_rules
    assert planned.predict(saved).total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-4)


def test_a_plan_file_holds_its_statistics(tmp_path: Path) -> None:
    hot = {"b_f0": replace(STATISTICS["b_f0"], hot=HotIds((3,), (9.0,)))}
    saved = saved_of(model(), TableStatistics({**STATISTICS, **hot}), CUDA)
    assert saved.inputs.features == dict(STATISTICS)
    saved.save(file := tmp_path / "plan.json")
    assert job_of(SavedPlan.load(file)).model.statistics == STATISTICS
    done = run("replan", file, "--steps", "10")
    assert "Stay with plan.json" in done.stdout and "note:" not in done.stderr
    STATISTICS.to_json(counted := tmp_path / "counted.json")
    for given in ((), ("--statistics", counted)):
        explained_ms = run_json("explain", file, *given)["total_ms"]
        assert explained_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-4)


def test_a_plan_of_a_collection_alone_and_of_ranks_that_fill_no_hosts() -> None:
    saved = saved_of(collection(table("a", 50)), None, CUDA)
    assert job_of(saved).plan().predict(saved).feasible
    odd = replace(saved.inputs, topology=replace(saved.inputs.topology, local_world_size=3))
    with pytest.raises(PlanError, match="4 ranks do not fill hosts of 3"):
        job_of(replace(saved, inputs=odd))


def test_sharding_groups_come_back(tmp_path: Path) -> None:
    groups = ShardingGroups(size=4, sync_interval=5, use_inter_host_allreduce=True)
    all_ranks = Machine(ranks_per_host=4, hosts=2, gpu="h100").topology()
    given = {"sharding_groups": groups, "sharding_types": ["table_wise"]}
    saved = saved_of(model(), None, all_ranks, **given)
    job = job_of(saved)
    assert (job.machine.ranks_per_host, job.machine.hosts, job.settings["sharding_groups"]) == (4, 2, groups)
    again = job.plan()
    assert again.saved_plan().inputs.topology == saved.inputs.topology
    assert again.predict(saved).total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-6)
    saved.save(tmp_path / "plan.json")
    assert "Rank" in run("explain", tmp_path / "plan.json", "--rank", "0").stdout
    assert run_json("replan", tmp_path / "plan.json", "--steps", "1000")
    fewer = ("--steps", "9", "--gpus-per-node", "2", "--nodes", "4")
    told = run("replan", tmp_path / "plan.json", *fewer, status=3).stdout
    assert "8 cuda ranks in 2 sharding groups of 4, 4 on a host -> 8" in " ".join(told.split())
    alone = saved_of(model(), None, Machine(ranks_per_host=4, gpu="h100").topology(), **given)
    assert alone.inputs.topology.groups is None
    assert job_of(alone).plan().saved_plan().inputs.topology == alone.inputs.topology


@pytest.mark.parametrize(
    "machine",
    [Machine(ranks_per_host=2, gpu="h100"), Machine(ranks_per_host=2, device="cpu", memory_bytes=8 * 10**9)],
    ids=str,
)
def test_memory_and_cost_are_the_plans(machine: Machine, tmp_path: Path) -> None:
    model = OfflineModel.of_specs([spec(name, name) for name in OPTIMIZERS])
    made = Job(model=model, machine=machine, batch_size=256, reserve=0.3, settings={"effort": "quick"}).plan()
    made.save_plan(tmp_path / "plan.json")
    saved = SavedPlan.load(tmp_path / "plan.json")
    job = job_of(saved)
    assert job.model.statistics == saved.inputs.features
    again = job.read().saved_plan(saved)
    assert again.predicted.memory == saved.predicted.memory
    assert again.predicted.chosen.total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-6)
    own = "DDR" if machine.device == "cpu" else "HBM"
    (limits,) = [entry.limit_bytes for entry in saved.predicted.memory if entry.kind == own]
    assert limits == tuple(round(0.7 * size) for size in saved.inputs.topology.memory_bytes[own])


def test_a_shared_feature_has_one_number_of_lookups() -> None:
    one, other = spec("a", factor=40.0, feature="f"), spec("b", factor=1.0, feature="f")
    with pytest.raises(TaskError, match=r"list\.json: tables 'a' and 'b' .* feature 'f' .*40 and 1"):
        OfflineModel.of_specs([one, other], "list.json")
    assert OfflineModel.of_specs([one, spec("b", factor=None, feature="f")]).statistics["f"].pooling_factor == 40
    for name in ("a.b", "keys", "training"):  # names that no module has
        with pytest.raises(TaskError, match=name):
            spec(name)


WRONG = {"cost_source": "oracle", "sharding_types": ["diagonal"], "exact_training": "sometimes", "seed": 1.5,
         "effort": "lazy", "sharding_groups": {"size": 0}}  # fmt: skip


@pytest.mark.parametrize(("setting", "value"), WRONG.items())
def test_a_setting_that_no_planner_takes_is_named(setting: str, value: Any, base: SavedPlan) -> None:
    odd = replace(base, name="odd.json", inputs=replace(base.inputs, settings={**base.inputs.settings, setting: value}))
    with pytest.raises(PlanError, match=f"odd.json: settings: .*{setting.replace('_', '.')} must be"):
        job_of(odd)


def test_tables_of_a_list_and_of_its_plan_have_their_optimizers_and_statistics() -> None:
    """Statistics that are given stand above those of list and plan; a feature without any has one lookup."""
    misspelt = TableStatistics({"brend": FeatureStatistics(7.0)})
    given = TableStatistics({"item_id": FeatureStatistics(4.0)})
    model = read_model(str(EXAMPLE))
    planned = Job(model=model, machine=Machine(ranks_per_host=2, gpu="h100"), batch_size=64, settings=QUICK).plan()
    for source in (model, job_of(planned.saved_plan()).model):
        for statistics, lookups in ((None, 1.0), (given, 4.0)):
            tables = {table.name: table for table in source.with_statistics(statistics).tables()}
            assert [each.pooling_factor for each in tables["pooled.item_id"].features] == [lookups, 40.0]
            assert tables["sequences_64.history"].optimizer == "adam" and len(tables) == 8
        with pytest.raises(StatisticsError, match="features that no table .* serves: 'brend' .did you mean 'brand'"):
            source.with_statistics(misspelt)
