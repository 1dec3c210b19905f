# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Hot rows as a part of TorchRec's plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType

from dreamshard_planner.errors import PlanError


@dataclass(frozen=True, eq=False)
class HotRows:
    """Ids of the rows of one table that every rank holds.

    Raises:
        PlanError: an id is given twice or lies outside the table.
    """

    ids: Tensor
    """Ascending, int64, on the CPU."""
    table_rows: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", self.ids.detach().to("cpu", torch.int64).sort().values)
        if self.ids.dim() != 1 or not len(self.ids):
            raise PlanError(f"hot rows must be a list of at least one id, got shape {tuple(self.ids.shape)}.")
        if self.ids[0] < 0 or self.ids[-1] >= self.table_rows:
            raise PlanError(
                f"hot rows must lie in a table of {self.table_rows:,} rows, got ids from {self.ids[0]} to "
                f"{self.ids[-1]}. Take the hot rows from statistics of this table."
            )
        if twice := int((self.ids.diff() == 0).sum()):
            raise PlanError(f"hot rows must be different rows, got {twice} ids twice.")

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HotRows) and self.table_rows == other.table_rows and torch.equal(self.ids, other.ids)

    def __hash__(self) -> int:
        return hash((self.table_rows, len(self.ids)))

    def __repr__(self) -> str:
        return f"<{len(self):,} hot rows of {self.table_rows:,}>"


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
