# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The searched plan: over all options of all tables, or for a proposal with one option of each."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from dreamshard_planner.cost.model import Chosen, Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.baseline import BASELINE, TorchRecPlan, torchrec_plan
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.infeasible import infeasible, infeasible_wide
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.policy.network import Policy, policy_starts
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.search.effort import NO_DEADLINE, Deadline, SearchConfig
from dreamshard_planner.search.heuristics import heuristic_placements
from dreamshard_planner.search.laying import lay_wide
from dreamshard_planner.search.packing import pack
from dreamshard_planner.search.search import SearchResult, search
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.options import is_torchrecs, ranks_of, same_options, set_ranks
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.search_space.towers import pin, pinned_options
from dreamshard_planner.search_space.variants import all_sized, other_sizes, uses_host_memory
from dreamshard_planner.support.torch_state import collector_paused, neutral, single_thread

QUICK = SearchConfig(starts=1, reshards=1, reshards_per_table=1, moves=100, last_moves=1, patience=1, effort=0.02)
"""A few steps of one descent."""
WHOLE = "whole_tables"
"""What reports call our plan of whole tables."""


@dataclass(frozen=True)
class SearchSettings:
    """What bounds and seeds the searches for one plan."""

    config: SearchConfig
    seed: int = 0
    deadline: Deadline = NO_DEADLINE
    """Of all of them, on top of their counts of candidates."""


@dataclass(frozen=True)
class PlacedProposal:
    """A proposal, which is one option for every table, with ranks."""

    read: ReadProblem
    cost: Cost
    sharding: Sharding
    rivals: tuple[ReportEntry, ...] = ()
    """The plans that its search started from, feasible or not."""
    result: SearchResult | None = None
    """None where it came with ranks."""

    def is_plan(self, plan: Sequence[ShardingOption]) -> bool:
        """Whether a plan has the same options on the same ranks."""
        try:
            return self.has_options_of(plan) and self.read.sharding(plan) == self.sharding
        except PlannerError:
            return False

    def has_options_of(self, plan: Sequence[ShardingOption]) -> bool:
        """Whether a plan shards the same tables in the same way, on whatever ranks."""
        return same_options([options[0] for options in self.read.options], plan)


def place_proposal(
    context: PlanRater,
    proposal: list[ShardingOption],
    topology: Topology,
    how: SearchSettings,
    packs: bool = True,
    quickly: bool = False,
) -> PlacedProposal:
    """Return ranks for the shards of a proposal: those that it comes with, if they fit, else those of a search. Ranks
    are set on no option but on those of tables that depend on each other.

    Args:
        context: reads and rates options.
        proposal: one option for every table.
        topology: what the storage reservation leaves.
        how: settings.
        packs: whether to pack exactly where nothing else finds room.
        quickly: only so far that many proposals can be compared: a short descent from heuristics.

    Raises:
        PlannerError: the tables do not fit, naming table and missing bytes.
    """
    has_ranks = all(rank is not None for option in proposal for rank in ranks_of(option))
    if not has_ranks and any(option.dependency for option in proposal):
        pin(proposal, topology)
    read = context.read(proposal, topology)
    cost = context.cost(read)
    if has_ranks and cost.problem.fits(given := read.sharding(proposal)):
        return PlacedProposal(read, cost, given)
    chosen = wide_units_laid_down(cost)
    plans: dict[str, Sharding | None] = {
        name: None if assignment_S is None else chosen.placed(assignment_S)
        for name, assignment_S in heuristic_placements(chosen.cost).items()
    }
    rolled_out = None if quickly else partial(_rolled_out, context.checkpoint.policy, how.config.effort, plans)
    starts = [plan for plan in plans.values() if plan is not None]
    config = QUICK if quickly else how.config
    result = search(cost, starts, config, how.seed, None if quickly else how.deadline.left(), rolled_out)
    if result is None:
        packed_S, proven = pack(chosen.cost.problem, how.config.effort if packs else 0.0, how.deadline.left())
        if packed_S is None:
            raise infeasible(chosen.cost.problem, proven, context.splitting_left_out)
        result = search(cost, [chosen.placed(packed_S)], config, how.seed, how.deadline.left())
        assert result is not None  # there is a start
    return PlacedProposal(read, cost, result.sharding, _rated(cost, plans), result)


def wide_units_laid_down(cost: Cost) -> Chosen:
    """Return the placement problem of the units that span one rank, on top of a proposal's wider ones.

    Raises:
        PlannerError: the wider ones do not fit.
    """
    laid = lay_wide(cost, (0,) * cost.problem.num_tables)
    if laid is None:
        raise infeasible_wide(cost.problem)
    return cost.chosen(laid)


@dataclass(frozen=True)
class SearchedPlan:
    """The outcome of a search over all options."""

    proposal: list[ShardingOption]
    """The chosen option of every table, with ranks; where nothing fits, the options that ask least of every memory,
    without ranks: the partitioner then says what is missing."""
    rivals: tuple[ReportEntry, ...]
    """The plans that the search started from, and the baselines of whole tables."""
    result: SearchResult | None
    """None where nothing fits."""
    torchrec: TorchRecPlan | None
    """TorchRec's plan over the same options; None where it found none."""

    @property
    def baseline(self) -> list[ShardingOption] | None:
        """TorchRec's plan, with ranks; None if no plan of TorchRec's was found that fits."""
        fits = any(rival.name == BASELINE and rival.feasible for rival in self.rivals)
        return copy.deepcopy(self.torchrec.options) if self.torchrec is not None and fits else None

    def notes(self) -> tuple[Note, ...]:
        """Return the report's note on TorchRec's plan, if its search was not finished."""
        if self.torchrec is None or self.torchrec.finished:
            return ()
        return noted("search", [f"TorchRec's plan is the best of its first {self.torchrec.proposals} proposals"])


@neutral()
@collector_paused()
@torch.no_grad()
def search_plan(
    context: PlanRater,
    options: Sequence[ShardingOption],
    topology: Topology,
    how: SearchSettings,
    known: SearchedPlan | None = None,
) -> SearchedPlan:
    """Search all options.

    Args:
        context: reads and rates them.
        options: of all tables, with storage.
        topology: what the storage reservation leaves.
        how: settings.
        known: the outcome of a search of fewer options, which this one starts from alone.
    """
    alone: SearchResult | None = None  # of whole tables, where these are all options
    with single_thread():
        if known is None:
            plans, whole = _whole_tables(context, options, topology, how)
            if whole is not None and all(option.sharding_type == TW for option in options):
                options, alone = fastest_whole(options), whole.result  # slower kernels are for what does not fit
            rivals = () if whole is None else whole.rivals
            theirs = None
            if how.deadline.left() != 0.0:
                offered = [option for option in options if is_torchrecs(option)]
                theirs = torchrec_plan(offered, topology, context.estimate_as_torchrec, how.config.effort)
            if theirs is not None:
                plans[BASELINE] = theirs.options
        else:
            plans = {} if known.result is None else {"known": copy.deepcopy(known.proposal)}
            rivals, theirs = known.rivals, known.torchrec
        try:
            pinned = pinned_options(options, topology, plans.get(BASELINE, plans.get("known")))
        except PlannerError:  # towers fit on no host by these options
            return SearchedPlan(_smallest(context.read(options, topology)), rivals, None, theirs)
        read = context.read(pinned, topology)
        cost = context.cost(read)
        starts = {name: start for name, plan in plans.items() if (start := _within(read, plan)) is not None}
        # TorchRec's plan may break placement rules.
        fitting = {name: start for name, start in starts.items() if cost.problem.fits(start)}
        if known is None:
            rivals = (*rivals, *_rated(cost, {name: fitting.get(name) for name in starts}))
        rolled_out = partial(_rolled_out, context.checkpoint.policy, how.config.effort, {})
        further = rolled_out if known is None else None
        result: SearchResult | None
        if alone is not None and _is_best(WHOLE, fitting, cost):
            result = replace(alone, sharding=fitting[WHOLE])
        else:
            result = search(cost, fitting.values(), how.config, how.seed, how.deadline.left(), further)
        for option in pinned:
            set_ranks(option, None)
        if result is None:
            return SearchedPlan(_smallest(context.read(options, topology)), rivals, None, theirs)
        return SearchedPlan(read.assign(result.sharding), rivals, result, theirs)


def with_cache_sizes(
    context: PlanRater,
    options: Sequence[ShardingOption],
    topology: Topology,
    how: SearchSettings,
    found: SearchedPlan,
) -> SearchedPlan:
    """Search once more with caches of other sizes, if some table lies in host memory or nothing fits; never dearer.

    Args:
        context, options, topology, how: see :func:`search_plan`.
        found: the plan with caches of TorchRec's size; no search follows if it took all its time.
    """
    if found.result is not None and not uses_host_memory(found.proposal):
        return found
    sizes = other_sizes(options, context.reader.load_factor)
    if sizes and (found.result is None or not found.result.cut_short):
        context.complete(sizes)
        found = search_plan(context, [*options, *sizes], topology, how, known=found)
    proposal = all_sized(found.proposal, context.reader.load_factor)
    return found if proposal is found.proposal else replace(found, proposal=proposal)


def fastest_whole(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Every table whole where it may be, by its fastest kernel; else its fastest option."""
    best: dict[str, tuple[tuple[bool, float], ShardingOption]] = {}
    for option in options:
        key = (option.sharding_type != TW, option.total_perf)
        if option.fqn not in best or key < best[option.fqn][0]:
            best[option.fqn] = key, option
    return [option for _, option in best.values()]


def _whole_tables(
    context: PlanRater, options: Sequence[ShardingOption], topology: Topology, how: SearchSettings
) -> tuple[dict[str, list[ShardingOption]], PlacedProposal | None]:
    """Return our plan of whole tables, by name, and how it was placed; nothing where whole tables do not fit, since
    others may."""
    whole, left = copy.deepcopy(fastest_whole(options)), how.deadline.left()
    third = replace(how, deadline=Deadline(None if left is None else left / 3))
    try:
        placed = place_proposal(context, whole, topology, third, packs=False)
    except PlannerError:
        return {}, None
    plan = placed.read.assign(placed.sharding)
    if any(option.sharding_type != TW for option in whole):
        placed = replace(placed, rivals=())
    return {WHOLE: plan}, placed


def _is_best(name: str, plans: Mapping[str, Sharding], cost: Cost) -> bool:
    """Return whether none of some plans costs less than the one of this name."""
    return name in plans and min(map(cost.overall_ms, plans.values())) == cost.overall_ms(plans[name])


def _rated(cost: Cost, plans: Mapping[str, Sharding | None]) -> tuple[ReportEntry, ...]:
    return tuple(ReportEntry.of(name, None if plan is None else cost.rate(plan)) for name, plan in plans.items())


def _rolled_out(
    policy: Policy,
    effort: float,
    plans: dict[str, Sharding | None],
    cost: Cost,
    asked: OptionTotals,
    level: Sequence[Sharding],
    seconds: float | None,
) -> list[Sharding]:
    """Return starts by the policy, of which the cheapest is noted among some plans."""
    starts = policy_starts(cost, policy, asked, level, seconds, effort)
    plans["policy"] = starts[0] if starts else None
    return starts


def _within(read: ReadProblem, plan: list[ShardingOption]) -> Sharding | None:
    """A plan as a sharding of the problem; None where it has dependent tables elsewhere than these are pinned."""
    try:
        return read.sharding(plan)
    except PlannerError:
        if any(option.dependency for option in plan):
            return None
        raise


def _smallest(read: ReadProblem) -> list[ShardingOption]:
    """Every table, the largest first, as the option that leaves the least share of any memory used."""
    needs_PM, limits_DM = read.problem.needs_PM.double(), read.problem.limits_DM.double()
    share_PM = needs_PM / limits_DM.clamp_min(0).sum(0).clamp_min(1)
    used_M, proposal = torch.zeros(share_PM.shape[1], dtype=torch.float64), {}
    asked = [[share_PM[choice.parts].sum(0) for choice in choices] for choices in read.problem.tables]
    for table in sorted(range(len(asked)), key=lambda table: -min(float(need_M.max()) for need_M in asked[table])):
        # Among those that need as little in all, what fits more evenly.
        sizes = [
            (float((used_M + need_M).max()), float(share_PM[choice.parts].max()))
            for need_M, choice in zip(asked[table], read.problem.tables[table], strict=True)
        ]
        index = sizes.index(min(sizes))
        used_M += asked[table][index]
        proposal[table] = read.options[table][index]
    return [proposal[table] for table in range(len(asked))]
