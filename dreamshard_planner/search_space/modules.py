# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables that TorchRec would shard, with facts from their modules and sharders, and what is hardly meant of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.fused_params import FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS as SPLIT_PARAM
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DataType, PoolingType, data_type_to_dtype, data_type_to_sparse_type
from torchrec.modules.embedding_modules import EmbeddingCollectionInterface
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    convert_optimizer_type_and_kwargs,
)
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.quant.embedding_modules import MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS as SPLIT_ATTRIBUTE

from dreamshard_planner.search_space.sharding_types import (
    CPU_OPTIMIZERS,
    CPU_OUTPUTS,
    CPU_WEIGHTS,
    SHARDING_TYPES,
    Quantized,
)
from dreamshard_planner.support.formatting import some_of
from dreamshard_planner.torchrec_components.compat import optimizer_classes, optimizer_name, sharder_of_tables
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.lookups import FeatureStatistics

WithOptimizer = FusedEmbeddingBagCollection | FusedEmbeddingCollection
"""Modules with an optimizer of their own, which they keep for any sharding type."""
DIM_STEP = 4
"""FBGEMM's kernels read four columns at once."""
MAX_MEANT_DIM = 8192
"""Most columns of embeddings; beyond, rows and dim have probably changed places."""


def table_configs(module: nn.Module, deep: bool = True) -> dict[str, Any]:
    """Return the config of every table of ``module``, and if ``deep`` of its children, by table name; modules such
    as ``nn.EmbeddingBag`` have none."""
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


@dataclass(frozen=True, eq=False)
class TableModule:
    """A module whose tables TorchRec shards, with facts that its tables share."""

    path: str
    """Fully qualified name of the module."""
    module: nn.Module
    sharder: ModuleSharder[nn.Module] | None
    statistics: Mapping[str, FeatureStatistics] = field(default_factory=dict)
    """By feature, of any model."""

    @cached_property
    def configs(self) -> dict[str, Any]:
        """Configs of its tables by name, see :func:`table_configs`."""
        return table_configs(self.module)

    @cached_property
    def counted(self) -> dict[str, FeatureStatistics]:
        """Statistics of its features, if they are known."""
        names = (name for config in self.configs.values() for name in config.feature_names)
        return {name: self.statistics[name] for name in names if name in self.statistics}

    @cached_property
    def varied_batches(self) -> bool:
        """True if batch sizes are known to vary by feature."""
        return bool(in_smaller_batches(self.counted))

    @cached_property
    def weighted_batches(self) -> bool:
        """True if batches are known to carry weights of lookups."""
        return any(feature.weighted for feature in self.counted.values())

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
        """Return arguments of its fused kernels, from sharder, module and a table's constraint; outputs as
        ``SparseType``."""
        given = getattr(sharder_of_tables(self.sharder), "fused_params", None) or {}
        output = given.get("output_dtype") if output_dtype is None else output_dtype
        if isinstance(output, DataType):
            given = given | {"output_dtype": data_type_to_sparse_type(output)}
        if isinstance(self.module, WithOptimizer):
            made = self.module.optimizer_type(), self.module.optimizer_kwargs()
            given = given | {"optimizer": convert_optimizer_type_and_kwargs(*made)[0]}
        return given

    def output_type(self, output_dtype: DataType | None = None) -> torch.dtype:
        """Return the type of its fused kernels' outputs, float32 by default."""
        output = self.fused_params(output_dtype).get("output_dtype")
        return torch.float32 if output is None else output.as_dtype()

    @property
    def exchange_codecs(self) -> dict[str, Any]:
        """Codecs that quantize its exchanges, by TorchRec's name of the exchange."""
        return getattr(sharder_of_tables(self.sharder), "qcomm_codecs_registry", None) or {}


@dataclass(frozen=True)
class ShardableTable:
    """A table that TorchRec would shard."""

    owner: TableModule
    name: str
    parameter: Tensor

    @property
    def sharder(self) -> Any:
        return self.owner.sharder

    @property
    def fqn(self) -> str:
        return f"{self.owner.path}.{self.name}".removeprefix(".")

    @property
    def config(self) -> Any:
        """``EmbeddingBagConfig`` or ``EmbeddingConfig``; None if the module has none."""
        return self.owner.configs.get(self.name)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of its features; empty if the module has no configs."""
        return () if self.config is None else tuple(self.config.feature_names)

    @property
    def is_mean(self) -> bool:
        """True if its config asks for mean pooling."""
        return getattr(self.config, "pooling", None) is PoolingType.MEAN

    @property
    def has_optimizer(self) -> bool:
        """True if it was given an in-backward optimizer."""
        return bool(optimizer_classes(self.parameter) or self.owner.fused_params().get("optimizer"))

    @property
    def optimizer(self) -> str:
        """FBGEMM's name of its in-backward optimizer, by default SGD's."""
        return optimizer_name(self.parameter, self.owner.fused_params())

    @property
    def quantized(self) -> Quantized | None:
        """Storage of a quantized table; None for tables that are trained."""
        if not isinstance(self.owner.sharder, BaseQuantEmbeddingSharder):
            return None
        apart = (self.owner.sharder.fused_params or {}).get(
            SPLIT_PARAM, getattr(self.owner.module, SPLIT_ATTRIBUTE, False)
        )
        return Quantized(bool(apart), self.parameter.shape[1] == getattr(self.config, "embedding_dim", None))


def checked_sharders(sharders: Sequence[ModuleSharder[nn.Module]]) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders; TypeError for a single one, or for classes instead of their objects."""
    given = list(sharders) if isinstance(sharders, Iterable) else None
    if given is None or any(isinstance(one, type) for one in given):
        raise TypeError(f"sharders must be a list of objects, as [EmbeddingBagCollectionSharder()], got {sharders!r}")
    return given


def _walk(
    module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module] | None]]:
    """Yield path, module and sharder of all modules in TorchRec's order, but for those inside of sharded ones."""
    by_name = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    queue = [("", module)]
    while queue:
        path, child = queue.pop()
        yield path, child, (sharder := by_name.get(sharder_name(type(child))))
        if sharder is None:
            queue += [(f"{path}.{name}" if path else name, grandchild) for name, grandchild in child.named_children()]


def unsharded_modules(module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]]) -> list[str]:
    """Return paths of embedding modules that have no sharder: no plan has their tables."""
    found: list[str] = []
    for path, child, sharder in _walk(module, sharders):
        is_inside = any(path.startswith(f"{outer}." if outer else "") for outer in found)
        has_tables = isinstance(child, nn.Embedding | nn.EmbeddingBag) or table_configs(child, deep=False)
        if sharder is None and has_tables and not is_inside:
            found.append(path)
    return sorted(found)


def shardable_tables(
    module: nn.Module,
    sharders: Iterable[ModuleSharder[nn.Module]],
    statistics: Mapping[str, FeatureStatistics] | None = None,
) -> list[ShardableTable]:
    """Return every table of ``module`` that has a sharder, with statistics by feature."""
    owners = (TableModule(*each, statistics or {}) for each in _walk(module, sharders))
    return [
        ShardableTable(owner, *named)
        for owner in owners
        if owner.sharder is not None
        for named in owner.sharder.shardable_parameters(owner.module).items()
    ]


def names_of_others(
    module: nn.Module, tables: Sequence[ShardableTable], constraints: Mapping[str, ParameterConstraints] | None
) -> tuple[str | None, bool]:
    """Tell which constraints match no table of the model, sharded or not, or None; and whether none matches."""
    known = {table.name for table in tables} | table_configs(module).keys()
    known |= {f"{path}.{name}" for path, child in module.named_modules() for name in table_configs(child, deep=False)}
    unknown = [name for name in constraints or {} if name not in known]
    if not unknown or not known:
        return None, False
    text = (
        f"constraints for tables that the model does not have: {some_of(unknown, known)}; a key is the table's own "
        "name, its fully qualified name, or '*' for all tables without a key"
    )
    return text, len(unknown) == len(constraints or {})


def doubtful_tables(
    tables: Sequence[ShardableTable],
    compute_device: str,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> list[str]:
    """Tell what is hardly meant of tables: dims that kernels refuse or that are too large, ids beyond their rows, what
    CPU kernels cannot train, a constraint for another device, a module in two places."""
    named: dict[str, list[str]] = {}
    """Tables of each reason."""
    paths: dict[int, str] = {}
    for table in tables:
        if (path := paths.setdefault(id(table.owner.module), table.owner.path)) != table.owner.path:
            again = f"is also in {path!r}, the same module, which TorchRec shards once: costs and memory count it twice"
            named.setdefault(again, []).append(table.fqn)
        constraint = (constraints or {}).get(table.name, ParameterConstraints())
        for reason in _doubts(table, compute_device, constraint):
            named.setdefault(reason, []).append(table.fqn)
    return [
        f"table {first!r}{f' (and {len(others)} more)' if others else ''} {reason}"
        for reason, (first, *others) in named.items()
    ]


def _doubts(table: ShardableTable, compute_device: str, constraint: ParameterConstraints) -> Iterator[str]:
    """Tell what is hardly meant of one table."""
    if (group := constraint.device_group or compute_device) != compute_device:
        yield (
            f"is left out: the device_group of its constraint is {group!r}, the topology's device {compute_device!r}, "
            "and TorchRec shards no module without one of its tables"
        )
    rows, dim = table.parameter.shape
    dim = getattr(table.config, "embedding_dim", dim)  # columns of quantized tables may be bytes
    if compute_device == "cuda" and dim % DIM_STEP:
        yield (
            f"has dim {dim}: FBGEMM's kernels for GPUs need a multiple of {DIM_STEP}, such as "
            f"{-(-dim // DIM_STEP) * DIM_STEP}"
        )
    if compute_device == "cpu":
        yield from _unrunnable_on_cpu(table, constraint)
    if dim > MAX_MEANT_DIM:
        yield f"has {rows:,} rows of dim {dim:,}: perhaps these have changed places"
    counted = {} if table.owner.remaps_ids else table.owner.counted
    for name in table.feature_names:
        ids = counted[name].ids if name in counted else None
        if ids is not None and ids.end > rows:
            yield (
                f"has {rows:,} rows, and statistics of its feature {name!r} count ids up to {ids.end - 1:,}: they may "
                "be of another table, or FBGEMM reads row 0 instead"
            )


def _unrunnable_on_cpu(table: ShardableTable, constraint: ParameterConstraints) -> Iterator[str]:
    """Tell why FBGEMM's CPU kernels cannot train a table under its constraint."""
    if not table.parameter.is_floating_point():
        return
    declared = getattr(table.config, "data_type", None)  # a collection holds bfloat16 tables as float16 until sharded
    dtype = table.parameter.dtype if declared is None else data_type_to_dtype(declared)
    weights, known = str(dtype).removeprefix("torch."), ", ".join(CPU_OPTIMIZERS)
    if weights not in CPU_WEIGHTS:
        yield (
            f"has weights of {weights}, and FBGEMM's CPU kernels train "
            f"{' and '.join(CPU_WEIGHTS)}: set data_type in its config, or train it on GPUs"
        )
    types = constraint.sharding_types
    if types and all(kind in SHARDING_TYPES and SHARDING_TYPES[kind].is_replicated for kind in types):
        return  # without fused kernels
    output = str(table.owner.output_type(constraint.output_dtype)).removeprefix("torch.")
    if output not in CPU_OUTPUTS:
        yield (
            f"has outputs of {output}, and FBGEMM's fused kernels on CPUs give "
            f"{' and '.join(CPU_OUTPUTS)}: leave output_dtype out of its constraint and its sharder's fused_params, or "
            "train it on GPUs"
        )
    if table.optimizer not in CPU_OPTIMIZERS:
        yield (
            f"has the in-backward optimizer {table.optimizer}, and FBGEMM's CPU kernels have {known}: "
            "DistributedModelParallel would end in an AssertionError. Apply one of these, or train it on "
            "GPUs"
        )
