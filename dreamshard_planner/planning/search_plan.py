# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Search for a plan among all options of all tables, or for the ranks of a proposal; and TorchRec's own plan."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import torch
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from dreamshard_planner.cost.problem import Cost, Sharding
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.planning.rater import PlanRater, RatedPlan
from dreamshard_planner.plans.report import Note, ReportEntry
from dreamshard_planner.policy.network import policy_starts
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.search.effort import SearchSettings, portion
from dreamshard_planner.search.search import Further, SearchResult, search
from dreamshard_planner.search.starts import heuristic_placements, place_wide_units
from dreamshard_planner.search_space.options import by_table, counted, is_torchrecs, ranks_of
from dreamshard_planner.search_space.sharding_types import TW, in_host_memory
from dreamshard_planner.search_space.variants import all_sized, other_sizes
from dreamshard_planner.support.reproducible import collector_paused, neutral, single_thread

QUICK = 0.002
"""Effort of a few steps of one descent."""
WHOLE = "whole_tables"
"""Name of our plan of whole tables in reports."""
BASELINE = "torchrec"
"""Name of TorchRec's plan in reports."""
TORCHREC_DEFAULT = "torchrec_default"
"""Name of the plan that TorchRec makes without lookups per sample, as most run it."""
MAX_PROPOSALS = 64
SHARDS_PROPOSED = 200_000
"""Tables x ranks x proposals to try, about a second; a count, so that plans repeat."""
LEAST_PROPOSALS = 4
SHARDS_OF_ONE = 2_000_000
"""Tables x ranks from which on a single proposal is tried."""


def place_proposal(
    rater: PlanRater,
    proposal: list[ShardingOption],
    topology: Topology,
    settings: SearchSettings,
    quickly: bool = False,
) -> RatedPlan:
    """Find ranks for the shards of a proposal: its own, if they fit, else those of a search.

    No rank is set on the options.

    Args:
        rater: reads and rates options.
        proposal: one option for every table.
        topology: with the memory that the storage reservation left.
        settings: bounds and seed of the search.
        quickly: whether a short descent from heuristics is enough, to compare many proposals.

    Raises:
        PlannerError: the tables do not fit; names table and missing bytes.
    """
    has_ranks = all(rank is not None for option in proposal for rank in ranks_of(option))
    read = rater.read(proposal, topology)
    cost = rater.cost(read)
    if has_ranks and cost.problem.fits(given := read.sharding(proposal)):
        return RatedPlan(read, cost, given)
    laid = place_wide_units(cost, (0,) * cost.problem.num_tables)
    if laid is None:
        raise infeasible(cost.problem, rater.splitting_left_out)
    chosen = cost.chosen(laid)
    plans: dict[str, Sharding | None] = {
        name: None if assignment_S is None else chosen.placed(assignment_S)
        for name, assignment_S in heuristic_placements(chosen.cost).items()
    }
    starts = [plan for plan in plans.values() if plan is not None]
    if quickly:
        result = search(cost, starts, replace(settings, effort=QUICK, seconds=math.inf))
    else:
        result = search(cost, starts, settings, _roll_outs(rater))
    if result is None:
        raise infeasible(chosen.cost.problem, rater.splitting_left_out)
    plans |= _cheapest_roll_out(result)
    return RatedPlan(read, cost, result.sharding, _rated(cost, plans), result)


@dataclass(frozen=True)
class TorchRecPlan:
    """The best plan that TorchRec found."""

    options: list[ShardingOption]
    """One option for every table, with ranks."""
    proposals: int
    """Number of proposals tried."""
    finished: bool
    """True if the proposers had no further proposals."""

    def notes(self) -> tuple[Note, ...]:
        """Return the report's note on an unfinished search."""
        tried = f"{self.proposals:,} proposal{'s' * (self.proposals != 1)}"
        text = f"TorchRec's search was stopped after {tried}; this is its best plan"
        return () if self.finished else (Note("search", text),)


def torchrec_plan(
    search_space: Sequence[ShardingOption], topology: Topology, effort: float = 1.0
) -> TorchRecPlan | None:
    """Return the plan that TorchRec's planner would choose among the options; None if no proposal fits.

    Args:
        search_space: options with TorchRec's estimates; not changed.
        topology: with the memory that the storage reservation left.
        effort: number of proposals, as a multiple of the default's; below 1 it counts as 1, since a baseline that was
            hardly searched for would flatter our plan.
    """
    size = len({option.fqn for option in search_space}) * topology.world_size
    least = LEAST_PROPOSALS if size < SHARDS_OF_ONE else 1
    # Shared evenly by TorchRec's four proposers.
    proposals = portion(max(least, min(MAX_PROPOSALS, SHARDS_PROPOSED // size)), max(1.0, effort))
    read: list[Any] = [_AsRead(option) for option in search_space]
    best: tuple[float, list[ShardingOption]] | None = None
    proposers = GreedyProposer(), UniformProposer(), GreedyProposer(use_depth=False), GridSearchProposer()
    tried, finished = 0, True
    rated: dict[tuple[int, ...], float | None] = {}
    for index, proposer in enumerate(proposers):
        limit = tried + -(-(proposals - tried) // (len(proposers) - index))
        if tried == proposals:
            finished = False
            break
        proposer.load(search_space=read)
        while proposal := proposer.propose():
            if tried >= limit:
                finished = False
                break
            # Proposals that another proposer has made already cost nothing, as in TorchRec's planner.
            key = tuple(sorted(map(id, proposal)))
            if key not in rated:
                plan = [copy.deepcopy(one.option) for one in proposal]
                rated[key] = rating = _rating(plan, topology)
                tried += 1
                if rating is not None and (best is None or rating < best[0]):
                    best = rating, plan
            rating = rated[key]
            proposer.feedback(rating is not None, proposal, rating, topology)
    return None if best is None else TorchRecPlan(best[1], tried, finished)


class _AsRead:
    """An option as TorchRec's proposers read it, with equal shards as one object."""

    def __init__(self, option: ShardingOption) -> None:
        self.option, self.fqn, self.sharding_type = option, option.fqn, option.sharding_type
        self.shards = [*chain.from_iterable(repeat(shard, count) for shard, count in counted(option))]


def _rating(proposal: list[ShardingOption], topology: Topology) -> float | None:
    """Partition and rate a proposal; return None if it does not fit."""
    try:
        return NoopPerfModel(topology).rate(GreedyPerfPartitioner().partition(proposal, topology))
    except PlannerError:
        return None


@dataclass(frozen=True)
class SearchedPlan:
    """The outcome of a search over all options."""

    proposal: list[ShardingOption]
    """The chosen option of every table, with ranks, which TorchRec's loop removes at its end. If nothing fits, the
    options that ask least of every memory, without ranks: the partitioner then names the missing bytes."""
    rivals: tuple[ReportEntry, ...]
    """The plans that the search started from, and the baselines of whole tables."""
    result: SearchResult | None
    """None if nothing fits."""
    torchrec: TorchRecPlan | None
    """TorchRec's plan over the same options; None if none was found."""
    baseline: list[ShardingOption] | None
    """TorchRec's plan, with ranks; None without one that fits."""


@neutral()
@collector_paused()
@torch.no_grad()
def search_plan(
    rater: PlanRater, search_space: Sequence[ShardingOption], topology: Topology, settings: SearchSettings
) -> SearchedPlan:
    """Search all options; those whose cost is a guess only if nothing fits otherwise.

    Args:
        rater: reads and rates options.
        search_space: options of all tables, with storage. The chosen ones get ranks.
        topology: with the memory that the storage reservation left.
        settings: bounds and seed of the searches, all of which share the seconds.
    """
    options, until = rater.certain_options(search_space), time.monotonic() + settings.seconds
    with single_thread():
        found = _searched(rater, options, topology, settings, until)
        if found.result is None and len(options) < len(search_space):
            found = _searched(rater, search_space, topology, settings, until)
    return found


def _searched(
    rater: PlanRater, options: Sequence[ShardingOption], topology: Topology, settings: SearchSettings, until: float
) -> SearchedPlan:
    plans: dict[str, list[ShardingOption]] = {}
    rivals: tuple[ReportEntry, ...] = ()
    theirs: TorchRecPlan | None = None
    sizes = _cache_sizes(rater, options, topology)
    fastest = _fastest_whole(rater, options)
    third = replace(settings, seconds=(until - time.monotonic()) / 3)
    whole = _whole_tables(rater, copy.deepcopy(fastest), topology, third)
    alone: SearchResult | None = None  # the search for whole tables, if these are all options
    if whole is not None:
        plans[WHOLE], rivals = whole.options, whole.rivals
        if all(option.sharding_type == TW for option in options):
            # Slower kernels are for what does not fit.
            options, alone = fastest, None if sizes else whole.result
    if time.monotonic() < until:
        offered = [option for option in options if is_torchrecs(option)]
        theirs = torchrec_plan(offered, topology, settings.effort)
        if theirs is not None:
            plans[BASELINE] = theirs.options
        untold = rater.with_one_lookup(offered)
        if untold and (default := torchrec_plan(untold, topology, settings.effort)) is not None:
            plans[TORCHREC_DEFAULT] = default.options
    options = [*options, *sizes]
    read = rater.read(options, topology)
    cost = rater.cost(read)
    starts = {name: read.sharding(plan) for name, plan in plans.items()}
    # TorchRec's plan may break placement rules.
    fitting = {name: start for name, start in starts.items() if cost.problem.fits(start)}
    rivals = (*rivals, *_rated(cost, {name: fitting.get(name) for name in starts}))
    result: SearchResult | None
    if alone is not None and _is_best(WHOLE, fitting, cost):
        result = replace(alone, sharding=fitting[WHOLE])
    else:
        rest = replace(settings, seconds=until - time.monotonic())
        result = search(cost, fitting.values(), rest, _roll_outs(rater))
        drafts = _cheapest_roll_out(result)
        # A roll-out over all options takes the place of the one over whole tables.
        rivals = (*(one for one in rivals if one.name not in drafts), *_rated(cost, drafts))
    baseline = plans[BASELINE] if BASELINE in fitting else None
    if result is None:
        return SearchedPlan(_smallest(read), rivals, None, theirs, baseline)
    proposal = all_sized(read.assign(result.sharding), rater.reader.load_factor)
    return SearchedPlan(proposal, rivals, result, theirs, baseline)


def _cache_sizes(rater: PlanRater, options: Sequence[ShardingOption], topology: Topology) -> Sequence[ShardingOption]:
    """Return options with caches of other sizes than TorchRec's, if the devices cannot hold all tables."""
    room = sum(max(0, device.storage.hbm) for device in topology.devices)
    need = 0.0
    for choices in by_table(options).values():
        on_device = [option for option in choices if not in_host_memory(option.compute_kernel)]
        need += min((option.total_storage.hbm for option in on_device), default=float("inf"))
    if need <= room:
        return ()
    sizes = other_sizes(options, rater.reader.load_factor)
    rater.estimate_missing(sizes)
    return sizes


def _fastest_whole(rater: PlanRater, options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Return the fastest whole option of each table, or its fastest option if it may not be whole."""
    tables = [[one for one in choices if one.sharding_type == TW] or choices for choices in by_table(options).values()]
    alone_ms = iter(rater.alone_ms([*chain.from_iterable(tables)]))
    each_ms = [[next(alone_ms) for _ in choices] for choices in tables]
    return [choices[each.index(min(each))] for choices, each in zip(tables, each_ms, strict=True)]


def _whole_tables(
    rater: PlanRater, whole: list[ShardingOption], topology: Topology, settings: SearchSettings
) -> RatedPlan | None:
    """Return our plan of whole tables, which get ranks; None if they do not fit, since other options may."""
    try:
        placed = place_proposal(rater, whole, topology, settings)
    except PlannerError:
        return None
    placed.read.assign(placed.sharding)
    return placed if all(option.sharding_type == TW for option in whole) else replace(placed, rivals=())


def _is_best(name: str, plans: Mapping[str, Sharding], cost: Cost) -> bool:
    """Return whether no plan costs less than the one of this name."""
    return name in plans and min(map(cost.overall_ms, plans.values())) == cost.overall_ms(plans[name])


def _rated(cost: Cost, plans: Mapping[str, Sharding | None]) -> tuple[ReportEntry, ...]:
    return tuple(ReportEntry.of(name, None if plan is None else cost.rate(plan)) for name, plan in plans.items())


def _roll_outs(rater: PlanRater) -> Further:
    """Return a maker of starts by the policy, the cheapest first."""
    return lambda cost, asked, seconds: policy_starts(cost, rater.ranks.checkpoint.policy, asked, seconds)


def _cheapest_roll_out(result: SearchResult | None) -> dict[str, Sharding]:
    return {"policy": result.further[0]} if result is not None and result.further else {}


def _smallest(read: ReadProblem) -> list[ShardingOption]:
    """Return for every table, the largest first, the option that leaves the least share of any memory used."""
    needs_PM, limits_DM = read.problem.needs_PM.double(), read.problem.limits_DM.double()
    share_PM = needs_PM / limits_DM.clamp_min(0).sum(0).clamp_min(1)
    used_M, proposal = torch.zeros(share_PM.shape[1], dtype=torch.float64), {}
    asked = [[share_PM[choice.parts].sum(0) for choice in choices] for choices in read.problem.tables]
    for table in sorted(range(len(asked)), key=lambda table: -min(float(need_M.max()) for need_M in asked[table])):
        # Among options that need as little in all, the one with the smallest parts.
        sizes = [
            (float((used_M + need_M).max()), float(share_PM[choice.parts].max()))
            for need_M, choice in zip(asked[table], read.problem.tables[table], strict=True)
        ]
        index = sizes.index(min(sizes))
        used_M += asked[table][index]
        proposal[table] = read.options[table][index]
    return [proposal[table] for table in range(len(asked))]
