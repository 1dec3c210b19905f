# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables that TorchRec would shard, with facts from their modules and sharders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.fused_params import FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS as SPLIT_PARAM
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType, PoolingType, data_type_to_sparse_type
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    convert_optimizer_type_and_kwargs,
)
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.quant.embedding_modules import MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS as SPLIT_ATTRIBUTE

from dreamshard_planner.search_space.replica_rules import replicas_follow
from dreamshard_planner.search_space.sharding_types import Quantized, TableFacts
from dreamshard_planner.torchrec_components.compat import grid_takes_varied_batches, optimizer_name, sharder_of_tables


def table_configs(module: nn.Module, deep: bool = True) -> dict[str, Any]:
    """Return the config of every table of ``module``, and if ``deep`` of its children, by table name.

    Modules such as ``nn.EmbeddingBag`` have none.
    """
    configs: dict[str, Any] = {}
    for child in module.modules() if deep else (module,):
        for method in ("embedding_bag_configs", "embedding_configs"):
            if hasattr(child, method):
                configs.update((config.name, config) for config in getattr(child, method)())
    return configs


def without_weights(module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]) -> nn.Module:
    """Copy a model on the meta device, to plan it again after TorchRec has sharded it in place.

    Modules without a sharder become bare ones: some cannot be copied, and planning only counts their parameters. Those
    of lazy modules are left out.
    """
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
            other._parameters = {
                name: None if p is None or is_lazy(p) else bare(p) for name, p in one._parameters.items()
            }
            other._buffers = {name: b for name, b in one._buffers.items() if b is None or not is_lazy(b)}
            other._modules = {
                name: None if child is None else copied(child, whole) for name, child in one._modules.items()
            }
        return copies[id(one)]

    return copied(module, False)


def brings_optimizer(module: nn.Module) -> TypeGuard[FusedEmbeddingBagCollection | FusedEmbeddingCollection]:
    """Return whether the module has its own optimizer, which it keeps for any sharding type."""
    return isinstance(module, FusedEmbeddingBagCollection | FusedEmbeddingCollection)


def exchange_codecs(sharder: ModuleSharder[nn.Module] | None) -> dict[str, Any]:
    """Return the codecs that quantize a module's exchanges, by TorchRec's name of the exchange."""
    return getattr(sharder_of_tables(sharder), "qcomm_codecs_registry", None) or {}


def fused_params(
    module: nn.Module, sharder: ModuleSharder[nn.Module] | None, output_dtype: DataType | None = None
) -> dict[str, Any]:
    """Return the fused kernels' arguments, from sharder, module and a table's constraint; outputs as ``SparseType``."""
    given = getattr(sharder_of_tables(sharder), "fused_params", None) or {}
    output = given.get("output_dtype") if output_dtype is None else output_dtype
    if isinstance(output, DataType):
        given = given | {"output_dtype": data_type_to_sparse_type(output)}
    if not brings_optimizer(module):
        return given
    optimizer, _ = convert_optimizer_type_and_kwargs(module.optimizer_type(), module.optimizer_kwargs())
    return given | {"optimizer": optimizer}


def output_type(params: Mapping[str, Any]) -> torch.dtype:
    """Return the output type of fused kernels with these arguments, float32 by default."""
    output = params.get("output_dtype")
    return torch.float32 if output is None else output.as_dtype()


def is_mean(config: Any) -> bool:
    """Return whether a table's config asks for mean pooling."""
    return getattr(config, "pooling", None) is PoolingType.MEAN


@dataclass(frozen=True, eq=False)
class TableModule:
    """A module whose tables TorchRec shards, with facts that its tables share."""

    path: str
    """Fully qualified name of the module."""
    module: nn.Module
    sharder: ModuleSharder[nn.Module] | None

    @cached_property
    def configs(self) -> dict[str, Any]:
        """Configs of its tables by name, see :func:`table_configs`."""
        return table_configs(self.module)

    @cached_property
    def is_weighted(self) -> bool:
        """True if lookups carry weights, also if a feature processor gives them to a wrapped module."""
        says = (getattr(child, "is_weighted", None) for child in self.module.modules())
        return any(is_weighted() for is_weighted in says if callable(is_weighted))

    @cached_property
    def is_sequence(self) -> bool:
        return any(isinstance(child, EmbeddingCollectionInterface) for child in self.module.modules())

    @cached_property
    def remaps_ids(self) -> bool:
        """True if ids get their rows while training, so that an id's row is unknown."""
        remapping = ManagedCollisionCollection | GenericITEPModule
        return any(isinstance(child, remapping) for child in self.module.modules())

    def fused_params(self, output_dtype: DataType | None = None) -> dict[str, Any]:
        """Return arguments of its fused kernels, see :func:`fused_params`."""
        if output_dtype not in self._fused_params:
            self._fused_params[output_dtype] = fused_params(self.module, self.sharder, output_dtype)
        return self._fused_params[output_dtype]

    @cached_property
    def _fused_params(self) -> dict[DataType | None, dict[str, Any]]:
        return {}


@dataclass(frozen=True)
class ShardableTable:
    """A table that TorchRec would shard."""

    owner: TableModule
    name: str
    parameter: Tensor

    @property
    def path(self) -> str:
        """Fully qualified name of its module."""
        return self.owner.path

    @property
    def module(self) -> nn.Module:
        return self.owner.module

    @property
    def sharder(self) -> Any:
        return self.owner.sharder

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.name}".removeprefix(".")

    @property
    def config(self) -> Any:
        """``EmbeddingBagConfig`` or ``EmbeddingConfig``; None if the module has none."""
        return self.owner.configs.get(self.name)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of its features; empty if the module has no configs."""
        return () if self.config is None else tuple(self.config.feature_names)

    @property
    def quantized(self) -> Quantized | None:
        """Storage of a quantized table; None for tables that are trained."""
        if not isinstance(self.sharder, BaseQuantEmbeddingSharder):
            return None
        apart = (self.sharder.fused_params or {}).get(SPLIT_PARAM, getattr(self.module, SPLIT_ATTRIBUTE, False))
        return Quantized(bool(apart), self.parameter.shape[1] == getattr(self.config, "embedding_dim", None))

    def facts(
        self,
        compute_device: str,
        output_dtype: DataType | None = None,
        *,
        attached: bool = False,
        in_groups: bool = False,
        varied_batches: bool = False,
        weighted_batches: bool = False,
    ) -> TableFacts:
        """Return the facts that decide which sharding types the table may have.

        Args:
            compute_device: of the topology.
            output_dtype: of the table's constraint.
            attached, in_groups, varied_batches, weighted_batches: see :class:`TableFacts`.
        """
        given = self.owner.fused_params(output_dtype)
        return TableFacts(
            compute_device=compute_device,
            optimizer=optimizer_name(self.parameter, given),
            weight_bytes=self.parameter.dtype.itemsize,
            is_mean=is_mean(self.config),
            is_weighted=weighted_batches or self.owner.is_weighted,
            is_sequence=self.owner.is_sequence,
            bag_mode=self.module.mode if isinstance(self.module, nn.EmbeddingBag) else None,
            attached=attached,
            replicas_follow=attached and replicas_follow(self.parameter, given, self.module),
            quantized=self.quantized,
            varied_batches=varied_batches,
            grid_takes_varied_batches=grid_takes_varied_batches(),
            in_groups=in_groups,
        )


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
    """Return every table of ``module`` that has a sharder."""
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    found, queue = [], [("", module)]
    while queue:
        path, child = queue.pop()
        sharder = by_name.get(sharder_name(type(child)))
        if sharder is None:
            queue += [(f"{path}.{name}" if path else name, grandchild) for name, grandchild in child.named_children()]
            continue
        owner = TableModule(path, child, sharder)
        found += [ShardableTable(owner, *named) for named in sharder.shardable_parameters(child).items()]
    return found
