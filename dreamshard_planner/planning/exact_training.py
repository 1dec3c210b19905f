# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The options that exact training excludes, and notes on what that costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.planning.baseline import torchrec_plan
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.search.effort import SearchConfig
from dreamshard_planner.search.search import search
from dreamshard_planner.search_space.enumeration import sharding_only
from dreamshard_planner.search_space.kernels import memory_of
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import by_table, fqn_of, is_torchrecs, same_option
from dreamshard_planner.support.torch_state import neutral, single_thread

FIGURE_EFFORT = 0.1
"""Share of a plan's candidates that the search for a figure may try."""
NOTHING = 1e-3
"""Share of a cost below which a gain is not told."""
MAX_SHARDS = 4_000
"""Tables times ranks up to which reports have TorchRec's plan over all options, which takes seconds beyond."""


def opened_types(
    exact: Mapping[str, ParameterConstraints], all_types: Mapping[str, ParameterConstraints]
) -> dict[str, set[str]]:
    """Return the sharding types that only the second constraints allow, by table; only of tables that have some."""
    opened = {}
    for name, constraint in all_types.items():
        allowed = exact[name].sharding_types or () if name in exact else ()
        if types := set(constraint.sharding_types or ()) - set(allowed):
            opened[name] = types
    return opened


@dataclass(frozen=True)
class WiderSpace:
    """The options that a model would have without exact training, or with optimizers attached to replicas."""

    context: PlanRater
    """With the wider constraints."""
    module: nn.Module
    """Without weights."""
    sharders: Sequence[ModuleSharder[nn.Module]]
    batch_size: int
    topology: Topology
    """What the storage reservation left."""
    opened: Mapping[str, set[str]]
    """Sharding types that only this space has, by name of the table."""

    def enumerated(self, names: Collection[str]) -> list[ShardingOption]:
        """Return the options of the tables with these names."""
        found = shardable_tables(self.module, self.sharders)
        tables = frozenset((id(table.module), table.name) for table in found if table.name in names)
        sharders = [sharding_only(tables, sharder) for sharder in self.sharders]
        return self.context.enumerator(self.batch_size).enumerate(self.module, sharders)

    def opened_in_words(self) -> str:
        """Return the types that only this space has, and of how many tables."""
        return _counted(sorted(Counter(chain.from_iterable(self.opened.values())).items()))


def _counted(types: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in types)


@neutral()
@torch.no_grad()
def forced_out_note(
    space: WiderSpace, plan: Sequence[ShardingOption], config: SearchConfig, seed: int, seconds: float | None
) -> tuple[Note, ...]:
    """Return a note on tables that only exact training keeps out of device memory; none without such tables.

    A short search, from the plan on, lets the tables outside take the options that exact training excludes.

    Args:
        space: the options without exact training.
        plan: the exact plan, with ranks.
        config: of the search for the plan.
        seed: of the search.
        seconds: cap on the search; None for none.
    """
    outside = {fqn_of(option) for option in plan if memory_of(option.compute_kernel) != "device"}
    named = {option.name for option in plan if fqn_of(option) in outside and option.name in space.opened}
    if space.context.topology.compute_device == "cpu" or not named:
        return ()
    context = space.context
    with single_thread():
        options = [option for option in context.usable_options(space.enumerated(named)) if fqn_of(option) in outside]
        offered = by_table(options)
        options += [one for one in plan if not any(same_option(one, other) for other in offered.get(fqn_of(one), ()))]
        read = context.read(options, space.topology)
        cost, start = context.cost(read), read.sharding(plan)
        found = search(cost, [start], config.times(FIGURE_EFFORT), seed, seconds)
        exact_ms = cost.overall_ms(start)
    if found is None or not found.overall_ms < exact_ms * (1 - NOTHING):
        return ()
    inside = [
        choices[index].sharding_type
        for name, choices, index in zip(read.problem.names, read.problem.tables, found.sharding.options, strict=True)
        if name in outside and memory_of(choices[index].kernel) == "device"
    ]
    if not inside:
        return ()
    lost_ms = exact_ms - found.overall_ms
    text = (
        f"Exact training keeps {len(inside)} table(s) out of device memory, which is predicted to cost {lost_ms:.3f} "
        f"of {exact_ms:.3f} ms. With exact_training=False they would fit: {_counted(Counter(inside).most_common())}"
    )
    return (Note("forced_out", text, {"tables": len(inside), "lost_ms": lost_ms}),)


def left_out_note(
    space: WiderSpace,
    attached: WiderSpace | None,
    searched: Sequence[ShardingOption],
    plan: Sequence[ShardingOption],
    effort: float,
) -> Note:
    """Return a note on the options that exact training excludes; of models up to :data:`MAX_SHARDS`, with the predicted
    cost of TorchRec's plan over all options.

    Args:
        space: the options without exact training.
        attached: the options with optimizers attached to replicas; None if these are no more.
        searched: the options of exact training.
        plan: the exact plan, with ranks.
        effort: multiple of the default's number of TorchRec's proposals.
    """
    text = f"exact training leaves out {space.opened_in_words()} (exact_training=False allows it)"
    figures = {}
    if len(plan) * space.topology.world_size <= MAX_SHARDS:
        exact_ms, theirs_ms = _with_torchrecs(space, searched, plan, effort)
        figures["exact_ms"] = exact_ms
        if theirs_ms is None:
            text += ": TorchRec's plan over all options is not found"
        else:
            factor = exact_ms / theirs_ms if theirs_ms > 0 else 1.0
            text += (
                f": TorchRec's plan over all options is predicted at {theirs_ms:.3f} ms, this plan at {exact_ms:.3f} "
                f"({factor:.3f} times)"
            )
            figures["torchrec_ms"] = theirs_ms
    if attached is not None:
        text += f"; optimizers_attached=True allows {attached.opened_in_words()} and trains exactly"
    return Note("beyond_exact_training", text, figures)


@neutral()
@torch.no_grad()
def _with_torchrecs(
    space: WiderSpace, searched: Sequence[ShardingOption], plan: Sequence[ShardingOption], effort: float
) -> tuple[float, float | None]:
    """Return the predicted milliseconds of a plan, and of TorchRec's plan over all options; None if there is none."""
    context = space.context
    with single_thread():
        options = [option for option in searched if option.name not in space.opened]
        options += context.usable_options(space.enumerated(space.opened))
        if not any(map(context.is_guess, plan)):
            options = context.certain_options(options)
        order = {fqn: index for index, fqn in enumerate(by_table(searched))}
        options.sort(key=lambda option: order[fqn_of(option)])
        offered = [option for option in options if is_torchrecs(option)]
        theirs = torchrec_plan(offered, space.topology, context.estimate_as_torchrec, effort)
        exact_ms = float(context.rated(plan).overall_ms_B[0])
        return exact_ms, None if theirs is None else float(context.rated(theirs.options).overall_ms_B[0])
