# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows as a part of TorchRec's plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from torch import Tensor
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType

from dreamshard_planner.errors import PlanError
from dreamshard_planner.workload.lookups import HotRows


@dataclass
class HotRowsSharding(ParameterSharding):
    """A row_wise table with hot rows. TorchRec's own sharder reads it as plain row_wise."""

    hot_rows: HotRows | None = None


def hot_rows_of(plan: ShardingPlan) -> Iterator[tuple[str, HotRows]]:
    """Yield the name, such as ``model.ec.items``, and the hot rows of every table of a plan that has some."""
    for path, tables in plan.plan.items():
        if isinstance(tables, EmbeddingModuleShardingPlan):
            for name, sharding in tables.items():
                if isinstance(sharding, HotRowsSharding) and sharding.hot_rows is not None:
                    yield f"{path}.{name}".lstrip("."), sharding.hot_rows


def replicate_hot_rows(plan: ShardingPlan, ids: Mapping[str, Tensor]) -> ShardingPlan:
    """Return a plan in which every rank holds the hot rows of some tables.

    Args:
        plan: TorchRec's. Stays as it is.
        ids: hot rows by name of the table, as in the plan: ``ec.items`` for table ``items`` of module ``ec``.

    Raises:
        PlanError: a table is not in the plan or not row_wise; or an id is not of the table.
    """
    left, modules = dict(ids), {}
    for path, tables in plan.plan.items():
        modules[path] = tables
        if isinstance(tables, EmbeddingModuleShardingPlan):
            names = {f"{path}.{name}".lstrip("."): name for name in tables}
            chosen = {names[fqn]: left.pop(fqn) for fqn in names if fqn in left}
            modules[path] = EmbeddingModuleShardingPlan(
                {
                    name: _with_hot_rows(name, sharding, chosen[name]) if name in chosen else sharding
                    for name, sharding in tables.items()
                }
            )
    if left:
        raise PlanError(f"hot rows are given for tables that the plan lacks: {', '.join(sorted(left))}.")
    return ShardingPlan(modules)


def _with_hot_rows(name: str, sharding: ParameterSharding, ids: Tensor) -> HotRowsSharding:
    if sharding.sharding_type != ShardingType.ROW_WISE.value:
        raise PlanError(f"hot rows need a row_wise table, but table {name!r} is {sharding.sharding_type}.")
    given = {each.name: getattr(sharding, each.name) for each in fields(ParameterSharding)}
    return HotRowsSharding(**given, hot_rows=HotRows(ids, rows_of(sharding)))


def rows_of(sharding: ParameterSharding) -> int:
    """Return the rows of a sharded table; 0 if the plan does not tell its shards."""
    shards = getattr(sharding.sharding_spec, "shards", [])
    return max((shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards), default=0)
