# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The result of one run of TorchRec's loop: the plan with its report, immutable."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torchrec.distributed.planner.types import PlannerError, ShardingOption

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.planning.model_problem import ModelProblem, libraries
from dreamshard_planner.planning.plan_notes import assumptions, exact_training_notes, training_notes
from dreamshard_planner.planning.search_plan import BASELINE
from dreamshard_planner.plans.comparison import differences
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Note, Report, ReportEntry, noted
from dreamshard_planner.search.search import SearchResult
from dreamshard_planner.search_space.allowed_types import UNEVEN_OUTPUTS
from dreamshard_planner.search_space.options import fqn_of, ranks_of, refused
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.support.formatting import first_of

Signatures: TypeAlias = dict[str, tuple[Hashable, tuple[int | None, ...]]]
"""Sharding and ranks of each table, by name."""


def signatures(plan: Iterable[ShardingOption]) -> Signatures:
    """Return the sharding and the ranks of each table; equal for equal plans."""
    return {
        fqn_of(option): (
            (option.sharding_type, option.compute_kernel, option.cache_load_factor, option.num_shards),
            tuple(ranks_of(option)),
        )
        for option in plan
    }


@dataclass(frozen=True)
class ChosenPlan:
    """The plan that the user's callbacks get, and its origin."""

    options: list[ShardingOption]
    """One option for every table, with ranks. Callbacks may change them."""
    signatures: Signatures
    """Sharding and ranks before callbacks."""
    notes: Sequence[Note] = ()
    rivals: Sequence[ReportEntry] = ()
    """Plans that it was chosen from."""
    result: SearchResult | None = None
    """Outcome of the search that found it."""
    is_placed: bool = False
    """True if our partitioner placed it."""
    excludes: bool = False
    """True if exact training may have left options out of the search."""
    loaded: SavedPlan | None = None
    """The file that it comes from, instead of a search."""


@dataclass(frozen=True)
class PlanResult:
    """The plan that a planner made, with its model and report."""

    model: ModelProblem
    plan: tuple[ShardingOption, ...]
    """One option for every table, with ranks, after callbacks."""
    told: Report | str
    """The report, or the reason why there is none."""

    @classmethod
    def of(cls, model: ModelProblem, chosen: ChosenPlan, plan: Sequence[ShardingOption]) -> PlanResult:
        """Report on the plan that callbacks made of the chosen one.

        Raises:
            PlannerError: ranks would exchange outputs of different types.
        """
        if mixed := model.mixed_exchanges(plan):
            raise refused(mixed[0])
        before, after = chosen.signatures, signatures(plan)
        is_changed = chosen.is_placed and before != after
        try:
            if chosen.loaded is not None:
                report = _of_file(model, plan, chosen.loaded)
            else:
                # Placed shards need no check: a user's enumerator may make placeholders, which TorchRec replaces.
                checked = is_changed or not chosen.is_placed
                rated = model.rated(plan) if checked else model.context.rated(plan, model.left)
                notes = [*chosen.notes]
                if chosen.is_placed:
                    notes += noted("placement_rule", () if model.legal is None else model.legal.notes())
                    if not any(rival.name == BASELINE and rival.feasible for rival in chosen.rivals):
                        notes.append(Note("search", "no plan of TorchRec's that fits was found to compare with"))
                if is_changed:
                    same_ways = all(after[fqn][0] == way for fqn, (way, _) in before.items())
                    verb = "moved tables" if same_ways else "changed options"
                    text = f"callbacks {verb} after they were placed; dreamshard is the plan that they made"
                    notes.append(Note("callbacks", text))
                notes += exact_training_notes(model, plan) if chosen.excludes else ()
                report = model.context.report(rated, notes, chosen.rivals, chosen.result)
            return cls(model, tuple(plan), report.noting(_model_notes(model, plan)))
        except PlannerError as error:
            whose = "callbacks changed the last plan to one whose" if is_changed else "the last plan's"
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
        rated, (Note("loaded", loaded), *noted("stale", [f"since the plan was made: {text}" for text in changed]))
    )
    if not alike:
        return report
    return replace(report, rivals=then.rivals, candidates=then.candidates, reshards=then.reshards)


def _model_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return notes on any plan of the model: its assumptions, and oddities of the module and its inputs."""
    unsharded = [repr(path) if path else "the model itself" for path in model.unsharded]
    uneven = [fqn for fqn, why in model.left_out.items() if TW in why and UNEVEN_OUTPUTS in why.values()]
    return (
        *noted("hardware", filter(None, [model.ranks.hardware])),
        *noted("source", filter(None, [model.settings.recalled])),
        *assumptions(model, plan),
        *noted("table", model.doubtful),
        *noted("unused", model.unused),
        *noted(
            "unused",
            [f"{len(unsharded)} embedding module(s) have no sharder and are not in the plan: {first_of(unsharded)}"]
            * bool(unsharded),
        ),
        *noted("training", training_notes(model, plan)),
        *noted(
            "table",
            [f"{len(uneven)} table(s) ({first_of(uneven)}) may only lie on all ranks: {UNEVEN_OUTPUTS}"] * bool(uneven),
        ),
    )
