# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans with hot rows, and TorchRec's sharded EmbeddingCollection with them. Names, shapes, outputs and checkpoints of
the collection stay the same.

Shapes: N lookups of a batch or sharding type, H of hot rows and C of others; F features; S = F x B samples; K hot rows;
D embedding dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionContext,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from dreamshard_planner.errors import DreamShardError, PlanError
from dreamshard_planner.hot_rows.replicas import HotReplicas
from dreamshard_planner.torchrec_components import compat
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
        if isinstance(tables, EmbeddingModuleShardingPlan):
            tables = EmbeddingModuleShardingPlan(tables)
            for name, sharding in tables.items():
                if (of_table := left.pop(f"{path}.{name}".lstrip("."), None)) is not None:
                    tables[name] = _with_ids(name, sharding, of_table)
        modules[path] = tables
    if left:
        raise PlanError(f"hot rows are given for tables that the plan lacks: {', '.join(sorted(left))}.")
    return ShardingPlan(modules)


def _with_ids(name: str, sharding: ParameterSharding, ids: Tensor) -> HotRowsSharding:
    if sharding.sharding_type != ShardingType.ROW_WISE.value:
        raise PlanError(f"hot rows need a row_wise table, but table {name!r} is {sharding.sharding_type}.")
    given = {each.name: getattr(sharding, each.name) for each in fields(ParameterSharding)}
    shards = getattr(sharding.sharding_spec, "shards", [])
    rows = max((shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards), default=0)
    return HotRowsSharding(**given, hot_rows=HotRows(ids, rows))


@dataclass(frozen=True)
class Routed:
    """A batch, told apart."""

    batch: KeyedJaggedTensor
    """All lookups, features in the order of the sharding types."""
    position_H: Tensor
    """Lookups of hot rows, ascending."""
    hot_row_H: Tensor
    """Their rows among the hot rows of all tables."""
    position_C: Tensor
    """All other lookups, ascending."""
    others: KeyedJaggedTensor
    """Batch of the other lookups alone."""


class HotIndex:
    """Sorted keys of all hot rows: ids of every table, behind those of the tables before.

    Args:
        hot: hot rows by table; they are numbered through all tables, in this order.
        table_of_feature: the table that each feature of a batch reads, in the batch's order.
    """

    def __init__(self, hot: Mapping[str, HotRows], table_of_feature: Sequence[str], device: torch.device) -> None:
        first = dict(zip(hot, accumulate((of_table.table_rows for of_table in hot.values()), initial=0), strict=False))
        self._key_K = torch.cat([first[name] + of_table.ids for name, of_table in hot.items()]).to(device)
        self._first_F = torch.tensor([first.get(name, 0) for name in table_of_feature]).to(device)
        # A table without hot rows has none of its ids among them.
        rows = [hot[name].table_rows if name in hot else 0 for name in table_of_feature]
        self._rows_F = torch.tensor(rows).to(device)

    def route(self, batch: KeyedJaggedTensor) -> Routed:
        """Tell the lookups of a batch apart. Ids outside of their table are no hot rows."""
        id_N, length_S = batch.values().long(), batch.lengths()
        feature_N = torch.repeat_interleave(length_S.view(len(self._rows_F), -1).sum(1), output_size=len(id_N))
        inside_N = (id_N >= 0) & (id_N < self._rows_F[feature_N])
        key_N = torch.where(inside_N, self._first_F[feature_N] + id_N, -1)
        row_N = torch.searchsorted(self._key_K, key_N).clamp_max(len(self._key_K) - 1)
        hot_N = self._key_K[row_N] == key_N
        position_H, position_C = hot_N.nonzero().squeeze(1), (~hot_N).nonzero().squeeze(1)
        before_N1 = torch.nn.functional.pad(hot_N.cumsum(0), (1, 0))
        hot_S = before_N1[torch.nn.functional.pad(length_S.cumsum(0), (1, 0))].diff()
        weight_N = batch.weights_or_none()
        others = KeyedJaggedTensor(
            batch.keys(),
            batch.values()[position_C],
            None if weight_N is None else weight_N[position_C],
            lengths=length_S - hot_S.to(length_S.dtype),
            stride=batch.stride(),
        )
        return Routed(batch, position_H, row_N[position_H], position_C, others)


class HotRowsContext(EmbeddingCollectionContext):
    """TorchRec's context of one batch, with the lookups of hot rows. It is no dataclass in TorchRec 1.6.1."""

    def __init__(self) -> None:
        super().__init__()
        self.routed: Routed | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        super().record_stream(stream)
        if self.routed is not None:
            for tensors in vars(self.routed).values():
                tensors.record_stream(stream)


class HotRowsEmbeddingCollection(ShardedEmbeddingCollection):
    """TorchRec's ``ShardedEmbeddingCollection``, of which every rank holds the hot rows.

    Lookups of hot rows read this rank's replicas. Only the others are exchanged. The arguments are TorchRec's.

    Raises:
        DreamShardError: a table cannot have hot rows; names it and says why.
    """

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(module, table_name_to_parameter_sharding, env, *args, **kwargs)
        self._hot = {
            name: sharding.hot_rows
            for name, sharding in table_name_to_parameter_sharding.items()
            if isinstance(sharding, HotRowsSharding) and sharding.hot_rows is not None
        }
        self._features = compat.sequence_features(self)
        names = [feature for of_kind in self._features.values() for feature in of_kind]
        tables = {config.name: config.feature_names for config in module.embedding_configs()}
        if shared := sorted({name for name in names if names.count(name) > 1}):
            raise DreamShardError(
                f"hot rows need features that read one table each, but several tables read {', '.join(shared)}."
            )
        self._replicas = HotReplicas(self, env, self._hot)
        table_of = {feature: table for table, features in tables.items() for feature in features}
        self._index = HotIndex(self._hot, [table_of[name] for name in names], self._replicas.device)
        self.register_load_state_dict_post_hook(_read_later)

    def create_context(self) -> HotRowsContext:
        return HotRowsContext()

    def input_dist(self, ctx: EmbeddingCollectionContext, features: Any) -> Any:
        assert isinstance(ctx, HotRowsContext)
        if not isinstance(features, KeyedJaggedTensor):
            features = maybe_td_to_kjt(features, list(features.keys()))
        if features.variable_stride_per_key():
            raise DreamShardError(
                "hot rows take no batches whose size varies by feature. Plan these tables without hot rows."
            )
        with torch.no_grad():
            wanted = [name for of_kind in self._features.values() for name in of_kind]
            keys = features.keys()
            batch = features if keys == wanted else features.permute([keys.index(name) for name in wanted])
            ctx.routed = self._index.route(batch)
        return super().input_dist(ctx, ctx.routed.others)

    def output_dist(
        self, ctx: EmbeddingCollectionContext, output: list[Tensor]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self._with_hot_rows(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(
        self, ctx: EmbeddingCollectionContext, input: KJTList
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        return self._with_hot_rows(ctx, super().compute_and_output_dist(ctx, input))

    def _with_hot_rows(
        self, ctx: EmbeddingCollectionContext, outputs: LazyAwaitable[dict[str, JaggedTensor]]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Put hot rows, as they are now, between the rows that the exchange will bring."""
        assert isinstance(ctx, HotRowsContext) and ctx.routed is not None
        number = list(self._features).index(ShardingType.ROW_WISE.value)
        parts = ctx.routed.batch.split([len(of_kind) for of_kind in self._features.values()])
        first, lookups = sum(len(part.values()) for part in parts[:number]), len(parts[number].values())
        merged = partial(_Merged, ctx.routed, self._replicas, first, lookups)
        compat.replace_sequence_output(outputs, number, parts[number], merged)
        return outputs


class _Merged(Awaitable[Tensor]):
    """Embeddings of lookups in row_wise tables, of which ``first`` is the first; ``unique`` numbers exchanged rows."""

    def __init__(
        self,
        routed: Routed,
        replicas: HotReplicas,
        first: int,
        lookups: int,
        exchanged: Awaitable[Tensor],
        unique: Tensor | None,
    ) -> None:
        super().__init__()
        self._exchanged = exchanged
        self._rows_KD = replicas.rows()
        position_C = routed.position_C
        position_C = position_C[(position_C >= first) & (position_C < first + lookups)] - first
        if unique is None:
            unique = torch.arange(len(position_C), device=position_C.device)
        self._row_N = position_C.new_empty(lookups)
        self._row_N[routed.position_H - first] = routed.hot_row_H
        self._row_N[position_C] = len(replicas) + unique

    def _wait_impl(self) -> Tensor:
        return nn.functional.embedding(self._row_N, torch.cat([self._rows_KD, self._exchanged.wait()]))


def _read_later(module: nn.Module, *_: Any) -> None:
    assert isinstance(module, HotRowsEmbeddingCollection)
    module._replicas.read_later()


class HotRowsSharder(EmbeddingCollectionSharder):
    """TorchRec's ``EmbeddingCollectionSharder`` for plans with hot rows. The arguments are TorchRec's."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        if not any(isinstance(sharding, HotRowsSharding) and sharding.hot_rows for sharding in params.values()):
            return super().shard(module, params, env, device, module_fqn)
        return HotRowsEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            use_index_dedup=compat.dedups_ids(self),
            module_fqn=module_fqn,
        )


def with_hot_rows(sharders: Iterable[ModuleSharder[nn.Module]]) -> list[ModuleSharder[nn.Module]]:
    """Return sharders, those of TorchRec's class ``EmbeddingCollectionSharder`` with hot rows. Other classes stay."""
    return [
        HotRowsSharder(sharder.fused_params, sharder.qcomm_codecs_registry, compat.dedups_ids(sharder))
        if type(sharder) is EmbeddingCollectionSharder
        else sharder
        for sharder in sharders
    ]
