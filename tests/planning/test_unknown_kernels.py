# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compute kernels without costs of the planner's own: their estimator prices them, and the report says so."""

import copy
from pathlib import Path
from typing import Any

import pytest
from small_models import SHARDERS, collection, planned, planner, table, topology
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import Perf, PlannerError, Shard, ShardEstimator, ShardingOption, Storage
from torchrec.distributed.types import CacheParams

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search_space.sharding_types import RW, TW
from dreamshard_planner.torchrec_components.components import JsonPlanLoader

CUSTOM = "customized_kernel"
FORWARD_MS, BACKWARD_MS, PREFETCH_MS = 1.0, 2.0, 4.0
GPUS = topology(2, 2**30, "cuda")


class CustomSharder(EmbeddingBagCollectionSharder):
    """Offers a kernel of its own beside TorchRec's."""

    def __init__(self, kernel: str = CUSTOM) -> None:
        super().__init__()
        self._kernel = kernel

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [*super().compute_kernels(sharding_type, compute_device_type), self._kernel]


class OwnEstimator(ShardEstimator):
    """Prices the custom kernel by its cache and its shard's index; leaves other kernels to an estimator of TorchRec."""

    def __init__(self, estimator: ShardEstimator, sets: str) -> None:
        self._estimator, self._sets = estimator, sets

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        others = [option for option in sharding_options if option.compute_kernel != CUSTOM]
        self._estimator.estimate(others, *args, **kwargs)
        for option in (option for option in sharding_options if option.compute_kernel == CUSTOM):
            cached = option.cache_load_factor or 1.0
            for index, shard in enumerate(option.shards):
                slower = (1 + index) / cached
                perf = Perf(FORWARD_MS * slower, 0.5, BACKWARD_MS * slower, 0.5, prefetch_compute=PREFETCH_MS * slower)
                storage = Storage(hbm=int(cached * 1000) + option.caching, ddr=1000)
                setattr(shard, self._sets, perf if self._sets == "perf" else storage)


class OwnEnumerator(EmbeddingEnumerator):
    """Keeps its own rules by fully qualified name: the tables named get the custom kernel with caches of several sizes,
    each in two modes that TorchRec knows nothing of."""

    def __init__(self, custom: tuple[str, ...], sharding_type: str = RW, modes: tuple[int, ...] = (0, 1)) -> None:
        costs, sizes = EmbeddingPerfEstimator(GPUS), EmbeddingStorageEstimator(GPUS)
        super().__init__(GPUS, 64, estimator=[OwnEstimator(costs, "perf"), OwnEstimator(sizes, "storage")])
        self._custom, self._type, self._modes = custom, sharding_type, modes

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        made = [option for option in sharding_options if option.fqn not in self._custom]
        for option in sharding_options:
            if option.fqn in self._custom and (option.sharding_type, option.compute_kernel) == (self._type, "fused"):
                for caching in self._modes:
                    for load_factor in (0.1, 0.5):
                        variant = copy.deepcopy(option)
                        variant.compute_kernel, variant.cache_params = CUSTOM, CacheParams(load_factor=load_factor)
                        variant.use_custom, variant.caching = True, caching
                        made.append(variant)
        sharding_options[:] = made
        super().populate_estimates(sharding_options)


def model(tables: int = 3) -> nn.Module:
    return nn.ModuleDict({"sparse": collection(*(table(f"t{i}", 1000, 64) for i in range(tables)))})


def source_notes(made: DreamShardPlanner) -> str:
    return "\n".join(note.text for note in made.report().notes if note.code == "source")


@pytest.mark.parametrize(
    ("cost_source", "proposer"), [("auto", None), ("roofline", [UniformProposer()]), ("torchrec", None)]
)
def test_an_enumerator_prices_its_own_kernel(cost_source: str, proposer: list[Any] | None) -> None:
    enumerator = OwnEnumerator(("sparse.t0",))
    made = planner(topology=GPUS, enumerator=enumerator, cost_source=cost_source, proposer=proposer)
    plan = made.plan(model(), SHARDERS)
    option = next(option for option in made.options if option.name == "t0")
    assert option.compute_kernel == plan.plan["sparse"]["t0"].compute_kernel == CUSTOM
    # What the enumerator set is still there, of the cache that costs least.
    assert option.use_custom and option.cache_load_factor == 0.5
    assert [shard.storage.hbm for shard in option.shards] == [500 + option.caching] * 2
    assert [shard.perf.prefetch_compute for shard in option.shards] == [2 * PREFETCH_MS, 4 * PREFETCH_MS]
    # Shards of one size may have prices of their own: the second rank takes twice as long for the table.
    compute_ms = FORWARD_MS + BACKWARD_MS + PREFETCH_MS
    costs = made.report().chosen
    if cost_source != "torchrec":
        assert 4 * compute_ms - 1 <= costs.total_ms < 4 * compute_ms + 2
        assert "1 table(s) (sparse.t0)" in source_notes(made) and CUSTOM in source_notes(made)
        assert "an estimator that was given made them" in source_notes(made)
    assert made.predict(made.options).total_ms == pytest.approx(costs.total_ms)


def test_the_search_weighs_the_prices() -> None:
    """Four tables of equal price: two on each rank."""
    enumerator = OwnEnumerator(tuple(f"sparse.t{i}" for i in range(4)), TW)
    made = planned(model(4), topology=GPUS, enumerator=enumerator)
    ranks = sorted(option.shards[0].rank for option in made.options)
    assert ranks == [0, 0, 1, 1] and {option.compute_kernel for option in made.options} == {CUSTOM}


def test_plans_of_such_kernels_are_saved_loaded_and_explained(tmp_path: Path) -> None:
    # TorchRec loads no plan where two options differ in what only their enumerator knows.
    made, loaded = (planner(topology=GPUS, enumerator=OwnEnumerator(("sparse.t0",), modes=(1,))) for _ in range(2))
    path = tmp_path / "plan.json"
    plan = made.plan(model(), SHARDERS)
    made.save_plan(path)
    assert SavedPlan.load(path).sharding["sparse"]["t0"].kernel == CUSTOM
    loaded.plan_loader = JsonPlanLoader(path)
    again = loaded.plan(model(), SHARDERS)
    assert again.plan["sparse"]["t0"] == plan.plan["sparse"]["t0"]
    assert loaded.report().chosen.total_ms == pytest.approx(made.report().chosen.total_ms)
    assert next(option for option in loaded.options if option.name == "t0").use_custom
    assert "sparse.t0" in {entry.table for entry in made.explain().tables}
    assert made.replan(plan, steps=10).plan.sharding["sparse"]["t0"].kernel == CUSTOM


def test_a_constraint_may_name_a_kernel_that_torchrec_prices() -> None:
    named = ParameterConstraints(compute_kernels=["fused_triton"])
    made = planned(model(), [CustomSharder("fused_triton")], topology=GPUS, constraints={"t0": named})
    kernels = {option.name: option.compute_kernel for option in made.options}
    assert kernels["t0"] == "fused_triton" and "fused_triton" not in (kernels["t1"], kernels["t2"])
    assert "which are TorchRec's" in source_notes(made) and "(sparse.t0)" in source_notes(made)
    entry = {entry.name: entry for entry in made.report().tables}["sparse.t0"]
    assert entry.kernel == "fused_triton" and min(entry.shard_ms) > 0


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
@pytest.mark.parametrize("kernel", [CUSTOM, "warp9"])
def test_a_kernel_that_nobody_prices_is_refused(cost_source: str, kernel: str) -> None:
    named = ParameterConstraints(compute_kernels=[kernel])
    made = planner(topology=GPUS, constraints={"t0": named}, cost_source=cost_source)
    with pytest.raises(PlannerError, match=rf"'sparse.t0' .*'{kernel}'.*enumerator") as caught:
        made.plan(model(), [CustomSharder(kernel)])
    assert "compute_kernels" in str(caught.value)


class OwnConstraintsPlanner(DreamShardPlanner):
    """Takes some constraints from TorchRec's planner, and keeps all of them once that is made."""

    def __init__(self, constraints: dict[str, ParameterConstraints], **arguments: Any) -> None:
        known = {name: one for name, one in constraints.items() if CUSTOM not in (one.compute_kernels or ())}
        super().__init__(constraints=known, **arguments)
        self._constraints = constraints


class Placeholders(EmbeddingEnumerator):
    """Keeps a table that something else shards in the plan, as a fused one of an element per rank."""

    def enumerate(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        options = super().enumerate(module, sharders)
        kept = [option for option in options if option.name != "t0" or option.sharding_type == RW]
        kept = [option for option in kept if option.name != "t0" or option.compute_kernel == "fused"]
        for option in kept:
            if option.name == "t0":
                option.shards = [Shard([1, 1], [rank, 0]) for rank in range(self._world_size)]
        self.populate_estimates(kept)
        return kept


def test_a_subclass_that_resets_constraints_and_replaces_placeholders() -> None:
    constraints = {"t0": ParameterConstraints([RW], [CUSTOM]), "t1": ParameterConstraints([TW])}
    arguments = {"topology": GPUS, "batch_size": 64, "stats": [], "debug": False, "effort": "quick"}
    made = OwnConstraintsPlanner(constraints, enumerator=Placeholders(GPUS, 64), **arguments)
    plan = made.plan(model(), SHARDERS).plan["sparse"]
    assert (plan["t0"].sharding_type, plan["t0"].ranks) == (RW, [0, 1]) and plan["t1"].sharding_type == TW
    assert made.report().chosen.total_ms > 0


class SlowLast(ShardEstimator):
    """Prices the last shard of each option apart."""

    def __init__(self, last_ms: float) -> None:
        self._last_ms = last_ms

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        for option in sharding_options:
            for shard in option.shards:
                shard.perf = Perf(1.0 if shard is not option.shards[-1] else self._last_ms, 0, 0, 0)


def estimated_by(*estimators: ShardEstimator, cost_source: str = "torchrec") -> DreamShardPlanner:
    """Return a planner with an enumerator of these estimators, after planning a table in two slices."""
    sliced = {"t0": ParameterConstraints(sharding_types=["column_wise"], min_partition=32)}
    enumerator = EmbeddingEnumerator(GPUS, 64, sliced, estimator=[*estimators])
    return planned(model(1), topology=GPUS, enumerator=enumerator, constraints=sliced, cost_source=cost_source)


@pytest.mark.parametrize("last_ms", [float("nan"), -1.5])
def test_shards_of_one_size_may_have_own_estimates_which_must_be_times(last_ms: float) -> None:
    made = estimated_by(SlowLast(3.0), EmbeddingStorageEstimator(GPUS))
    assert sorted(made.report().chosen.rank_ms) == [1.0, 3.0]
    with pytest.raises(PlannerError, match=rf"'sparse.t0': its enumerator estimates {last_ms} ms"):
        estimated_by(SlowLast(last_ms), EmbeddingStorageEstimator(GPUS))


@pytest.mark.parametrize("cost_source", ["auto", "torchrec"])
@pytest.mark.parametrize("estimator", [EmbeddingPerfEstimator, EmbeddingStorageEstimator])
def test_what_an_enumerator_does_not_estimate_is_estimated_as_torchrec_does(
    cost_source: str, estimator: type[ShardEstimator]
) -> None:
    given, both = (
        estimated_by(*(one(GPUS) for one in some), cost_source=cost_source).report().chosen
        for some in ([estimator], [EmbeddingPerfEstimator, EmbeddingStorageEstimator])
    )
    assert given == both
