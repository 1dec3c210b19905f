# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The search over all options of all tables: from the plans of whole tables and of TorchRec, how each table is split
and where its shards go."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.baseline import BASELINE, WHOLE_BASELINE, TorchRecPlan, torchrec_plan
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.placing import Countdown, place_proposal
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.policy.joint_network import joint_starts, shipped_joint_policy
from dreamshard_planner.policy.place import Contender
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.search.joint import DEFAULT_JOINT, JointResult, joint_search
from dreamshard_planner.search.local_search import SearchConfig
from dreamshard_planner.search.starts import JointOptions
from dreamshard_planner.search_space.options import is_torchrecs, set_ranks
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.search_space.towers import pinned_options
from dreamshard_planner.search_space.variants import all_sized, other_sizes, uses_host_memory
from dreamshard_planner.support.torch_state import collector_paused, neutral, single_thread


@dataclass(frozen=True)
class HowToSearch:
    """Settings of the search over all options."""

    moves: SearchConfig
    """Of moves and swaps."""
    effort: float
    """Multiple of the default's candidates, for all else."""
    seed: int
    stage_seconds: float | None
    """For the plan of whole tables."""
    clock: Countdown
    """Of the joint searches, which share as much."""

    @property
    def has_time(self) -> bool:
        """Whether any is left for starts that no cap ends: TorchRec's plan, and roll-outs."""
        return self.stage_seconds != 0.0


@dataclass(frozen=True)
class JointPlan:
    """What the search over all options came to."""

    proposal: list[ShardingOption]
    """The chosen option of every table, with ranks; where nothing fits, the options that ask least of every memory,
    without ranks: the partitioner then says what is missing."""
    rivals: tuple[Contender, ...]
    """The plans that the search started from, and the baselines of whole tables."""
    result: JointResult | None
    """None where nothing fits."""
    torchrec: TorchRecPlan | None
    """TorchRec's plan over the same options; None where it found none."""

    def notes(self) -> tuple[Note, ...]:
        """For the report: what was cut short."""
        notes = []
        if self.result is not None and self.result.cut_short:
            notes.append(
                "the joint search was cut short (search_seconds, timeout_seconds); more time may give another plan"
            )
        if self.torchrec is not None and not self.torchrec.finished:
            notes.append(f"TorchRec's plan is the best of its first {self.torchrec.proposals} proposals")
        return noted("search", notes)


@neutral()
@collector_paused()
@torch.no_grad()
def joint_plan(
    context: PlanningContext,
    options: Sequence[ShardingOption],
    topology: Topology,
    how: HowToSearch,
    known: JointPlan | None = None,
) -> JointPlan:
    """Search all options.

    Args:
        context: reads and rates them.
        options: of all tables, with storage.
        topology: what the storage reservation leaves.
        how: settings.
        known: what a search of fewer options came to, which this one starts from alone.
    """
    with single_thread():
        if known is None:
            plans, rivals = _whole_tables(context, options, topology, how)
            offered = [option for option in options if is_torchrecs(option)]
            theirs = None
            if how.has_time:
                theirs = torchrec_plan(offered, topology, context.estimate_as_torchrec, how.effort)
            if theirs is not None:
                plans[BASELINE] = theirs.options
        else:
            plans = {} if known.result is None else {"known": copy.deepcopy(known.proposal)}
            rivals, theirs = known.rivals, known.torchrec
        rated: dict[str, Contender] = {}
        best: tuple[ReadProblem, JointResult] | None = None
        for pinned in pinned_options(options, topology, plans.get(BASELINE, plans.get("known"))):
            read = context.read(pinned, topology)
            cost = context.cost(read)
            starts = {name: start for name, plan in plans.items() if (start := _within(read, plan)) is not None}
            # TorchRec's plan may break placement rules.
            fitting = {name: start for name, start in starts.items() if cost.problem.fits(start)}
            costs = {name: cost.rate(start) for name, start in fitting.items()}
            if known is None:
                rated.update({name: Contender(name, None, costs.get(name)) for name in starts})
            further = partial(_rolled_out, how.effort) if known is None and how.has_time else None
            config = DEFAULT_JOINT.times(how.effort)
            result = joint_search(cost, fitting.values(), config, how.moves, how.seed, how.clock.left(), further)
            if result is not None and (best is None or result.overall_ms < best[1].overall_ms):
                best = read, result
            for option in pinned:
                set_ranks(option, None)
        rivals = (*rivals, *rated.values())
        if best is None:
            return JointPlan(_smallest(context.read(options, topology)), rivals, None, theirs)
        read, result = best
        return JointPlan(read.assign(result.sharding), rivals, result, theirs)


def with_cache_sizes(
    context: PlanningContext,
    options: Sequence[ShardingOption],
    topology: Topology,
    how: HowToSearch,
    found: JointPlan,
) -> JointPlan:
    """Search once more with caches of other sizes, if some table lies in host memory or nothing fits; never dearer.

    Args:
        context, options, topology, how: see :func:`joint_plan`.
        found: the plan with caches of TorchRec's size; no search follows if it took all its time.
    """
    if found.result is not None and not uses_host_memory(found.proposal):
        return found
    sizes = other_sizes(options, context.reader.load_factor)
    if sizes and (found.result is None or not found.result.cut_short):
        context.complete(sizes)
        found = joint_plan(context, [*options, *sizes], topology, how, known=found)
    proposal = all_sized(found.proposal, context.reader.load_factor)
    return found if proposal is found.proposal else replace(found, proposal=proposal)


def as_found(
    context: PlanningContext, options: Sequence[ShardingOption], topology: Topology, plan: list[ShardingOption] | None
) -> JointPlan:
    """A plan with ranks, of these options, as a search without rivals would have found it; None: nothing fits."""
    if plan is None:
        return JointPlan([], (), None, None)
    read = context.read(options, topology)
    sharding = read.sharding(plan)
    return JointPlan(plan, (), JointResult(sharding, context.cost(read).overall_ms(sharding), 0, 0), None)


def fastest_whole(options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Every table whole where it may be, by its fastest kernel; else its fastest option."""
    best: dict[str, tuple[tuple[bool, float], ShardingOption]] = {}
    for option in options:
        key = (option.sharding_type != TW, option.total_perf)
        if option.fqn not in best or key < best[option.fqn][0]:
            best[option.fqn] = key, option
    return [option for _, option in best.values()]


def _whole_tables(
    context: PlanningContext, options: Sequence[ShardingOption], topology: Topology, how: HowToSearch
) -> tuple[dict[str, list[ShardingOption]], tuple[Contender, ...]]:
    """Our plan of whole tables, by name, and the baselines that it was compared with; nothing where whole tables do not
    fit, since others may."""
    whole = copy.deepcopy(fastest_whole(options))
    try:
        outcome = place_proposal(
            context, whole, topology, how.moves, seed=how.seed, seconds=how.stage_seconds, packing=0.0
        )
    except PlannerError:
        return {}, ()
    plans = {"whole_tables": outcome.read.assign(outcome.sharding)}
    if any(option.sharding_type != TW for option in whole):
        return plans, ()
    named = {BASELINE: WHOLE_BASELINE}
    return plans, tuple(replace(rival, name=named.get(rival.name, rival.name)) for rival in outcome.placement.rivals)


def _rolled_out(
    effort: float, cost: Cost, asked: JointOptions, level: Sequence[Sharding], seconds: float | None
) -> list[Sharding]:
    """Starts by the joint policy that ships."""
    return joint_starts(cost, shipped_joint_policy(), asked, level, seconds, effort)


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
