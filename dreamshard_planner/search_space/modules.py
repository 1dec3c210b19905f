# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which tables TorchRec would shard, and how their modules describe them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.fused_params import FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS as SPLIT_PARAM
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType, data_type_to_sparse_type
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    convert_optimizer_type_and_kwargs,
)
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.quant.embedding_modules import MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS as SPLIT_ATTRIBUTE

from dreamshard_planner.search_space.input_checks import check_per_feature
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.torchrec_components.compat import sharder_of_tables


def table_configs(module: nn.Module, deep: bool = True) -> dict[str, Any]:
    """The ``EmbeddingBagConfig`` or ``EmbeddingConfig`` of every table of ``module``, by table name, and if ``deep`` of
    those inside; empty for modules without configs, such as ``nn.EmbeddingBag``."""
    configs: dict[str, Any] = {}
    for child in module.modules() if deep else (module,):
        for method in ("embedding_bag_configs", "embedding_configs"):
            if hasattr(child, method):
                configs.update((config.name, config) for config in getattr(child, method)())
    return configs


def without_weights(module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]) -> nn.Module:
    """A copy to plan once more, whose parameters take no memory: TorchRec shards the modules of a model in place.
    Modules that have no sharder are bare ones, since some cannot be copied, and planning counts their parameters
    alone."""
    sharded = {sharder_name(sharder.module_type) for sharder in sharders}
    copies: dict[int, nn.Module] = {}
    weights: dict[int, nn.Parameter] = {}

    def bare(weight: nn.Parameter) -> nn.Parameter:
        if id(weight) not in weights:
            weights[id(weight)] = made = nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
            made.__dict__.update(weight.__dict__)  # its in-backward optimizer
        return weights[id(weight)]

    def copied(one: nn.Module, whole: bool) -> nn.Module:
        if id(one) not in copies:
            whole = whole or sharder_name(type(one)) in sharded or bool(table_configs(one, deep=False))
            copies[id(one)] = other = object.__new__(type(one)) if whole else nn.Module()
            if whole:
                other.__dict__.update(one.__dict__)
            other._parameters = {name: None if p is None else bare(p) for name, p in one._parameters.items()}
            other._buffers = dict(one._buffers)
            other._modules = {
                name: None if child is None else copied(child, whole) for name, child in one._modules.items()
            }
        return copies[id(one)]

    return copied(module, False)


def of_modules(paths: Iterable[str]) -> str:
    """Modules at these paths, in words."""
    named = [repr(path) if path else "the model itself" for path in sorted(paths)]
    return f"of module{'s' if len(named) > 1 else ''} {', '.join(named)}"


def remaps_ids(module: nn.Module) -> bool:
    """Whether ids are given rows while training, so that nobody knows an id's row beforehand."""
    return any(isinstance(child, ManagedCollisionCollection | GenericITEPModule) for child in module.modules())


def brings_optimizer(module: nn.Module) -> TypeGuard[FusedEmbeddingBagCollection | FusedEmbeddingCollection]:
    """Whether the module has an optimizer of its own, which it keeps whatever its tables' sharding type."""
    return isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection)


def exchange_codecs(sharder: ModuleSharder[nn.Module] | None) -> dict[str, Any]:
    """What a module's exchanges are quantized by, by TorchRec's name of the exchange; empty where they are not."""
    return getattr(sharder_of_tables(sharder), "qcomm_codecs_registry", None) or {}


def fused_params(
    module: nn.Module, sharder: ModuleSharder[nn.Module] | None, output_dtype: DataType | None = None
) -> dict[str, Any]:
    """Arguments of the fused kernels of a module's tables: their sharder's, the optimizer that it brings itself, and
    what a table's constraint says of its output, a ``SparseType``."""
    given = getattr(sharder_of_tables(sharder), "fused_params", None) or {}
    output = given.get("output_dtype") if output_dtype is None else output_dtype
    if isinstance(output, DataType):
        given = given | {"output_dtype": data_type_to_sparse_type(output)}
    if not brings_optimizer(module):
        return given
    optimizer, _ = convert_optimizer_type_and_kwargs(module.optimizer_type(), module.optimizer_kwargs())
    return given | {"optimizer": optimizer}


@dataclass(frozen=True)
class Quantized:
    """How a quantized table is stored."""

    shards_apart: bool
    """Whether its shards will have scales and biases apart from their weights, as its sharder or its module asks."""
    columns_are_dims: bool
    """Whether a column of its tensor is a dimension of its embeddings: not where scales lie in the rows, or a weight
    takes several bytes."""

    @classmethod
    def of(
        cls, module: nn.Module, sharder: ModuleSharder[nn.Module] | None, weights: Tensor, config: Any
    ) -> Self | None:
        """Of a table of ``module``; None for tables that are trained."""
        if not isinstance(sharder, BaseQuantEmbeddingSharder):
            return None
        apart = (sharder.fused_params or {}).get(SPLIT_PARAM, getattr(module, SPLIT_ATTRIBUTE, False))
        return cls(bool(apart), weights.shape[1] == getattr(config, "embedding_dim", None))


def per_feature(values: Sequence[float], count: int, table: str, what: str) -> list[float]:
    """One value per feature; a single value holds for all of them.

    Raises:
        PlannerError: where the lengths don't match, or a value is no number or cannot be meant.
    """
    check_per_feature(values, table, what)
    if len(values) == count:
        return list(values)
    if len(values) == 1:
        return list(values) * count
    raise refused(
        f"table {table!r} serves {count} features, but its constraints give {len(values)} {what}: {list(values)}. "
        "Give one per feature."
    )


@dataclass(frozen=True)
class ShardableTable:
    """A table that TorchRec would shard."""

    path: str
    """Fully qualified name of its module."""
    name: str
    module: nn.Module
    sharder: ModuleSharder[nn.Module]
    parameter: nn.Parameter
    config: Any
    """Its ``EmbeddingBagConfig`` or ``EmbeddingConfig``; None where the module has none."""

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Empty where the module has no configs."""
        return () if self.config is None else tuple(self.config.feature_names)

    @property
    def in_tower(self) -> bool:
        """Whether TorchRec wants it on one host with others."""
        return isinstance(self.module, EmbeddingTower | EmbeddingTowerCollection)

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.name}".removeprefix(".")


def unsharded_modules(module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]) -> list[str]:
    """Return paths of embedding modules that have no sharder: no plan has their tables."""
    sharded = {sharder_name(sharder.module_type) for sharder in sharders}
    found, queue = [], [("", module)]
    while queue:
        path, child = queue.pop()
        if sharder_name(type(child)) in sharded:
            continue
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) or table_configs(child, deep=False):
            found.append(path)
            continue
        queue += [(f"{path}.{name}" if path else name, grandchild) for name, grandchild in child.named_children()]
    return sorted(found)


def shardable_tables(module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]) -> list[ShardableTable]:
    """Every table of ``module`` that has a sharder."""
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    found, queue = [], [("", module)]
    while queue:
        path, child = queue.pop()
        sharder = by_name.get(sharder_name(type(child)))
        if sharder is None:
            queue += [(f"{path}.{name}" if path else name, grandchild) for name, grandchild in child.named_children()]
            continue
        configs = table_configs(child)
        for name, parameter in sharder.shardable_parameters(child).items():
            found.append(ShardableTable(path, name, child, sharder, parameter, configs.get(name)))
    return found
