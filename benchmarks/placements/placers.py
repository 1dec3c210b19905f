# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every method of placement under one contract: a task in, a device per table out, or nothing where it finds none.

A placer is deterministic, and what it returns fits into memory.

Shapes: S shards (tables), D devices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage

from common.tasks import meta_collection
from common.whole_tables import rolled_out
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.problem import Cost
from dreamshard_planner.search.effort import DEFAULT_SEARCH, NO_DEADLINE, Budget, SearchConfig
from dreamshard_planner.search.moves import local_search
from dreamshard_planner.search.placing import HEURISTICS, greedy_by_score, place_by_heuristic
from placements.contests import Contest


def best_scale(predicted_X2: Tensor, label_X2: Tensor) -> Tensor:
    """Constants of forward and backward, [2], that bring the median relative error to nothing."""
    return (label_X2 / predicted_X2).median(0).values


def rule_starts(cost: Cost) -> list[Tensor]:
    """Return the placements of the rules and of greedy by single-table cost, [S] each, the cheapest first."""
    plans = [place_by_heuristic(cost.problem, rule) for rule in HEURISTICS]
    plans = [plan for plan in (*plans, greedy_by_score(cost.problem, cost.single_ms_P)) if plan is not None]
    if not plans:
        return []
    order = cost.rate(torch.stack(plans)).overall_ms_B.argsort(stable=True).tolist()
    return [plans[index] for index in order]


def searched(cost: Cost, starts: Sequence[Tensor], config: SearchConfig, seed: int = 0) -> Tensor | None:
    """Search by moves and swaps from the cheapest of some feasible placements; None without any."""
    if not starts:
        return None
    best = starts[int(cost.rate(torch.stack(list(starts))).overall_ms_B.argmin())]
    budget, generator = Budget(config.last_moves, NO_DEADLINE), torch.Generator().manual_seed(seed)
    return local_search(cost, best[None], config, budget, generator)


Placer = Callable[[Contest], Tensor | None]


class Field:
    """All placers by name; what they share (checkpoints, fitted costs) is made once, when it is first needed."""

    def __init__(self, checkpoint: str = "auto", device: str = "cpu", seed: int = 0) -> None:
        self._checkpoint, self._device, self._seed = checkpoint, device, seed
        self.placers: dict[str, Placer] = {
            "random": self._random,
            **{rule: partial(self._rule, rule) for rule in HEURISTICS},
            "torchrec": partial(self._torchrec, True),
            "torchrec_default": partial(self._torchrec, False),
            "policy": partial(self._policy, search=False),
            "search_alone": self._search,
            "dreamshard": partial(self._policy, search=True),
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
        return Cost(contest.task.problem.over(contest.collectives), compute or self.network)

    def _random(self, contest: Contest) -> Tensor | None:
        """Any device that has room, table by table."""
        problem = contest.task.problem
        generator = torch.Generator().manual_seed(self._seed)
        free_DM, chosen = problem.limits_DM.clone(), []
        for need_M in problem.needs_PM:
            room = (free_DM >= need_M).all(-1).nonzero()[:, 0]
            if len(room) == 0:
                return None
            chosen.append(int(room[torch.randint(len(room), (1,), generator=generator)]))
            free_DM[chosen[-1]] -= need_M
        return torch.tensor(chosen)

    def _rule(self, rule: str, contest: Contest) -> Tensor | None:
        return place_by_heuristic(contest.task.problem, rule)

    def _search(self, contest: Contest) -> Tensor | None:
        """Search without a policy, from what the rules and single-table costs give."""
        cost = self.cost(contest)
        return searched(cost, rule_starts(cost), DEFAULT_SEARCH, self._seed)

    def _policy(self, contest: Contest, search: bool) -> Tensor | None:
        """One greedy roll-out of the policy, alone or with a search from it and from the rules."""
        topology = Topology(world_size=contest.task.problem.num_ranks, compute_device=self._device)
        cost = self.cost(contest, self.learned.compute_cost(topology))
        drafted = rolled_out(self.learned.policy, cost)
        if not search:
            return drafted
        return searched(cost, [*([] if drafted is None else [drafted]), *rule_starts(cost)], DEFAULT_SEARCH, self._seed)

    def _torchrec(self, informed: bool, contest: Contest) -> Tensor | None:
        """TorchRec's planner, table-wise in fused kernels, with the contest's memory."""
        problem = contest.task.problem
        names = [table.name for table in contest.tables]
        module = meta_collection(contest.tables)
        constraints = {
            table.name: ParameterConstraints(
                ["table_wise"],
                [EmbeddingComputeKernel.FUSED.value],
                pooling_factors=[f.pooling_factor if informed else 1.0 for f in table.features],
            )
            for table in contest.tables
        }
        memory = {"hbm_cap" if self._device == "cuda" else "ddr_cap": int(problem.limits_DM[0, 0])}
        topology = Topology(problem.num_ranks, self._device, local_world_size=problem.num_ranks, **memory)
        storage = dict(zip(names, problem.needs_PM[:, 0].tolist(), strict=True))
        batch_size = max(1, contest.batch_size // problem.num_ranks)
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=_SameStorage(topology, batch_size, constraints, storage=storage),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            constraints=constraints,
            debug=False,
        )
        try:
            plan = planner.plan(copy.copy(module), [EmbeddingBagCollectionSharder()])
        except PlannerError:
            return None
        (sharding,) = plan.plan.values()
        return torch.tensor([sharding[name].ranks[0] for name in names])


class _SameStorage(EmbeddingEnumerator):
    """TorchRec's enumerator with the contest's storage, so that all placers have the same memory to fill."""

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints],
        *,
        storage: dict[str, int],
    ) -> None:
        super().__init__(topology, batch_size, constraints)
        self._storage, self._on_cuda = storage, topology.compute_device == "cuda"

    def enumerate(self, *args, **kwargs) -> list[ShardingOption]:  # noqa: ANN002, ANN003
        options = super().enumerate(*args, **kwargs)
        for option in options:
            size = self._storage[option.name]
            for shard in option.shards:
                shard.storage = Storage(hbm=size, ddr=0) if self._on_cuda else Storage(hbm=0, ddr=size)
        return options
