# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a planning pass came to: the model that was planned, by which any plan of it is rated, saved, loaded and
explained, and the plan that was made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import torch
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan

from dreamshard_planner import __version__
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.measure.hardware import library_versions
from dreamshard_planner.planning.beyond import WiderSpace
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.explaining import explain
from dreamshard_planner.planning.given_plans import GivenPlans, Rated, shardings
from dreamshard_planner.plans.explanation import Explanation
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.plans.plan_file import PlanInputs, SavedPlan
from dreamshard_planner.plans.predicted import Predicted
from dreamshard_planner.plans.report import Report
from dreamshard_planner.plans.stale import differences
from dreamshard_planner.policy.place import Contender, Placement
from dreamshard_planner.search_space.options import fqn_of
from dreamshard_planner.search_space.rank_constraints import LegalRanks
from dreamshard_planner.search_space.usable_options import usable_options

AnyPlan: TypeAlias = ShardingPlan | SavedPlan | str | Path | Sequence[ShardingOption]
"""A plan as TorchRec has it, one with all that it was made from, its file, or one option with ranks for each table."""


@dataclass(frozen=True)
class PlannedModel:
    """A model whose options were read, by which any plan of it, whoever made it, is rated, saved, loaded, explained."""

    context: PlanningContext
    search_space: Sequence[ShardingOption]
    left: Topology
    """What the storage reservation leaves."""
    read_inputs: Callable[[], PlanInputs]
    """What plans are made from: digests of statistics and networks, which rating alone does without."""
    assumed: Callable[[Sequence[ShardingOption]], tuple[Note, ...]]
    """What the figures of a plan rest on that nobody said."""
    legal: LegalRanks | None
    """Where placement rules let tables lie; None without rules."""
    wider: WiderSpace | None = None
    """What exact training leaves out; None where that is nothing, or was not read."""

    @cached_property
    def inputs(self) -> PlanInputs:
        """What plans are made from."""
        return self.read_inputs()

    @cached_property
    def _given(self) -> GivenPlans:
        return GivenPlans(self.context, self.search_space, self.left)

    def rated(self, plan: AnyPlan) -> Rated:
        """A plan, read and rated; errors as of :meth:`GivenPlans.options`, and PlanError for a file."""
        return self._given.rated(SavedPlan.load(plan) if isinstance(plan, str | Path) else plan)

    def check_room(self, plan: AnyPlan, name: str) -> None:
        """PlannerError unless a plan keeps within what the storage reservation leaves, by all that we count."""
        self._given.check_room(self.rated(plan), name)

    @torch.no_grad()
    def without_ms(self, plan: Sequence[ShardingOption], table: str) -> float:
        """Predicted cost of a plan, were one of its tables not there."""
        left = [option for option in plan if fqn_of(option) != table]
        read = self.context.read(left, with_storage=False)
        return self.context.cost(read).overall_ms(read.sharding(left))

    def saved(self, plan: AnyPlan, name: str, known: Report | None = None) -> SavedPlan:
        """A plan with all that it was made from, and with its report, if that is ``known``."""
        rated = self.rated(plan)
        return SavedPlan(
            libraries=_libraries(),
            predicted=Predicted.of_report(known or self._report(rated, self.context.notes(rated.options))),
            inputs=self.inputs,
            sharding=shardings(rated.options),
            name=name,
        )

    def matched(self, saved: SavedPlan) -> dict[int, ShardingOption]:
        """Options as a file has them, as :meth:`GivenPlans.enumerated`.

        Raises:
            PlannerError: it was made for something else, which is named; it does not fit; or it breaks a rule.
        """
        stale = [difference.text for difference in differences(saved.inputs, self.inputs) if difference.stale]
        if stale:
            raise PlannerError(
                f"{saved.name} was made for something else (then -> now): {'; '.join(stale)}. Plan without "
                "plan_loader, and save again.",
                PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH,
            )
        options = self._given.enumerated(saved)
        self._given.check_room(self._given.rated(list(options.values())), saved.name)
        if self.legal is not None:
            self.legal.check(dict(saved.tables()), saved.name)
        return options

    def report(self, plan: Sequence[ShardingOption], saved: SavedPlan) -> Report:
        """On a plan that was loaded."""
        rated, now = self.rated(plan), _libraries()
        changed = [difference.text for difference in differences(saved.inputs, self.inputs)]
        changed += [f"{name} {was} -> {now.get(name)}" for name, was in saved.libraries.items() if now.get(name) != was]
        then, sources = saved.predicted, (str(rated.cost.compute.source), rated.read.problem.collectives.world.source)
        alike = sources == (then.cost_source, then.collectives_source) and math.isclose(
            then.total_ms, float(rated.costs.overall_ms_B[0]), rel_tol=1e-6, abs_tol=1e-6
        )
        others = "" if alike else f"; dreamshard report {saved.name} tells what it was chosen from by the costs of then"
        loaded = f"the plan was loaded from {saved.name}, where its cost is {then.total_ms:.3f} ms{others}"
        notes = (
            Note("loaded", loaded),
            *noted("stale", [f"since the plan was made: {text}" for text in changed]),
            *self.context.notes(plan),
        )
        report = self._report(rated, notes)
        if not alike:
            return report
        return replace(report, rivals=saved.report().rivals, candidates=then.candidates, reshards=then.reshards)

    @staticmethod
    def _report(rated: Rated, notes: Sequence[Note]) -> Report:
        """On a plan that was not searched for."""
        placement = Placement(Contender("chosen", None, rated.costs), (), 0, False)
        return Report.of(rated.cost, rated.sharding, placement, notes=notes)

    def explained(self, plan: AnyPlan, rank: int | None) -> Explanation:
        """Why a rank of a plan, the slowest by default, takes as long as it does."""
        usable, rated = usable_options(self.search_space, self.context.topology.compute_device), self.rated(plan)
        found = explain(self.context, self._given, rated, usable, self.wider, rank)
        notes = (*self.context.notes(rated.options), *self.assumed(rated.options))
        return replace(found, assumptions=tuple(note.text for note in notes if note.code == "assumption"))


def _libraries() -> dict[str, str]:
    return {"dreamshard_planner": __version__, **library_versions()}


@dataclass(frozen=True)
class PlanResult:
    """The plan that a planner made, and all that is asked of it afterwards."""

    model: PlannedModel
    plan: tuple[ShardingOption, ...]
    """One option for every table, with ranks, after callbacks."""
    told: Report | str
    """The report; or why there is none."""
    wider: WiderSpace | None
    """What exact training left out; None where it left out nothing."""

    @property
    def report(self) -> Report:
        """What the plan is, and what it was chosen from; raises DreamShardError where there is none."""
        if isinstance(self.told, str):
            raise DreamShardError(f"there is no report: {self.told}")
        return self.told

    def saved(self, name: str) -> SavedPlan:
        """The plan with all that it was made from, and with its report where there is one."""
        return self.model.saved(self.plan, name, self.told if isinstance(self.told, Report) else None)
