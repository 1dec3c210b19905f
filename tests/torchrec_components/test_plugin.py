# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Components of TorchRec's that users give, and TorchRec's planning API; the same plan everywhere."""

import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import SHARDERS, TABLE_WISE, collection, planned, planner, ranks_of, small_model, table, topology
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopStorageModel
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PlannerError,
    ShardingOption,
    Stats,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import DreamShardPlanner, TaskError
from dreamshard_planner.devices import GPUS
from dreamshard_planner.torchrec_components import components
from dreamshard_planner.torchrec_components.provider import DreamShardProvider


@pytest.mark.parametrize("seam", ["partitioner", "estimator", "perf_model"])
def test_each_component_works_alone(seam: str) -> None:
    two = topology()
    constraints = {f"t{i}": ParameterConstraints(**TABLE_WISE) for i in range(6)}
    rater = components.rater(two, constraints)
    estimators = [components.DreamShardEstimator(rater), EmbeddingStorageEstimator(two)]
    arguments = {
        "partitioner": {"partitioner": components.DreamShardPartitioner()},
        "perf_model": {"performance_model": components.DreamShardPerfModel(rater)},
        "estimator": {"enumerator": EmbeddingEnumerator(two, 64, constraints, estimator=estimators)},
    }[seam]
    theirs = EmbeddingShardingPlanner(
        topology=two, batch_size=64, constraints=constraints, stats=[], debug=False, **arguments
    )
    assert len(ranks_of(theirs.plan(small_model(), SHARDERS))) == 6


def test_one_rater_serves_models_whose_tables_share_names() -> None:
    two, shared, costs = topology(), components.rater(topology()), []
    for rows, dim in ((100, 16), (1_000_000, 256)):
        options = EmbeddingEnumerator(two, 64).enumerate(collection(table("t", rows, dim)), SHARDERS)
        costs.append([of.alone_ms(options) for of in (shared, components.rater(two))])
    assert all(one == pytest.approx(other) for one, other in costs) and costs[0] != costs[1]


class OnTheLastRank(Partitioner):
    """A user's partitioner."""

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        for option in proposal:
            for shard in option.shards:
                shard.rank = storage_constraint.world_size - 1
        return proposal


def test_given_components_are_used() -> None:
    made = planner(partitioner=OnTheLastRank(), sharding_types=("table_wise",))
    assert set(map(tuple, ranks_of(made.plan(small_model(), SHARDERS)).values())) == {(1,)}
    report = made.report()
    assert report.rivals == () and report.chosen.total_ms == made.predict(made.options).total_ms
    assert any("OnTheLastRank" in note.text for note in report.notes)


def test_a_subclass_may_take_memory_out_of_the_topology() -> None:
    """As planners do that place further tables themselves."""

    class Less(DreamShardPlanner):
        def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> ShardingPlan:
            whole, self._topology = self._topology, left
            try:
                return super().plan(module, sharders)
            finally:
                self._topology = whole

    left = topology(memory=1000)
    made = Less(topology=topology(), effort="quick", stats=[])
    with pytest.raises(PlannerError, match="Tables do not fit"):
        made.plan(small_model(), SHARDERS)
    left = topology()
    assert len(ranks_of(made.plan(small_model(), SHARDERS))) == 6


def test_a_given_performance_model_decides() -> None:
    """TorchRec's, which wants the fullest rank as empty as it can be."""
    devices, model = topology(device="cuda"), collection(*(table(f"t{i}", 100_000 * (i + 1)) for i in range(4)))
    made = planned(model, topology=devices, performance_model=NoopStorageModel(devices))
    theirs = EmbeddingShardingPlanner(
        topology=devices, batch_size=64, performance_model=NoopStorageModel(devices), stats=[], debug=False
    )
    theirs.plan(model, SHARDERS)
    rated = NoopStorageModel(devices).rate
    assert rated(made.options) <= rated(theirs._best_plan) * 1.01
    assert any("NoopStorageModel" in note.text for note in made.report().notes)


def test_a_given_enumerator_does_not_undo_exact_training() -> None:
    """It offers every type, as TorchRec's does unless it has constraints."""
    model = collection(table("t", 100_000, 1024), table("u", 100), optimizer=RowWiseAdagrad)
    devices = topology(device="cuda")
    for named, expected in ((None, {"table_wise", "row_wise"}), (["column_wise"], {"column_wise"})):
        constraints = named and {"t": ParameterConstraints(sharding_types=named)}
        given = {"cost_source": "torchrec", "enumerator": EmbeddingEnumerator(devices, 64)}
        made = planner(topology=devices, constraints=constraints, **given)
        assert made.plan(model, SHARDERS).plan[""]["t"].sharding_type in expected
    only = EmbeddingEnumerator(devices, 64, constraints)
    with pytest.raises(PlannerError, match="'t' is offered only column_wise by the enumerator, and .* row_wise, "):
        planner(topology=devices, enumerator=only).plan(model, SHARDERS)


def test_planners_pickle_with_what_they_planned() -> None:
    made = planner()
    plan = made.plan(small_model(), SHARDERS)
    again = pickle.loads(pickle.dumps(made))
    assert str(again.report()) == str(made.report())
    assert ranks_of(again.plan(small_model(), SHARDERS)) == ranks_of(plan)


def test_statistics_tell_what_the_user_constrained() -> None:
    told: list[dict[str, ParameterConstraints]] = []

    class Told(Stats):
        def log(self, *args, constraints=None, **kwargs) -> None:
            told.append(constraints)

    constraints = {"t2": ParameterConstraints(compute_kernels=["fused"])}
    devices = topology(device="cuda")
    made = planner(topology=devices, stats=Told(), constraints=constraints)
    made.plan(small_model(), SHARDERS)
    assert {name for name, constraint in told[0].items() if constraint.compute_kernels} == {"t2"}


RANKS = {"world_size": 16, "local_world_size": 8, "pod_size": None, "compute_device": None}
MEMORY = {"hbm_gb": None, "ddr_gb": None}


def sku_topology(sku: str, **changed: Any) -> Any:
    """The topology of a request; of the API's context only the sources of hardware matter here."""
    return DreamShardProvider().build_topology(
        sku, SimpleNamespace(**(RANKS | MEMORY | changed)), SimpleNamespace(hw_source={})
    )


@pytest.mark.parametrize("sku", ["h100", "H100", "NVIDIA H100 80GB HBM3"])
def test_the_topology_is_that_of_the_sku(sku: str) -> None:
    made, gpu = sku_topology(sku), GPUS["h100"]
    assert (made.world_size, made.local_world_size, made.compute_device) == (16, 8, "cuda")
    assert made.devices[0].storage.hbm == gpu.memory_bytes
    assert made.hbm_mem_bw == gpu.memory_bytes_per_s / 1e3
    assert made.comms_bandwidths.intra_host_bw == gpu.link_bytes_per_s / 1e3
    assert made.comms_bandwidths.inter_host_bw == gpu.network_bytes_per_s / 1e3


def test_memory_and_device_of_the_request_are_taken() -> None:
    assert sku_topology("h100", hbm_gb=40, ddr_gb=100).devices[0].storage.hbm == 40 * 2**30
    on_cpu = sku_topology("any", compute_device="cpu", ddr_gb=10)
    assert (on_cpu.compute_device, on_cpu.devices[0].storage.ddr) == ("cpu", 10 * 2**30)


def test_what_has_no_topology_is_refused() -> None:
    with pytest.raises(TaskError, match=r"unknown GPU 'a100' \(did you mean 'a100-40' or 'a100-80'\?\)"):
        sku_topology("A100")
    for changed, told in (
        ({"local_world_size": 6}, "world_size 16 must be a multiple of local_world_size 6"),
        ({"pod_size": 16}, "pod_size 16 is not supported"),
        ({"compute_device": "mtia"}, "compute_device must be 'cuda' or 'cpu', got 'mtia'"),
    ):
        with pytest.raises(PlannerError, match=told):
            sku_topology("h100", **changed)


def request_and_context(**changed: Any) -> tuple[Any, Any]:
    types = pytest.importorskip("torchrec.distributed.planner.dry_run", reason="TorchRec 1.9 has the planning API")
    from torchrec.distributed.planner.types import PlannerSessionContext

    request = types.DryRunRequest(
        model=collection(*(table(f"t{i}") for i in range(4))),
        sharders=SHARDERS,
        **({"sku_list": ["h100", "b200"], "world_size": 2, "local_world_size": 2, "batch_size": 64} | changed),
        training_framework="apf",
    )
    return request, PlannerSessionContext(request=request, results={})


def test_dry_run_and_production_plan_with_dreamshard() -> None:
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    request, context = request_and_context(constraints=constraints)
    from torchrec.distributed.planner.api import ProductionPlannerOrchestrator
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor

    made: list[DreamShardPlanner] = []

    class Kept(DreamShardProvider):
        def build_planner(self, *args: Any, **kwargs: Any) -> DreamShardPlanner:
            made.append(super().build_planner(*args, **kwargs))
            return made[-1]

    executor = DefaultPlannerExecutor(Kept(seed=1))
    results = DryRunOrchestrator(executor).plan(request, context)
    assert [result.planner_failure_reason for result in results.values()] == [None, None]
    assert context.hw_source == {"h100": GPUS["h100"].source, "b200": GPUS["b200"].source}
    for one, result in zip(made, results.values(), strict=True):
        assert {option.name: option.sharding_type for option in one.options}["t0"] == "row_wise"
        assert result.estimated_max_hbm_bytes > 0 and len(result.sharding_options) == 4
    alone = ProductionPlannerOrchestrator(executor, sku="h100").plan(request, context)["h100"]
    assert str(alone.sharding_plan) == str(results["h100"].sharding_plan)


def test_parts_of_another_planner_are_refused() -> None:
    request, _ = request_and_context()
    from torchrec.distributed.planner.dry_run import DryRunOrchestrator
    from torchrec.distributed.planner.executor import DefaultPlannerExecutor
    from torchrec.distributed.planner.types import PlannerConfig, PlannerVariant

    for config in ({"proposer_type": "greedy"}, {"planner_variant": PlannerVariant.MANIFOLD}):
        request, context = request_and_context(planner_config=PlannerConfig(**config))
        results = DryRunOrchestrator(DefaultPlannerExecutor(DreamShardProvider())).plan(request, context)
        name, value = next(iter(config.items()))
        assert f"PlannerConfig has {name}='{getattr(value, 'value', value)}'" in results["h100"].planner_failure_reason
