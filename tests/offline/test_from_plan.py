# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Jobs that are read from plans: what they were made from, whole."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from small_models import collection, sequences, table
from torch import nn
from torchrec.distributed.planner.types import (
    CollectiveType,
    CustomTopologyData,
    GeneralizedCommsBandwidth,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import CacheParams, KeyValueParams
from torchrec.modules.embedding_configs import DataType, PoolingType

from dreamshard_planner import (
    DreamShardPlanner,
    FeatureStatistics,
    PlacementRules,
    PlanError,
    ShardingGroups,
    TableStatistics,
    TaskError,
)
from dreamshard_planner.devices import Machine
from dreamshard_planner.offline.from_plan import job_of
from dreamshard_planner.offline.jobs import OPTIMIZERS, Job, OfflineModel, TableSpec
from dreamshard_planner.planning.plan_inputs import topology_inputs
from dreamshard_planner.plans.comparison import machine_differences, stale_differences
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.workload.ids import HotIds, IdHistogram
from tests.cli.test_commands import run, run_json


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
    "hbm_cap": 2 * 10**9,
    "ddr_cap": 2 * 10**9,
    "ssd_cap": 2 * 10**9,
    "local_world_size": 2,
    "pod_size": 2,
    "hbm_mem_bw": 2e9,
    "ddr_mem_bw": 2e6,
    "ssd_mem_bw": 2e6,
    "hbm_to_ddr_mem_bw": 2e6,
    "intra_host_bw": 2e6,
    "inter_host_bw": 2e6,
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


@pytest.mark.parametrize("argument", OTHER)
def test_each_argument_of_a_topology_comes_back_from_a_plan(argument: str) -> None:
    topology = Topology(**(BASE | {argument: OTHER[argument]}))
    given: dict[str, Any] = {"batch_size": 64, "cost_source": "torchrec", "sharding_types": ["table_wise"]}
    base, made = (DreamShardPlanner(topology=each, effort="quick", **given) for each in (Topology(**BASE), topology))
    base.read(model(), get_default_sharders())
    made.plan(model(), get_default_sharders())
    saved = made.saved_plan()
    assert machine_differences(base.saved_plan(saved).inputs.topology, saved.inputs.topology)
    again = job_of(saved).machine.topology()
    assert topology_inputs(again) == saved.inputs.topology
    read = job_of(saved).read()
    assert read.predict(saved).total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-4)
    other = DreamShardPlanner(topology=again, effort="quick", **given)
    other.plan(model(), get_default_sharders())
    assert other.hash_planner_context_inputs_str() == made.hash_planner_context_inputs_str()


def test_collectives_of_other_ranks_than_the_file_tells_are_refused() -> None:
    topology = Topology(**BASE, generalized_comms_bandwidths=SlowRings())
    job = job_of(saved_of(model(), None, topology))
    with pytest.raises(PlanError, match="no bandwidth of .* of . ranks, 1 on a host: its own are of 8 cuda"):
        replace(job, machine=replace(job.machine, ranks_per_host=1, hosts=3)).plan()
    told = replace(job.machine, ranks_per_host=1, hosts=3, inter_bytes_per_s=3e11)
    assert replace(job, machine=told).plan().report().chosen.total_ms > 0


def test_pods_count_in_what_a_plan_costs_and_in_what_it_fits() -> None:
    saved = saved_of(model(), STATISTICS, POD)
    read = job_of(saved, STATISTICS).read()
    assert read.predict(saved).total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-4)
    hosts = Topology(8, "cuda", local_world_size=2, hbm_cap=10**9)
    other = replace(saved.inputs, topology=topology_inputs(hosts))
    assert list(stale_differences(saved.inputs, other)) == ["hosts of a pod 4 -> 1"]
    groups = {"sharding_groups": ShardingGroups(size=4)}
    in_groups = saved_of(model(), STATISTICS, POD, **groups)
    assert in_groups.inputs.topology.pod_size == 4 and in_groups.inputs.topology.pod_ranks == 4
    read = job_of(in_groups, STATISTICS).read()
    assert read.predict(in_groups).total_ms == pytest.approx(in_groups.predicted.chosen.total_ms, rel=1e-4)


@pytest.mark.parametrize(
    "topology",
    [CUDA, Topology(4, "cuda", local_world_size=2, hbm_cap=10**9), POD, Topology(2, "cpu")],
    ids=["named", "cuda", "pod", "cpu"],
)
def test_what_a_plan_was_made_from_comes_back(topology: Topology) -> None:
    constraints = {
        "a": ParameterConstraints(
            pooling_factors=[4.0, 2.0], min_partition=8, cache_params=CacheParams(CacheAlgorithm.LFU, load_factor=0.5)
        ),
        "b": ParameterConstraints(
            sharding_types=["table_wise", "row_wise"],
            bounds_check_mode=BoundsCheckMode.FATAL,
            output_dtype=DataType.FP32,
            key_value_params=KeyValueParams(ssd_rocksdb_shards=2, ps_hosts=(("localhost", 1),)),
        ),
    }
    rules = PlacementRules(on_ranks={"b": [0, 1]})
    saved = saved_of(model(), STATISTICS, topology, constraints=constraints, placement_rules=rules)
    job = job_of(saved, STATISTICS)
    planned = job.plan()
    again = planned.saved_plan()
    assert list(stale_differences(saved.inputs, again.inputs)) == [] and again.inputs.tables == saved.inputs.tables
    assert again.inputs.constraints == saved.inputs.constraints
    assert again.inputs.placement_rules == saved.inputs.placement_rules
    cost = planned.predict(saved)
    assert cost.total_ms == pytest.approx(saved.predicted.chosen.total_ms, rel=1e-4)
    for kept, left in zip(again.predicted.memory, saved.predicted.memory, strict=True):
        if topology.compute_device == "cuda":
            assert kept.limit_bytes == pytest.approx(left.limit_bytes, rel=1e-6)


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


@pytest.mark.parametrize("next_to_each_other", [False, True])
def test_sharding_groups_come_back(next_to_each_other: bool, tmp_path: Path) -> None:
    groups = ShardingGroups(size=4, sync_interval=5, use_inter_host_allreduce=next_to_each_other)
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


def spec(name: str, optimizer: str = "sgd", factor: float | None = 20.0, feature: str | None = None) -> TableSpec:
    return TableSpec(
        name=name,
        num_embeddings=500_000,
        embedding_dim=32,
        feature_names=(feature or name,),
        pooling_factor=factor,
        optimizer=optimizer,
    )


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


@pytest.mark.parametrize("name", ["a.b", "keys", "training"])
def test_names_that_no_module_has_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match=name):
        spec(name)


def test_a_setting_that_no_planner_takes_is_named(tmp_path: Path) -> None:
    saved = saved_of(collection(table("a", 50)), None, CUDA)
    for setting, value in (
        ("cost_source", "oracle"),
        ("sharding_types", ["diagonal"]),
        ("exact_training", "sometimes"),
        ("seed", 1.5),
        ("effort", "lazy"),
        ("sharding_groups", {"size": 0}),
    ):
        settings = {**saved.inputs.settings, setting: value}
        replace(saved, inputs=replace(saved.inputs, settings=settings)).save(tmp_path / "odd.json")
        for command, *options in (("explain",), ("replan", "--steps", "10")):
            told = run(command, tmp_path / "odd.json", *options, status=1).stderr
            assert f"odd.json: settings: {setting} {value!r}" in " ".join(told.split())
