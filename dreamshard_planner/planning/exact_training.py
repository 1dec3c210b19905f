# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes on the options that exact training leaves out: their types, and what they would gain by prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.model_problem import ModelProblem, planned_constraints
from dreamshard_planner.planning.search_plan import torchrec_plan
from dreamshard_planner.plans.report import Note
from dreamshard_planner.search.search import search
from dreamshard_planner.search_space.enumeration import sharding_only
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import by_table, fqn_of, is_torchrecs, same_option
from dreamshard_planner.search_space.sharding_types import memory_of
from dreamshard_planner.support.torch_state import neutral, single_thread

FIGURE_EFFORT = 0.1
"""Candidates of the search for a figure, as a share of the plan's."""
NOTHING = 1e-3
"""Share of a cost below which a gain is not reported."""
MAX_SHARDS = 4_000
"""Tables times ranks up to which reports have TorchRec's plan over all options, which takes seconds beyond."""


@neutral()
@torch.no_grad()
def exact_training_notes(model: ModelProblem, plan: Sequence[ShardingOption]) -> list[Note]:
    """Return notes on the options that exact training excludes from the search for a plan with ranks."""
    wider = _WiderSpace.of(model, exact_training=False)
    if not wider.opened:
        return []
    with single_thread():
        return [*_forced_out(model, wider, plan), _left_out(model, wider, plan)]


@dataclass(frozen=True)
class _WiderSpace:
    """The options of a model under other settings."""

    model: ModelProblem
    context: PlanRater
    """Rates options within the wider constraints."""
    opened: Mapping[str, set[str]]
    """Sharding types that only this space has, by table name."""

    @classmethod
    def of(cls, model: ModelProblem, **settings: Any) -> _WiderSpace:
        """Widen the options of a model by changed settings."""
        tables = shardable_tables(model.skeleton, model.sharders)
        constraints = planned_constraints(replace(model.settings, **settings), model.ranks, tables, model.legal)
        known: Mapping[str, ParameterConstraints] = model.context.constraints or {}
        exact = {name: set(constraint.sharding_types or ()) for name, constraint in known.items()}
        opened = {
            name: types
            for name, constraint in constraints.items()
            if (types := set(constraint.sharding_types or ()) - exact.get(name, set()))
        }
        return cls(model, replace(model.context, constraints=constraints), opened)

    def enumerated(self, names: Collection[str]) -> list[ShardingOption]:
        """Return the options of the tables with these names."""
        module, given = self.model.skeleton, self.model.sharders
        tables = frozenset((id(t.module), t.name) for t in shardable_tables(module, given) if t.name in names)
        sharders = [sharding_only(tables, sharder) for sharder in given]
        enumerator = self.context.enumerator(self.model.settings.batch_size)
        return self.context.usable_options(enumerator.enumerate(module, sharders))

    def opened_in_words(self) -> str:
        """Return the types that only this space has, with their number of tables."""
        return _counted(sorted(Counter(chain.from_iterable(self.opened.values())).items()))


def _counted(types: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in types)


def _forced_out(model: ModelProblem, wider: _WiderSpace, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
    """Return a note on tables that only exact training keeps out of device memory, if there are any.

    A short search from the plan lets these tables take the options that exact training excludes.
    """
    outside = {fqn_of(option) for option in plan if memory_of(option.compute_kernel) != "device"}
    named = {option.name for option in plan if fqn_of(option) in outside and option.name in wider.opened}
    if model.ranks.topology.compute_device == "cpu" or not named:
        return ()
    options = [option for option in wider.enumerated(named) if fqn_of(option) in outside]
    offered = by_table(options)
    options += [one for one in plan if not any(same_option(one, other) for other in offered.get(fqn_of(one), ()))]
    read = wider.context.read(options, model.left)
    cost, start, settings = wider.context.cost(read), read.sharding(plan), model.settings
    found = search(cost, [start], settings.search.times(FIGURE_EFFORT), settings.seed, settings.seconds)
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


def _left_out(model: ModelProblem, wider: _WiderSpace, plan: Sequence[ShardingOption]) -> Note:
    """Return a note on the excluded options, with the cost of TorchRec's plan over all options of smaller models."""
    text = f"exact training leaves out {wider.opened_in_words()} (exact_training=False allows it)"
    figures = {}
    if len(plan) * model.left.world_size <= MAX_SHARDS:
        figures["exact_ms"] = exact_ms = wider.context.rated(plan).total_ms
        theirs_ms = _torchrec_ms(model, wider, plan)
        if theirs_ms is None:
            text += ": TorchRec's plan over all options is not found"
        else:
            factor = exact_ms / theirs_ms if theirs_ms > 0 else 1.0
            text += (
                f": TorchRec's plan over all options is predicted at {theirs_ms:.3f} ms, this plan at {exact_ms:.3f} "
                f"({factor:.3f} times)"
            )
            figures["torchrec_ms"] = theirs_ms
    attached = _WiderSpace.of(model, optimizers_attached=True)
    if attached.opened:
        text += f"; optimizers_attached=True allows {attached.opened_in_words()} and trains exactly"
    return Note("beyond_exact_training", text, figures)


def _torchrec_ms(model: ModelProblem, wider: _WiderSpace, plan: Sequence[ShardingOption]) -> float | None:
    """Return the predicted milliseconds of TorchRec's plan over all options; None if there is none."""
    context, searched = wider.context, model.searched
    options = [option for option in searched if option.name not in wider.opened]
    options += wider.enumerated(set(wider.opened))
    if not any(map(context.is_guess, plan)):
        options = context.certain_options(options)
    order = {fqn: index for index, fqn in enumerate(by_table(searched))}
    options.sort(key=lambda option: order[fqn_of(option)])
    offered = [option for option in options if is_torchrecs(option)]
    theirs = torchrec_plan(offered, model.left, model.settings.candidates)
    return None if theirs is None else context.rated(theirs.options).total_ms
