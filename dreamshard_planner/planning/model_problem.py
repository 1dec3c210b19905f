# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The planning problem of one model, which rates, saves and loads plans of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from torchrec.distributed.planner.types import (
    Enumerator,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner import __version__
from dreamshard_planner.measure.hardware import library_versions
from dreamshard_planner.planning.given_plans import (
    GivenPlan,
    as_option,
    check_rows,
    enumerated_as,
    shardings,
    tables_of_model,
)
from dreamshard_planner.planning.infeasible import check_room
from dreamshard_planner.planning.notes import report_on
from dreamshard_planner.planning.plan_inputs import doubtful_bandwidths, plan_inputs
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater, RatedPlan
from dreamshard_planner.planning.settings import DefaultReservation, PlannerSettings
from dreamshard_planner.plans.comparison import stale_differences
from dreamshard_planner.plans.plan_file import PlanInputs, SavedPlan, TableSharding
from dreamshard_planner.plans.report import Report
from dreamshard_planner.problem.reader import OptionReader, check_topology
from dreamshard_planner.search_space.constraints import (
    AllowedTypes,
    PlanningConstraints,
    constraints_by_name,
    planning_constraints,
)
from dreamshard_planner.search_space.modules import (
    ShardableTable,
    doubtful_tables,
    names_of_others,
    shardable_tables,
    unsharded_modules,
    without_weights,
)
from dreamshard_planner.search_space.options import by_table, fqn_of, hot_rows_of
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.variants import mixed_exchanges
from dreamshard_planner.support.formatting import first_of, memory_in_words
from dreamshard_planner.support.reproducible import canonical, digest, single_thread
from dreamshard_planner.workload.lookups import FeatureStatistics

Sharders = Sequence[ModuleSharder[nn.Module]]
AnyPlan: TypeAlias = GivenPlan | str | Path
"""A plan of TorchRec's, a saved one, its file, or one option with ranks for each table."""


@dataclass(frozen=True)
class ModelProblem:
    """The planning problem of one module."""

    settings: PlannerSettings
    ranks: PlannedRanks
    skeleton: nn.Module
    """A copy of the module without weights, as it was before sharding."""
    rater: PlanRater
    """Reads and rates options, within constraints and rules."""
    room: Topology
    """Topology with the memory that the storage reservation leaves."""
    legal: LegalRanks | None
    """Ranks that placement rules leave to tables; None without rules."""
    reservation: StorageReservation
    doubtful: tuple[str, ...]
    """Texts on tables with an unlikely shape or unlikely ids."""
    unused: tuple[str, ...]
    """Texts on names in constraints and statistics that the module lacks."""
    unsharded: tuple[str, ...]
    """Names of embedding modules that have no sharder."""
    enumerator: Enumerator
    """Keeps the options for TorchRec's loop."""
    search_space: Sequence[ShardingOption]
    """All options of the module."""

    @classmethod
    def of(
        cls,
        settings: PlannerSettings,
        ranks: PlannedRanks,
        module: nn.Module,
        sharders: Sharders,
        reservation: StorageReservation,
        enumerator: Enumerator | None = None,
    ) -> ModelProblem:
        """Read a module, and enumerate its options, by default with our enumerator.

        Raises:
            PlannerError, StatisticsError: constraints, rules or statistics do not go with the module or topology.
        """
        topology = ranks.topology
        check_topology(topology)
        statistics, tables = settings.statistics, shardable_tables(module, sharders, settings.statistics)
        settings = replace(settings, constraints=constraints_by_name(tables, settings.constraints))
        of_others, is_doubtful = names_of_others(module, tables, settings.constraints)
        doubtful = [of_others] if of_others and is_doubtful else []
        doubtful += doubtful_tables(tables, topology.compute_device, settings.constraints)
        legal = None
        if settings.placement_rules is not None:
            legal = LegalRanks.of(settings.placement_rules, tables, topology)
        constraints = constraints_under(settings, ranks, tables, legal)
        reader = OptionReader(constraints, statistics, sharders, legal)
        rater = PlanRater(ranks, reader, settings.cost_source, constraints, sharders)
        features = [feature for table in tables for feature in table.feature_names]
        unused = [statistics.unused(features) if statistics is not None and tables else None]
        unused += [None if is_doubtful else of_others]
        made = enumerator or rater.enumerator(settings.batch_size)
        search_space = made.enumerate(module, [*sharders])
        if enumerator is not None:
            rater.estimate_missing(search_space, with_perf=True)
            settings = _of_enumerator(settings, search_space)
        skeleton = without_weights(module, sharders)
        try:
            room = reservation.reserve(
                topology=topology,
                batch_size=settings.batch_size,
                module=skeleton if isinstance(reservation, DefaultReservation) else module,
                sharders=sharders,
                constraints=constraints,
            )
        except PlannerError as error:
            memory = topology.devices[0].storage
            sizes = f"{memory_in_words(int(memory.hbm))} of HBM and {memory_in_words(int(memory.ddr))} of DDR"
            raise PlannerError(
                f"the storage reservation needs more than rank 0 has, {sizes} (hbm_cap and ddr_cap of "
                f"Topology are bytes).\nTorchRec: {error}",
                error.error_type,
            ) from None
        return cls(
            settings=settings,
            ranks=ranks,
            skeleton=skeleton,
            rater=rater,
            room=room,
            legal=legal,
            reservation=reservation,
            doubtful=(*doubtful, *doubtful_bandwidths(topology)),
            unused=tuple(filter(None, unused)),
            unsharded=tuple(repr(path) if path else "the model itself" for path in unsharded_modules(module, sharders)),
            enumerator=made,
            search_space=search_space,
        )

    @property
    def sharders(self) -> Sharders:
        """Sharders of the module."""
        return self.rater.sharders

    @property
    def left_out(self) -> dict[str, dict[str, str]]:
        """Sharding types that each table may not take, with reasons, by its fully qualified name."""
        return self.rater.constraints.left_out

    def training_change(self, option: ShardingOption) -> str | None:
        """Return why a table trains differently than a whole one by the type of an option, or None."""
        return self.rater.constraints.changes.get(fqn_of(option), {}).get(option.sharding_type)

    @cached_property
    def searched(self) -> list[ShardingOption]:
        """Options that planning searches; raises PlannerError if a table has none."""
        return self.rater.searched_options(self.search_space)

    @cached_property
    def inputs(self) -> PlanInputs:
        """Inputs of the plans."""
        return plan_inputs(self.settings, self.ranks, self.search_space, self.rater.reader, self.reservation)

    def digest(self, components: Iterable[object]) -> str:
        """Return the digest of all inputs of plans, in hexadecimal, the same in every process.

        Only the types of TorchRec's ``components`` count.
        """
        settings = self.settings
        options = [
            [
                (option.fqn, option.sharding_type, option.compute_kernel, option.cache_params),
                [(list(shard.size), list(shard.offset), shard.storage) for shard in option.shards],
            ]
            for option in self.search_space
        ]
        parts = [
            *map(type, components),
            self.ranks.checkpoint.digest(),
            (settings.constraints, settings.placement_rules),
            (settings.effort_factor, settings.timeout_seconds, settings.hot_rows_bytes),
        ]
        left_bytes = [device.storage for device in self.room.devices]
        # TorchRec enumerates kernels in the order of a set.
        return digest([self.inputs, left_bytes, sorted(map(canonical, options)), parts])

    @cached_property
    def by_table(self) -> dict[str, list[ShardingOption]]:
        """Options of every table, by its fully qualified name."""
        return by_table(self.search_space)

    def options(self, plan: AnyPlan) -> list[ShardingOption]:
        """Return one option with ranks for each table, in the order of the search space.

        Given options are returned as they are. Other plans become copies of the enumerated options.

        Raises:
            PlannerError: tables are missing, unknown or given twice; shards leave their table or do not cover it; ranks
                are missing or impossible; a sharding type or kernel is unknown; blocks of rows are not equal.
            PlanError: a file can't be read.
        """
        given = tables_of_model(_loaded(plan), self.by_table)
        ranks = self.room.world_size
        options = [as_option(fqn, given[fqn], choices, ranks) for fqn, choices in self.by_table.items()]
        for option in options:
            check_rows(option)
        return options

    @torch.no_grad()
    def rated(self, plan: AnyPlan) -> RatedPlan:
        """Return a plan with its memory and costs; errors as of :meth:`options`."""
        with single_thread():
            options = self.options(plan)
            self.rater.estimate_missing(options)
            return self.rater.rated(options, self.room)

    def lookups_per_sample(self) -> dict[str, float]:
        """Return lookups per sample, by feature: from statistics, constraints, or TorchRec's default.

        If constraints of several tables differ for a feature, the most count.
        """
        reader, found = self.rater.reader, dict[str, float]()
        for option, *_ in self.by_table.values():
            for name, factor in zip(reader.declared(option).features, reader.pooling_factors(option), strict=True):
                found[name] = max(factor, found.get(name, 0.0))
        return found

    def saved(self, plan: AnyPlan, name: str, report: Report | None = None) -> SavedPlan:
        """Return a plan with all its inputs and with its report, by default a new one."""
        options = self.options(plan)
        if report is None:
            report = report_on(self.rater, self.rated(options))
        return SavedPlan(
            libraries=libraries(),
            predicted=report.predicted,
            alone_ms=report.alone_ms,
            inputs=self._inputs_of(options),
            sharding=shardings(options),
            name=name,
        )

    def _inputs_of(self, plan: Iterable[ShardingOption]) -> PlanInputs:
        """Return the inputs of a plan, with the hot ids that its costs depend on."""
        hot = {name for one in plan if hot_rows_of(one) for name in self.rater.reader.declared(one).features}
        known: Mapping[str, FeatureStatistics] = self.settings.statistics or {}
        features = {name: known[name] if name in hot else feature for name, feature in self.inputs.features.items()}
        return replace(self.inputs, features=features)

    def matched(self, saved: SavedPlan) -> dict[int, ShardingOption]:
        """Return the options that a file chose, each by the storage hash of the enumerated option.

        Raises:
            PlannerError: the file was made for other inputs; its plan does not fit, or breaks a rule; a table is
                sharded in a way that was not enumerated for it; or as of :meth:`options`.
        """
        if not saved.inputs.tables.keys() & self.inputs.tables.keys():
            planned, known = (first_of(sorted(inputs.tables)) for inputs in (saved.inputs, self.inputs))
            raise PlannerError(
                f"{saved.name} has none of the model's tables: it is for {planned}, and the model has {known}. Plan "
                "the model itself, offline by dreamshard plan --tables module:function. Tables of a JSON list have "
                "paths of their own.",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        if stale := list(stale_differences(saved.inputs, self.inputs)):
            raise PlannerError(
                f"{saved.name} was made for something else (then -> now): {'; '.join(stale)}. Load the plan that "
                "replan (dreamshard replan) makes of it, which keeps what lies where it lies; or plan without "
                "plan_loader, and save again, which moves everything anew.",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        tables, options = dict(saved.tables()), {}
        made_for = saved.inputs.settings.get("vocabulary", "")
        if made_for != self.settings.vocabulary and any(table.hot_rows for table in tables.values()):
            raise PlannerError(
                f"{saved.name} has hot rows of vocabulary {made_for!r}, this job has {self.settings.vocabulary!r}. "
                "Plan again with statistics of the present vocabulary.",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        for option in self.options(saved):
            known = self._enumerated(option, tables[fqn_of(option)], saved.name)
            options[known.storage_hash()] = option
        check_room(self.rated(list(options.values())), saved.name)
        if self.legal is not None:
            self.legal.check(tables, saved.name)
        return options

    def _enumerated(self, option: ShardingOption, sharding: TableSharding, name: str) -> ShardingOption:
        """Return the enumerated option that shards a table as a file of this name does."""
        fqn = fqn_of(option)
        choices = self.by_table[fqn]
        if (known := enumerated_as(choices, sharding)) is not None:
            return known
        ways = sorted({f"{choice.sharding_type} {choice.compute_kernel}" for choice in choices})
        why = self.left_out.get(fqn, {}).get(sharding.sharding_type)
        raise PlannerError(
            f"table {fqn!r} is sharded {sharding.label} by compute kernel {sharding.kernel!r} in "
            f"{len(sharding.shards)} shard(s) in {name}, which is none of the ways that it may be sharded "
            f"here ({', '.join(ways)})" + (f"; {sharding.sharding_type} is left out: {why}" if why else ""),
            PlannerErrorType.PLAN_LOADING_FAILED,
        )

    def mixed_exchanges(self, plan: Sequence[ShardingOption]) -> list[str]:
        """Return a text for every exchange in which ranks would send different types."""
        return mixed_exchanges(plan, self.sharders, self.ranks.topology.world_size)


def _of_enumerator(settings: PlannerSettings, search_space: Iterable[ShardingOption]) -> PlannerSettings:
    """Return settings with the batch size of a given enumerator; raises PlannerError if the planner has another one."""
    for size in {option.batch_size for option in search_space} - {settings.given_batch_size}:
        if settings.given_batch_size is not None:
            raise PlannerError(
                f"the planner's batch_size is {settings.batch_size:,}, and the enumerator's {size:,}: give both one"
            )
        settings = replace(settings, given_batch_size=size)
    return settings


def _loaded(plan: AnyPlan) -> GivenPlan:
    return SavedPlan.load(plan) if isinstance(plan, str | Path) else plan


def libraries() -> dict[str, str]:
    """Return the versions of this package and of the libraries that compute embeddings, by name."""
    return {"dreamshard_planner": __version__, **library_versions()}


def constraints_under(
    settings: PlannerSettings, ranks: PlannedRanks, tables: Sequence[ShardableTable], legal: LegalRanks | None
) -> PlanningConstraints:
    """Return the constraints of every table under some settings."""
    allowed = AllowedTypes(
        ranks.topology,
        sharding_types=settings.sharding_types,
        exact_training=settings.exact_training,
        optimizers_attached=settings.optimizers_attached,
        in_groups=ranks.groups > 1,
        legal=legal,
    )
    return planning_constraints(tables, settings.constraints, allowed)
