# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes on what exact training costs: tables that it keeps out of device memory, and TorchRec's plan without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torchrec.distributed.planner.types import ShardingOption

from dreamshard_planner.planning.baseline import torchrec_plan
from dreamshard_planner.planning.beyond import WiderSpace, counted_types, others
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.search.effort import SearchConfig
from dreamshard_planner.search.search import search
from dreamshard_planner.search_space.kernels import memory_of
from dreamshard_planner.search_space.options import by_table, fqn_of, is_torchrecs
from dreamshard_planner.support.torch_state import neutral, single_thread

QUICK = SearchConfig(starts=2, reshards=6_000, moves=3_000, last_moves=3_000)
"""Settings of a search for a figure, not for a plan."""
NOTHING = 1e-3
"""Share of a cost below which a gain is not told."""


@neutral()
@torch.no_grad()
def forced_out_note(
    space: WiderSpace, plan: Sequence[ShardingOption], seed: int, seconds: float | None
) -> tuple[Note, ...]:
    """Return a note on tables that only exact training keeps out of device memory; none without such tables.

    The same search, from the plan on, lets the tables that lie outside take the options that exact training excludes.

    Args:
        space: the options without exact training.
        plan: the exact plan, with ranks.
        seed: of the search.
        seconds: cap on the search; None for none.
    """
    outside = {fqn_of(option) for option in plan if memory_of(option.compute_kernel) != "device"}
    opened = space.opened_tables
    named = {option.name for option in plan if fqn_of(option) in outside and option.name in opened}
    if space.context.topology.compute_device == "cpu" or not named:
        return ()
    context = space.context
    options = [option for option in context.usable_options(space.enumerated(named)) if fqn_of(option) in outside]
    with single_thread():
        read = context.read([*options, *others(plan, options)], space.topology)
        cost, start = context.cost(read), read.sharding(plan)
        found = search(cost, [start], QUICK, seed, seconds)
        exact_ms = cost.overall_ms(start)
    if found is None or not found.overall_ms < exact_ms * (1 - NOTHING):
        return ()
    chosen = [choices[index] for choices, index in zip(read.problem.tables, found.sharding.options, strict=True)]
    inside = [
        option
        for name, option in zip(read.problem.names, chosen, strict=True)
        if name in outside and memory_of(option.kernel) == "device"
    ]
    if not inside:
        return ()
    lost_ms = exact_ms - found.overall_ms
    kinds = counted_types(Counter(option.sharding_type for option in inside).most_common())
    text = (
        f"Exact training keeps {len(inside)} table(s) out of device memory, which is predicted to cost {lost_ms:.3f} "
        f"of {exact_ms:.3f} ms. With exact_training=False they would fit: {kinds}"
    )
    return (Note("forced_out", text, {"tables": len(inside), "lost_ms": lost_ms}),)


@neutral()
@torch.no_grad()
def left_out_note(
    space: WiderSpace, attached: WiderSpace | None, searched: Sequence[ShardingOption], plan: Sequence[ShardingOption]
) -> Note:
    """Return a note on the options that exact training excludes, with the predicted cost of TorchRec's plan over all.

    Args:
        space: the options without exact training.
        attached: the options with optimizers attached to replicas; None if these are no more.
        searched: the options of exact training.
        plan: the exact plan, with ranks.
    """
    context, opened = space.context, space.opened_tables
    with single_thread():
        options = [option for option in searched if option.name not in opened]
        options += context.usable_options(space.enumerated(opened))
        if not any(map(context.is_guess, plan)):
            options = context.certain_options(options)
        order = {fqn: index for index, fqn in enumerate(by_table(searched))}
        options.sort(key=lambda option: order[fqn_of(option)])
        offered = [option for option in options if is_torchrecs(option)]
        theirs = torchrec_plan(offered, space.topology, context.estimate_as_torchrec)
        exact_ms = float(context.rated(plan).overall_ms_B[0])
        theirs_ms = None if theirs is None else float(context.rated(theirs.options).overall_ms_B[0])
    text = f"exact training leaves out {counted_types(space.opened)} (exact_training=False allows it): TorchRec's plan "
    figures = {"exact_ms": exact_ms}
    if theirs_ms is None:
        text += "over all options is not found"
    else:
        factor = exact_ms / theirs_ms if theirs_ms > 0 else 1.0
        text += f"over all options is predicted at {theirs_ms:.3f} ms, this plan at {exact_ms:.3f} ({factor:.3f} times)"
        figures["torchrec_ms"] = theirs_ms
    if attached is not None:
        text += f"; {attached.opened_by} allows {counted_types(attached.opened)} and trains exactly"
    return Note("beyond_exact_training", text, figures)
