# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's seams: reading options, constraints, errors that help, each seam alone, the same plan everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from dreamshard_planner import (
    CheckpointError,
    DistributedModelParallel,
    DreamShardError,
    DreamShardPlanner,
    FeatureStatistics,
    StatisticsError,
    TableStatistics,
)
from dreamshard_planner.checkpoint import resolve
from dreamshard_planner.plugin import (
    DreamShardEstimator,
    DreamShardPartitioner,
    DreamShardPerfModel,
    JointProposer,
    RulePartitioner,
    TableWiseProposer,
)
from dreamshard_planner.plugin.constraints import planning_constraints
from dreamshard_planner.plugin.context import PlanningContext, links_of
from dreamshard_planner.plugin.reader import OptionReader
from dreamshard_planner.workload.features import FEATURE_INDEX

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SHARDERS = [EmbeddingBagCollectionSharder()]
TABLE_WISE = {"sharding_types": ["table_wise"]}


def table(name: str, rows: int = 1000, dim: int = 16, features: int = 1, **arguments) -> EmbeddingBagConfig:
    names = [f"{name}_f{k}" for k in range(features)]
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=names, **arguments)


def collection(*tables: EmbeddingBagConfig, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=list(tables), is_weighted=weighted, device=torch.device("meta"))


def small_model() -> nn.Module:
    model = nn.Module()
    model.sparse = collection(*(table(f"t{i}", 100 * (i + 1), 8 * (1 + i % 3), 1 + i % 2) for i in range(6)))
    return model


def topology(world_size: int = 2, memory: int = 2**34, device: str = "cpu") -> Topology:
    return Topology(world_size=world_size, compute_device=device, ddr_cap=memory, hbm_cap=memory)


def planner(**arguments) -> DreamShardPlanner:
    arguments.setdefault("topology", topology())
    return DreamShardPlanner(batch_size=64, stats=[], debug=False, **arguments)


def ranks_of(plan) -> dict[str, list[int]]:
    return {name: sharding.ranks for module in plan.plan.values() for name, sharding in module.items()}


def test_pooling_factors_come_from_statistics_then_constraints_then_torchrec() -> None:
    model = nn.Module()
    model.sparse = collection(table("a", features=3), table("b", features=2), table("c"))
    given = {"a": ParameterConstraints(pooling_factors=[2.0, 3.0, 4.0]), "b": ParameterConstraints()}
    statistics = TableStatistics({"a_f1": FeatureStatistics(30.0), "c_f0": FeatureStatistics(0.0)})
    expanded = planning_constraints(model, SHARDERS, given, statistics, "cpu", ("table_wise",))
    assert expanded["a"].pooling_factors == [2.0, 30.0, 4.0]
    assert expanded["b"].pooling_factors == [1.0, 1.0]
    assert expanded["c"].pooling_factors == [0.0]
    assert all(constraint.sharding_types == ["table_wise"] for constraint in expanded.values())
    assert given["a"].pooling_factors == [2.0, 3.0, 4.0] and given["a"].sharding_types is None  # copies


@pytest.mark.parametrize(
    ("given", "expected"),
    [([2.0, 3.0, 4.0], {"a.t": [2.0, 3.0, 4.0], "b.t": [7.0]}), ([5.0], {"a.t": [5.0, 5.0, 5.0], "b.t": [7.0]})],
)
def test_tables_of_one_name_may_have_other_features(given: list[float], expected: dict) -> None:
    model = nn.Module()
    model.a = collection(table("t", features=3))
    other = EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=["x"])
    model.b = collection(other)
    options: list = []
    made = planner(
        constraints={"t": ParameterConstraints(pooling_factors=given)},
        statistics=TableStatistics({"x": FeatureStatistics(7.0)}),
        callbacks=[lambda plan: options.extend(plan) or plan],
    )
    made.plan(model, SHARDERS)
    assert {option.fqn: option.input_lengths for option in options} == expected
    for what, values in (("pooling_factors", [1.0, 2.0]), ("num_poolings", [2.0]), ("batch_sizes", [8, 8, 8])):
        constraints = {"t": ParameterConstraints(**{what: values})}
        with pytest.raises(PlannerError, match=r"tables \['a.t', 'b.t'\] have one name and \[1, 3\] features.*" + what):
            planner(constraints=constraints).plan(model, SHARDERS)


def test_tables_of_one_name_have_statistics_of_their_own() -> None:
    model = nn.Module()
    for module, feature in (("a", "x"), ("b", "y"), ("c", "z")):
        config = EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=8, feature_names=[feature])
        setattr(model, module, collection(config))
    options: list = []
    made = planner(
        constraints={"t": ParameterConstraints(pooling_factors=[3.0], num_poolings=[2.0])},
        statistics=TableStatistics({"x": FeatureStatistics(5.0), "z": FeatureStatistics(7.0)}),
        callbacks=[lambda plan: options.extend(plan) or plan],
    )
    made.plan(model, SHARDERS)
    assert {option.fqn: option.input_lengths for option in options} == {"a.t": [5.0], "b.t": [3.0], "c.t": [7.0]}


def quantized(model: nn.Module) -> nn.Module:
    observer = torch.ao.quantization.PlaceholderObserver
    kept, eighth = observer.with_args(dtype=torch.float), observer.with_args(dtype=torch.qint8)
    model.qconfig = torch.ao.quantization.QConfig(activation=kept, weight=eighth)
    return QuantEmbeddingBagCollection.from_float(model)


def test_modules_whose_kernels_nobody_knows_are_refused_and_others_are_planned() -> None:
    model = nn.Module()
    model.sparse = quantized(EmbeddingBagCollection(tables=[table("t0")], device=torch.device("cpu")))
    reason = "'sparse.t0' may only use compute kernels .'quant'.: QuantEmbeddingBagCollectionSharder offers no others"
    with pytest.raises(PlannerError, match=reason):
        planner().plan(model, get_default_sharders())
    managed = MCHManagedCollisionModule(1000, torch.device("meta"), DistanceLFU_EvictionPolicy(), eviction_interval=2)
    plain = collection(table("t0"))
    collisions = ManagedCollisionCollection({"t0": managed}, plain.embedding_bag_configs())
    model.sparse = ManagedCollisionEmbeddingBagCollection(plain, collisions)
    plan = planner(topology=topology(1, device="cuda")).plan(model, get_default_sharders())
    assert plan.plan["sparse"]["t0"].sharding_type == "row_wise"  # nothing else is offered


def test_options_become_workloads() -> None:
    model = nn.Module()
    model.plain = collection(
        table("a", features=2), table("b", data_type=DataType.FP16), table("c", pooling=PoolingType.MEAN)
    )
    model.weighted = collection(table("d", dim=32), weighted=True)
    constraints = {"a": ParameterConstraints(pooling_factors=[2.0, 3.0], num_poolings=[1.0, 3.0], batch_sizes=[64, 16])}
    expanded = planning_constraints(model, SHARDERS, constraints, None, "cpu", ("table_wise",))
    options = EmbeddingEnumerator(topology(4), batch_size=64, constraints=expanded).enumerate(model, SHARDERS)
    reader = OptionReader(expanded, None, SHARDERS)
    by_name = {workload.name: workload for workload in reader.workloads(options, topology(4))}
    shared = by_name["plain.a"]
    assert shared.batch_size == 4 * 64 and shared.num_features == 2
    # The second feature has a quarter of the batch and three poolings per sample.
    assert shared.lookups == pytest.approx(4 * 64 * (2.0 + 0.75 * 3.0))
    assert shared.output_elements == pytest.approx(4 * 64 * 1.75 * 16)
    assert by_name["plain.b"].weight_bytes == 2 and by_name["plain.a"].weight_bytes == 4
    assert by_name["weighted.d"].weighted and not shared.weighted
    problem = PlanningContext(topology(4), reader, resolve("auto", "cpu")).read(options).problem
    group = dict(zip(problem.names, problem.group_P.tolist(), strict=True))
    # Precision, pooling and weightedness each make a kernel of their own.
    assert problem.num_groups == 4 and len(set(group.values())) == 4
    row = problem.features_PF[problem.names.index("weighted.d")]
    assert row[FEATURE_INDEX["dim"]] == 32 and row[FEATURE_INDEX["weighted"]] == 1
    # One rank's batch of pooled vectors of 16 floats.
    assert problem.bytes_PC[problem.names.index("plain.a")].sum() == 64 * 1.75 * 16 * 4
    # An all-to-all for each module.
    assert [c.name for c in problem.collectives.collectives] == [
        "weighted table_wise all-to-all",
        "plain table_wise all-to-all",
    ]


def workloads_and_problem(model: nn.Module, sharders, constraints=None):
    expanded = planning_constraints(model, sharders, constraints, None, "cpu", ("table_wise",))
    options = EmbeddingEnumerator(topology(), batch_size=64, constraints=expanded).enumerate(model, sharders)
    context = PlanningContext(topology(), OptionReader(expanded, None, sharders), resolve("auto", "cpu"))
    return context.reader.workloads(options, topology()), context.read(options).problem


def test_feature_processors_make_lookups_weighted() -> None:
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.modules.feature_processor_ import PositionWeightedModule
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    model = nn.Module()
    processors = {"t0_f0": PositionWeightedModule(max_feature_length=8)}
    model.sparse = FeatureProcessedEmbeddingBagCollection(collection(table("t0"), weighted=True), processors)
    workloads, _ = workloads_and_problem(model, [FeatureProcessedEmbeddingBagCollectionSharder()])
    assert [workload.weighted for workload in workloads] == [True]


def test_bytes_on_the_wire_are_what_is_sent() -> None:
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    model = nn.Module()
    model.sparse = collection(table("t0"))

    def output_bytes(sharders, **constraint) -> float:
        _, problem = workloads_and_problem(model, sharders, {"t0": ParameterConstraints(**constraint)})
        return float(problem.bytes_PC)

    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    quantized = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(config, device=torch.device("cpu"))
    )
    assert output_bytes(SHARDERS) == 64 * 16 * 4
    assert output_bytes(SHARDERS, output_dtype=DataType.FP16) == 64 * 16 * 2
    assert output_bytes([quantized]) == 64 * 16 * 2


def test_tables_that_torchrec_does_not_fuse_are_apart() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Module()
    model.sparse = collection(table("t0"), table("t1"), table("t2", data_type=DataType.FP32))
    assert workloads_and_problem(model, SHARDERS)[1].num_groups == 1
    rounded = {"t0": ParameterConstraints(stochastic_rounding=False)}
    assert workloads_and_problem(model, SHARDERS, rounded)[1].num_groups == 2
    alone = [EmbeddingBagCollectionSharder(fused_params={"use_one_tbe_per_table": True})]
    assert workloads_and_problem(model, alone)[1].num_groups == 3
    for name, parameter in model.sparse.named_parameters():
        _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1 if "t0" in name else 0.2})
    assert workloads_and_problem(model, SHARDERS)[1].num_groups == 2


def test_optimizer_is_read_from_parameters_and_sharders() -> None:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    def optimizer(model: nn.Module, sharders) -> str:
        options = EmbeddingEnumerator(topology(), 64, {"t0": ParameterConstraints(**TABLE_WISE)}).enumerate(
            model, sharders
        )
        return OptionReader(None, None, sharders).workloads(options, topology())[0].optimizer

    plain = nn.Module()
    plain.sparse = collection(table("t0"))
    assert optimizer(plain, SHARDERS) == "sgd"
    fused = [EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})]
    assert optimizer(plain, fused) == "rowwise_adagrad"
    _apply_optimizer_in_backward(RowWiseAdagrad, plain.sparse.parameters(), {"lr": 0.1})
    assert optimizer(plain, SHARDERS) == "rowwise_adagrad"


def test_tables_of_one_name_in_two_modules() -> None:
    model = nn.Module()
    model.one, model.two = collection(table("t", features=1)), collection(table("t", features=3))
    plan = planner().plan(model, SHARDERS)
    assert set(plan.plan) == {"one", "two"}


def test_tables_without_a_sharding_type_are_an_error() -> None:
    constraints = {"t1": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(PlannerError, match=r"no sharding type is left for table 'sparse.t1' .row_wise: the sharder"):
        planner(constraints=constraints).plan(small_model(), SHARDERS)
    constraints = {"t1": ParameterConstraints(sharding_types=["column_wise"])}
    with pytest.raises(PlannerError, match=r"'sparse.t1' .column_wise: the planner's sharding_types leave it out"):
        planner(constraints=constraints, sharding_types=("table_wise",)).plan(small_model(), SHARDERS)


def test_lengths_that_do_not_match_the_features_are_an_error() -> None:
    constraints = {"t1": ParameterConstraints(pooling_factors=[1.0, 2.0, 3.0])}
    with pytest.raises(PlannerError, match="'t1' serves 2 features, .* 3 pooling_factors"):
        planner(constraints=constraints).plan(small_model(), SHARDERS)


def test_compute_kernel_constraints_are_honoured() -> None:
    constraints = {"t2": ParameterConstraints(compute_kernels=["fused_uvm"])}
    plan = planner(topology=topology(device="cuda"), constraints=constraints).plan(small_model(), SHARDERS)
    kernels = {name: sharding.compute_kernel for name, sharding in plan.plan["sparse"].items()}
    assert kernels["t2"] == "fused_uvm" and kernels["t1"] == "fused"


def test_the_largest_tables_leave_device_memory_where_it_is_scarce() -> None:
    model = nn.Module()
    model.sparse = collection(table("large", 2_000_000, 64), *(table(f"t{i}", 1000) for i in range(5)))
    scarce = Topology(world_size=2, compute_device="cuda", hbm_cap=400 * 2**20, ddr_cap=2**36)
    plan = planner(topology=scarce, sharding_types=("table_wise",)).plan(model, SHARDERS)
    kernels = {name: sharding.compute_kernel for name, sharding in plan.plan["sparse"].items()}
    assert kernels["large"] != "fused" and all(kernels[f"t{i}"] == "fused" for i in range(5))


def test_hot_tables_stay_in_device_memory_where_it_is_scarce() -> None:
    """The largest one, read most, stays; the two that are hardly read leave, as few as it takes."""
    model = collection(table("hot", 2_000_000, 64), table("cold0", 1_500_000, 64), table("cold1", 1_500_000, 64))
    statistics = TableStatistics({"hot_f0": FeatureStatistics(60.0), "cold0_f0": FeatureStatistics(0.01)})
    scarce = Topology(world_size=1, compute_device="cuda", hbm_cap=1200 * 2**20, ddr_cap=2**36)
    made = planner(topology=scarce, statistics=statistics)
    plan = made.plan(model, SHARDERS)
    kernels = {name: sharding.compute_kernel for name, sharding in plan.plan[""].items()}
    assert kernels["hot"] == "fused" and "fused_uvm_caching" in kernels.values()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_room_names_table_and_missing_bytes(device: str) -> None:
    model = nn.Module()
    model.sparse = collection(table("small"), table("huge", 10_000_000, 128))
    with pytest.raises(PlannerError, match=r"'sparse.huge' needs [\d,]+ bytes of (HBM|DDR).*[\d,]+ bytes are missing"):
        planner(topology=topology(memory=2**28, device=device)).plan(model, SHARDERS)


def test_unknown_features_are_an_error() -> None:
    statistics = TableStatistics({"t0_f0": FeatureStatistics(1.0), "t9_f0": FeatureStatistics(2.0)})
    with pytest.raises(StatisticsError, match="'t9_f0'"):
        planner(statistics=statistics).plan(small_model(), SHARDERS)


def test_wrong_arguments_are_errors(tmp_path) -> None:
    with pytest.raises(ValueError, match="recipe must be one of default, paper"):
        planner(recipe="papper")
    with pytest.raises(ValueError, match="search_seconds"):
        planner(search_seconds=0)
    for kinds in ((), "table_wise", ("table_wise", "diagonal")):
        with pytest.raises(ValueError, match="sharding_types must be some of table_wise, column_wise"):
            planner(sharding_types=kinds)
    with pytest.raises(ValueError, match="cost_source must be one of auto, roofline, torchrec, got 'guess'"):
        planner(cost_source="guess")
    with pytest.raises(CheckpointError, match="gone.safetensors"):
        planner(checkpoint=tmp_path / "gone.safetensors")
    with pytest.raises(TypeError, match="TableStatistics, got dict"):
        planner(statistics={"t0_f0": 1.0})
    with pytest.raises(DreamShardError, match="no process group"):
        DreamShardPlanner()
    with pytest.raises(DreamShardError, match="needs a process group"):
        planner().collective_plan(small_model(), SHARDERS)
    with pytest.raises(DreamShardError, match="plan first"):
        planner().report()
    with pytest.raises(ValueError, match="either plan= or planner="):
        DistributedModelParallel(small_model(), plan=object(), planner=planner())


def test_a_model_without_tables_has_an_empty_plan() -> None:
    assert planner().plan(nn.Sequential(nn.Linear(2, 2)), SHARDERS).plan == {}


def test_report_says_what_and_why() -> None:
    chosen = planner()
    chosen.plan(small_model(), SHARDERS)
    report = chosen.report()
    assert len(report.chosen.rank_ms) == 2
    assert report.chosen.total_ms == pytest.approx(max(report.chosen.rank_ms) + report.chosen.collectives_ms)
    names = {rival.name for rival in report.rivals}
    assert names >= {"torchrec", "size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy", "policy"}
    assert "network (cpu.safetensors, measured on" in report.cost_source
    text = str(report)
    assert "dreamshard" in text and report.cost_source in text
    assert report.to_dict()["chosen"]["total_ms"] == report.chosen.total_ms
    with pytest.raises(KeyError, match="size_greedy"):
        report.rival("nobody")


def test_cuda_without_measurements_says_roofline() -> None:
    chosen = planner(topology=topology(device="cuda"))
    chosen.plan(small_model(), SHARDERS)
    assert chosen.report().cost_source.startswith("roofline")
    assert any("nothing was measured" in note for note in chosen.report().notes)


def test_paper_recipe_plans() -> None:
    chosen = planner(recipe="paper")
    plan = chosen.plan(small_model(), SHARDERS)
    assert set(ranks_of(plan)) == {f"t{i}" for i in range(6)}
    assert chosen.report().candidates == 0 and "paper" in chosen.report().cost_source
    assert "its features do not tell" in str(chosen.report())


def test_search_that_is_cut_short_says_so() -> None:
    chosen = planner(search_seconds=1e-6)
    chosen.plan(small_model(), SHARDERS)
    assert any("cut short" in note for note in chosen.report().notes)


@pytest.mark.parametrize("seam", ["partitioner", "estimator", "perf_model", "rule", "proposer", "joint"])
def test_each_seam_works_alone(seam: str) -> None:
    model, devices = small_model(), topology()
    constraints = {f"t{i}": ParameterConstraints(**TABLE_WISE) for i in range(6)}
    arguments = {
        "partitioner": lambda: {"partitioner": DreamShardPartitioner()},
        "rule": lambda: {"partitioner": RulePartitioner("lookup_greedy")},
        "perf_model": lambda: {"performance_model": DreamShardPerfModel(devices)},
        "proposer": lambda: {"proposer": TableWiseProposer()},
        "joint": lambda: {"proposer": JointProposer(PlanningContext.of(devices))},
        "estimator": lambda: {
            "enumerator": EmbeddingEnumerator(
                devices,
                64,
                constraints,
                estimator=[DreamShardEstimator(devices), EmbeddingStorageEstimator(devices)],
            )
        },
    }[seam]()
    theirs = EmbeddingShardingPlanner(
        topology=devices, batch_size=64, constraints=constraints, stats=[], debug=False, **arguments
    )
    assert len(ranks_of(theirs.plan(model, SHARDERS))) == 6


def test_given_components_are_used() -> None:
    ruled = planner(partitioner=RulePartitioner("size_greedy"))
    theirs = EmbeddingShardingPlanner(
        topology=topology(),
        batch_size=64,
        constraints={f"t{i}": ParameterConstraints(**TABLE_WISE) for i in range(6)},
        partitioner=RulePartitioner("size_greedy"),
        stats=[],
    )
    model = small_model()
    assert ranks_of(ruled.plan(model, SHARDERS)) == ranks_of(theirs.plan(model, SHARDERS))
    with pytest.raises(DreamShardError, match="no report"):
        ruled.report()


PRINT_PLAN = """
import torch, warnings
warnings.simplefilter("ignore")
import sys
torch.set_num_threads(int(sys.argv[1]))
from tests.test_plugin import SHARDERS, planner, ranks_of, small_model, topology
for device in ("cpu", "cuda"):
    print(sorted(ranks_of(planner(topology=topology(3, device=device), seed=7).plan(small_model(), SHARDERS)).items()))
"""


def test_same_plan_in_every_process() -> None:
    outputs = set()
    for hash_seed, threads in (("0", "1"), ("1", "2"), ("2", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", PRINT_PLAN, threads]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        outputs.add(result.stdout)
    assert len(outputs) == 1 and outputs.pop().count("\n") == 2


def test_import_starts_nothing() -> None:
    code = (
        "import dreamshard_planner, torch, torch.distributed as dist; "
        "assert not torch.cuda.is_initialized() and not dist.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


MB = 2**20


def scarce_planner(**arguments) -> tuple[DreamShardPlanner, EmbeddingBagCollection]:
    """Four tables on two GPUs whose memory holds only some of them; two are read often."""
    sizes_mb = {"z": 11_000, "a": 9_000, "b": 4_500, "c": 4_500}
    model = collection(*(table(name, size * MB // 256, 64) for name, size in sizes_mb.items()))
    pooling = {"z": 0.01, "a": 0.01, "b": 60.0, "c": 60.0}
    statistics = TableStatistics({f"{name}_f0": FeatureStatistics(factor) for name, factor in pooling.items()})
    made = DreamShardPlanner(
        topology=Topology(2, "cuda", hbm_cap=11_900 * MB, ddr_cap=2**40),
        batch_size=16_384,
        statistics=statistics,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[],
        debug=False,
        **arguments,
    )
    return made, model


def test_report_is_of_the_plan_that_won() -> None:
    made, model = scarce_planner()
    options: list = []
    made._callbacks.append(lambda plan: options.extend(plan) or plan)
    made.plan(model, SHARDERS)
    kernels = {option.name: option.compute_kernel for option in options}
    assert set(kernels.values()) == {"fused", "fused_uvm_caching"}  # several proposals were rated
    assert made.report().chosen.total_ms == pytest.approx(made.predict(options).total_ms)


def test_report_is_of_the_plan_that_callbacks_made() -> None:
    def all_on_rank_0(plan: list) -> list:
        for option in plan:
            option.shards[0].rank = 0
        return plan

    made = planner(callbacks=[all_on_rank_0])
    made.plan(small_model(), SHARDERS)
    report = made.report()
    assert report.chosen.rank_ms[0] > 0 and report.chosen.rank_ms[1] == 0
    assert any("callbacks moved tables" in note for note in report.notes)


def test_report_says_why_there_is_none() -> None:
    made = planner(topology=topology(memory=1000))
    with pytest.raises(DreamShardError, match="no report: plan first, on this rank"):
        made.report()
    with pytest.raises(PlannerError):
        made.plan(small_model(), SHARDERS)
    with pytest.raises(DreamShardError, match="(?s)no report: the last plan failed, PlannerError: .*bytes are missing"):
        made.report()
    made = planner()
    made.plan(small_model(), SHARDERS)
    assert made.report().chosen.feasible
    assert made.plan(nn.Linear(2, 2), SHARDERS).plan == {}  # as TorchRec plans a model without tables
    with pytest.raises(DreamShardError, match="no report: the last planned module has no table"):
        made.report()
    with pytest.raises(StatisticsError):
        failing = planner(statistics=TableStatistics({"nobody": FeatureStatistics(1.0)}))
        failing.plan(small_model(), SHARDERS)
    with pytest.raises(DreamShardError, match="the last plan failed, StatisticsError: .*'nobody'"):
        failing.report()


def test_report_after_callbacks_changed_kernels() -> None:
    def to_host(plan: list) -> list:
        for option in plan:
            option.compute_kernel = "fused_uvm"
        return plan

    kept, changed = (planner(topology=topology(device="cuda"), callbacks=given) for given in (None, [to_host]))
    for made in (kept, changed):
        made.plan(small_model(), SHARDERS)
    report = changed.report()
    assert report.chosen.total_ms > kept.report().chosen.total_ms and report.rivals == kept.report().rivals
    assert any("callbacks changed options after they were placed" in note for note in report.notes)

    def split(plan: list) -> list:
        plan[0].sharding_type = "row_wise"
        return plan

    made = planner(callbacks=[split])
    assert made.plan(small_model(), SHARDERS).plan["sparse"]["t0"].sharding_type == "row_wise"
    with pytest.raises(DreamShardError, match="(?s)callbacks changed .* cost is not known: table 'sparse.t0'"):
        made.report()


@pytest.mark.parametrize("part", [planner, DreamShardPartitioner])
@pytest.mark.parametrize("seed", [None, "7", 1.5, True])
def test_seeds_are_whole_numbers(part, seed) -> None:
    with pytest.raises(TypeError, match=f"seed must be a whole number, .* got {seed!r}"):
        part(seed=seed)
    with pytest.raises(ValueError, match="seed must be from"):
        part(seed=2**64)


def test_batches_larger_than_measured_are_noted() -> None:
    notes = {}
    for batch_size in (16_384, 131_072):
        made = DreamShardPlanner(topology=topology(2), batch_size=batch_size, stats=[], debug=False)
        made.plan(small_model(), SHARDERS)
        notes[batch_size] = [note for note in made.report().notes if "samples per batch" in note]
    assert notes[16_384] == [] and "more samples per batch than was measured (262,144 against" in notes[131_072][0]


def test_kernels_of_unknown_cost_are_left_alone() -> None:
    constraints = {name: ParameterConstraints(compute_kernels=["fused", "quant"]) for name in "zabc"}
    made, model = scarce_planner(constraints=constraints)
    with pytest.raises(PlannerError, match="Tables do not fit"):
        made.plan(model, SHARDERS)
    constraints["z"] = ParameterConstraints(compute_kernels=["quant"])
    made, model = scarce_planner(constraints=constraints)
    with pytest.raises(PlannerError, match="'z' may only use compute kernels .'quant'., whose cost"):
        made.plan(model, SHARDERS)


def test_kernels_of_several_memories_are_fused_together() -> None:
    constraints = {"t1": ParameterConstraints(compute_kernels=["fused_uvm"])}
    made = planner(topology=topology(device="cuda"), constraints=constraints)
    options: list = []
    made._callbacks.append(lambda plan: options.extend(plan) or plan)
    made.plan(collection(table("t0"), table("t1")), SHARDERS)
    assert {option.compute_kernel for option in options} == {"fused", "fused_uvm"}
    assert PlanningContext.of(topology(device="cuda"), constraints).read(options).problem.num_groups == 1


def test_refinement_leaves_host_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made, model = scarce_planner(refine="measure", refine_seconds=1.0)
    made.plan(model, SHARDERS)
    assert any("nothing was measured" in note and "outside of device memory" in note for note in made.report().notes)
    assert made.report().measured is None


@pytest.mark.parametrize(
    ("made", "source"),
    [
        (Topology(4, "cpu", local_world_size=4), "measured with gloo on 2 ranks"),
        (Topology(16, "cpu", local_world_size=8), "nothing measured"),
        (Topology(4, "cuda", local_world_size=4), "nothing measured"),
    ],
    ids=["one host", "two hosts", "another device"],
)
def test_measured_collectives_hold_for_what_they_were_measured_on(made: Topology, source: str) -> None:
    links = links_of(made, resolve("auto", "cpu"))
    known = (links.all_to_all, links.reduce_scatter, links.all_gather, links.all_reduce)
    assert all(source in model.source for model in known)
    assert (
        links.all_to_all.world_size == made.world_size
        and links.across.world_size == made.world_size // links.host_reduce_scatter.world_size
    )


def test_what_passes_between_hosts_is_what_takes_long() -> None:
    """Two hosts of eight: eight peers of fifteen are on the other host."""
    made = Topology(16, "cuda", local_world_size=8, intra_host_bw=400e6, inter_host_bw=10e6)
    links = links_of(made, resolve("auto", "cuda"))
    sent = torch.full((16,), 1e6)
    assert float(links.all_to_all.all_to_all_ms(sent)[0]) == pytest.approx(8e6 / 10e6 + 0.02, rel=1e-3)
    assert float(links.host_all_gather.all_to_all_ms(sent[:8])[0]) == pytest.approx(7e6 / 400e6 + 0.02, rel=1e-3)
    assert float(links.across.all_to_all_ms(sent[:2])[0]) == pytest.approx(1e6 / 10e6 + 0.02, rel=1e-3)
    assert float(links.all_reduce.all_to_all_ms(sent)[0]) == pytest.approx(2 * (8e6 / 10e6 + 0.02), rel=1e-3)
