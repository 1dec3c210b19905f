# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a planner keeps of one run of TorchRec's loop: the plan with its report, immutable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.planning.baseline import BASELINE, BaselineFallback
from dreamshard_planner.planning.exact_training import forced_out_note, left_out_note
from dreamshard_planner.planning.model_problem import ModelProblem, libraries
from dreamshard_planner.planning.plan_notes import training_notes
from dreamshard_planner.planning.search_plan import PlacedProposal, SearchedPlan
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report
from dreamshard_planner.plans.stale import differences
from dreamshard_planner.search_space.constraints import UNEVEN_OUTPUTS
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.search_space.usable_options import never_run
from dreamshard_planner.support.formatting import first_of


@dataclass(frozen=True)
class SearchRecord:
    """What one run of TorchRec's loop came to."""

    plan: tuple[ShardingOption, ...]
    """The best, after callbacks."""
    made_by: str
    """Who made it where nothing was ``placed``, in words."""
    found: SearchedPlan | None
    """By our proposer."""
    placed: Sequence[PlacedProposal]
    """By our partitioner."""
    kept: BaselineFallback | None
    """TorchRec's plan, where it was taken before callbacks."""
    loaded: SavedPlan | None
    """From a file, instead of a search."""
    notes: tuple[Note, ...] = ()
    """Further ones, for the report."""


@dataclass(frozen=True)
class PlanResult:
    """The plan that a planner made, and all that is asked of it afterwards."""

    model: ModelProblem
    plan: tuple[ShardingOption, ...]
    """One option for every table, with ranks, after callbacks."""
    told: Report | str
    """The report; or why there is none."""

    @classmethod
    def of(cls, model: ModelProblem, record: SearchRecord) -> PlanResult:
        """The plan and its report.

        Raises:
            PlannerError: ranks would exchange outputs of different types.
        """
        if mixed := model.mixed_exchanges(record.plan):
            raise refused(mixed[0])
        try:
            told: Report | str = _report(model, record).noting((*_notes(model, record.plan), *record.notes))
        except _NoReport as why:
            told = str(why)
        return cls(model, record.plan, told)

    @property
    def report(self) -> Report:
        """What the plan is, and what it was chosen from; raises DreamShardError where there is none."""
        if isinstance(self.told, str):
            raise DreamShardError(f"there is no report: {self.told}")
        return self.told

    def saved(self, name: str) -> SavedPlan:
        """The plan with all that it was made from, and with its report where there is one."""
        return self.model.saved(self.plan, name, self.told if isinstance(self.told, Report) else None)


class _NoReport(Exception):
    """Why a plan has none, in words."""


def _report(model: ModelProblem, record: SearchRecord) -> Report:
    """With the notes on how the plan was made, and those of its costs."""
    if record.loaded is not None:
        return _of_loaded(model, record.plan, record.loaded)
    if record.placed:
        return _of_searched(model, record)
    how = f"the plan was {record.made_by}" + ("" if record.found else "; no other was searched for")
    try:
        return model.rated(record.plan).report((*noted("search", [how]), *model.context.notes(record.plan)))
    except PlannerError as error:
        raise _NoReport(f"the cost of the last plan is not known: {error}") from error


def _of_searched(model: ModelProblem, record: SearchRecord) -> Report:
    """On a plan that our partitioner placed, as it is after callbacks."""
    plan, found, placed, kept = record.plan, record.found, record.placed, record.kept
    outcome = next((one for one in reversed(placed) if one.is_plan(plan)), None)
    changed = outcome is None
    if outcome is None:  # by callbacks: of what TorchRec chose, if only ranks were changed, else of the cheapest
        alike = [one for one in placed if one.has_options_of(plan)]
        outcome = min(alike or placed, key=lambda one: one.cost.overall_ms(one.sharding))
    report = Report.of(
        outcome.cost,
        outcome.sharding,
        rivals=outcome.rivals if found is None else found.rivals,
        result=outcome.result if found is None else found.result,
        notes=() if found is None else found.notes(),
    )
    ruled = noted("placement_rule", () if model.legal is None else model.legal.notes())
    compared = {report.chosen.name, *(rival.name for rival in report.rivals if rival.feasible)}
    alone = [] if BASELINE in compared else ["no plan of TorchRec's that fits was found to compare with"]
    further = (*model.context.notes(plan), *ruled, *noted("search", alone))
    if not changed:
        return report.noting((*further, *_exact_training(model, plan)))
    try:
        rated = model.rated(plan)
    except PlannerError as error:
        raise _NoReport(f"callbacks changed the last plan to one whose cost is not known: {error}") from error
    how_found = [one for one in report.notes if one.code == "search"]
    if kept is not None:
        report, how_found = kept.beside(report), [*how_found, kept.note()]
    if kept is None or not kept.is_plan(plan):
        verb = "moved tables" if outcome.has_options_of(plan) else "changed options"
        note = f"callbacks {verb} after they were placed; dreamshard is the plan that they made"
        how_found += noted("callbacks", [note])
    return rated.report((*how_found, *further, *_exact_training(model, plan)), report)


def _exact_training(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return what exact training excludes, and what that costs."""
    space = model.unrestricted
    if space is None:
        return ()
    searched = model.context.searched_options(model.search_space)
    settings = model.settings
    return (
        *forced_out_note(space, plan, settings.search, settings.seed, settings.seconds),
        left_out_note(space, model.attached, searched, plan, settings.candidates),
    )


def _of_loaded(model: ModelProblem, plan: Sequence[ShardingOption], saved: SavedPlan) -> Report:
    """On a plan of a file."""
    rated, now = model.rated(plan), libraries()
    changed = differences(saved.inputs, model.inputs)
    changed += [f"{name} {was} -> {now.get(name)}" for name, was in saved.libraries.items() if now.get(name) != was]
    then, sources = saved.predicted, (str(rated.cost.compute.source), rated.read.problem.collectives.world.source)
    alike = sources == (then.cost_source, then.collectives_source) and math.isclose(
        then.chosen.total_ms, float(rated.costs.overall_ms_B[0]), rel_tol=1e-6, abs_tol=1e-6
    )
    others = "" if alike else f"; dreamshard report {saved.name} tells what it was chosen from by the costs of then"
    loaded = f"the plan was loaded from {saved.name}, where its cost is {then.chosen.total_ms:.3f} ms{others}"
    notes = (
        Note("loaded", loaded),
        *noted("stale", [f"since the plan was made: {text}" for text in changed]),
        *model.context.notes(plan),
    )
    return rated.report(notes, saved.report() if alike else None)


def _unsharded(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    named = [repr(path) if path else "the model itself" for path in paths]
    return [f"{len(paths)} embedding module(s) have no sharder and are not in the plan: {first_of(named)}"]


def _uneven(model: ModelProblem) -> list[str]:
    """Return a note on tables whose outputs, of another type than float32, leave them few sharding types."""
    named = [fqn for fqn, why in model.left_out.items() if TW in why and UNEVEN_OUTPUTS in why.values()]
    return [f"{len(named)} table(s) ({first_of(named)}) may only lie on all ranks: {UNEVEN_OUTPUTS}"] if named else []


def _notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Of any plan, however it was made: what it takes for granted, and what is odd about the module and its inputs."""
    device = model.ranks.topology.compute_device
    return (
        *noted("hardware", filter(None, [model.ranks.hardware])),
        *model.assumptions(plan),
        *noted("table", model.doubtful),
        *noted("unused", model.unused),
        *noted("unused", _unsharded(model.unsharded)),
        *noted("training", training_notes(plan, model.context.reader, device)),
        *noted("table", _uneven(model)),
        *noted("table", never_run(model.search_space, device)),
    )
