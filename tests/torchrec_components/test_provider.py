# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's planning API plans with DreamShardPlanner, for the GPUs that a SKU names."""

from types import SimpleNamespace
from typing import Any

import pytest
from small_models import SHARDERS, collection, table
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError

from dreamshard_planner import DreamShardPlanner, TaskError
from dreamshard_planner.devices import GPUS
from dreamshard_planner.torchrec_components.provider import DreamShardProvider

RANKS = {"world_size": 16, "local_world_size": 8, "pod_size": None, "compute_device": None}
MEMORY = {"hbm_gb": None, "ddr_gb": None}


def topology(sku: str, **changed: Any) -> Any:
    """The topology of a request; of the API's context only the sources of hardware matter here."""
    return DreamShardProvider().build_topology(
        sku, SimpleNamespace(**(RANKS | MEMORY | changed)), SimpleNamespace(hw_source={})
    )


@pytest.mark.parametrize("sku", ["h100", "H100", "NVIDIA H100 80GB HBM3"])
def test_the_topology_is_that_of_the_sku(sku: str) -> None:
    made, gpu = topology(sku), GPUS["h100"]
    assert (made.world_size, made.local_world_size, made.compute_device) == (16, 8, "cuda")
    assert made.devices[0].storage.hbm == gpu.memory_bytes
    assert made.hbm_mem_bw == gpu.memory_bytes_per_s / 1e3
    assert made.comms_bandwidths.intra_host_bw == gpu.link_bytes_per_s / 1e3
    assert made.comms_bandwidths.inter_host_bw == gpu.network_bytes_per_s / 1e3


def test_memory_and_device_of_the_request_are_taken() -> None:
    assert topology("h100", hbm_gb=40, ddr_gb=100).devices[0].storage.hbm == 40 * 2**30
    on_cpu = topology("any", compute_device="cpu", ddr_gb=10)
    assert (on_cpu.compute_device, on_cpu.devices[0].storage.ddr) == ("cpu", 10 * 2**30)


def test_what_has_no_topology_is_refused() -> None:
    with pytest.raises(TaskError, match=r"unknown GPU 'a100' \(did you mean 'a100-40' or 'a100-80'\?\)"):
        topology("A100")
    for changed, told in (
        ({"local_world_size": 6}, "world_size 16 must be a multiple of local_world_size 6"),
        ({"pod_size": 16}, "pod_size 16 is not supported"),
        ({"compute_device": "mtia"}, "compute_device must be 'cuda' or 'cpu', got 'mtia'"),
    ):
        with pytest.raises(PlannerError, match=told):
            topology("h100", **changed)


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
    for planner, result in zip(made, results.values(), strict=True):
        assert {option.name: option.sharding_type for option in planner.options}["t0"] == "row_wise"
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
