# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The one changed line: ``DreamShardPlanner`` instead of TorchRec's planner."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

# TorchRec imports this late, in apply_optimizer_in_backward. Its default arguments then keep the process group that
# there is by now, even past destroy_process_group, and gloo's threads may abort Python's exit. Early, there is none.
import torch.distributed.optim  # noqa: F401
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from dreamshard_planner import driver
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.errors import DreamShardError, InputWarning
from dreamshard_planner.planning.explanation import Explanation
from dreamshard_planner.planning.infeasible import reason_first
from dreamshard_planner.planning.model_problem import AnyPlan, ModelProblem
from dreamshard_planner.planning.plan_inputs import DefaultReservation, PlannerSettings
from dreamshard_planner.planning.plan_notes import lost_optimizers
from dreamshard_planner.planning.ranks import (
    PlannedRanks,
    ShardingGroups,
    check_ranks,
    gathered,
    plan_on_rank_0,
    read_topology,
    told,
    topology_here,
)
from dreamshard_planner.planning.replanning import replanned
from dreamshard_planner.planning.result import PlanResult
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.replan import Moving, Replan
from dreamshard_planner.plans.report import Report, ReportEntry
from dreamshard_planner.search.effort import DEFAULT_EFFORT
from dreamshard_planner.search_space.constraints import given_constraints
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.torchrec_components.loop import GivenComponents, SearchLoop
from dreamshard_planner.workload.statistics import TableStatistics


class DreamShardPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with learned cost, a learned policy, and search over every sharding type.

    Every argument of ``torchrec.distributed.planner.EmbeddingShardingPlanner`` is honoured; a component that
    is given (enumerator, proposer, partitioner, performance model) is used instead of ours.

    Args:
        topology: the devices. By default the ranks of the process group, with the cards, memory and links that the
            driver of each rank tells; CPUs if its backend is gloo. :meth:`plan` takes all ranks for alike.
        batch_size: local batch size; TorchRec's default is 512.
        checkpoint: ``"auto"`` (the user's own for this machine, else what ships for the type of device), ``"roofline"``
            (bandwidths, whatever was measured), a path, or a loaded checkpoint.
        statistics: workload statistics per feature; precedence over the constraints' pooling factors.
        seed: a whole number; the same inputs, versions and seed give the same plan.
        effort: how many candidates every part of planning may try: ``"quick"`` for trials and tests, ``"default"``, or
            ``"thorough"`` for four times the candidates of the default. A count, so the clock decides no plan.
        search_seconds: cap on the search, on top of its effort; a plan it cuts short says so. Reading and rating the
            tables comes on top. TorchRec's ``timeout_seconds`` is one as well.
        sharding_types: TorchRec's names of the sharding types to use; all by default. ``("table_wise",)`` is the
            setting of the DreamShard paper.
        exact_training: leave out sharding types that change how a table is trained (data-parallel takes its in-backward
            optimizer away; column slices keep row-wise optimizer states of their own), unless its constraint names
            them.
        optimizers_attached: data-parallel tables keep their in-backward optimizers, since
            ``attach_optimizers(model)`` is called once the model is sharded; exact training may then use them. Implied
            where ``DistributedModelParallel(..., planner=planner)`` of this package plans, which does so.
        cost_source: ``"auto"`` for the checkpoint's cost network, where it has one for this device, else bandwidths;
            ``"roofline"`` for bandwidths; ``"torchrec"`` for the estimates of the TorchRec that is installed.
        placement_rules: tables that must lie together, apart, or on certain ranks; every plan keeps them.
        sharding_groups: for TorchRec's ``DMPCollection`` (2D parallelism). ``topology`` is then that of all ranks, the
            plan for those of one group, and its cost counts the averaging of replicas.
        least_gain: share of what TorchRec's plan is predicted to cost that another plan has to gain to be taken over
            it. Default: 0.03 where neither statistics nor constraints tell the lookups per sample of any feature, as
            both plans then rest on a guess, else 0. Where an enumerator, proposer, partitioner or performance model
            is given, and in :meth:`replan`, costs alone decide.

    Raises:
        CheckpointError: where the checkpoint can't be read.
        DreamShardError: where there is neither a topology nor a process group.

    Example::

        planner = DreamShardPlanner(topology=topology, batch_size=512, statistics=statistics)
        plan = planner.collective_plan(model, sharders, dist.group.WORLD)
        print(planner.report())
    """

    @neutral()
    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        stats: Stats | list[Stats] | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        *,
        checkpoint: str | Path | Checkpoint = "auto",
        statistics: TableStatistics | None = None,
        seed: int = 0,
        effort: str = DEFAULT_EFFORT,
        search_seconds: float | None = None,
        sharding_types: Sequence[str] | None = None,
        exact_training: bool = True,
        optimizers_attached: bool = False,
        cost_source: str = "auto",
        placement_rules: PlacementRules | None = None,
        sharding_groups: ShardingGroups | None = None,
        least_gain: float | None = None,
    ) -> None:
        constraints = given_constraints(constraints)
        self._settings = PlannerSettings(
            given_batch_size=batch_size,
            constraints=constraints,
            timeout_seconds=timeout_seconds,
            statistics=statistics,
            seed=seed,
            effort=effort,
            search_seconds=search_seconds,
            sharding_types=sharding_types,
            exact_training=exact_training,
            optimizers_attached=optimizers_attached,
            cost_source=cost_source,
            placement_rules=placement_rules,
            sharding_groups=sharding_groups,
            least_gain=least_gain,
        )
        if placement_rules is not None and partitioner is not None:
            raise ValueError(f"placement_rules are kept by DreamShardPlanner's own partitioner, not by {partitioner!r}")
        self._reads_topology, self._checkpoint, hardware = topology is None, checkpoint, ""
        if topology is None:
            topology, hardware = topology_here()
        self._ranks = PlannedRanks.of(topology, checkpoint, sharding_groups, hardware)
        super().__init__(
            topology=self._ranks.topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=DefaultReservation() if storage_reservation is None else storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=[self._before_callbacks, *(callbacks or [])],
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        proposers = proposer if isinstance(proposer, list) or proposer is None else [proposer]
        self._given = GivenComponents(enumerator, proposers or None, partitioner, performance_model)
        self._loop: SearchLoop | None = None
        self._falls_back = True  # to TorchRec's plan, if ours gains too little
        self._result: PlanResult | str = "plan first, on this rank (collective_plan plans on rank 0)"

    def __copy__(self) -> DreamShardPlanner:
        other = type(self).__new__(type(self))
        other.__dict__.update(vars(self))
        other._callbacks = [other._before_callbacks, *self._callbacks[1:]]
        return other

    @property
    def optimizers_attached(self) -> bool:
        """The argument of this name, for plans to come."""
        return self._settings.optimizers_attached

    @optimizers_attached.setter
    def optimizers_attached(self, attached: bool) -> None:
        self._settings = replace(self._settings, optimizers_attached=attached)

    @neutral()
    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plan for ``module``; needs no process group.

        Raises:
            PlannerError: TorchRec's; where tables do not fit (naming table and bytes), or where constraints leave a
                table without a sharding type.
            StatisticsError: where the statistics name features that the module lacks.
        """
        sharders = list(sharders)
        self._best_plan = None
        try:
            loop = self._begin(module, sharders)
            for text in loop.model.doubtful:
                warnings.warn(text, InputWarning, stacklevel=3)
            sharding_plan = self._search(module, sharders)
            if self._best_plan is None:
                self._result = "the last planned module has no table that its sharders shard"
            else:
                self._result = loop.result(self._best_plan, self._num_proposals)
        except BaseException as error:
            self._result = f"the last plan failed, {type(error).__name__}: {error}"
            raise
        for lost in lost_optimizers(self._best_plan or [], loop.model.context.reader, self._topology.compute_device):
            warnings.warn(lost, stacklevel=3)
        return sharding_plan

    @neutral()
    def read(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
        """Read ``module`` without planning it: :meth:`predict`, :meth:`explain` and :meth:`saved_plan` then take plans
        of it that are there already.

        Raises:
            PlannerError, StatisticsError: as :meth:`plan`, but for tables that do not fit.
        """
        sharders = list(sharders)
        self._result = "the last module was read, and not planned"
        self._begin(module, sharders)
        self._enumerator.enumerate(module, sharders)

    def _begin(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> SearchLoop:
        """Read a module, and give TorchRec's loop what it runs with."""
        model = ModelProblem.of(self._settings, self._ranks, module, sharders, self._storage_reservation)
        self._loop = loop = SearchLoop(model, self._given, self.plan_loader, self._falls_back)
        self._constraints = model.constraints
        self._enumerator, self._proposers = loop.enumerator, loop.proposers
        self._partitioner, self._perf_model = loop.partitioner, loop.perf_model
        return loop

    def _search(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """TorchRec's loop: enumerate, propose, partition, rate, keep the best."""
        try:
            return super().plan(module, sharders)
        except PlannerError as error:
            reason = reason_first(error, self._proposers, self._settings.timeout_seconds)
            raise PlannerError(reason, error.error_type) from None

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
        in_groups: bool = True,
        device: str | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and broadcast. As in TorchRec, what the other ranks were given does not matter. An error on
        rank 0 is raised on every rank, so that none waits for ever: a ``PlannerError`` as one, others as
        ``DreamShardError``.

        Args:
            module: as TorchRec's.
            sharders: as TorchRec's.
            pg: as TorchRec's.
            in_groups: whether the ranks may be several sharding groups of as many ranks as the topology has.
            device: kind of device to read the topology of, if the planner was given none: ``cuda`` or ``cpu``. By
                default the kind that ranks of the default process group compute on.

        Raises:
            DreamShardError: where there is no process group; where its size is not that of the topology or a multiple
                of it (in 2D parallelism every sharding group of ranks follows the same plan).
        """
        if pg is None:
            pg = dist.group.WORLD
        if pg is None:
            raise DreamShardError(
                "collective_plan needs a process group: call torch.distributed.init_process_group() first, or "
                "use plan(), which needs none"
            )
        ranks = pg.size()

        def device_to_read() -> str | None:
            """Return the kind of device to read; None to read nothing, as for the ranks of a single sharding group."""
            all_ranks = self._ranks.all_ranks
            reads = self._reads_topology and (all_ranks is None or ranks == all_ranks.world_size)
            return (device or driver.compute_device()) if reads else None

        def make() -> ShardingPlan:
            if found is not None:
                topology, settings = read_topology(*found), self._settings
                self._ranks = PlannedRanks.of(
                    topology, self._checkpoint, settings.sharding_groups, told(topology, found[1])
                )
                self._topology: Topology = self._ranks.topology
            check_ranks(self._topology.world_size, self._ranks.all_ranks, ranks, in_groups)
            return self.plan(module, get_default_sharders() if sharders is None else sharders)

        try:
            found = gathered(pg, device_to_read)
            return plan_on_rank_0(make, pg)
        finally:
            del pg  # an error holds this frame, and must not keep the group, whose threads must not outlive Python

    @neutral()
    def hash_planner_context_inputs_str(self) -> str:
        """Digest, in hexadecimal, of all that the last plan was made from, the same in every process: what TorchRec's
        covers, with memory to the byte, and tables with their statistics, checkpoint, seed, limits of search,
        and types of the planner's parts. A ``plan_loader`` whose plan has another one is refused.

        Raises:
            DreamShardError: before any plan, on this rank; or the given enumerator keeps no search space.
        """
        components = (self._partitioner, self._perf_model, self._storage_reservation, *self._proposers)
        return self._model().digest(components)

    def hash_planner_context_inputs(self) -> int:
        """:meth:`hash_planner_context_inputs_str` as a number."""
        return int(self.hash_planner_context_inputs_str(), 16)

    def report(self) -> Report:
        """What the last plan is, and what it was chosen from; on the rank that planned (rank 0).

        Raises:
            DreamShardError: where there is none; says why: before any plan, on other ranks, of a plan that failed, of a
                module without tables, or whose cost is not known, as callbacks or parts that were given made it.
        """
        if isinstance(self._result, str):
            raise DreamShardError(f"there is no report: {self._result}")
        return self._result.report

    @property
    def options(self) -> list[ShardingOption]:
        """The last plan as TorchRec's sharding options, one for every table, with ``shard.rank`` set.

        Raises:
            DreamShardError: there is no plan yet on this rank.
        """
        return list(self._last().plan)

    @neutral()
    def predict(self, plan: AnyPlan, name: str = "plan") -> ReportEntry:
        """Predicted cost of any plan of the last planned module, whoever made it.

        Args:
            plan: a ``ShardingPlan``, the file of a plan, or one option per table with ``shard.rank`` set.
            name: of the entry.

        Warns:
            UserWarning: the plan takes the in-backward optimizer away from tables; names them.

        Raises:
            PlannerError: the plan lacks tables or has unknown ones, or shards without ranks or on impossible ones, or
                shards that do not cover their table; names them.
            PlanError: the file can't be read.
        """
        model = self._model()
        rated = model.rated(plan)
        for lost in lost_optimizers(rated.options, model.context.reader, self._topology.compute_device):
            warnings.warn(lost, stacklevel=3)
        return ReportEntry.of(name, rated.costs)

    @neutral()
    def saved_plan(self, plan: AnyPlan | None = None, name: str = "plan") -> SavedPlan:
        """A plan of the last planned module with all that it was made from, to save, or to compare.

        Args:
            plan: as :meth:`predict`; by default the last one that this planner made.
            name: for people.

        Raises:
            DreamShardError: there is no plan yet on this rank (``collective_plan`` plans on rank 0).
            PlannerError, PlanError: as :meth:`predict`.
        """
        return self._last().saved(name) if plan is None else self._model().saved(plan, name)

    def save_plan(self, path: str | Path) -> None:
        """Write the last plan to a file that
        :class:`~dreamshard_planner.torchrec_components.loop.JsonPlanLoader` loads; on the
        rank that planned (rank 0). An existing file is replaced as a whole.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlanError: the file can't be written.
        """
        self.saved_plan(name=Path(path).name).save(path)

    def lookups_per_sample(self) -> dict[str, float]:
        """By feature, that the last planned or read module's plans are for: from statistics, constraints, or TorchRec's
        default.

        Raises:
            DreamShardError: no module was planned or read yet on this rank.
        """
        return self._model().lookups_per_sample()

    @neutral()
    def replan(
        self,
        current: ShardingPlan | SavedPlan | str | Path,
        *,
        steps: int,
        statistics: TableStatistics | None = None,
        max_bytes_moved: int | None = None,
        restart_seconds: float = 60.0,
        bytes_per_s: float | None = None,
        lost: Sequence[int] = (),
    ) -> Replan:
        """The plan of the last planned module that takes least time over the steps that remain, moving included, on a
        way of few moves from the one that runs; with the curve of cost against bytes moved. Constraints, placement
        rules and memory are kept. A table that stays is sharded as it was.

        Ranks are renamed where that keeps more bytes in place. A planner of another topology, or of a model with other
        tables, says what little has to move; tables that ``current`` lacks move nothing.

        Args:
            current: the plan that runs, or its file.
            steps: training steps that remain.
            statistics: of the data as it is now; by default those of the planner. Other ones are planned with first.
            max_bytes_moved: of weights and optimizer states, all ranks together (in 2D parallelism: of one sharding
                group); no limit by default.
            restart_seconds: from the last step under one plan to the first under the other, moving nothing.
            bytes_per_s: at which these come to a rank; by default by the topology's slowest link.
            lost: ranks of ``current`` that are gone; those left take the numbers from 0 on in their order. By default,
                those past the topology's.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlannerError: ``current`` does not shard the tables as TorchRec could, or is of embedding towers.
            PlanError: the file can't be read; or nothing is reached with ``max_bytes_moved``.
        """
        if isinstance(current, str | Path):
            current = SavedPlan.load(current)
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ValueError(f"steps are a whole number from 0, got {steps!r}")
        result = self._last() if statistics is None and self.plan_loader is None else self._afresh(statistics)
        links = self._topology.comms_bandwidths
        one_host = self._topology.world_size <= self._topology.intra_group_size
        link_bytes_per_s = 1e3 * (links.intra_host_bw if one_host else min(links.intra_host_bw, links.inter_host_bw))
        return replanned(
            result.model,
            current,
            result.plan,
            steps=steps,
            moving=Moving(bytes_per_s or link_bytes_per_s, restart_seconds),
            max_bytes_moved=max_bytes_moved,
            lost=lost,
        )

    def _afresh(self, statistics: TableStatistics | None) -> PlanResult:
        """The last module planned once more, by other statistics and without a plan loader, beside this planner."""
        other, model = copy.copy(self), self._model()
        other._settings = replace(model.settings, statistics=statistics or model.settings.statistics)
        other.plan_loader = None
        other._falls_back = False
        other.plan(model.skeleton, model.context.sharders or ())
        return other._last()

    @neutral()
    def explain(self, rank: int | None = None, plan: AnyPlan | None = None) -> Explanation:
        """Why a rank of a plan takes as long as it does: its fused kernels, its costliest tables, and what moving
        or splitting each would gain.

        Args:
            rank: the slowest by default.
            plan: as :meth:`predict`; by default the last one that this planner made.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlannerError: there is no such rank; and, with PlanError, as :meth:`predict`.
        """
        return self._model().explained(self._last().plan if plan is None else plan, rank)

    def _last(self) -> PlanResult:
        if isinstance(self._result, str):
            raise DreamShardError(f"there is no plan: {self._result}")
        return self._result

    def _model(self) -> ModelProblem:
        """The last module that was read, whether or not a plan was found."""
        if self._loop is None or not self._loop.search_space:
            raise DreamShardError(f"there is no plan: {self._result}")
        return self._loop.model

    def _before_callbacks(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Finish TorchRec's best plan, as the first callback."""
        return plan if self._loop is None else self._loop.before_callbacks(plan)
