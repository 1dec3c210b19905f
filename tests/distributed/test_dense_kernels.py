# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans by hand whose kernels are dense drop in-backward optimizers; prediction and model parallelism say so."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from ranks import Rank
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
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
