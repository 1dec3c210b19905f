# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``DreamShardPlanner``, which replaces TorchRec's planner by one changed line."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from numbers import Real
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

from dreamshard_planner import devices
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.errors import DreamShardError, InputWarning, StatisticsError
from dreamshard_planner.hot_rows.sharded import replicate_hot_rows
from dreamshard_planner.planning.explanation import Explanation, explain
from dreamshard_planner.planning.infeasible import reason_first
from dreamshard_planner.planning.model_problem import AnyPlan, ModelProblem
from dreamshard_planner.planning.ranks import (
    PlannedRanks,
    RankHardware,
    ShardingGroups,
    check_hosts,
    check_ranks,
    check_tables,
    gathered,
    hardware_in_words,
    place_on_hosts,
    plan_on_rank_0,
    read_topology,
    topology_here,
)
from dreamshard_planner.planning.replanning import Replan, link_bytes_per_s, replanned
from dreamshard_planner.planning.result import PlanResult, lost_optimizers, missing_optimizers
from dreamshard_planner.planning.settings import DefaultReservation, PlannerSettings, Remembered, answering
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report, ReportEntry
from dreamshard_planner.search.effort import DEFAULT_EFFORT
from dreamshard_planner.search_space.constraints import given_constraints
from dreamshard_planner.search_space.modules import checked_sharders
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.support.formatting import checked, first_of
from dreamshard_planner.support.reproducible import neutral
from dreamshard_planner.torchrec_components.compat import let_lack_of_room_be_told
from dreamshard_planner.torchrec_components.components import GivenComponents, LoopComponents
from dreamshard_planner.workload.statistics import TableStatistics

logger = logging.getLogger(__name__)


class DreamShardPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner with learned cost, a learned policy, and search over every sharding type.

    It honours every argument of ``torchrec.distributed.planner.EmbeddingShardingPlanner``. A given component
    (enumerator, proposer, partitioner, performance model) replaces ours. The estimates of a given enumerator are costs
    with ``cost_source="torchrec"`` alone, and of kernels that are unknown here.

    Args:
        topology: the devices. By default the ranks of the process group, with cards, memory and links as the driver
            of each rank tells; CPUs if its backend is gloo. :meth:`plan` assumes that all ranks are alike.
        batch_size: local batch size; TorchRec's default is 512.
        checkpoint: ``"auto"`` (the user's own for this machine, else the shipped one for the type of device),
            ``"roofline"`` (bandwidths, ignoring measurements), a path, or a loaded checkpoint.
        statistics: workload statistics per feature; they take precedence over pooling factors of constraints.
        seed: a whole number; equal inputs, versions and seed give equal plans.
        effort: candidates that every part of planning may try: ``"quick"`` for trials and tests, ``"default"``, or
            ``"thorough"`` for four times the default. A count, so the clock decides no plan.
        search_seconds: cap on the search, on top of its effort; the report of a plan that it cuts short says so.
            Reading tables, before the search, and the report take further time. TorchRec's ``timeout_seconds`` caps
            the search as well.
        sharding_types: TorchRec's names of the sharding types to use; all by default. ``("table_wise",)`` is the
            setting of the DreamShard paper.
        exact_training: exclude sharding types that change the training of a table, unless its constraint names them.
            Data-parallel loses the in-backward optimizer; column slices keep row-wise states of their own.
        optimizers_attached: ``attach_optimizers(model)`` runs after sharding, so data-parallel tables keep their
            in-backward optimizers and exact training may use them. This package's
            ``DistributedModelParallel(..., planner=planner)`` does both.
        cost_source: ``"auto"`` for the checkpoint's cost network, or bandwidths if it has none for this device;
            ``"roofline"`` for bandwidths; ``"torchrec"`` for the estimates of the installed TorchRec.
        placement_rules: tables that must lie together, apart, or on certain ranks; every plan keeps them.
        sharding_groups: for TorchRec's ``DMPCollection`` (2D parallelism). ``topology`` then has all ranks, the plan is
            for the ranks of one group, and its cost counts the averaging of replicas.
        least_gain: share of the predicted cost of TorchRec's plan that another plan must gain to replace it. By default
            0.03 if no lookups per sample are known, from statistics or constraints, else 0. Costs alone decide with a
            given enumerator, proposer, partitioner or performance model, and in :meth:`replan`.
        hot_rows_bytes: most memory of each rank for hot rows of sequence tables, which every rank then holds. They are
            chosen from the ids that ``statistics`` counted, where they lower the predicted cost of a step. Such plans
            need this package's ``DistributedModelParallel``, or sharders of ``with_hot_rows``.
        vocabulary: name of the mapping from items to ids, such as the date of its file. A plan file with hot rows is
            refused for another vocabulary.

    Raises:
        CheckpointError: the checkpoint can't be read.
        DreamShardError: there is neither a topology nor a process group.

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
        hot_rows_bytes: int = 0,
        vocabulary: str = "",
    ) -> None:
        if not isinstance(topology, Topology | None):
            hint = f": give a batch size by name, batch_size={topology}" if isinstance(topology, int) else ""
            raise TypeError(f"topology must be a torchrec.distributed.planner.Topology, got {topology!r}{hint}")
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
            hot_rows_bytes=hot_rows_bytes,
            vocabulary=vocabulary,
        )
        if placement_rules is not None and partitioner is not None:
            raise ValueError(f"placement_rules are kept by DreamShardPlanner's own partitioner, not by {partitioner!r}")
        self._reads_topology, self._checkpoint, hardware = topology is None, checkpoint, ""
        if topology is None:
            topology, hardware = topology_here()
        self._ranks = PlannedRanks.of(topology, checkpoint, sharding_groups, hardware)
        self._reservation = DefaultReservation() if storage_reservation is None else storage_reservation
        super().__init__(
            topology=self._ranks.topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=self._reservation,
            proposer=proposer,
            partitioner=partitioner,
            performance_model=performance_model,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=[self._before_callbacks, *(callbacks or []), self._after_callbacks],
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        proposers = proposer if isinstance(proposer, list) or proposer is None else [proposer]
        self._given = GivenComponents(enumerator, proposers or None, partitioner, performance_model)
        self._loop: LoopComponents | None = None
        self._result: PlanResult | str = (
            "plan first, on this rank (DistributedModelParallel and collective_plan plan on rank 0 alone)"
        )

    def __copy__(self) -> DreamShardPlanner:
        other = type(self).__new__(type(self))
        other.__dict__.update(vars(self))
        other._callbacks = [other._before_callbacks, *self._callbacks[1:-1], other._after_callbacks]
        return other

    @property
    def optimizers_attached(self) -> bool:
        """The argument of this name."""
        return self._settings.optimizers_attached

    @contextmanager
    def attaching_optimizers(self) -> Iterator[None]:
        """Plan with ``optimizers_attached=True`` inside the block."""
        own, self._settings = self._settings, replace(self._settings, optimizers_attached=True)
        try:
            yield
        finally:
            self._settings = own

    @neutral()
    def plan(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plan for ``module``; needs no process group.

        Raises:
            PlannerError: tables do not fit (names table and bytes), or constraints leave a table no sharding type.
            StatisticsError: the statistics name features that the module lacks.
        """
        sharders = checked_sharders(sharders)
        self._best_plan = None
        try:
            model = self._begin(module, sharders)
            for text in model.doubtful:
                warnings.warn(text, InputWarning, stacklevel=3)
            try:
                # Enumerate, propose, partition, rate, keep the best, call back: first _before_callbacks.
                sharding_plan = super().plan(module, sharders)
            except PlannerError as error:
                reason = reason_first(error, self._proposers, self._settings.timeout_seconds)
                raise PlannerError(reason, error.error_type) from None
            if self._best_plan is None:
                self._result = "the last planned module has no table that its sharders shard"
                if model.unsharded:
                    text = f"the plan is empty: no sharder is for {first_of(model.unsharded)}"
                    warnings.warn(text, InputWarning, stacklevel=3)
            else:
                self._result = PlanResult.of(model, self._chosen, self._best_plan)
        except BaseException as error:
            self._result = f"the last plan failed, {type(error).__name__}: {error}"
            raise
        options: Sequence[ShardingOption] = self._best_plan or []
        self._warn_of_lost_optimizers(model, options)
        if missing := missing_optimizers(options, model.rater.reader):
            warnings.warn(missing, InputWarning, stacklevel=3)
        hot = {fqn_of(option): rows.ids for option in options if (rows := hot_rows_of(option)) is not None}
        return replicate_hot_rows(sharding_plan, hot) if hot else sharding_plan

    @neutral()
    def read(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> None:
        """Read ``module`` without planning it, for :meth:`predict`, :meth:`explain` and :meth:`saved_plan` of existing
        plans.

        Raises:
            PlannerError, StatisticsError: as :meth:`plan`, except for tables that do not fit.
        """
        self._result = "the last module was read, and not planned"
        self._begin(module, checked_sharders(sharders))

    def _begin(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ModelProblem:
        """Read a module, and set the components of TorchRec's loop."""
        self._loop = None
        if self._topology is not self._ranks.topology:  # a subclass took memory out
            self._ranks = replace(self._ranks, topology=self._topology)
        model = ModelProblem.of(
            self._settings, self._ranks, module, sharders, self._reservation, self._given.enumerator
        )
        self._loop = loop = LoopComponents(model, self._given, self.plan_loader)
        self._batch_size: int = model.settings.batch_size
        self._storage_reservation = answering(self._reservation, "reserve", model.room)
        let_lack_of_room_be_told(self._storage_reservation)
        self._constraints = model.rater.constraints
        self._enumerator = answering(model.enumerator, "enumerate", model.search_space)
        self._proposers: list[Proposer] = loop.proposers
        self._partitioner, self._perf_model = loop.partitioner, loop.perf_model
        return model

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
        in_groups: bool = True,
        device: str | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 by its arguments, and broadcast the plan.

        Without statistics and plan loader, it takes the statistics that earlier trainings of the same tables counted,
        and the fastest plan that they observed, unless the planned one is predicted to gain enough.

        An error on rank 0 is raised on every rank: a ``PlannerError`` as such, others as ``DreamShardError``.

        Args:
            module: as TorchRec's.
            sharders: as TorchRec's.
            pg: as TorchRec's.
            in_groups: whether the ranks may form several sharding groups of the topology's size.
            device: ``cuda`` or ``cpu``, of the model; by default the kind of device of the default process group,
                for a topology that was not given.

        Raises:
            DreamShardError: there is no process group; or its size is no multiple of the topology's ranks (in 2D
                parallelism every sharding group follows the same plan); the topology is for another kind of device;
                tables differ between ranks; or TorchRec would form other groups of ranks than the plan's hosts.
        """
        if pg is None:
            pg = dist.group.WORLD
        if pg is None:
            raise DreamShardError(
                "collective_plan needs a process group: call torch.distributed.init_process_group() first, or "
                "use plan(), which needs none"
            )
        all_ranks = self._ranks.all_ranks  # those of a single sharding group are not read
        reads = self._reads_topology and (all_ranks is None or pg.size() == all_ranks.world_size)
        try:
            check_tables(module, pg)
            found = gathered(pg, lambda: (device or devices.device_of_ranks()) if reads else None)
            given = get_default_sharders() if sharders is None else sharders
            return plan_on_rank_0(partial(self._plan_for, pg.size(), found, in_groups, device, module, given), pg)
        finally:
            del pg  # an error holds this frame, and must not keep the group, whose threads must not outlive Python

    def _plan_for(
        self,
        ranks: int,
        found: tuple[str, list[RankHardware]] | None,
        in_groups: bool,
        device: str | None,
        module: nn.Module,
        sharders: Sequence[ModuleSharder[nn.Module]],
    ) -> ShardingPlan:
        """Plan for a process group of so many ranks, on the hardware that was read of them, if any."""
        if found is not None:
            topology, groups = read_topology(*found), self._settings.sharding_groups
            self._ranks = PlannedRanks.of(topology, self._checkpoint, groups, hardware_in_words(topology, found[1]))
            self._topology: Topology = self._ranks.topology
        if device in ("cpu", "cuda") and device != self._topology.compute_device:
            raise DreamShardError(
                f"the planner's topology is for {self._topology.compute_device}, and the model for {device}: give "
                f"Topology compute_device={device!r}, or no topology"
            )
        check_ranks(self._topology.world_size, self._ranks.all_ranks, ranks, in_groups)
        plan = self.plan(module, sharders) if self.plan_loader else self._plan_as_remembered(module, sharders)
        if self._topology.world_size == ranks:
            check_hosts(plan, self._topology)
            if self._ranks.all_ranks is None:  # DMPCollection places the shards of sharding groups
                place_on_hosts(plan, self._topology)
        return plan

    def _plan_as_remembered(self, module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Plan with what earlier trainings of the same tables observed, or without if that is not possible."""
        own = self._settings
        self._settings = Remembered.of_module(module, sharders, self._topology).completed(own)
        try:
            return self.plan(module, sharders)
        except (PlannerError, StatisticsError) as error:
            if not self._settings.recalled:
                raise
            logger.warning("planned without what earlier trainings observed: %s", error)
        finally:
            self._settings = own
        return self.plan(module, sharders)

    @neutral()
    def hash_planner_context_inputs_str(self) -> str:
        """Return the digest of all inputs of the last plan, in hexadecimal, the same in every process.

        It covers TorchRec's inputs, statistics, checkpoint, seed, limits of search, and types of the components. The
        plan of a ``plan_loader`` must have the same digest.

        Raises:
            DreamShardError: there is no plan yet on this rank.
        """
        components = (self._partitioner, self._perf_model, self._storage_reservation, *self._proposers)
        return self._model().digest(components)

    def hash_planner_context_inputs(self) -> int:
        """:meth:`hash_planner_context_inputs_str` as a number."""
        return int(self.hash_planner_context_inputs_str(), 16)

    def report(self) -> Report:
        """Return the report on the last plan and its rivals, on the rank that planned (rank 0).

        Raises:
            DreamShardError: there is none, with the reason: no plan yet, another rank, a failed plan, a module without
                tables, or a plan by callbacks or given components that cannot be rated.
        """
        return self._last("report").report

    @property
    def options(self) -> list[ShardingOption]:
        """TorchRec's sharding options of the last plan, one for every table, with ``shard.rank`` set.

        Raises:
            DreamShardError: there is no plan yet on this rank.
        """
        return list(self._last().plan)

    @neutral()
    def predict(self, plan: AnyPlan, name: str = "plan") -> ReportEntry:
        """Predict the cost of any plan of the last planned module.

        Args:
            plan: a ``ShardingPlan``, the file of a plan, or one option per table with ``shard.rank`` set.
            name: of the entry.

        Warns:
            UserWarning: tables lose their in-backward optimizers; names them.

        Raises:
            PlannerError: tables are missing or unknown, shards have no ranks or impossible ones, or do not cover their
                table; names them.
            PlanError: the file can't be read.
        """
        model = self._model()
        rated = model.rated(plan)
        self._warn_of_lost_optimizers(model, rated.options)
        return ReportEntry.of(name, rated.costs)

    @neutral()
    def saved_plan(self, plan: AnyPlan | None = None, name: str = "plan") -> SavedPlan:
        """Return a plan of the last planned module with all its inputs, to save or to compare.

        Args:
            plan: as :meth:`predict`; by default the last plan of this planner.
            name: for people.

        Raises:
            DreamShardError: there is no plan yet on this rank (``collective_plan`` plans on rank 0).
            PlannerError, PlanError: as :meth:`predict`.
        """
        return self._last().saved(name) if plan is None else self._model().saved(plan, name)

    def best_known(self) -> SavedPlan | None:
        """Return the plan that is known to be better than the last one, on the rank that planned; None without any.

        It comes from what was observed in the training since, or in earlier trainings of the same tables.

        Raises:
            DreamShardError: no module was planned or read yet on this rank.
        """
        model = self._model()
        return Remembered.of_module(model.skeleton, model.sharders, self._ranks.topology).better()

    def save_plan(self, path: str | Path) -> None:
        """Write the last plan to a file for ``JsonPlanLoader``, on the rank that planned; replaces an existing file.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlanError: the file can't be written.
        """
        self.saved_plan(name=Path(path).name).save(path)

    def lookups_per_sample(self) -> dict[str, float]:
        """Return the lookups per sample of each feature, from statistics, constraints, or TorchRec's default.

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
        """Find the plan of the last planned module that takes least time over the remaining steps, moving included.

        The search makes few moves from the running plan, and returns its curve of cost against bytes moved. It keeps
        constraints, placement rules and memory. Tables that stay keep their sharding. Ranks are renamed if that keeps
        more bytes in place. The planner may have another topology or model; tables that ``current`` lacks move nothing.

        Args:
            current: the running plan, or its file.
            steps: training steps that remain.
            statistics: of the present data, to plan by first; by default those of the planner.
            max_bytes_moved: weights and optimizer states of all ranks together (in 2D parallelism: of one sharding
                group); no limit by default.
            restart_seconds: seconds between the last step under one plan and the first under the other, without moving.
            bytes_per_s: rate at which a rank receives bytes; by default that of the topology's slowest link.
            lost: ranks of ``current`` that are gone; the other ranks are renumbered from 0 on in their order. By
                default, ranks past the topology's.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlannerError: a table of ``current`` has no ranks.
            PlanError: the file can't be read; or ``max_bytes_moved`` is too low.
        """
        if isinstance(current, str | Path):
            current = SavedPlan.load(current)
        steps = checked("steps", steps, 0)
        if max_bytes_moved is not None:
            max_bytes_moved = checked("max_bytes_moved", max_bytes_moved, 0, kind=Real)
        default = link_bytes_per_s(self._topology)
        rate = checked("bytes_per_s", default if bytes_per_s is None else bytes_per_s, kind=Real)
        restart_seconds = checked("restart_seconds", restart_seconds, 0, sys.float_info.max, Real)
        result = self._last() if statistics is None and self.plan_loader is None else self._afresh(statistics)
        return replanned(result.model, current, result.plan, steps, rate, restart_seconds, max_bytes_moved, lost)

    def _afresh(self, statistics: TableStatistics | None) -> PlanResult:
        """Plan the last module again with a copy of the planner, by other statistics and without a plan loader."""
        other, model = copy.copy(self), self._model()
        statistics = statistics or model.settings.statistics
        other._settings = replace(model.settings, statistics=statistics, remembered=None, falls_back=False)
        other.plan_loader = None
        other.plan(model.skeleton, model.sharders)
        return other._last()

    @neutral()
    def explain(self, rank: int | None = None, plan: AnyPlan | None = None) -> Explanation:
        """Explain the time of one rank: fused kernels, costliest tables, and the gain of moving or splitting each.

        Args:
            rank: the slowest by default.
            plan: as :meth:`predict`; by default the last plan of this planner.

        Raises:
            DreamShardError: there is no plan yet on this rank.
            PlannerError: there is no such rank; and, with PlanError, as :meth:`predict`.
        """
        return explain(self._model(), self._last().plan if plan is None else plan, rank)

    def _warn_of_lost_optimizers(self, model: ModelProblem, plan: Sequence[ShardingOption]) -> None:
        for lost in lost_optimizers(model, plan):
            warnings.warn(lost, stacklevel=4)

    def _last(self, what: str = "plan") -> PlanResult:
        if isinstance(self._result, str):
            raise DreamShardError(f"there is no {what}: {self._result}")
        return self._result

    def _model(self) -> ModelProblem:
        """Return the problem of the last module that was read, with or without a plan."""
        if self._loop is None or not self._loop.model.search_space:
            raise DreamShardError(f"there is no plan: {self._result}")
        return self._loop.model

    def _before_callbacks(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Finish TorchRec's best plan, as the first callback, which can return no more than options."""
        assert self._loop is not None  # TorchRec's loop runs within plan
        self._chosen = self._loop.chosen(plan, self._num_proposals)
        return self._chosen.options

    def _after_callbacks(self, plan: list[ShardingOption] | None) -> list[ShardingOption]:
        """Check, as the last callback, that the user's callbacks returned an option for every table."""
        options = plan or []
        if missing := self._model().by_table.keys() - map(fqn_of, options):
            raise PlannerError(
                f"callbacks returned a plan without {first_of(sorted(missing))}: each callback must return one option "
                "for every table"
            )
        return options
