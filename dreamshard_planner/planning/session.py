# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One planning pass: the problem of one module is read, TorchRec's loop searches it with our components, and what came
of it becomes one immutable result, by which any plan of the module is rated, saved, loaded and explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from dreamshard_planner import __version__
from dreamshard_planner.cost.problem import has_room
from dreamshard_planner.measure.hardware import library_versions
from dreamshard_planner.planning.assumptions import assumptions, knows_lookups
from dreamshard_planner.planning.beyond import WiderSpace, opened_types
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.explanation import Explanation, explain
from dreamshard_planner.planning.given_plans import GivenPlans, Rated, shardings
from dreamshard_planner.planning.kept import LEAST_GAIN, KeptPlan, baseline_of
from dreamshard_planner.planning.plan_inputs import PlanRequest
from dreamshard_planner.planning.search_plan import SearchedPlan
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.plan_file import PlanInputs, SavedPlan
from dreamshard_planner.plans.report import Report
from dreamshard_planner.plans.stale import stale_differences
from dreamshard_planner.problem.parts import impossible_types
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.constraints import (
    AllowedTypes,
    PlanningConstraints,
    constraints_by_name,
    planning_constraints,
)
from dreamshard_planner.search_space.input_checks import (
    available_bytes,
    check_topology,
    doubtful_inputs,
    needed_bytes,
    unused_names,
)
from dreamshard_planner.search_space.modules import shardable_tables, unsharded_modules, without_weights
from dreamshard_planner.search_space.options import by_table, counted
from dreamshard_planner.search_space.output_types import MixedExchange, may_mix, mixed_exchanges
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.usable_options import as_constrained

Sharders = Sequence[ModuleSharder[nn.Module]]
MakeEstimator = Callable[[PlanningContext], ShardEstimator]
"""Of the costs of single shards."""
AnyPlan: TypeAlias = ShardingPlan | SavedPlan | str | Path | Sequence[ShardingOption]
"""A plan as TorchRec has it, one with all that it was made from, its file, or one option with ranks for each table."""


@dataclass(frozen=True)
class PlanningSession:
    """The problem of one module, and how any plan of it, whoever made it, is rated, saved, loaded and explained; made
    before TorchRec's loop asks for proposals."""

    request: PlanRequest
    skeleton: nn.Module
    """A copy of the module without weights, as it was when it was read: modules change when they are sharded."""
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
    unsharded: tuple[str, ...]
    """Paths of embedding modules that have no sharder."""
    wider: WiderSpace | None
    """What exact training leaves out; None where that is nothing, or nobody could ask for it."""
    unrestricted: WiderSpace | None = None
    """All options without exact training; None as for :attr:`wider`."""
    search_space: Sequence[ShardingOption] = ()
    """All options of the module; none before they are enumerated."""
    in_rows: frozenset[str] = frozenset()
    """Paths of modules all of whose tables lie in blocks of rows, since mean-pooled ones fit in no other way."""

    @classmethod
    def of(
        cls,
        request: PlanRequest,
        module: nn.Module,
        sharders: Sharders,
        reservation: StorageReservation,
        beyond: MakeEstimator | None,
        in_rows: frozenset[str] = frozenset(),
    ) -> PlanningSession:
        """Read a module.

        Args:
            request: what the planner was given.
            module: to be planned.
            sharders: of its modules.
            reservation: of memory.
            beyond: estimates the options that exact training leaves out, where they are asked for; None to leave that.
            in_rows: paths of modules to plan in blocks of rows, of :meth:`rows_instead`.

        Raises:
            PlannerError, StatisticsError: constraints, rules or statistics do not go with the module or topology.
        """
        check_topology(request.topology)
        request = replace(request, constraints=constraints_by_name(module, sharders, request.constraints))
        doubtful = doubtful_inputs(
            module, sharders, request.settings.statistics, request.topology.compute_device, request.constraints
        )
        unused = unused_names(module, sharders, request.constraints, request.settings.statistics)
        unsharded = tuple(unsharded_modules(module, sharders))
        legal = _legal_ranks(request, module, sharders)
        constraints = _constraints(request, module, sharders, legal, in_rows)
        settings = request.settings
        reader = OptionReader(
            constraints, settings.statistics, sharders, legal, settings.optimizers_attached, request.in_groups
        )
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
        skeleton = without_weights(module, sharders)
        session = cls(
            request, skeleton, context, left, legal, reservation, doubtful, unused, unsharded, None, in_rows=in_rows
        )
        if beyond is None:
            return session
        attached, unrestricted = (
            session._wider(module, sharders, beyond, argument, value)
            for argument, value in (("optimizers_attached", True), ("exact_training", False))
        )
        return replace(session, wider=attached or unrestricted, unrestricted=unrestricted)

    @property
    def constraints(self) -> dict[str, ParameterConstraints]:
        """Of every table, with what exact training, rules and the topology leave."""
        return self.context.constraints or {}

    def planned(self, search_space: Sequence[ShardingOption]) -> PlanningSession:
        """The same with all options of the module."""
        return replace(self, search_space=search_space)

    def rows_instead(self) -> list[frozenset[str]]:
        """Paths of modules that may be planned in blocks of rows alone where nothing fits: those with tables that no
        rank has room for, where there are any, then all."""
        constraints = self.context.constraints
        every = frozenset() if constraints is None else constraints.rows_instead
        allowed = as_constrained(self.search_space, self.constraints) if every else []
        tables = by_table(option for option in allowed if option.path in every)
        homeless = {options[0].path for options in tables.values() if not any(map(self._has_room, options))}
        return [some for some in dict.fromkeys([frozenset(homeless), every]) if some]

    def _has_room(self, option: ShardingOption) -> bool:
        """Whether every shard of an option finds a rank, were there no others."""
        needs_SM = needed_bytes([shard for shard, _ in counted(option)])
        return bool(has_room(needs_SM[:, None], available_bytes(self.left)).any(-1).all())

    @cached_property
    def inputs(self) -> PlanInputs:
        """What plans are made from."""
        return self.request.inputs(self.search_space, self.context.reader, self.reservation)

    @cached_property
    def _given(self) -> GivenPlans:
        return GivenPlans(self.context, self.search_space, self.left)

    def rated(self, plan: AnyPlan) -> Rated:
        """A plan, read and rated; errors as of :meth:`GivenPlans.options`, and PlanError for a file."""
        return self._given.rated(_read(plan))

    def saved(self, plan: AnyPlan, name: str, known: Report | None = None) -> SavedPlan:
        """A plan with all that it was made from, and with its report, if that is ``known``."""
        if known is None:
            rated = self.rated(plan)
            options, known = rated.options, rated.report(self.context.notes(rated.options))
        else:
            options = self._given.options(_read(plan))
        return SavedPlan(
            libraries=libraries(),
            predicted=known.predicted,
            alone_ms=known.alone_ms,
            inputs=self.inputs,
            sharding=shardings(options),
            name=name,
        )

    def matched(self, saved: SavedPlan) -> dict[int, ShardingOption]:
        """Options as a file has them, as :meth:`GivenPlans.enumerated`.

        Raises:
            PlannerError: it was made for something else, which is named; it does not fit; or it breaks a rule.
        """
        if stale := list(stale_differences(saved.inputs, self.inputs)):
            raise PlannerError(
                f"{saved.name} was made for something else (then -> now): {'; '.join(stale)}. Load the plan that "
                "replan (dreamshard replan) makes of it, which keeps what lies where it lies; or plan without "
                "plan_loader, and save again, which moves everything anew.",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        options = self._given.enumerated(saved)
        self._given.check_room(self._given.rated(list(options.values())), saved.name)
        if self.legal is not None:
            self.legal.check(dict(saved.tables()), saved.name)
        return options

    def explained(self, plan: AnyPlan, rank: int | None) -> Explanation:
        """Why a rank of a plan, the slowest by default, takes as long as it does."""
        usable, rated = self.context.usable_options(self.search_space), self.rated(plan)
        notes = (*self.context.notes(rated.options), *self.assumptions(rated.options))
        return explain(self.context, self._given, rated, usable, notes, rank)

    def kept(self, plan: Sequence[ShardingOption], found: SearchedPlan | None) -> KeptPlan | None:
        """TorchRec's plan, where a searched one gains too little over it to be taken, or cannot run and it can; None
        where the searched one is taken."""
        settings, guessed = self.request.settings, False
        least = settings.least_gain or 0.0
        if settings.least_gain is None:
            known = knows_lookups(self.context, plan, self.request.constraints, settings.statistics)
            guessed = not known and settings.cost_source != "torchrec"
            least = LEAST_GAIN if guessed else 0.0
        mixed = bool(self.mixed_exchanges(plan))
        narrowed = bool(self.context.left_out)  # of types that TorchRec's plan may have
        theirs = baseline_of(found) if least or mixed or narrowed else None
        if theirs is None or self.mixed_exchanges(theirs):
            return None
        searched, base = self.rated(plan).costs, self.rated(theirs).costs
        gain = 1 - float(searched.overall_ms_B[0] / base.overall_ms_B[0].clamp_min(1e-9))
        kept = KeptPlan(tuple(theirs), searched, gain, None if mixed else least, guessed)
        return kept if (mixed or gain < least) and not kept.is_plan(plan) else None

    def mixed_exchanges(self, plan: Sequence[ShardingOption]) -> list[MixedExchange]:
        """Where ranks would exchange outputs of different types."""
        return mixed_exchanges(plan, self.context.sharders or (), self.request.topology.world_size)

    def may_mix(self, options: Sequence[ShardingOption]) -> bool:
        """Whether they could, wherever these tables lie."""
        return may_mix(options, self.context.sharders or ())

    def assumptions(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        """What a plan's figures rest on that nobody said."""
        request = self.request
        try:
            return assumptions(
                self.context, plan, request.constraints, request.settings.statistics, request.given_batch_size
            )
        except PlannerError:  # callbacks changed the plan to one whose cost is not known
            return ()

    def _wider(
        self, module: nn.Module, sharders: Sharders, estimator: MakeEstimator, argument: str, value: bool
    ) -> WiderSpace | None:
        """Return the options with another value of a planner's argument; None if these are no more."""
        change: dict[str, Any] = {argument: value}
        wider = replace(self.request, settings=replace(self.request.settings, **change))
        all_types = _constraints(wider, module, sharders, self.legal, self.in_rows)
        opened = opened_types(self.constraints, all_types)
        if not opened or any(table.in_tower for table in shardable_tables(module, sharders)):
            return None  # which hosts towers are pinned to is settled while planning
        context = replace(self.context, constraints=all_types)
        return WiderSpace(
            context,
            self.skeleton,
            sharders,
            self.request.batch_size,
            estimator(context),
            self.left,
            f"{argument}={value}",
            tuple(sorted(Counter(chain.from_iterable(opened.values())).items())),
            frozenset(opened),
        )


def _read(plan: AnyPlan) -> ShardingPlan | SavedPlan | Sequence[ShardingOption]:
    """A file's content."""
    return SavedPlan.load(plan) if isinstance(plan, str | Path) else plan


def libraries() -> dict[str, str]:
    """Versions of this package and of the libraries that compute embeddings, by name."""
    return {"dreamshard_planner": __version__, **library_versions()}


def _legal_ranks(request: PlanRequest, module: nn.Module, sharders: Sharders) -> LegalRanks | None:
    """Where the rules let tables lie; None without rules."""
    rules = request.settings.placement_rules
    if rules is None:
        return None
    tables = shardable_tables(module, sharders)
    return LegalRanks.of(rules, tables, request.topology, request.settings.statistics)


def _constraints(
    request: PlanRequest, module: nn.Module, sharders: Sharders, legal: LegalRanks | None, in_rows: frozenset[str]
) -> PlanningConstraints:
    settings, topology = request.settings, request.topology
    allowed = AllowedTypes(
        topology.compute_device,
        sharding_types=settings.sharding_types,
        exact_training=settings.exact_training,
        optimizers_attached=settings.optimizers_attached,
        in_groups=request.in_groups,
        has_ssd=any(device.storage.ssd > 0 for device in topology.devices),
        legal=legal,
        impossible=impossible_types(topology),
    )
    return planning_constraints(module, sharders, request.constraints, settings.statistics, allowed, in_rows)
