# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The options that exact training excludes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.search_space.enumeration import sharding_only
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import by_table, fqn_of, same_option


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

    def enumerated(self, names: Collection[str]) -> list[ShardingOption]:
        """Return the options of the tables with these names."""
        found = shardable_tables(self.module, self.sharders)
        tables = frozenset((id(table.module), table.name) for table in found if table.name in names)
        sharders = [sharding_only(tables, sharder) for sharder in self.sharders]
        return self.context.enumerator(self.batch_size, self.estimator).enumerate(self.module, sharders)


def others(plan: Sequence[ShardingOption], options: Sequence[ShardingOption]) -> list[ShardingOption]:
    """Options of a plan that are not among those given: proposers of others use what ours has no use for."""
    given = by_table(options)
    return [option for option in plan if not any(same_option(option, other) for other in given.get(fqn_of(option), ()))]


def counted_types(opened: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} for {count} table(s)" for kind, count in opened)
