# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The memory that tables lie in must not change the trained model."""

import pytest
from ranks import Rank, gpu_ranks, run_on_ranks
from tiny import LOCAL_BATCH, SHAPES, shard, train
from torchrec.distributed.planner import ParameterConstraints, Topology

from dreamshard_planner import DreamShardPlanner

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
