# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables of several output types, and single ``nn.EmbeddingBag`` modules: refused if TorchRec cannot run them. Dense
kernels drop in-backward optimizers, and training does not depend on the memory of a kernel."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from ranks import Rank, gpu_ranks, run_on_ranks
from small_models import collection, planned, planner, table, topology
from tiny import LOCAL_BATCH, SHAPES, shard, train
from torch import nn
from torch.multiprocessing.spawn import ProcessException
from torch.nn.functional import embedding_bag
from torchrec.distributed import DistributedModelParallel as TorchRecsDistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner, PlacementRules
from dreamshard_planner.search_space.constraints import UNEVEN_OUTPUTS
from dreamshard_planner.search_space.sharding_types import BAGS_OF_MEANS, CW, DP, SLICES_OF_BAGS, TW, WHOLE_BAGS

EACH = ((True, True, False), (0, 0, 1))
"""Tables that put out float16, and the ranks of all."""
FAILS = {"a rank of each": EACH, "a rank of none": ((True, True), (0, 0))}
RUNS = {
    "one type": ((True, True), (0, 1), torch.float16),
    "both on each rank": ((True, False, True, False), (0, 0, 1, 1), torch.float32),
}
"""Besides, the type that the module returns."""


def constraints(halves: tuple[bool, ...]) -> dict[str, ParameterConstraints]:
    return {
        f"t{i}": ParameterConstraints(sharding_types=["table_wise"], output_dtype=DataType.FP16 if half else None)
        for i, half in enumerate(halves)
    }


def model(halves: tuple[bool, ...]):
    return collection(*(table(f"t{i}") for i in range(len(halves))))


def sharders(quantized: bool) -> list[EmbeddingBagCollectionSharder]:
    config = QCommsConfig(CommType.FP16, CommType.FP16)
    codecs = get_qcomm_codecs_registry(config, device=torch.device("cpu")) if quantized else None
    return [EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)]


def _run(rank: Rank, halves: tuple[bool, ...], ranks: tuple[int, ...], quantized: bool = False) -> torch.dtype:
    def moved(plan: list[ShardingOption]) -> list[ShardingOption]:
        for option in plan:
            option.shards[0].rank = ranks[int(option.name[1:])]
        return plan

    made = EmbeddingShardingPlanner(
        Topology(2, "cpu"), 64, constraints=constraints(halves), callbacks=[moved], stats=[], debug=False
    )
    given = sharders(quantized)
    plan = made.collective_plan(model(halves), given, dist.group.WORLD)
    sharded = TorchRecsDistributedModelParallel(model(halves), device=rank.device, sharders=given, plan=plan)
    names = [f"t{i}_f0" for i in range(len(halves))]
    lengths = torch.ones(4 * len(names), dtype=torch.int64)
    values = sharded(KeyedJaggedTensor(names, torch.arange(len(lengths)), lengths=lengths)).values()
    values.sum().backward()
    return values.dtype


def _plan(halves: tuple[bool, ...], ranks: tuple[int, ...], quantized: bool = False) -> None:
    rules = PlacementRules(on_ranks={f"t{i}": [rank] for i, rank in enumerate(ranks)})
    planner(constraints=constraints(halves), placement_rules=rules).plan(model(halves), sharders(quantized))


@pytest.mark.parametrize("name", FAILS)
def test_plans_are_refused_that_torchrec_cannot_run(name: str) -> None:
    if name == "a rank of each":
        with pytest.raises(ProcessException):
            run_on_ranks(_run, *EACH, world_size=2)
    with pytest.raises(PlannerError) as refused:
        _plan(*FAILS[name])
    assert all(word in str(refused.value) for word in ("table_wise", "'t0' float16", "float32 by rank"))


def test_what_is_planned_runs(told: list[dict[str, Any]]) -> None:
    """Outputs that are quantized before they are sent have one type."""
    for of_rank in told:
        assert {name: of_rank[name] for name in RUNS} == {name: expected for name, (*_, expected) in RUNS.items()}
        assert of_rank["quantized"] == torch.float32 and of_rank["finite"]
    for halves, ranks, _ in RUNS.values():
        _plan(halves, ranks)
    _plan(*EACH, quantized=True)


def test_the_output_type_of_a_sharder_counts() -> None:
    halves = [EmbeddingBagCollectionSharder(fused_params={"output_dtype": SparseType.FP16})]
    whole = {"t0": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(PlannerError, match="'t0' float16"):
        planner(constraints=whole).plan(collection(table("t0")), halves)
    planner(constraints=whole, topology=topology(1)).plan(collection(table("t0")), halves)


HALVES = [
    EmbeddingBagCollectionSharder(
        fused_params={"output_dtype": SparseType.FP16, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    )
]
LARGE = table("t0", 1_000_000, 8)
"""Cheapest whole, on one rank; the other one would send float32."""


def _trained_half(rank: Rank) -> bool:
    plan = planner(topology=topology(2), exact_training=False).collective_plan(collection(LARGE), HALVES)
    sharded = TorchRecsDistributedModelParallel(collection(LARGE), device=rank.device, sharders=HALVES, plan=plan)
    values = sharded(KeyedJaggedTensor(["t0_f0"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))).values()
    values.sum().backward()
    return bool(values.isfinite().all())


def test_types_are_left_out_whose_outputs_ranks_could_not_exchange() -> None:
    made = planned(collection(LARGE), HALVES, topology=topology(2), exact_training=False)
    assert {option.sharding_type for option in made.options} == {"data_parallel"}
    assert any(UNEVEN_OUTPUTS in str(note) for note in made.report().notes)
    found = made.replan(made.saved_plan(), steps=10**9)
    assert found.stays and all("table_wise" not in str(found.make(at).sharding) for at in range(len(found.curve)))
    assert not any(change and "table_wise" in change.how for table in made.explain().tables
                   for change in (table.moved, table.split))  # fmt: skip


def test_a_refusal_says_why_a_table_has_no_type_left() -> None:
    with pytest.raises(PlannerError, match="ranks without such a table would send float32"):
        planner(topology=topology(2)).plan(collection(LARGE), HALVES)


def test_many_tables_of_one_output_type_may_stay_whole() -> None:
    model = collection(*(table(f"t{i}", 100_000 * (i + 1), 64) for i in range(8)))
    made = planned(model, HALVES, topology=topology(2, device="cuda"))
    assert {option.sharding_type for option in made.options} == {"table_wise"}
    assert not any(UNEVEN_OUTPUTS in str(note) for note in made.report().notes)
    few = planned(model, HALVES, topology=topology(8, device="cuda"))
    assert {option.sharding_type for option in few.options} == {"row_wise"}
    assert any(UNEVEN_OUTPUTS in str(note) for note in few.report().notes)


ROWS, DIM = 50, 8
CASES: dict[str, tuple[str, ParameterConstraints, str]] = {
    "whole": ("sum", ParameterConstraints(sharding_types=[TW]), WHOLE_BAGS.text),
    "slices": ("sum", ParameterConstraints(sharding_types=[CW], min_partition=4), SLICES_OF_BAGS.text),
    "means": ("mean", ParameterConstraints(sharding_types=[DP]), BAGS_OF_MEANS.text),
}


class Bag(nn.Module):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode=mode, include_last_offset=True)
        self.top = nn.Linear(DIM, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(indices, offsets))


def bag_planner(kind: type[EmbeddingShardingPlanner], given: ParameterConstraints | None, **arguments: Any):
    constraints = None if given is None else {"weight": given}
    return kind(Topology(2, "cpu"), batch_size=64, constraints=constraints, stats=[], debug=False, **arguments)


def _run_bag(rank: Rank, kind: type[EmbeddingShardingPlanner], mode: str, given: ParameterConstraints | None) -> str:
    """Return the bag's sharding if its outputs are right, else the error."""
    torch.manual_seed(0)
    single = [EmbeddingBagSharder()]
    plan = bag_planner(kind, given).collective_plan(Bag(mode), single, dist.group.WORLD)
    try:
        model = TorchRecsDistributedModelParallel(Bag(mode), device=rank.device, sharders=single, plan=plan)
        weights = torch.rand(ROWS, DIM, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            if rank.rank in plan.plan["bag"]["weight"].ranks:  # the other one has no such name
                model.state_dict()["bag.weight"].local_shards()[0].tensor.copy_(weights)
        indices, offsets = torch.arange(6 * (rank.rank + 1)), torch.tensor([0, 2, 6 * (rank.rank + 1)])
        pooled = model.module.bag(indices, offsets).wait()
        torch.testing.assert_close(
            pooled, embedding_bag(indices, weights, offsets, include_last_offset=True, mode="sum")
        )
        model(indices, offsets).sum().backward()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return plan.plan["bag"]["weight"].sharding_type


def _all(rank: Rank) -> dict[str, Any]:
    bags = {name: _run_bag(rank, EmbeddingShardingPlanner, mode, given) for name, (mode, given, _) in CASES.items()}
    outputs = {name: _run(rank, halves, ranks) for name, (halves, ranks, _) in RUNS.items()}
    ours = _run_bag(rank, DreamShardPlanner, "sum", None)
    return bags | outputs | {"ours": ours, "quantized": _run(rank, *EACH, True), "finite": _trained_half(rank)}


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """By rank: its error or sharding type in each case of bags, and outputs of collections."""
    return run_on_ranks(_all, world_size=2)


@pytest.mark.parametrize("name", CASES)
def test_what_torchrec_cannot_run_is_refused(name: str, told: list[dict[str, Any]]) -> None:
    mode, given, reason = CASES[name]
    assert all("Error" in of_rank[name] for of_rank in told)
    with pytest.raises(PlannerError) as refused:
        bag_planner(DreamShardPlanner, given, exact_training=False).plan(Bag(mode), [EmbeddingBagSharder()])
    assert reason in str(refused.value) and "'bag.weight'" in str(refused.value)


def test_one_slice_is_the_whole_bag(told: list[dict[str, Any]]) -> None:
    assert [of_rank["ours"] for of_rank in told] == [CW, CW]
    hot = ParameterConstraints(pooling_factors=[500.0])  # worth halving
    made = bag_planner(DreamShardPlanner, hot)
    wide = nn.Sequential(nn.EmbeddingBag(10_000, 64, mode="sum"), nn.Linear(64, 1))
    assert made.plan(wide, [EmbeddingBagSharder()]).plan["0"]["weight"].ranks in ([0], [1])
    assert all(entry.split is None for entry in made.explain().tables)


def _told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "dense kernels" in str(one.message)]


def _trained(rank: Rank, how: str) -> tuple[list[str], list[str], list[bool]]:
    """Return warnings for a plan by hand, predicted and sharded, and True if a step changes the weights here."""
    ebc = collection(table("t", 20, 8), device="cpu")
    model, fused = nn.Sequential(ebc), {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused if how == "fused_params" else None)
    if how == "first":
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    by_hand = construct_module_sharding_plan(
        ebc, {"t": table_wise(rank=0)}, sharder, local_size=2, world_size=rank.world_size, device_type="cpu"
    )
    if how == "late":
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    plan = ShardingPlan({"0": by_hand})
    planner = DreamShardPlanner()
    planner.read(model, [sharder])
    with warnings.catch_warnings(record=True) as predicted:
        warnings.simplefilter("always")
        planner.predict(plan)
    with warnings.catch_warnings(record=True) as sharded:
        warnings.simplefilter("always")
        parallel = DistributedModelParallel(model, device=rank.device, plan=plan, sharders=[sharder])
    before = _weights(parallel)
    lookups = KeyedJaggedTensor.from_lengths_sync(["t_f0"], torch.tensor([1, 2]), torch.tensor([1, 1]))
    parallel(lookups).wait().values().sum().backward()
    changed = [not torch.equal(one, other) for one, other in zip(before, _weights(parallel), strict=True)]
    return _told(predicted), _told(sharded), changed


def _weights(parallel: nn.Module) -> list[torch.Tensor]:
    values = parallel.state_dict().values()
    return [shard.tensor.clone() for value in values for shard in value.local_shards()]


def _each(rank: Rank) -> dict[str, tuple[list[str], list[str], list[bool]]]:
    return {how: _trained(rank, how) for how in ("late", "fused_params", "first")}


def test_tables_that_a_plan_by_hand_does_not_train_are_named(launch: Callable[..., list[Any]]) -> None:
    first, second = launch(_each, world_size=2)
    for how, (predicted, sharded, changed) in first.items():
        assert predicted == second[how][0]  # every rank predicts
        if how == "first":  # the optimizer is there before the plan, so its kernel is fused
            assert (predicted, sharded, changed) == ([], [], [True])
        else:
            assert changed == [False] and "0.t" in predicted[0] and "0.t" in sharded[0]
            assert "apply_optimizer_in_backward before construct_module_sharding_plan" in sharded[0]


STEPS = 20


def _train_from(rank: Rank, kernel: str) -> tuple[set[str], list[float]]:
    constraints = {
        f"t{index}": ParameterConstraints(sharding_types=["table_wise"], compute_kernels=[kernel])
        for index in range(len(SHAPES))
    }
    topology = Topology(rank.world_size, "cuda", hbm_cap=8 << 30, ddr_cap=8 << 30)
    planner = DreamShardPlanner(topology=topology, batch_size=LOCAL_BATCH, constraints=constraints, stats=[])
    model = shard(planner, rank)
    (plan,) = model.plan.plan.values()
    return {of.compute_kernel for of in plan.values()}, train(model, rank, STEPS, LOCAL_BATCH * rank.world_size)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused_uvm", "fused_uvm_caching"])
def test_losses_do_not_depend_on_where_weights_lie(kernel: str) -> None:
    runs = {each: run_on_ranks(_train_from, each, world_size=gpu_ranks(), backend="nccl") for each in ("fused", kernel)}
    for each, of_ranks in runs.items():
        assert all(kernels == {each} for kernels, _ in of_ranks)
    for (_, on_device), (_, elsewhere) in zip(*runs.values(), strict=True):
        assert elsewhere == pytest.approx(on_device, rel=1e-5)
