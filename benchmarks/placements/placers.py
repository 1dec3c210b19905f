# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Every method of placement under one contract: a task in, a device per table out, or nothing where it finds none.

A placer is deterministic, and what it returns fits into memory.

Shapes: S shards (tables), D devices.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.proposers import DynamicProgrammingProposer
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage

from common.linear_cost import LinearCost
from common.tasks import meta_collection
from dreamshard_planner.checkpoints.checkpoint import SHIPPED, Checkpoint, resolve
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.compute import ComputeCost, CostSource
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import LabelledSets, predict_ms
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.policy.environment import TaskBatch
from dreamshard_planner.policy.network import AnyPolicy, greedy_plan, roll_out
from dreamshard_planner.policy.tasks import Task
from dreamshard_planner.search.effort import DEFAULT_SEARCH, Deadline, SearchConfig
from dreamshard_planner.search.exact import solve
from dreamshard_planner.search.heuristics import HEURISTICS, greedy_by_score, place_by_heuristic
from dreamshard_planner.search.moves import local_search
from dreamshard_planner.workload.tables import Table
from placements.torchrec_estimates import TorchRecCost, torchrec_table_ms

DATA = Path(__file__).parents[1] / "data"
EXACT_SECONDS = 60.0
"""Far more than the solver takes for up to 100 tables on 8 devices, so that its plan does not depend on the clock."""


@dataclass(frozen=True)
class Contest:
    """A task for all placers: tables, devices and memory, and the samples that a kernel sees."""

    name: str
    pool: str
    tables: tuple[Table, ...]
    task: Task
    batch_size: int
    tight: bool
    collectives: CollectiveModel


@dataclass(frozen=True)
class ScaledCost(ComputeCost):
    """Another compute cost, forward and backward each times a constant."""

    inner: ComputeCost
    scale_2: Tensor

    @property
    def source(self) -> CostSource:
        """The other's."""
        return self.inner.source

    @property
    def approximate_channels(self) -> int | None:
        """The other's."""
        return self.inner.approximate_channels

    @property
    def approximates(self) -> bool:
        """The other's."""
        return self.inner.approximates

    def encode(self, features_SF: Tensor) -> Tensor:
        """The other's."""
        return self.inner.encode(features_SF)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """The other's, scaled."""
        return self.inner.group_cost_ms(latent_XH) * self.scale_2

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """The other's, scaled."""
        return self.inner.approximate_ms(latent_XH) * self.scale_2

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The other's."""
        return self.inner.notes(features_SF, latent_XH)


def best_scale(predicted_X2: Tensor, label_X2: Tensor) -> Tensor:
    """Constants of forward and backward, [2], that bring the median relative error to nothing."""
    return (label_X2 / predicted_X2).median(0).values


def rule_starts(cost: Cost) -> list[Tensor]:
    """What the rules and greedy by single-table cost find, [S] each, the cheapest first: starts without a policy."""
    plans = [place_by_heuristic(cost.problem, rule) for rule in HEURISTICS]
    plans = [plan for plan in (*plans, greedy_by_score(cost.problem, cost.single_ms_P)) if plan is not None]
    if not plans:
        return []
    order = cost.rate(torch.stack(plans)).overall_ms_B.argsort(stable=True).tolist()
    return [plans[index] for index in order]


def searched(cost: Cost, starts: Sequence[Tensor], config: SearchConfig, seed: int = 0) -> Tensor | None:
    """Where moves and swaps lead from the cheapest of some feasible placements; None without any."""
    if not starts:
        return None
    best = starts[int(cost.rate(torch.stack(list(starts))).overall_ms_B.argmin())]
    generator = torch.Generator().manual_seed(seed)
    return local_search(cost, best, config, Deadline(None), generator).assignment_S


Placer = Callable[[Contest], Tensor | None]


class Field:
    """All placers by name; what they share (checkpoints, fitted costs) is made once, when it is first needed."""

    def __init__(self, checkpoint: str = "auto", device: str = "cpu", seed: int = 0) -> None:
        self._checkpoint, self._device, self._seed = checkpoint, device, seed
        self.placers: dict[str, Placer] = {
            "random": self._random,
            **{rule: partial(self._rule, rule) for rule in HEURISTICS},
            "torchrec": partial(self._torchrec, "greedy", True),
            "torchrec_default": partial(self._torchrec, "greedy", False),
            "torchrec_memory_balanced": partial(self._torchrec, "memory_balanced", True),
            "torchrec_dynamic": partial(self._torchrec, "dynamic", True),
            "linear_greedy": self._linear_greedy,
            "linear_exact": self._linear_exact,
            "linear_search": lambda contest: self._search(contest, self.linear, DEFAULT_SEARCH),
            "roofline_search": lambda contest: self._search(contest, self.roofline, DEFAULT_SEARCH),
            "torchrec_search": lambda contest: self._search(contest, self._torchrec_cost(contest), DEFAULT_SEARCH),
            "neuroshard": self._neuroshard,
            "policy": lambda contest: self._learned(contest, self.learned, None),
            "policy_best_of_16": self._best_of,
            "search_alone": lambda contest: self._search(contest, self.network, DEFAULT_SEARCH),
            "prior": lambda contest: self._learned(contest, self.prior, DEFAULT_SEARCH),
            "dreamshard": lambda contest: self._learned(contest, self.learned, DEFAULT_SEARCH),
        }

    @cached_property
    def learned(self) -> Checkpoint:
        """The checkpoint in use."""
        return resolve(self._checkpoint, self._device)

    @cached_property
    def prior(self) -> Checkpoint:
        """What plans where nobody has measured."""
        return Checkpoint.load(SHIPPED / "roofline.safetensors")

    @cached_property
    def network(self) -> ComputeCost:
        """Its cost network."""
        return self.learned.compute_cost(Topology(world_size=1, compute_device=self._device))

    @cached_property
    def _measured(self) -> CostDataset:
        """The training sets of the shipped network."""
        return CostDataset.concatenate([CostDataset.load(p) for p in sorted(DATA.glob(f"{self._device}-train*.npz"))])

    @cached_property
    def _train(self) -> LabelledSets:
        return LabelledSets.of_dataset(self._measured)

    @cached_property
    def linear(self) -> LinearCost:
        """The additive baseline on the same training sets."""
        return LinearCost.fit(self._train)

    @cached_property
    def roofline(self) -> ComputeCost:
        """From the bandwidths that TorchRec assumes, with its best constants on the training sets."""
        roofline = RooflineCost.of_topology(Topology(1, self._device))
        return ScaledCost(roofline, best_scale(predict_ms(roofline, self._train), self._train.labels_ms_X2))

    @cached_property
    def _torchrec_scale_2(self) -> Tensor:
        """Best constants of TorchRec's estimator, forward and backward, on some of the training sets."""
        sets = self._measured.sets[::50]
        return best_scale(torchrec_table_ms(sets, self._device), self._measured.forward_backward_ms[::50])

    def _torchrec_cost(self, contest: Contest) -> ComputeCost:
        return ScaledCost(TorchRecCost(contest.task.workloads, self._device), self._torchrec_scale_2)

    def cost(self, contest: Contest, compute: ComputeCost | None = None) -> Cost:
        """Of the contest's placements; by the network, if nothing else is given."""
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

    def _linear_greedy(self, contest: Contest) -> Tensor | None:
        return greedy_by_score(contest.task.problem, self.cost(contest, self.linear).single_ms_P)

    def _linear_exact(self, contest: Contest) -> Tensor | None:
        """The additive optimum up to the solver's gap."""
        problem = contest.task.problem
        return solve(problem, EXACT_SECONDS, self.linear.shard_ms(problem.features_PF)).assignment_S

    def _search(self, contest: Contest, compute: ComputeCost, config: SearchConfig) -> Tensor | None:
        """Search without a policy, from what the rules and single-table costs give."""
        cost = self.cost(contest, compute)
        return searched(cost, rule_starts(cost), config, self._seed)

    def _learned(self, contest: Contest, checkpoint: Checkpoint, config: SearchConfig | None) -> Tensor | None:
        topology = Topology(world_size=contest.task.problem.num_ranks, compute_device=self._device)
        return self._place(self.cost(contest, checkpoint.compute_cost(topology)), checkpoint.policy, config)

    @torch.no_grad()
    def _best_of(self, contest: Contest) -> Tensor | None:
        """One greedy and 15 sampled roll-outs, the cheapest by prediction."""
        cost, generator = self.cost(contest), torch.Generator().manual_seed(self._seed)
        batch = TaskBatch.collate([cost])
        environment = roll_out(self.learned.policy, batch, 16, generator, greedy_first=True).environment
        plans = environment.assignments(0)[environment.alive_E]
        return plans[int(cost.rate(plans).overall_ms_B.argmin())] if len(plans) else None

    def _place(self, cost: Cost, policy: AnyPolicy, config: SearchConfig | None) -> Tensor | None:
        drafted = greedy_plan(policy, cost)
        if config is None:
            return drafted
        return searched(cost, [*([] if drafted is None else [drafted]), *rule_starts(cost)], config, self._seed)

    @torch.no_grad()
    def _neuroshard(self, contest: Contest) -> Tensor | None:
        """The table-wise part of NeuroShard (arXiv 2305.01868, section 4): greedy on the predicted multi-table cost
        under a cap on the dims of a device, for 11 caps from the mean to one and a half times the mean."""
        cost, problem = self.cost(contest), contest.task.problem
        dim_S = problem.bytes_PC[:, 0]
        order = cost.single_ms_P.argsort(descending=True, stable=True).tolist()
        plans = []
        for cap in torch.linspace(1.0, 1.5, 11).tolist():
            plan = self._capped_greedy(cost, order, cap * float(dim_S.sum()) / problem.num_ranks)
            if plan is not None:
                plans.append(plan)
        return plans[int(cost.rate(torch.stack(plans)).overall_ms_B.argmin())] if plans else None

    def _capped_greedy(self, cost: Cost, order: Sequence[int], cap_bytes: float) -> Tensor | None:
        problem = cost.problem
        latent_DGH = torch.zeros(problem.num_ranks, problem.num_groups, cost.latent_PH.shape[1]).double()
        bytes_D, free_DM = torch.zeros(problem.num_ranks).double(), problem.limits_DM.clone()
        assignment_S = torch.zeros(problem.num_parts, dtype=torch.int64)
        for shard in order:
            fits_D = (free_DM >= problem.needs_PM[shard]).all(-1)
            fits_D &= bytes_D + problem.bytes_PC[shard, 0] <= cap_bytes
            if not fits_D.any():
                return None
            with_DGH = latent_DGH.clone()
            with_DGH[:, problem.group_P[shard]] += cost.latent_PH[shard]
            device_ms_D = cost.compute.group_cost_ms(with_DGH).sum((-1, -2))
            device = int(device_ms_D.masked_fill(~fits_D, torch.inf).argmin())
            assignment_S[shard], latent_DGH[device] = device, with_DGH[device]
            bytes_D[device] += problem.bytes_PC[shard, 0]
            free_DM[device] -= problem.needs_PM[shard]
        return assignment_S

    def _torchrec(self, method: str, informed: bool, contest: Contest) -> Tensor | None:
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
        device = "cuda" if method == "dynamic" else self._device  # that proposer knows no memory but HBM
        memory = {"hbm_cap" if device == "cuda" else "ddr_cap": int(problem.limits_DM[0, 0])}
        topology = Topology(problem.num_ranks, device, local_world_size=problem.num_ranks, **memory)
        storage = dict(zip(names, problem.needs_PM[:, 0].tolist(), strict=True))
        batch_size = max(1, contest.batch_size // problem.num_ranks)
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=batch_size,
            enumerator=_SameStorage(topology, batch_size, constraints, storage=storage),
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=[DynamicProgrammingProposer()] if method == "dynamic" else None,
            partitioner=MemoryBalancedPartitioner() if method == "memory_balanced" else GreedyPerfPartitioner(),
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
