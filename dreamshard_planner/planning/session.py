# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One planning pass: the problem of one module is read, TorchRec's loop searches it with our components, and what came
of it becomes one immutable result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardEstimator,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.planning.assumptions import assumptions
from dreamshard_planner.planning.beyond import WiderSpace, opened_types
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.joint_plan import JointPlan
from dreamshard_planner.planning.placing import Outcome
from dreamshard_planner.planning.plan_inputs import MadeFrom
from dreamshard_planner.planning.result import PlannedModel, PlanResult
from dreamshard_planner.planning.settings import PlannerSettings
from dreamshard_planner.planning.training_notes import training_notes
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report, ReportEntry
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.problem.units import impossible_types
from dreamshard_planner.search_space.constraints import (
    PlanningConstraints,
    doubtful_inputs,
    planning_constraints,
    unused_names,
)
from dreamshard_planner.search_space.input_checks import check_topology
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.rank_constraints import LegalRanks

Sharders = Sequence[ModuleSharder[nn.Module]]
MakeEstimator = Callable[[PlanningContext], ShardEstimator]
"""Of the costs of single shards."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a planner was given, whatever module it plans."""

    topology: Topology
    batch_size: int
    """Local."""
    given_batch_size: int | None
    """None where it is TorchRec's default."""
    constraints: dict[str, ParameterConstraints] | None
    checkpoint: Checkpoint
    settings: PlannerSettings
    timeout_seconds: float | None
    """TorchRec's, of planning."""
    sync_ms_per_byte: float = 0.0
    """Of averaging the replicas of other sharding groups."""
    all_ranks: Topology | None = None
    """Of all sharding groups; None where there is one."""

    @property
    def seconds(self) -> float | None:
        """Cap on the search: the shorter of ours and TorchRec's; None for none."""
        caps = (self.settings.search_seconds, self.timeout_seconds)
        return min(filter(None, caps), default=None)

    def made_from(
        self,
        search_space: Sequence[ShardingOption],
        reservation: StorageReservation,
        reader: OptionReader | None = None,
    ) -> MadeFrom:
        """What plans are made from, by the options of the module."""
        return MadeFrom(
            search_space=search_space,
            reader=reader or OptionReader(self.constraints, self.settings.statistics),
            topology=self.topology,
            batch_size=self.batch_size,
            constraints=self.constraints,
            checkpoint=self.checkpoint,
            settings=self.settings,
            reservation=type(reservation).__name__,
        )


@dataclass(frozen=True)
class PlanningSession:
    """The problem of one module, and how it is rated; made before TorchRec's loop asks for proposals."""

    request: PlanRequest
    context: PlanningContext
    """Reads and rates options, within constraints and rules."""
    left: Topology
    """What the storage reservation leaves."""
    legal: LegalRanks | None
    """Where placement rules let tables lie; None without rules."""
    reservation: StorageReservation
    doubtful: tuple[str, ...]
    """Tables whose shape or ids are hardly meant, in words."""
    unused: tuple[str, ...]
    """What constraints and statistics name that the module does not have, in words."""
    wider: WiderSpace | None
    """What exact training leaves out; None where that is nothing, or nobody could ask for it."""

    @classmethod
    def of(
        cls,
        request: PlanRequest,
        module: nn.Module,
        sharders: Sharders,
        reservation: StorageReservation,
        beyond: MakeEstimator | None,
    ) -> PlanningSession:
        """Read a module.

        Args:
            request: what the planner was given.
            module: to be planned.
            sharders: of its modules.
            reservation: of memory.
            beyond: estimates the options that exact training leaves out, which are read as well; None to leave that.

        Raises:
            PlannerError, StatisticsError: constraints, rules or statistics do not go with the module or topology.
        """
        check_topology(request.topology)
        doubtful = doubtful_inputs(module, sharders, request.settings.statistics, request.topology.compute_device)
        unused = unused_names(module, sharders, request.constraints, request.settings.statistics)
        legal = _legal_ranks(request, module, sharders)
        constraints = _constraints(request, module, sharders, legal)
        settings = request.settings
        reader = OptionReader(constraints, settings.statistics, sharders, legal, settings.optimizers_attached)
        context = PlanningContext(
            request.topology,
            reader,
            request.checkpoint,
            settings.cost_source,
            constraints,
            sharders,
            request.sync_ms_per_byte,
            request.all_ranks,
        )
        left = reservation.reserve(
            topology=request.topology,
            batch_size=request.batch_size,
            module=module,
            sharders=sharders,
            constraints=constraints,
        )
        session = cls(request, context, left, legal, reservation, doubtful, unused, None)
        return session if beyond is None else replace(session, wider=session._wider(module, sharders, beyond))

    @property
    def constraints(self) -> dict[str, ParameterConstraints]:
        """Of every table, with what exact training, rules and the topology leave."""
        return self.context.constraints or {}

    def planned(self, search_space: Sequence[ShardingOption]) -> PlannedModel:
        """The module, by all its options."""
        inputs = self.request.made_from(search_space, self.reservation, self.context.reader).inputs
        return PlannedModel(self.context, search_space, self.left, inputs, self._assumptions, self.legal, self.wider)

    def result(
        self,
        plan: Sequence[ShardingOption],
        search_space: Sequence[ShardingOption],
        found: JointPlan | None,
        placed: Sequence[Outcome] | str,
        loaded: SavedPlan | None,
    ) -> PlanResult:
        """What TorchRec's loop came to.

        Args:
            plan: the best, after callbacks.
            search_space: all options.
            found: by our proposer.
            placed: by our partitioner; where it was not ours, why there is no report.
            loaded: from a file, instead of a search.
        """
        model = self.planned(search_space)
        told = self._told(model, plan, found, placed) if loaded is None else model.report(plan, loaded)
        if isinstance(told, Report):
            training = training_notes(plan, self.context.reader, self.request.topology.compute_device)
            told = told.noting(self._assumptions(plan)).noting(noted("table", self.doubtful))
            told = told.noting(noted("unused", self.unused)).noting(noted("training", training))
        return PlanResult(model, tuple(plan), told, self.wider)

    def _told(
        self,
        model: PlannedModel,
        plan: Sequence[ShardingOption],
        found: JointPlan | None,
        placed: Sequence[Outcome] | str,
    ) -> Report | str:
        """The report on a plan that was searched for; or why there is none."""
        if isinstance(placed, str):
            return placed
        if not placed:
            return "the last plan was loaded by plan_loader"
        outcome = next((one for one in placed if one.is_plan(plan)), None)
        changed = outcome is None
        if outcome is None:  # by callbacks: of what TorchRec chose, if only ranks were changed, else of the cheapest
            alike = [one for one in placed if one.has_options_of(plan)]
            outcome = min(alike or placed, key=lambda one: one.placement.chosen.total_ms)
        report = Report.of(
            outcome.cost,
            outcome.sharding,
            outcome.placement,
            (found.rivals or None) if found is not None else None,
            candidates=found.result.candidates if found is not None and found.result else 0,
            reshards=found.result.reshards if found is not None and found.result else 0,
            notes=() if found is None else found.notes(),
        )
        ruled = noted("placement_rule", () if self.legal is None else self.legal.notes())
        beyond = noted("beyond_exact_training", () if self.wider is None else (self.wider.note(),))
        report = report.noting((*self.context.notes(plan), *ruled, *beyond))
        if not changed:
            return report
        try:
            chosen = ReportEntry.of(report.chosen.name, model.rated(plan).costs)
        except PlannerError as error:
            return f"callbacks changed the last plan to one whose cost is not known: {error}"
        verb = "moved tables" if outcome.has_options_of(plan) else "changed options"
        note = f"callbacks {verb} after they were placed; dreamshard is the plan that they made"
        return replace(report, chosen=chosen).noting(noted("callbacks", [note]))

    def _assumptions(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        request = self.request
        try:
            return assumptions(
                self.context, plan, request.constraints, request.settings.statistics, request.given_batch_size
            )
        except PlannerError:  # callbacks changed the plan to one whose cost is not known
            return ()

    def _wider(self, module: nn.Module, sharders: Sharders, estimator: MakeEstimator) -> WiderSpace | None:
        for argument, value in (("optimizers_attached", True), ("exact_training", False)):
            change: dict[str, Any] = {argument: value}
            wider = replace(self.request, settings=replace(self.request.settings, **change))
            all_types = _constraints(wider, module, sharders, self.legal)
            if opened := opened_types(self.constraints, all_types):
                break
        else:
            return None
        context = replace(self.context, constraints=all_types)
        options = context.enumerator(self.request.batch_size, estimator(context)).enumerate(module, list(sharders))
        if any(option.dependency for option in options):
            return None  # which hosts towers are pinned to is settled while planning
        return WiderSpace(context, options, self.left, f"{argument}={value}", opened)


def _legal_ranks(request: PlanRequest, module: nn.Module, sharders: Sharders) -> LegalRanks | None:
    """Where the rules let tables lie; None without rules."""
    rules = request.settings.placement_rules
    if rules is None:
        return None
    tables = shardable_tables(module, sharders)
    return LegalRanks.of(rules, tables, request.topology, request.settings.statistics)


def _constraints(
    request: PlanRequest, module: nn.Module, sharders: Sharders, legal: LegalRanks | None
) -> PlanningConstraints:
    return planning_constraints(
        module,
        sharders,
        request.constraints,
        request.settings.statistics,
        request.topology.compute_device,
        sharding_types=request.settings.allowed_types,
        exact_training=request.settings.exact_training,
        optimizers_attached=request.settings.optimizers_attached,
        has_ssd=any(device.storage.ssd > 0 for device in request.topology.devices),
        legal=legal,
        impossible=impossible_types(request.topology),
    )
