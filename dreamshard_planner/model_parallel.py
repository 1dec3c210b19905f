# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``DistributedModelParallel`` with a planner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecDistributedModelParallel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from dreamshard_planner.hot_rows.sharded import hot_rows_of, with_hot_rows
from dreamshard_planner.observing.observer import begin
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.planning.ranks import RankHardware, read_topology
from dreamshard_planner.torchrec_components.replica_optimizers import attach_optimizers


class DistributedModelParallel(TorchRecDistributedModelParallel):
    """TorchRec's ``DistributedModelParallel`` plus ``planner=``, and with exact data-parallel tables: they are trained
    by the in-backward optimizer that they were given, see
    :func:`~dreamshard_planner.torchrec_components.replica_optimizers.attach_optimizers`.

    Args:
        planner: makes the plan on rank 0 of the environment's process group; give either this or ``plan``. Without
            both, a :class:`~dreamshard_planner.planner.DreamShardPlanner` plans for the hardware that is here.
        observe: observe 200 training steps of a planned model after 20 for warm-up, to learn costs from them. The
            environment variable ``DREAMSHARD_OBSERVE=0`` switches it off as well.

    All other arguments are TorchRec's.

    Raises:
        ValueError: both ``plan`` and ``planner`` are given.
        DreamShardError: the planner's topology has not the ranks that there are; those of
            :meth:`~dreamshard_planner.planner.DreamShardPlanner.collective_plan`.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        *args: Any,
        planner: EmbeddingShardingPlanner | None = None,
        observe: bool = True,
        **kwargs: Any,
    ) -> None:
        if planner is not None and plan is not None:
            raise ValueError("give DistributedModelParallel either plan= or planner=, not both")
        sharders = get_default_sharders() if sharders is None else sharders
        if plan is None:
            kind = "cpu" if device is None else device.type
            planner = _default_planner(env, kind) if planner is None else planner
            plan = _planned(planner, module, sharders, env, kind)
        if any(hot_rows_of(plan)):
            sharders = with_hot_rows(sharders)
        super().__init__(module, env, device, plan, sharders, *args, **kwargs)
        attach_optimizers(self)
        if observe and planner is not None:
            begin(self, planner)


def _default_planner(env: ShardingEnv | None, device: str) -> DreamShardPlanner:
    topology = None
    if env is not None and env.process_group is None:
        topology = read_topology(device, [RankHardware.here(device)] * env.world_size)
    return DreamShardPlanner(topology)


def _planned(
    planner: EmbeddingShardingPlanner, module: nn.Module, sharders: list[Any], env: ShardingEnv | None, device: str
) -> ShardingPlan:
    alone, group = env is not None and env.process_group is None, env and env.process_group
    if not isinstance(planner, DreamShardPlanner):
        return planner.plan(module, sharders) if alone else planner.collective_plan(module, sharders, group)
    with planner.attaching_optimizers():
        if alone:
            return planner.plan(module, sharders)
        # A plan of fewer ranks would leave the others without tables, or end in an IndexError of TorchRec's.
        return planner.collective_plan(module, sharders, group, in_groups=False, device=device)
