# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What sharding types that train differently would gain: the same search over them as well, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.planning.baseline import torchrec_plan
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.search.joint import JointConfig, joint_search
from dreamshard_planner.search.local_search import SearchConfig
from dreamshard_planner.search_space.alike_shards import is_torchrecs
from dreamshard_planner.search_space.enumeration import sharding_only
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import by_table, fqn_of, same_option
from dreamshard_planner.support.torch_state import neutral, single_thread

QUICK = JointConfig(starts=2, reshards=6_000, candidates=3_000)
"""Of the search: a figure, not a plan."""
NOTHING = 1e-3
"""Share of a cost that is no gain worth a word."""


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
class BeyondExactTraining:
    """What sharding types that exact training leaves out would gain."""

    opened_by: str
    """See :class:`WiderSpace`."""
    opened: tuple[tuple[str, int], ...]
    """Sharding types that exact training leaves out, and for how many tables."""
    exact_ms: float
    """Of the exact plan."""
    total_ms: float
    """Of the cheapest plan found with them, by the same cost source."""
    types: tuple[tuple[str, int], ...]
    """Tables of each sharding type in that plan."""
    torchrec_ms: float | None
    """Of TorchRec's own plan over the same types; None where it found none."""

    def __str__(self) -> str:
        if not self.total_ms < self.exact_ms * (1 - NOTHING):
            return f"{self.opened_by} would allow {counted_types(self.opened)}, and gain nothing that a search found"
        types = ", ".join(f"{count} {kind}" for kind, count in self.types)
        theirs = "finds none" if self.torchrec_ms is None else f"{self.torchrec_ms:.3f} ms"
        return (
            f"{self.opened_by} would allow {counted_types(self.opened)}: {self.total_ms:.3f} ms instead of "
            f"{self.exact_ms:.3f} ({types}); TorchRec's own plan over these types: {theirs}"
        )


@dataclass(frozen=True)
class WiderSpace:
    """The options that a model would have without exact training, or with optimizers attached to replicas."""

    context: PlanningContext
    """With the wider constraints."""
    module: nn.Module
    """Without weights."""
    sharders: Sequence[ModuleSharder[nn.Module]]
    batch_size: int
    estimator: ShardEstimator
    """Of the costs of single shards."""
    topology: Topology
    """What the storage reservation left."""
    opened_by: str
    """The planner's argument that opens it: ``optimizers_attached=True`` where that opens something, since training
    stays exact; else ``exact_training=False``."""
    opened: tuple[tuple[str, int], ...]
    """Sharding types that only this space has, and for how many tables."""
    opened_tables: frozenset[str]
    """Names of the tables that have them."""

    @cached_property
    def search_space(self) -> Sequence[ShardingOption]:
        """All options; enumerated when they are first asked for."""
        return self.context.enumerator(self.batch_size, self.estimator).enumerate(self.module, list(self.sharders))

    def enumerated(self, names: Collection[str]) -> list[ShardingOption]:
        """Return the options of the tables with these names."""
        found = shardable_tables(self.module, self.sharders)
        tables = frozenset((id(table.module), table.name) for table in found if table.name in names)
        sharders = [sharding_only(tables, sharder) for sharder in self.sharders]
        return self.context.enumerator(self.batch_size, self.estimator).enumerate(self.module, sharders)

    @neutral()
    @torch.no_grad()
    def search(
        self, exact: Sequence[ShardingOption], search: SearchConfig, seed: int, effort: float = 1.0
    ) -> BeyondExactTraining:
        """Search all of it, from the exact plan and from TorchRec's own on: never dearer than either.

        Args:
            exact: the plan, with ranks.
            search: of moves and swaps.
            seed: of the search.
            effort: multiple of the default's candidates, for all but moves and swaps.
        """
        context, topology = self.context, self.topology
        with single_thread():
            options = context.usable_options(self.search_space)
            if not any(map(context.is_guess, exact)):
                options = context.certain_options(options)
            read = context.read([*options, *others(exact, options)], topology)
            cost, start = context.cost(read), read.sharding(exact)
            offered = [option for option in options if is_torchrecs(option)]
            theirs = torchrec_plan(offered, topology, context.estimate_as_torchrec, effort)
            starts = [start]
            if theirs is not None:
                starts += [sharding for sharding in [read.sharding(theirs.options)] if cost.problem.fits(sharding)]
            found = joint_search(cost, starts, QUICK.times(effort), search, seed)
        exact_ms = cost.overall_ms(start)
        best, best_ms = (start, exact_ms) if found is None else (found.sharding, found.overall_ms)
        types = Counter(
            options[index].sharding_type for options, index in zip(read.problem.tables, best.options, strict=True)
        )
        theirs_ms = None if theirs is None else cost.overall_ms(read.sharding(theirs.options))
        opened = (self.opened_by, self.opened)
        return BeyondExactTraining(*opened, exact_ms, best_ms, tuple(types.most_common()), theirs_ms)


def others(plan: Sequence[ShardingOption], options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Options of a plan that are not among those given: proposers of others use what ours has no use for."""
    given = by_table(options)
    return [option for option in plan if not any(same_option(option, other) for other in given.get(fqn_of(option), ()))]


def counted_types(opened: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in opened)
