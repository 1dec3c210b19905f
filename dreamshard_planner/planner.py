# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The one changed line: ``DreamShardPlanner`` instead of TorchRec's planner."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

# TorchRec imports this late, in apply_optimizer_in_backward. Its default arguments then keep the process group that
# there is by now, even past destroy_process_group, and gloo's threads may abort Python's exit. Early, there is none.
import torch.distributed.optim  # noqa: F401
from torch import nn
from torchrec.distributed.comm import get_local_size
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

from dreamshard_planner.checkpoints.checkpoint import Checkpoint, resolve
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.planning.beyond import beyond_exact_training, opened_types
from dreamshard_planner.planning.collective import Together, check_patience, group_timeout_seconds, plan_on_rank_0
from dreamshard_planner.planning.context import PlanningContext, ranks_by_choice
from dreamshard_planner.planning.plan_inputs import MadeFrom
from dreamshard_planner.planning.planned import AnyPlan, Planned
from dreamshard_planner.planning.settings import PlannerSettings
from dreamshard_planner.planning.training_notes import lost_optimizers, training_notes
from dreamshard_planner.plans.explanation import Explanation
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import BeyondExactTraining, Report, ReportEntry
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.problem.units import impossible_types
from dreamshard_planner.search.local_search import DEFAULT_SEARCH
from dreamshard_planner.search_space.constraints import left_out_by_group, planning_constraints
from dreamshard_planner.search_space.input_checks import check_topology
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.search_space.rank_constraints import LegalRanks
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.torchrec_components.estimator import DreamShardEstimator
from dreamshard_planner.torchrec_components.joint_proposer import JointProposer
from dreamshard_planner.torchrec_components.partitioner import DreamShardPartitioner, Outcome
from dreamshard_planner.torchrec_components.perf_model import DreamShardPerfModel
from dreamshard_planner.torchrec_components.plan_loader import JsonPlanLoader
from dreamshard_planner.workload.statistics import TableStatistics


class DreamShardPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with learned cost, a learned policy, and search over every sharding type.

    Every argument of ``torchrec.distributed.planner.EmbeddingShardingPlanner`` is honoured; a component that
    is given (enumerator, proposer, partitioner, performance model) is used instead of ours.

    Args:
        topology: the devices; by default those of the initialised process group, CPUs where its backend is gloo.
        batch_size: local batch size; TorchRec's default is 512.
        checkpoint: ``"auto"`` (the user's own for this machine, else what ships for the type of device), a path, or a
            loaded checkpoint.
        statistics: workload statistics per feature; precedence over the constraints' pooling factors.
        recipe: ``"default"``, or ``"paper"`` for the method as published: one greedy policy roll-out.
        seed: a whole number; the same inputs, versions and seed give the same plan.
        search_seconds: cap on the search, on top of its budget of candidates; a plan it cuts short says so. TorchRec's
            ``timeout_seconds`` is one as well.
        refine: ``"measure"`` to time the fused kernels of the best plans on this machine, under
            :meth:`collective_plan` on the devices of all ranks at once, learn from them, search again, and choose by
            all evidence. Tables stay split as they were. The plan then depends on what was measured.
        refine_seconds: time for that; one call to the kernels may end later. The report says what it sufficed for.
        sharding_types: TorchRec's names of the sharding types to use; all by default. ``("table_wise",)`` is the
            setting of the DreamShard paper, and implied by ``recipe="paper"``.
        exact_training: leave out sharding types that change how a table is trained (data-parallel takes its in-backward
            optimizer away; column slices keep row-wise optimizer states of their own), unless its constraint names
            them.
        cost_source: ``"auto"`` for the checkpoint's cost network, where it has one for this device, else bandwidths;
            ``"roofline"`` for bandwidths; ``"torchrec"`` for the estimates of the TorchRec that is installed.
        placement_rules: tables that must lie together, apart, or on certain ranks; every plan keeps them.

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
        recipe: str = "default",
        seed: int = 0,
        search_seconds: float | None = None,
        refine: str = "none",
        refine_seconds: float = 60.0,
        sharding_types: Sequence[str] | None = None,
        exact_training: bool = True,
        cost_source: str = "auto",
        placement_rules: PlacementRules | None = None,
    ) -> None:
        settings = PlannerSettings(
            statistics=statistics,
            recipe=recipe,
            seed=seed,
            search_seconds=search_seconds,
            refine=refine,
            refine_seconds=refine_seconds,
            sharding_types=sharding_types,
            exact_training=exact_training,
            cost_source=cost_source,
            placement_rules=placement_rules,
        )
        if placement_rules is not None and partitioner is not None:
            raise ValueError(f"placement_rules are kept by DreamShardPlanner's own partitioner, not by {partitioner!r}")
        if topology is None and not dist.is_initialized():
            raise DreamShardError(
                "there is no process group to take the topology from: give topology=Topology(world_size=..., "
                "compute_device=...), or call torch.distributed.init_process_group() first"
            )
        super().__init__(
            topology=topology or _cpu_topology(),
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=[self._remember, *(callbacks or [])],
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        self._given_constraints = constraints
        self._given_enumerator = enumerator
        self._given_proposer = proposer
        self._given_partitioner = partitioner
        self._given_perf_model = performance_model
        self._settings = settings
        self._checkpoint = resolve(checkpoint, self._topology.compute_device, recipe)
        self._legal: LegalRanks | None = None
        self._report: Report | str = "plan first, on this rank (collective_plan plans on rank 0)"
        self._before_callbacks: dict[Hashable, list[int | None]] = {}
        self._beyond: Callable[[Outcome], BeyondExactTraining] | None = None
        self._together: Together | None = None
        self._reader: OptionReader | None = None
        self._context: PlanningContext | None = None
        self._left: Topology | None = None
        self._loaded: SavedPlan | None = None

    @neutral()
    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plan for ``module``; needs no process group.

        Raises:
            PlannerError: TorchRec's; where tables do not fit (naming table and bytes), or where constraints leave a
                table without a sharding type.
            StatisticsError: where the statistics name features that the module lacks.
        """
        sharders = list(sharders)
        self._best_plan, self._beyond, self._loaded = None, None, None
        try:
            sharding_plan = self._plan(module, sharders)
        except BaseException as error:
            self._report = f"the last plan failed, {type(error).__name__}: {error}"
            raise
        self._report = self._reported()
        self._tell_training(self._best_plan or [])
        return sharding_plan

    def _tell_training(self, plan: list[ShardingOption]) -> None:
        """In the report, and as a warning where tables lose their optimizer: what the plan changes in training."""
        lost = lost_optimizers(plan, self._reader)
        if lost is not None:
            warnings.warn(lost, stacklevel=4)
        if isinstance(self._report, Report):
            notes = training_notes(plan, self._reader, self._topology.compute_device)
            self._report = replace(self._report, notes=(*self._report.notes, *notes))

    def _plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """TorchRec's planning with our parts, made for this module."""
        check_topology(self._topology)
        self._context = self._context_of(module, sharders)
        self._left = self._storage_reservation.reserve(
            topology=self._topology,
            batch_size=self._batch_size,
            module=module,
            sharders=sharders,
            constraints=self._constraints,
        )
        self._make_parts(self._context, self._left)
        if isinstance(self.plan_loader, JsonPlanLoader):
            self.plan_loader.bind(self._matched)
        elif self._settings.exact_training and self._given_enumerator is None:
            self._beyond = self._beyond_exact_training(module, sharders, self._context, self._left)
        try:
            return super().plan(module, sharders)
        except PlannerError as error:
            left_out = left_out_by_group(error, self._constraints, self._topology.compute_device)
            if not left_out:
                raise
            raise PlannerError(f"{error} {left_out}", error.error_type) from error

    def _context_of(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> PlanningContext:
        """How options of the module are read and rated, within constraints and rules."""
        settings = self._settings
        self._legal = self._legal_ranks(module, sharders)
        self._constraints = self._constraints_of(module, sharders, settings.exact_training)
        self._reader = OptionReader(self._constraints, settings.statistics, sharders, self._legal)
        return PlanningContext(
            self._topology, self._reader, self._checkpoint, settings.cost_source, self._constraints, sharders
        )

    def _make_parts(self, context: PlanningContext, left: Topology) -> None:
        """The parts that TorchRec's planning asks, ours where none were given."""
        settings = self._settings
        estimator = DreamShardEstimator(self._topology, context=context)
        self._enumerator = self._given_enumerator or context.enumerator(self._batch_size, estimator)
        self._perf_model = self._given_perf_model or DreamShardPerfModel(self._topology, context=context)
        seconds = min(filter(None, (settings.search_seconds, self._timeout_seconds)), default=None)
        self._proposer = JointProposer(
            context,
            left,
            search=settings.search or DEFAULT_SEARCH,
            seed=settings.seed,
            seconds=seconds,
        )
        if self._given_proposer is None:
            self._proposers = [self._proposer]
        self._partitioner = self._given_partitioner or DreamShardPartitioner(
            search=settings.search,
            seed=settings.seed,
            search_seconds=seconds,
            refine_seconds=settings.measuring_seconds,
            together=self._together,
            context=context,
        )

    def _beyond_exact_training(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], context: PlanningContext, left: Topology
    ) -> Callable[[Outcome], BeyondExactTraining] | None:
        """What tells, of the plan, what sharding types that exact training leaves out would gain; None where it leaves
        out none. Options are read now, since modules change when they are sharded."""
        all_types = self._constraints_of(module, sharders, False)
        opened = opened_types(self._constraints, all_types)
        if not opened:
            return None
        wider = context.with_constraints(all_types)
        estimator = DreamShardEstimator(self._topology, context=wider)
        options = wider.enumerator(self._batch_size, estimator).enumerate(module, sharders)
        if any(option.dependency for option in options):
            return None  # which hosts towers are pinned to is settled while planning
        search = self._settings.search or DEFAULT_SEARCH
        return partial(beyond_exact_training, wider, options, left, opened, search, self._settings.seed)

    def _legal_ranks(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> LegalRanks | None:
        """Where the rules let tables lie; None without rules."""
        if self._settings.placement_rules is None:
            return None
        tables = shardable_tables(module, sharders)
        return LegalRanks.of(self._settings.placement_rules, tables, self._topology, self._settings.statistics)

    def _constraints_of(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], exact_training: bool
    ) -> dict[str, ParameterConstraints]:
        return planning_constraints(
            module,
            sharders,
            self._given_constraints,
            self._settings.statistics,
            self._topology.compute_device,
            sharding_types=self._settings.allowed_types,
            exact_training=exact_training,
            has_ssd=any(device.storage.ssd > 0 for device in self._topology.devices),
            legal=self._legal,
            impossible=impossible_types(self._topology),
        )

    def _remember(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """The first callback: what was chosen, before others change it."""
        self._before_callbacks = ranks_by_choice(plan)
        return plan

    def _reported(self) -> Report | str:
        """On the proposal that won, which need not be the last one; or why there is no report."""
        plan = self._best_plan
        if plan is None:
            return "the last planned module has no table that its sharders shard"
        if self._loaded is not None:
            return self._planned().report(plan, self._loaded)
        if not isinstance(self._partitioner, DreamShardPartitioner):
            return f"the last plan was placed by {type(self._partitioner).__name__}, not by DreamShardPartitioner"
        outcome = self._partitioner.outcome(self._before_callbacks)
        if outcome is None:
            return "the last plan was loaded by plan_loader"
        report = self._proposer.report(outcome)
        ruled = () if self._legal is None else self._legal.notes()
        report = replace(report, notes=(*report.notes, *self._context.notes(plan), *ruled))
        if ranks_by_choice(plan) == self._before_callbacks:
            return report
        try:
            chosen = self.predict(plan, report.chosen.name)
        except PlannerError as error:
            return f"callbacks changed the last plan to one whose cost is not known: {error}"
        moved = "moved tables" if ranks_by_choice(plan).keys() == self._before_callbacks.keys() else "changed options"
        note = f"callbacks {moved} after they were placed; dreamshard is the plan that they made"
        return replace(report, chosen=chosen, notes=(*report.notes, note))

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and broadcast; with ``refine`` all ranks measure. As in TorchRec, what the other ranks were
        given does not matter. An error on rank 0 is raised on every rank, so that none waits for ever, as
        :func:`~dreamshard_planner.planning.collective.plan_on_rank_0` says.

        Raises:
            DreamShardError: where there is no process group; where its size is not that of the topology or a multiple
                of it (in 2D parallelism every sharding group of ranks follows the same plan); or where the other ranks
                would give up waiting before ``search_seconds`` are over, or between two calls to measure. How long they
                wait is unknown for backends that don't say.
        """
        if pg is None:
            if not dist.is_initialized():
                raise DreamShardError(
                    "collective_plan needs a process group: call torch.distributed.init_process_group() first, or "
                    "use plan(), which needs none"
                )
            pg = dist.group.WORLD
        ranks, patience_seconds = pg.size(), group_timeout_seconds(pg)

        def make(together: Together) -> ShardingPlan:
            refines = bool(self._settings.measuring_seconds)
            check_patience(self._topology.world_size, ranks, patience_seconds, self._settings.search_seconds, refines)
            self._together = together
            return self.plan(module, get_default_sharders() if sharders is None else sharders)

        try:
            return plan_on_rank_0(make, pg)
        finally:
            self._together = None
            del pg  # an error holds this frame, and must not keep the group, whose threads must not outlive Python

    @neutral()
    def hash_planner_context_inputs_str(self) -> str:
        """Digest, in hexadecimal, of all that the last plan was made from, the same in every process: what TorchRec's
        covers, with memory to the byte, and tables with their statistics, checkpoint, recipe, seed, limits of search
        and refinement, and types of the planner's parts. A ``plan_loader`` whose plan has another one is refused.

        Raises:
            DreamShardError: before any plan, on this rank, unless an enumerator and a reservation are given that have
                done their work.
        """
        space = getattr(self._enumerator, "last_stored_search_space", None)
        reserved = getattr(self._storage_reservation, "last_reserved_topology", None)
        if space is None or reserved is None:
            raise DreamShardError(
                "there is no context to hash: plan first, on this rank, with an enumerator that keeps its search space"
            )
        parts = (self._partitioner, self._perf_model, self._storage_reservation, *self._proposers)
        return self._made_from(space).digest(reserved, self._timeout_seconds, parts)

    def hash_planner_context_inputs(self) -> int:
        """:meth:`hash_planner_context_inputs_str` as a number."""
        return int(self.hash_planner_context_inputs_str(), 16)

    @neutral()
    def report(self, beyond: bool = True) -> Report:
        """What the last plan is, and what it was chosen from; on the rank that planned (rank 0).

        Args:
            beyond: also tell what sharding types that train differently would gain; working it out, on first asking,
                takes about as long as planning.

        Raises:
            DreamShardError: where there is none; says why: before any plan, on other ranks, of a plan that failed, of a
                module without tables, with a partitioner that is not ours, of a plan that a plan loader brought, or
                that callbacks changed to one whose cost is not known.
        """
        if isinstance(self._report, str):
            raise DreamShardError(f"there is no report: {self._report}")
        if beyond and self._beyond is not None and isinstance(self._partitioner, DreamShardPartitioner):
            found = self._beyond(self._partitioner.outcome(self._before_callbacks))
            self._beyond = None
            note = found.note(self._report.chosen.total_ms)
            self._report = replace(self._report, beyond=found, notes=(*self._report.notes, note))
        return self._report

    @neutral()
    def predict(self, plan: AnyPlan, name: str = "plan") -> ReportEntry:
        """Predicted cost of any plan of the last planned module, whoever made it.

        Args:
            plan: a ``ShardingPlan``, the file of a plan, or one option per table with ``shard.rank`` set.
            name: of the entry.

        Raises:
            PlannerError: the plan lacks tables or has unknown ones, or shards without ranks or on impossible ones, or
                shards that do not cover their table; names them.
            PlanError: the file can't be read.
        """
        return ReportEntry.of(name, self._planned().rated(plan).costs)

    @neutral()
    def without_ms(self, table: str) -> float:
        """Predicted cost of the last plan, in milliseconds, were one of its tables not there.

        Args:
            table: its fully qualified name.

        Raises:
            DreamShardError: there is no plan yet on this rank.
        """
        return self._planned().without_ms(self._or_last(None), table)

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
        known = self._report if plan is None and isinstance(self._report, Report) else None
        return self._planned().saved(self._or_last(plan), name, known)

    def save_plan(self, path: str | Path) -> None:
        """Write the last plan to a file that
        :class:`~dreamshard_planner.torchrec_components.plan_loader.JsonPlanLoader` loads; on the
        rank that planned (rank 0). An existing file is replaced as a whole.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlanError: the file can't be written.
        """
        self.saved_plan(name=Path(path).name).save(path)

    @neutral()
    def explain(self, rank: int | None = None, plan: AnyPlan | None = None) -> Explanation:
        """Why a rank of a plan takes as long as it does: its fused kernels, its costliest tables and what leaving,
        splitting or caching each would gain, its memory; and whether one table is the bottleneck.

        Args:
            rank: the slowest by default.
            plan: as :meth:`predict`; by default the last one that this planner made.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlannerError: there is no such rank; and, with PlanError, as :meth:`predict`.
        """
        return self._planned().explained(self._or_last(plan), rank)

    def _planned(self) -> Planned:
        """The last planned module."""
        space = getattr(self._enumerator, "last_stored_search_space", None)
        if self._context is None or not space:
            raise DreamShardError(f"there is no plan: {self._report}")
        return Planned(self._context, space, self._left, self._made_from(space).inputs, self._legal)

    def _or_last(self, plan: AnyPlan | None) -> AnyPlan:
        """A plan, or the last one."""
        if plan is None and self._best_plan is None:
            raise DreamShardError(f"there is no plan: {self._report}")
        return self._best_plan if plan is None else plan

    def _made_from(self, search_space: Sequence[ShardingOption]) -> MadeFrom:
        """What the last plan was made from."""
        return MadeFrom(
            search_space=search_space,
            reader=self._reader or OptionReader(self._given_constraints, self._settings.statistics),
            topology=self._topology,
            batch_size=self._batch_size,
            constraints=self._given_constraints,
            checkpoint=self._checkpoint,
            settings=self._settings,
            reservation=type(self._storage_reservation).__name__,
        )

    def _matched(self, saved: SavedPlan) -> list[ShardingOption]:
        """For the plan loader: options as its file has them."""
        options, self._loaded = self._planned().matched(saved), saved
        return options


def _cpu_topology() -> Topology | None:
    """Of gloo ranks, which compute on CPUs; TorchRec takes every process that sees a GPU to compute there."""
    if dist.get_backend() != "gloo":
        return None
    return Topology(world_size=dist.get_world_size(), compute_device="cpu", local_world_size=get_local_size())
