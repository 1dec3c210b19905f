# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What sharding types that train differently would gain: the same search over them as well, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology

from dreamshard_planner.cost.sharding import Sharding
from dreamshard_planner.planning.baseline import torchrec_plan
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.plans.report import BeyondExactTraining
from dreamshard_planner.problem.options import by_table, fqn_of, same_option
from dreamshard_planner.search.joint import JointConfig, joint_search
from dreamshard_planner.search.local_search import SearchConfig
from dreamshard_planner.search_space.slices import is_torchrecs
from dreamshard_planner.search_space.usable_options import usable_options
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.torchrec_components.partitioner import Outcome

QUICK = JointConfig(starts=2, reshards=6_000, candidates=3_000)
"""Of the search: a figure for a report, not a plan."""


def opened_types(
    exact: Mapping[str, ParameterConstraints], all_types: Mapping[str, ParameterConstraints]
) -> tuple[tuple[str, int], ...]:
    """Sharding types that only the second constraints allow, and for how many tables."""
    counts: Counter[str] = Counter()
    for name, constraint in all_types.items():
        allowed = exact[name].sharding_types or () if name in exact else ()
        counts.update(set(constraint.sharding_types or ()) - set(allowed))
    return tuple(sorted(counts.items()))


@neutral()
@torch.no_grad()
def beyond_exact_training(
    context: PlanningContext,
    search_space: Sequence[ShardingOption],
    topology: Topology,
    opened: tuple[tuple[str, int], ...],
    search: SearchConfig,
    seed: int,
    outcome: Outcome,
) -> BeyondExactTraining:
    """Search the options of all types, from the exact plan on.

    Args:
        context: of the exact plan.
        search_space: options of all types, with storage.
        topology: what the storage reservation left.
        opened: see :class:`BeyondExactTraining`.
        search: of moves and swaps.
        seed: of the search.
        outcome: the exact plan.
    """
    with single_thread():
        options = usable_options(search_space, context.topology.compute_device)
        plan = outcome.read.assign(outcome.sharding)
        read = context.read([*options, *_others(plan, options)], topology)
        cost = context.cost(read)
        exact = read.sharding(plan)
        found = joint_search(cost, [exact], QUICK, search, seed)
        offered = [option for option in options if is_torchrecs(option)]
        theirs = torchrec_plan(offered, topology, context.estimate_as_torchrec)
    theirs_ms = None if theirs is None else cost.overall_ms(read.sharding(theirs.options))
    types = Counter(_kinds(read.problem.tables, found.sharding)).most_common()
    return BeyondExactTraining(opened, found.overall_ms, tuple(types), theirs_ms)


def _others(plan: Sequence[ShardingOption], options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Options of a plan that are not among those given: proposers of others use what ours has no use for."""
    given = by_table(options)
    return [option for option in plan if not any(same_option(option, other) for other in given.get(fqn_of(option), ()))]


def _kinds(tables: Sequence[Sequence], sharding: Sharding) -> list[str]:
    return [options[index].sharding_type for options, index in zip(tables, sharding.options, strict=True)]
