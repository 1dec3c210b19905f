# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a planner keeps of one run of TorchRec's loop: the plan with its report, immutable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.planning.baseline import BASELINE
from dreamshard_planner.planning.exact_notes import forced_out_note, left_out_note
from dreamshard_planner.planning.kept import KeptPlan
from dreamshard_planner.planning.search_plan import PlacedProposal, SearchedPlan
from dreamshard_planner.planning.session import PlanningSession, libraries
from dreamshard_planner.planning.training_notes import training_notes
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Report
from dreamshard_planner.plans.stale import differences
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.search_space.usable_options import never_run
from dreamshard_planner.support.formatting import first_of


@dataclass(frozen=True)
class CameTo:
    """What one run of TorchRec's loop came to."""

    plan: tuple[ShardingOption, ...]
    """The best, after callbacks."""
    made_by: str
    """Who made it where nothing was ``placed``, in words."""
    found: SearchedPlan | None
    """By our proposer."""
    placed: Sequence[PlacedProposal]
    """By our partitioner."""
    kept: KeptPlan | None
    """TorchRec's plan, where it was taken before callbacks."""
    loaded: SavedPlan | None
    """From a file, instead of a search."""
    notes: tuple[Note, ...] = ()
    """Further ones, for the report."""


@dataclass(frozen=True)
class PlanResult:
    """The plan that a planner made, and all that is asked of it afterwards."""

    model: PlanningSession
    plan: tuple[ShardingOption, ...]
    """One option for every table, with ranks, after callbacks."""
    told: Report | str
    """The report; or why there is none."""

    @classmethod
    def of(cls, session: PlanningSession, came_to: CameTo) -> PlanResult:
        """The plan and its report.

        Raises:
            PlannerError: ranks would exchange outputs of different types.
        """
        if mixed := session.mixed_exchanges(came_to.plan):
            more = "" if session.wider is None else f" {session.wider.opened_by} would allow more sharding types."
            raise refused(f"{mixed[0]}{more}")
        try:
            told: Report | str = _report(session, came_to).noting((*_notes(session, came_to.plan), *came_to.notes))
        except _NoReport as why:
            told = str(why)
        return cls(session, came_to.plan, told)

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


def _report(session: PlanningSession, came_to: CameTo) -> Report:
    """With the notes on how the plan was made, and those of its costs."""
    if came_to.loaded is not None:
        return _of_loaded(session, came_to.plan, came_to.loaded)
    if came_to.placed:
        return _of_searched(session, came_to)
    how = f"the plan was {came_to.made_by}" + ("" if came_to.found else "; no other was searched for")
    try:
        return session.rated(came_to.plan).report((*noted("search", [how]), *session.context.notes(came_to.plan)))
    except PlannerError as error:
        raise _NoReport(f"the cost of the last plan is not known: {error}") from error


def _of_searched(session: PlanningSession, came_to: CameTo) -> Report:
    """On a plan that our partitioner placed, as it is after callbacks."""
    plan, found, placed, kept = came_to.plan, came_to.found, came_to.placed, came_to.kept
    outcome = next((one for one in reversed(placed) if one.is_plan(plan)), None)
    changed = outcome is None
    if outcome is None:  # by callbacks: of what TorchRec chose, if only ranks were changed, else of the cheapest
        alike = [one for one in placed if one.has_options_of(plan)]
        outcome = min(alike or placed, key=lambda one: one.cost.overall_ms(one.sharding))
    types = ", ".join(f"{kind} of module {path!r}" for path, kind in session.context.left_out)
    left_out = [f"left out, since ranks would have sent outputs of different types: {types}"] if types else []
    report = Report.of(
        outcome.cost,
        outcome.sharding,
        rivals=outcome.rivals if found is None else found.rivals,
        result=outcome.result if found is None else found.result,
        notes=(*(() if found is None else found.notes()), *noted("search", left_out)),
    )
    ruled = noted("placement_rule", () if session.legal is None else session.legal.notes())
    compared = {report.chosen.name, *(rival.name for rival in report.rivals if rival.feasible)}
    alone = [] if BASELINE in compared else ["no plan of TorchRec's that fits was found to compare with"]
    further = (*session.context.notes(plan), *ruled, *noted("search", alone))
    if not changed:
        return report.noting((*further, *_exact_training(session, plan)))
    try:
        rated = session.rated(plan)
    except PlannerError as error:
        raise _NoReport(f"callbacks changed the last plan to one whose cost is not known: {error}") from error
    how_found = [one for one in report.notes if one.code == "search"]
    if kept is not None:
        report, how_found = kept.beside(report), [*how_found, kept.note()]
    if kept is None or not kept.is_plan(plan):
        verb = "moved tables" if outcome.has_options_of(plan) else "changed options"
        note = f"callbacks {verb} after they were placed; dreamshard is the plan that they made"
        how_found += noted("callbacks", [note])
    return rated.report((*how_found, *further, *_exact_training(session, plan)), report)


def _exact_training(session: PlanningSession, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return what exact training excludes, and what that costs."""
    space, request = session.unrestricted, session.request
    if space is None:
        return ()
    attached = None if session.wider is space else session.wider
    searched = session.context.searched_options(session.search_space)
    return (
        *forced_out_note(space, plan, request.settings.seed, request.seconds),
        left_out_note(space, attached, searched, plan),
    )


def _of_loaded(session: PlanningSession, plan: Sequence[ShardingOption], saved: SavedPlan) -> Report:
    """On a plan of a file."""
    rated, now = session.rated(plan), libraries()
    changed = differences(saved.inputs, session.inputs)
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
        *session.context.notes(plan),
    )
    return rated.report(notes, saved.report() if alike else None)


def _unsharded(paths: Sequence[str]) -> list[str]:
    if not paths:
        return []
    named = [repr(path) if path else "the model itself" for path in paths]
    return [f"{len(paths)} embedding module(s) have no sharder and are not in the plan: {first_of(named, 5)}"]


def _notes(session: PlanningSession, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Of any plan, however it was made: what it takes for granted, and what is odd about the module and its inputs."""
    device = session.request.topology.compute_device
    return (
        *noted("hardware", filter(None, [session.request.hardware])),
        *session.assumptions(plan),
        *noted("table", session.doubtful),
        *noted("unused", session.unused),
        *noted("unused", _unsharded(session.unsharded)),
        *noted("training", training_notes(plan, session.context.reader, device)),
        *noted("table", never_run(session.search_space, device)),
    )
