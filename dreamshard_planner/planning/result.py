# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The result of one run of TorchRec's loop: the plan with its report, immutable."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torchrec.distributed.planner.types import PlannerError, ShardingOption

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.model_problem import ModelProblem, libraries, planned_constraints
from dreamshard_planner.planning.plan_notes import training_notes
from dreamshard_planner.planning.search_plan import BASELINE, torchrec_plan
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Note, Report, ReportEntry, noted
from dreamshard_planner.plans.stale import differences
from dreamshard_planner.search.search import SearchResult
from dreamshard_planner.search_space.constraints import UNEVEN_OUTPUTS
from dreamshard_planner.search_space.enumeration import sharding_only
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import by_table, fqn_of, is_torchrecs, refused
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.support.formatting import first_of
from dreamshard_planner.support.torch_state import neutral, single_thread

MAX_SHARDS = 4_000
"""Tables times ranks up to which reports have TorchRec's plan over all options, which takes seconds beyond."""


@dataclass(frozen=True)
class SearchRecord:
    """The search that a plan comes from, for its report."""

    notes: tuple[Note, ...] = ()
    rivals: tuple[ReportEntry, ...] = ()
    result: SearchResult | None = None
    is_placed: bool = True
    """True if our partitioner placed the plan."""
    is_changed: bool = False
    """True if callbacks changed the plan afterwards."""
    excludes: bool = False
    """True if exact training may have excluded options."""
    loaded: SavedPlan | None = None
    """The file that the plan comes from, instead of a search."""


@dataclass(frozen=True)
class PlanResult:
    """The plan that a planner made, with its model and report."""

    model: ModelProblem
    plan: tuple[ShardingOption, ...]
    """One option for every table, with ranks, after callbacks."""
    told: Report | str
    """The report, or the reason why there is none."""

    @classmethod
    def of(cls, model: ModelProblem, plan: Sequence[ShardingOption], record: SearchRecord) -> PlanResult:
        """Report on a plan.

        Raises:
            PlannerError: ranks would exchange outputs of different types.
        """
        if mixed := model.mixed_exchanges(plan):
            raise refused(mixed[0])
        try:
            report = _of_search(model, plan, record) if record.loaded is None else _of_file(model, plan, record.loaded)
            return cls(model, tuple(plan), report.noting(_model_notes(model, plan)))
        except PlannerError as error:
            whose = "callbacks changed the last plan to one whose" if record.is_changed else "the last plan's"
            return cls(model, tuple(plan), f"{whose} cost is not known: {error}")

    @property
    def report(self) -> Report:
        """The plan and what it was chosen from; raises DreamShardError if it could not be rated."""
        if isinstance(self.told, str):
            raise DreamShardError(f"there is no report: {self.told}")
        return self.told

    def saved(self, name: str) -> SavedPlan:
        """Return the plan with all its inputs, and with its report if there is one."""
        return self.model.saved(self.plan, name, self.told if isinstance(self.told, Report) else None)


def _of_search(model: ModelProblem, plan: Sequence[ShardingOption], record: SearchRecord) -> Report:
    notes = [*record.notes]
    if record.is_placed:
        notes += noted("placement_rule", () if model.legal is None else model.legal.notes())
        if not any(rival.name == BASELINE and rival.feasible for rival in record.rivals):
            notes += noted("search", ["no plan of TorchRec's that fits was found to compare with"])
    if record.excludes:
        notes += _exact_training_notes(model, plan)
    if record.is_changed or not record.is_placed:
        rated = model.rated(plan)
    else:  # placed shards need no check: a user's enumerator may make placeholders, which TorchRec replaces
        rated = model.context.rated(plan, model.left)
    return model.context.report(rated, notes, record.rivals, record.result)


def _of_file(model: ModelProblem, plan: Sequence[ShardingOption], saved: SavedPlan) -> Report:
    rated, now = model.rated(plan), libraries()
    changed = differences(saved.inputs, model.inputs)
    changed += [f"{name} {was} -> {now.get(name)}" for name, was in saved.libraries.items() if now.get(name) != was]
    then, sources = saved.predicted, (str(rated.cost.compute.source), rated.read.problem.collectives.world.source)
    alike = sources == (then.cost_source, then.collectives_source) and math.isclose(
        then.chosen.total_ms, rated.total_ms, rel_tol=1e-6, abs_tol=1e-6
    )
    others = "" if alike else f"; dreamshard report {saved.name} tells what it was chosen from by the costs of then"
    loaded = f"the plan was loaded from {saved.name}, where its cost is {then.chosen.total_ms:.3f} ms{others}"
    report = model.context.report(
        rated,
        (
            Note("loaded", loaded),
            *noted("stale", [f"since the plan was made: {text}" for text in changed]),
        ),
    )
    if not alike:
        return report
    return replace(report, rivals=then.rivals, candidates=then.candidates, reshards=then.reshards)


def _model_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on any plan of the model: its assumptions, and oddities of the module and its inputs."""
    device = model.ranks.topology.compute_device
    unsharded = [repr(path) if path else "the model itself" for path in model.unsharded]
    uneven = [fqn for fqn, why in model.left_out.items() if TW in why and UNEVEN_OUTPUTS in why.values()]
    return (
        *noted("hardware", filter(None, [model.ranks.hardware])),
        *noted("source", filter(None, [model.settings.recalled])),
        *model.assumptions(plan),
        *noted("table", model.doubtful),
        *noted("unused", model.unused),
        *noted(
            "unused",
            [f"{len(unsharded)} embedding module(s) have no sharder and are not in the plan: {first_of(unsharded)}"]
            * bool(unsharded),
        ),
        *noted("training", training_notes(plan, model.context.reader, device)),
        *noted(
            "table",
            [f"{len(uneven)} table(s) ({first_of(uneven)}) may only lie on all ranks: {UNEVEN_OUTPUTS}"] * bool(uneven),
        ),
    )


@neutral()
@torch.no_grad()
def _exact_training_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> list[Note]:
    """Return a note on the options that exact training excludes, with the cost of TorchRec's plan over all options of
    smaller models."""
    context, opened = _wider_space(model, exact_training=False)
    if not opened:
        return []
    text = f"exact training leaves out {_in_words(opened)} (exact_training=False allows it)"
    figures = {}
    if len(plan) * model.left.world_size <= MAX_SHARDS:
        with single_thread():
            figures["exact_ms"] = exact_ms = context.rated(plan).total_ms
            theirs_ms = _torchrec_ms(model, context, opened, plan)
        if theirs_ms is None:
            text += ": TorchRec's plan over all options is not found"
        else:
            factor = exact_ms / theirs_ms if theirs_ms > 0 else 1.0
            text += (
                f": TorchRec's plan over all options is predicted at {theirs_ms:.3f} ms, this plan at {exact_ms:.3f} "
                f"({factor:.3f} times)"
            )
            figures["torchrec_ms"] = theirs_ms
    _, attached = _wider_space(model, optimizers_attached=True)
    if attached:
        text += f"; optimizers_attached=True allows {_in_words(attached)} and trains exactly"
    return [Note("beyond_exact_training", text, figures)]


def _wider_space(model: ModelProblem, **settings: Any) -> tuple[PlanRater, dict[str, set[str]]]:
    """Return a rater under changed settings, and the sharding types that only these allow, by table name."""
    changed = replace(model.settings, **settings)
    constraints = planned_constraints(changed, model.ranks, model.skeleton, model.sharders, model.legal)
    exact = {name: set(constraint.sharding_types or ()) for name, constraint in model.constraints.items()}
    types = {name: set(one.sharding_types or ()) - exact.get(name, set()) for name, one in constraints.items()}
    return replace(model.context, constraints=constraints), {name: more for name, more in types.items() if more}


def _in_words(opened: Mapping[str, set[str]]) -> str:
    """Return sharding types with their number of tables."""
    counts = Counter(chain.from_iterable(opened.values()))
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in sorted(counts.items()))


def _torchrec_ms(
    model: ModelProblem, context: PlanRater, opened: Collection[str], plan: Sequence[ShardingOption]
) -> float | None:
    """Return the predicted milliseconds of TorchRec's plan over all options; None if there is none.

    Args:
        model: whose own options exclude some.
        context: rates all options.
        opened: names of the tables with excluded options.
        plan: the exact plan.
    """
    tables = shardable_tables(model.skeleton, model.sharders)
    asked = frozenset((id(table.module), table.name) for table in tables if table.name in opened)
    sharders = [sharding_only(asked, sharder) for sharder in model.sharders]
    enumerated = context.enumerator(model.settings.batch_size).enumerate(model.skeleton, sharders)
    searched = model.context.searched_options(model.search_space)
    options = [option for option in searched if option.name not in opened] + context.usable_options(enumerated)
    if not any(map(context.is_guess, plan)):
        options = context.certain_options(options)
    order = {fqn: index for index, fqn in enumerate(by_table(searched))}
    options.sort(key=lambda option: order[fqn_of(option)])
    offered = [option for option in options if is_torchrecs(option)]
    theirs = torchrec_plan(offered, model.left, context.estimate_as_torchrec, model.settings.candidates)
    return None if theirs is None else context.rated(theirs.options).total_ms
