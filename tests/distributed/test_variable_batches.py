# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sharding types on batches whose size varies by feature, run by TorchRec on two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from ranks import Rank, run_on_ranks
from small_models import collection, table
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.optim import SGD
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.job import EveryTypeSharder
from dreamshard_planner.search_space.sharding_types import CW, DP, GRID, RW, SHARDING_TYPES, TW, TWCW, TWRW

ROWS, DIM = 20, 8


def outputs(rank: Rank) -> dict[str, list[Tensor] | str]:
    """By sharding type, outputs of two steps, or the error."""
    return {kind: _outputs(rank, kind) for kind in SHARDING_TYPES}


def _outputs(rank: Rank, kind: str) -> list[Tensor] | str:
    model = nn.Module()
    model.bags = collection(table("a", ROWS, DIM), table("b", ROWS, DIM))
    apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.5})
    one = ParameterConstraints(sharding_types=[kind], min_partition=4, compute_kernels=["fused", "dense"])
    topology = Topology(rank.world_size, "cpu", local_world_size=rank.world_size, ddr_cap=2**33)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=8, constraints={"a": one, "b": one})
    sharders = [EveryTypeSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=rank.device, sharders=sharders, plan=plan)
    weight_RC = torch.arange(float(ROWS * DIM)).view(ROWS, DIM) / 100
    for value in sharded.state_dict().values():
        for shard in value.local_shards() if kind != DP else ():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(weight_RC[row : row + rows, column : column + columns])
    found: list[Tensor] = []
    try:
        for step in range(2):
            generator = torch.Generator().manual_seed(2 * step + rank.rank)
            lengths = torch.randint(1, 4, (4 + 2,), generator=generator)
            ids = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
            back = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])
            names = ["a_f0", "b_f0"]
            batch = KeyedJaggedTensor(
                names, ids, lengths=lengths, stride_per_key_per_rank=[[4], [2]], inverse_indices=(names, back)
            )
            output_BE = sharded.module.bags(batch)
            found += [output_BE[name].detach().clone() for name in names]
            sum((output_BE[name] * (step + 1)).square().sum() for name in names).backward()
    except (IndexError, RuntimeError) as error:
        return type(error).__name__
    return found


def test_types_that_take_varied_batches_are_those_that_are_proposed() -> None:
    takes_grid = hasattr(GridPooledEmbeddingDist, "_preprocess_batch_size_per_rank_per_feature")
    for by_kind in run_on_ranks(outputs, world_size=2):
        crash = {kind for kind, found in by_kind.items() if isinstance(found, str)}
        assert crash == ({DP} if takes_grid else {DP, GRID})
        assert not torch.equal(by_kind[TW][0], by_kind[TW][2])
        for kind in {CW, TWCW, RW, TWRW, GRID} - crash:
            for found, whole in zip(by_kind[kind], by_kind[TW], strict=True):
                torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
