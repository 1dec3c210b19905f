# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every method of placement under one contract: a task in, a device per table out, or nothing where it finds none.

A placer is deterministic, and what it returns fits into memory.

Shapes: S shards (tables), D devices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage

from common.tasks import meta_collection
from common.whole_tables import over, rolled_out
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.problem import ComputeCost, Cost
from dreamshard_planner.search.effort import Budget
from dreamshard_planner.search.moves import local_search
from dreamshard_planner.search.search import LAST_MOVES
from dreamshard_planner.search.starts import HEURISTICS, greedy_by_score, place_by_heuristic
from placements.contests import Contest


def best_scale(predicted_X2: Tensor, label_X2: Tensor) -> Tensor:
    """Constants of forward and backward, [2], that bring the median relative error to nothing."""
    return (label_X2 / predicted_X2).median(0).values


def searched(cost: Cost, drafted: Tensor | None = None) -> Tensor | None:
    """Search by moves and swaps from the cheapest of a draft and of the placements by the rules and by single-table
    cost; None if none of them is feasible."""
    rules = (place_by_heuristic(cost.problem, rule) for rule in HEURISTICS)
    starts = [drafted, *rules, greedy_by_score(cost.problem, cost.single_ms_P)]
    starts = [start for start in starts if start is not None]
    if not starts:
        return None
    best = starts[int(cost.rate(torch.stack(starts)).overall_ms_B.argmin())]
    budget, generator = Budget(LAST_MOVES), torch.Generator().manual_seed(0)
    return local_search(cost, best[None], budget, generator)


Placer = Callable[[Contest], Tensor | None]


class Field:
    """All placers by name; what they share (checkpoints, fitted costs) is made once, when it is first needed."""

    def __init__(self, checkpoint: str = "auto", device: str = "cpu") -> None:
        self._checkpoint, self._device = checkpoint, device
        self.placers: dict[str, Placer] = {
            "random": self._random,
            **{rule: lambda contest, rule=rule: place_by_heuristic(contest.task.problem, rule) for rule in HEURISTICS},
            "torchrec": partial(self._torchrec, True),
            "torchrec_default": partial(self._torchrec, False),
            "policy": partial(self._policy, True, False),
            "search_alone": partial(self._policy, False, True),
            "dreamshard": partial(self._policy, True, True),
        }

    @cached_property
    def learned(self) -> Checkpoint:
        """The checkpoint in use."""
        return resolve(self._checkpoint, self._device)

    @cached_property
    def network(self) -> ComputeCost:
        """Its cost network."""
        return self.learned.compute_cost(Topology(world_size=1, compute_device=self._device))

    def cost(self, contest: Contest, compute: ComputeCost | None = None) -> Cost:
        """Return the cost of the contest's placements; by the network, if nothing else is given."""
        return Cost(over(contest.task.problem, contest.collectives), compute or self.network)

    def _random(self, contest: Contest) -> Tensor | None:
        """Any device that has room, table by table."""
        problem = contest.task.problem
        generator = torch.Generator().manual_seed(0)
        free_DM, chosen = problem.limits_DM.clone(), []
        for need_M in problem.needs_PM:
            room = (free_DM >= need_M).all(-1).nonzero()[:, 0]
            if len(room) == 0:
                return None
            chosen.append(int(room[torch.randint(len(room), (1,), generator=generator)]))
            free_DM[chosen[-1]] -= need_M
        return torch.tensor(chosen)

    def _policy(self, rolls_out: bool, searches: bool, contest: Contest) -> Tensor | None:
        """One greedy roll-out of the policy, or a search from it, or one from the rules alone."""
        topology = Topology(world_size=contest.task.problem.num_ranks, compute_device=self._device)
        cost = self.cost(contest, self.learned.compute_cost(topology) if rolls_out else None)
        drafted = rolled_out(self.learned.policy, cost) if rolls_out else None
        return searched(cost, drafted) if searches else drafted

    def _torchrec(self, informed: bool, contest: Contest) -> Tensor | None:
        """TorchRec's planner, table-wise in fused kernels, with the contest's memory."""
        problem, names = contest.task.problem, [table.name for table in contest.tables]
        constraints = {
            table.name: ParameterConstraints(
                ["table_wise"],
                [EmbeddingComputeKernel.FUSED.value],
                pooling_factors=[f.pooling_factor if informed else 1.0 for f in table.features],
            )
            for table in contest.tables
        }
        on_cuda, ranks = self._device == "cuda", problem.num_ranks
        memory = {"hbm_cap" if on_cuda else "ddr_cap": int(problem.limits_DM[0, 0])}
        topology = Topology(ranks, self._device, local_world_size=ranks, **memory)
        sizes = dict(zip(names, problem.needs_PM[:, 0].tolist(), strict=True))
        batch_size = max(1, contest.batch_size // ranks)
        enumerator = EmbeddingEnumerator(topology, batch_size, constraints)
        enumerate_options = enumerator.enumerate

        def enumerate_with_storage(*args: Any, **kwargs: Any) -> list[ShardingOption]:
            """Return options with the contest's storage, so that all placers have the same memory to fill."""
            options = enumerate_options(*args, **kwargs)
            for option in options:
                size = sizes[option.name]
                for shard in option.shards:
                    shard.storage = Storage(hbm=size, ddr=0) if on_cuda else Storage(hbm=0, ddr=size)
            return options

        enumerator.enumerate = enumerate_with_storage
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=constraints,
            debug=False,
        )
        try:
            plan = planner.plan(meta_collection(contest.tables), [EmbeddingBagCollectionSharder()])
        except PlannerError:
            return None
        (sharding,) = plan.plan.values()
        return torch.tensor([sharding[name].ranks[0] for name in names])
