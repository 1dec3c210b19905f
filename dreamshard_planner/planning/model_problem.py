# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The problem of one model, made of the planner's settings, by which any plan of the model is rated, saved, loaded and
explained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from dreamshard_planner import __version__
from dreamshard_planner.measure.hardware import library_versions
from dreamshard_planner.planning.baseline import LEAST_GAIN, BaselineFallback
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.exact_training import WiderSpace, opened_types
from dreamshard_planner.planning.explanation import Explanation, explain
from dreamshard_planner.planning.given_plans import GivenPlans, Rated, shardings
from dreamshard_planner.planning.plan_inputs import PlannerSettings, context_digest, plan_inputs
from dreamshard_planner.planning.plan_notes import assumptions, knows_lookups
from dreamshard_planner.planning.ranks import PlannedRanks
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
    check_topology,
    doubtful_inputs,
    unused_names,
)
from dreamshard_planner.search_space.modules import shardable_tables, unsharded_modules, without_weights
from dreamshard_planner.search_space.output_types import mixed_exchanges
from dreamshard_planner.search_space.placement_rules import LegalRanks

Sharders = Sequence[ModuleSharder[nn.Module]]
AnyPlan: TypeAlias = ShardingPlan | SavedPlan | str | Path | Sequence[ShardingOption]
"""A plan as TorchRec has it, one with all that it was made from, its file, or one option with ranks for each table."""


@dataclass(frozen=True)
class ModelProblem:
    """The problem of one module, and how any plan of it, whoever made it, is rated, saved, loaded and explained; made
    before TorchRec's loop asks for proposals."""

    settings: PlannerSettings
    ranks: PlannedRanks
    skeleton: nn.Module
    """A copy of the module without weights, as it was when it was read: modules change when they are sharded."""
    context: PlanRater
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
    unrestricted: WiderSpace | None = None
    """All options without exact training; None if these are no more, or nobody could ask for them."""
    attached: WiderSpace | None = None
    """All options with optimizers attached to replicas, which train exactly; None as for :attr:`unrestricted`."""
    search_space: Sequence[ShardingOption] = ()
    """All options of the module; none before they are enumerated."""

    @classmethod
    def of(
        cls,
        settings: PlannerSettings,
        ranks: PlannedRanks,
        module: nn.Module,
        sharders: Sharders,
        reservation: StorageReservation,
        beyond: bool,
    ) -> ModelProblem:
        """Read a module.

        Args:
            settings: of the planner.
            ranks: to plan for.
            module: to be planned.
            sharders: of its modules.
            reservation: of memory.
            beyond: whether the options that exact training leaves out may be asked for.

        Raises:
            PlannerError, StatisticsError: constraints, rules or statistics do not go with the module or topology.
        """
        check_topology(ranks.topology)
        settings = replace(settings, constraints=constraints_by_name(module, sharders, settings.constraints))
        doubtful = doubtful_inputs(
            module, sharders, settings.statistics, ranks.topology.compute_device, settings.constraints
        )
        legal = None
        if settings.placement_rules is not None:
            tables = shardable_tables(module, sharders)
            legal = LegalRanks.of(settings.placement_rules, tables, ranks.topology, settings.statistics)
        constraints = _constraints(settings, ranks, module, sharders, legal)
        reader = OptionReader(
            constraints, settings.statistics, sharders, legal, settings.optimizers_attached, ranks.groups > 1
        )
        context = PlanRater(
            ranks.topology,
            reader,
            ranks.checkpoint,
            settings.cost_source,
            constraints,
            sharders,
            ranks.sync_ms_per_byte,
            ranks.all_ranks,
        )
        left = reservation.reserve(
            topology=ranks.topology,
            batch_size=settings.batch_size,
            module=module,
            sharders=sharders,
            constraints=constraints,
        )
        model = cls(
            settings=settings,
            ranks=ranks,
            skeleton=without_weights(module, sharders),
            context=context,
            left=left,
            legal=legal,
            reservation=reservation,
            doubtful=doubtful,
            unused=unused_names(module, sharders, settings.constraints, settings.statistics),
            unsharded=tuple(unsharded_modules(module, sharders)),
        )
        # Hosts of towers are settled while planning.
        if not beyond or any(table.in_tower for table in shardable_tables(module, sharders)):
            return model
        unrestricted, attached = (
            model._wider(module, sharders, other)
            for other in (replace(settings, exact_training=False), replace(settings, optimizers_attached=True))
        )
        return replace(model, unrestricted=unrestricted, attached=attached)

    @property
    def constraints(self) -> dict[str, ParameterConstraints]:
        """Of every table, with what exact training, rules and the topology leave."""
        return self.context.constraints or {}

    @property
    def left_out(self) -> dict[str, dict[str, str]]:
        """Sharding types that each table may not take, and why, by its fully qualified name."""
        return {} if self.context.constraints is None else self.context.constraints.left_out

    @cached_property
    def inputs(self) -> PlanInputs:
        """What plans are made from."""
        return plan_inputs(self.settings, self.ranks, self.search_space, self.context.reader, self.reservation)

    def digest(self, components: Iterable[object]) -> str:
        """Return the digest, in hexadecimal, of all that plans are made from, by these components of TorchRec's."""
        settings = self.settings
        parts = [
            *map(type, components),
            self.ranks.checkpoint.digest(),
            (settings.constraints, settings.placement_rules),
            (settings.search, settings.timeout_seconds),
        ]
        return context_digest(self.inputs, self.search_space, self.left, parts)

    @cached_property
    def given(self) -> GivenPlans:
        """Reads and rates plans of the model, whoever made them."""
        return GivenPlans(self.context, self.search_space, self.left)

    def rated(self, plan: AnyPlan) -> Rated:
        """A plan, read and rated; errors as of :meth:`GivenPlans.options`, and PlanError for a file."""
        return self.given.rated(_read(plan))

    def lookups_per_sample(self) -> dict[str, float]:
        """Return lookups per sample, by feature: from statistics, constraints, or TorchRec's default."""
        reader, tables = self.context.reader, (options[0] for options in self.given.by_table.values())
        each = ((reader.declared(option).features, reader.pooling_factors(option)) for option in tables)
        return {name: factor for names, factors in each for name, factor in zip(names, factors, strict=True)}

    def saved(self, plan: AnyPlan, name: str, known: Report | None = None) -> SavedPlan:
        """A plan with all that it was made from, and with its report, if that is ``known``."""
        if known is None:
            rated = self.rated(plan)
            options, known = rated.options, rated.report(self.context.notes(rated.options))
        else:
            options = self.given.options(_read(plan))
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
        options = self.given.enumerated(saved)
        self.given.check_room(self.given.rated(list(options.values())), saved.name)
        if self.legal is not None:
            self.legal.check(dict(saved.tables()), saved.name)
        return options

    def explained(self, plan: AnyPlan, rank: int | None) -> Explanation:
        """Why a rank of a plan, the slowest by default, takes as long as it does."""
        usable, rated = self.context.usable_options(self.search_space), self.rated(plan)
        notes = (*self.context.notes(rated.options), *self.assumptions(rated.options))
        return explain(self.context, self.given, rated, usable, notes, rank)

    def kept(self, plan: Sequence[ShardingOption], found: SearchedPlan | None) -> BaselineFallback | None:
        """Return TorchRec's plan if a searched one gains too little over it to be taken; else None."""
        settings, guessed = self.settings, False
        least = settings.least_gain or 0.0
        if settings.least_gain is None:
            known = knows_lookups(self.context, plan, settings.constraints, settings.statistics)
            guessed = not known and settings.cost_source != "torchrec"
            least = LEAST_GAIN if guessed else 0.0
        theirs = found.baseline if least and found is not None else None
        if theirs is None:
            return None
        searched, base = self.rated(plan).costs, self.rated(theirs).costs
        gain = 1 - float(searched.overall_ms_B[0] / base.overall_ms_B[0].clamp_min(1e-9))
        kept = BaselineFallback(tuple(theirs), searched, gain, least, guessed)
        return kept if gain < least and not kept.is_plan(plan) else None

    def mixed_exchanges(self, plan: Sequence[ShardingOption]) -> list[str]:
        """Return a text for every exchange of which ranks would send different types."""
        return mixed_exchanges(plan, self.context.sharders or (), self.ranks.topology.world_size)

    def assumptions(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        """What a plan's figures rest on that nobody said."""
        settings = self.settings
        try:
            return assumptions(self.context, plan, settings.constraints, settings.statistics, settings.given_batch_size)
        except PlannerError:  # callbacks changed the plan to one whose cost is not known
            return ()

    def _wider(self, module: nn.Module, sharders: Sharders, settings: PlannerSettings) -> WiderSpace | None:
        """Return the options under other settings; None if these are no more."""
        all_types = _constraints(settings, self.ranks, module, sharders, self.legal)
        opened = opened_types(self.constraints, all_types)
        if not opened:
            return None
        context = replace(self.context, constraints=all_types)
        return WiderSpace(context, self.skeleton, sharders, settings.batch_size, self.left, opened)


def _read(plan: AnyPlan) -> ShardingPlan | SavedPlan | Sequence[ShardingOption]:
    """A file's content."""
    return SavedPlan.load(plan) if isinstance(plan, str | Path) else plan


def libraries() -> dict[str, str]:
    """Versions of this package and of the libraries that compute embeddings, by name."""
    return {"dreamshard_planner": __version__, **library_versions()}


def _constraints(
    settings: PlannerSettings, ranks: PlannedRanks, module: nn.Module, sharders: Sharders, legal: LegalRanks | None
) -> PlanningConstraints:
    topology = ranks.topology
    allowed = AllowedTypes(
        topology.compute_device,
        sharding_types=settings.sharding_types,
        exact_training=settings.exact_training,
        optimizers_attached=settings.optimizers_attached,
        in_groups=ranks.groups > 1,
        has_ssd=any(device.storage.ssd > 0 for device in topology.devices),
        legal=legal,
        ranks=topology.world_size,
        impossible=impossible_types(topology),
    )
    return planning_constraints(module, sharders, settings.constraints, settings.statistics, allowed)
