# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Dense kernels drop in-backward optimizers, and training does not depend on the memory of a kernel."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ranks import Rank, gpu_ranks, run_on_ranks
from tiny import LOCAL_BATCH, SHAPES, shard, train
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner import DistributedModelParallel, DreamShardPlanner


def _told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "dense kernels" in str(one.message)]


def _trained(rank: Rank, how: str) -> tuple[list[str], list[str], list[bool]]:
    """Return warnings for a plan by hand, predicted and sharded, and True if a step changes the weights here."""
    ebc = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=20, feature_names=["f"])]
    )
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
    lookups = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2]), torch.tensor([1, 1]))
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
