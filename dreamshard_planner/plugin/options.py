# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options read as workloads and placement problems.

Everything that depends on how TorchRec describes a table is here: features per table, pooling factors,
batch sizes, precision, optimizer, compute kernel, and which shards TorchRec fuses into one kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import (
    CollectiveType,
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import CommOp, ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import data_type_to_dtype

from dreamshard_planner.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import CollectiveFit, CollectiveModel
from dreamshard_planner.cost.model import PlacementProblem
from dreamshard_planner.plugin.limits import available_bytes, check_per_feature, needed_bytes
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics, Table, Workload, workloads_of

OUTPUT_BYTES = 4.0
"""Of one output element on the wire: TorchRec's kernels put out fp32 by default."""

KERNEL_MEMORY = {"fused": "device", "fused_uvm": "uvm", "fused_uvm_caching": "uvm_caching"}
"""Where FBGEMM's training kernels keep their weights; all of them share one fused kernel per group. For others, such as
``key_value`` on SSDs, there is no cost."""
_OPTIMIZERS = {"SGD": "sgd", "EXACT_SGD": "sgd", "RowWiseAdagrad": "rowwise_adagrad"}
_OPTIMIZERS["EXACT_ROWWISE_ADAGRAD"] = "rowwise_adagrad"


class OptionReader:
    """Reads sharding options with the user's constraints and statistics beside them.

    Args:
        constraints: TorchRec's constraints by table name.
        statistics: workload statistics by feature name; they take precedence over pooling factors.
        sharders: consulted for a fused optimizer that is set through ``fused_params``, and for quantized communication.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        sharders: Iterable[ModuleSharder[nn.Module]] = (),
    ) -> None:
        self._constraints = constraints or {}
        self._statistics = statistics
        self._configs: dict[nn.Module, dict[str, Any]] = {}
        self._weighted: dict[nn.Module, bool] = {}
        # Estimator, partitioner and perf model ask for the same tables one after the other.
        self._workloads: dict[tuple[Table, int], Workload] = {}
        self._sharders = {sharder_name(sharder.module_type): sharder for sharder in sharders}

    def workloads(self, options: Sequence[ShardingOption], topology: Topology) -> list[Workload]:
        """Workload of each option's only shard, at the batch that its kernel sees.

        Raises:
            PlannerError: for an option that is not table-wise.
        """
        for option in options:
            require_table_wise(option)
        keys = [(self.table(option, topology), option.batch_size * topology.world_size) for option in options]
        new: dict[int, list[Table]] = {}
        for table, batch_size in dict.fromkeys(keys):
            if (table, batch_size) not in self._workloads:
                new.setdefault(batch_size, []).append(table)
        for batch_size, tables in new.items():
            for table, workload in zip(tables, workloads_of(tables, batch_size), strict=True):
                self._workloads[table, batch_size] = workload
        return [self._workloads[key] for key in keys]

    def problem(
        self, options: Sequence[ShardingOption], topology: Topology, with_storage: bool = True
    ) -> PlacementProblem:
        """The placement problem of a proposal; ``topology`` is what the storage reservation left. Without
        storage (before it is estimated) no memory binds."""
        workloads = self.workloads(options, topology)
        keys = [self._group_key(option, workload) for option, workload in zip(options, workloads, strict=True)]
        group_of = {key: group for group, key in enumerate(dict.fromkeys(keys))}
        output_bytes = [
            workload.output_elements * self._wire_bytes(option) / topology.world_size
            for option, workload in zip(options, workloads, strict=True)
        ]
        return PlacementProblem(
            num_devices=topology.world_size,
            features_SF=feature_matrix(workloads),
            group_S=torch.tensor([group_of[key] for key in keys], dtype=torch.int64),
            num_groups=max(1, len(group_of)),
            output_bytes_S=torch.tensor(output_bytes, dtype=torch.float64),
            storage_SM=needed_bytes(options) if with_storage else torch.zeros(len(options), 3, dtype=torch.int64),
            capacity_DM=available_bytes(topology),
            names=tuple(option.fqn.removeprefix(".") for option in options),
        )

    def _config(self, option: ShardingOption) -> Any:
        module = option.module[1]
        if module not in self._configs:
            self._configs[module] = table_configs(module)
        return self._configs[module].get(option.name)

    def pooling_factors(self, option: ShardingOption) -> list[float]:
        """Pooling factor per feature of the option's table: statistics, else what the option says."""
        names, given = self._feature_names(option), option.input_lengths
        # TorchRec looks constraints up by table name alone; tables of one name in two modules may differ
        # in their features, and then the constraint belongs to the other table.
        if len(given) not in (1, len(names)):
            given = [POOLING_FACTOR]
        factors = per_feature(given, len(names), option.name, "pooling_factors")
        if self._statistics is None:
            return factors
        known = [self._statistics.get(name) for name in names]
        factors = [
            factor if feature is None else feature.pooling_factor
            for factor, feature in zip(factors, known, strict=True)
        ]
        check_per_feature(factors, option.name, f"pooling factors of {names}")
        return factors

    def _feature_names(self, option: ShardingOption) -> list[str]:
        """Features of the option's table; unnamed ones where the module has no configs."""
        config = self._config(option)
        if config is not None:
            return list(config.feature_names)
        return option.feature_names or [""] * len(option.input_lengths)

    def table(self, option: ShardingOption, topology: Topology) -> Table:
        """The option's table with what is known of its data, whatever its sharding."""
        constraint = self._constraints.get(option.name)
        names, pooling_factors = self._feature_names(option), self.pooling_factors(option)
        count = len(names)
        num_poolings = per_feature(
            (constraint and constraint.num_poolings) or option.num_poolings or [1.0], count, option.name, "num_poolings"
        )
        batch_sizes = per_feature(
            (constraint and constraint.batch_sizes) or [option.batch_size], count, option.name, "batch_sizes"
        )
        features, shares = [], []
        for index in range(count):
            known = self._statistics.get(names[index]) if self._statistics is not None else None
            feature = known or FeatureStatistics(pooling_factors[index])
            # Several poolings per sample, or a batch of its own, read the table more (or less) often than
            # the pooling factor says; the histogram still belongs to the lookups it was taken from.
            share = num_poolings[index] * batch_sizes[index] / option.batch_size
            shares.append(share)
            if share != 1.0 and share > 0:
                feature = replace(
                    feature,
                    pooling_factor=feature.pooling_factor * share,
                    batch_size=max(1, round(feature.batch_size / share)),
                )
            features.append(feature)
        rows, dim = option.shards[0].size
        on_host = topology.compute_device == "cpu"
        return Table(
            name=option.fqn.removeprefix("."),
            rows=max(1, rows),
            dim=max(1, dim),
            features=tuple(features),
            output_share=sum(shares) / count,
            weight_bytes=option.tensor.element_size(),
            pooled=option.is_pooled,
            weighted=bool(self._module_is_weighted(option.module[1]) or (constraint and constraint.is_weighted)),
            optimizer=self._optimizer(option),
            memory="device" if on_host else KERNEL_MEMORY.get(option.compute_kernel, "device"),
        )

    def _optimizer(self, option: ShardingOption) -> str:
        """Set on the parameter (``apply_optimizer_in_backward``) or in the sharder's fused parameters;
        FBGEMM's default is SGD."""
        classes = getattr(option.tensor, "_optimizer_classes", None)
        if classes:
            return _OPTIMIZERS.get(classes[0].__name__, "other")
        optimizer = self._fused_params(option).get("optimizer")
        return "sgd" if optimizer is None else _OPTIMIZERS.get(getattr(optimizer, "name", str(optimizer)), "other")

    def _sharder(self, option: ShardingOption) -> ModuleSharder[nn.Module] | None:
        return self._sharders.get(sharder_name(type(option.module[1])))

    def _fused_params(self, option: ShardingOption) -> dict[str, Any]:
        return getattr(self._sharder(option), "fused_params", None) or {}

    def _module_is_weighted(self, module: nn.Module) -> bool:
        """Also where it only wraps such a module: feature processors give the lookups weights."""
        if module not in self._weighted:
            self._weighted[module] = any(
                child.is_weighted() for child in module.modules() if callable(getattr(child, "is_weighted", None))
            )
        return self._weighted[module]

    def _wire_bytes(self, option: ShardingOption) -> float:
        """Of one output element in the all-to-all, mean over forward and backward: what the sharder quantizes to, else
        the kernel's output."""
        operation = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL if option.is_pooled else CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
        codecs = (getattr(self._sharder(option), "qcomm_codecs_registry", None) or {}).get(operation.name)
        if codecs is not None:
            return (codecs.forward.quantized_dtype.itemsize + codecs.backward.quantized_dtype.itemsize) / 2
        return OUTPUT_BYTES if option.output_dtype is None else data_type_to_dtype(option.output_dtype).itemsize

    def _group_key(self, option: ShardingOption, workload: Workload) -> Hashable:
        """What must agree for TorchRec to fuse two shards of a device into one kernel
        (``torchrec.distributed.embedding_sharding.group_tables``, once per module and sharding type)."""
        config, tensor, cache = self._config(option), option.tensor, option.cache_params
        cached_ahead = option.compute_kernel == "fused_uvm_caching" and bool(cache and cache.prefetch_pipeline)
        return (
            option.path,
            option.sharding_type,
            "fused" if option.compute_kernel in KERNEL_MEMORY else option.compute_kernel,
            str(option.tensor.dtype),
            str(getattr(config, "data_type", None)),
            str(getattr(config, "pooling", None)),
            workload.weighted,
            getattr(option, "has_feature_processor", False),
            workload.optimizer,
            repr(getattr(tensor, "_optimizer_classes", None)),
            repr(getattr(tensor, "_optimizer_kwargs", None)),
            workload.pooled,
            option.name if self._fused_params(option).get("use_one_tbe_per_table") else None,
            option.output_dtype,
            option.stochastic_rounding,
            option.bounds_check_mode,
            option.enforce_hbm,
            repr(cache and replace(cache, load_factor=None, stats=None)),
            option.shards[0].size[1] if cached_ahead else None,
        )


def require_table_wise(option: ShardingOption) -> None:
    """Raise TorchRec's ``PlannerError`` for an option of another sharding type."""
    if option.sharding_type != ShardingType.TABLE_WISE.value or len(option.shards) != 1:
        raise PlannerError(
            f"table {option.fqn.removeprefix('.')!r} is to be sharded {option.sharding_type}; DreamShardPlanner places "
            "tables table-wise only, so far. Allow 'table_wise' in its ParameterConstraints.sharding_types.",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )


def table_configs(module: nn.Module) -> dict[str, Any]:
    """The ``EmbeddingBagConfig`` or ``EmbeddingConfig`` of every table of ``module``, by table name; empty
    for modules without configs, such as ``nn.EmbeddingBag``."""
    configs = {}
    for child in module.modules():
        for method in ("embedding_bag_configs", "embedding_configs"):
            if hasattr(child, method):
                configs.update((config.name, config) for config in getattr(child, method)())
    return configs


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
    raise PlannerError(
        f"table {table!r} serves {count} features, but its constraints give {len(values)} {what}: {list(values)}. "
        "Give one per feature.",
        PlannerErrorType.STRICT_CONSTRAINTS,
    )


@dataclass(frozen=True)
class ShardableTable:
    """A table that TorchRec would shard."""

    path: str
    """Fully qualified name of its module."""
    name: str
    sharder: ModuleSharder[nn.Module]
    feature_names: tuple[str, ...]
    """Empty where the module has no configs."""

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.name}".removeprefix(".")


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
        for name in sharder.shardable_parameters(child):
            features = tuple(configs[name].feature_names) if name in configs else ()
            found.append(ShardableTable(path, name, sharder, features))
    return found


def table_wise_constraints(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: TableStatistics | None,
    compute_device: str,
) -> dict[str, ParameterConstraints]:
    """Copies of the constraints, one per table, restricted to table-wise and with one pooling factor,
    ``num_poolings`` and batch size per feature, so that TorchRec's storage and estimates are right.

    A feature's pooling factor comes from ``statistics``, else from the table's constraint, else from
    TorchRec's default.

    Raises:
        PlannerError: where constraints or sharder exclude table-wise, or lengths don't match the features.
        StatisticsError: where ``statistics`` names a feature that no table of the module serves.
    """
    tables = shardable_tables(module, sharders)
    if statistics is not None:
        statistics.check_features(feature for table in tables for feature in table.feature_names)
    table_wise = ShardingType.TABLE_WISE.value
    expanded: dict[str, ParameterConstraints] = dict(constraints or {})
    by_name: dict[str, list[ShardableTable]] = {}
    for table in tables:
        by_name.setdefault(table.name, []).append(table)
    for table in tables:
        name = table.name
        constraint = copy.copy((constraints or {}).get(name)) or ParameterConstraints()
        if constraint.device_group and constraint.device_group != compute_device:
            continue
        _require_supported(table, compute_device)
        if table_wise not in (constraint.sharding_types or [table_wise]):
            raise PlannerError(
                f"table {table.fqn!r} may only be sharded as {sorted(constraint.sharding_types)}; "
                "DreamShardPlanner places tables table-wise only, so far. Allow 'table_wise' in its "
                "ParameterConstraints.sharding_types, or plan this module with TorchRec's planner.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )
        constraint.sharding_types = [table_wise]
        features = table.feature_names
        # TorchRec looks up one constraint for all tables of a name: it holds no table's own statistics then, and the
        # reader adds these.
        namesakes = [other for other in by_name[name] if other.feature_names != features]
        own = None if namesakes else statistics
        if any(len(other.feature_names) != len(features) for other in namesakes):
            _check_shared(constraint, [table, *namesakes])
        elif features:
            pooling_factors = per_feature(constraint.pooling_factors, len(features), name, "pooling_factors")
            constraint.pooling_factors = [
                own[feature].pooling_factor if own is not None and feature in own else given
                for feature, given in zip(features, pooling_factors, strict=True)
            ]
            check_per_feature(constraint.pooling_factors, name, f"pooling factors of {list(features)}")
            for what in ("num_poolings", "batch_sizes"):
                values = getattr(constraint, what)
                if values:
                    setattr(constraint, what, per_feature(values, len(features), name, what))
        expanded[name] = constraint
    return expanded


def _require_supported(table: ShardableTable, compute_device: str) -> None:
    """PlannerError, with the true reason, where no constraint could make the table one that we place."""
    sharder, table_wise = type(table.sharder).__name__, ShardingType.TABLE_WISE.value
    supported = table.sharder.sharding_types(compute_device)
    if table_wise not in supported:
        raise PlannerError(
            f"table {table.fqn!r} may only be sharded as {sorted(supported)} on {compute_device}: {sharder} supports "
            "nothing else, and DreamShardPlanner places tables table-wise only, so far. Plan this module with "
            "TorchRec's planner.",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    kernels = table.sharder.compute_kernels(table_wise, compute_device)
    if not set(kernels) & KERNEL_MEMORY.keys():
        raise PlannerError(
            f"table {table.fqn!r} may only use compute kernels {sorted(kernels)}: {sharder} offers no others on "
            f"{compute_device}, and DreamShardPlanner knows what training costs, with {sorted(KERNEL_MEMORY)}. Plan "
            "this module with TorchRec's planner.",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )


def _check_shared(constraint: ParameterConstraints, tables: Sequence[ShardableTable]) -> None:
    """PlannerError where a constraint cannot be meant for one of several tables of its name."""
    counts, named = {len(table.feature_names) for table in tables}, sorted(table.fqn for table in tables)
    for what in ("pooling_factors", "num_poolings", "batch_sizes"):
        values = getattr(constraint, what)
        if not values:
            continue
        check_per_feature(values, tables[0].name, what)
        if what != "pooling_factors" or len(values) not in {1, *counts}:
            raise PlannerError(
                f"tables {named} have one name and {sorted(counts)} features: the constraint of {tables[0].name!r} "
                f"cannot give them {what} {list(values)}. Rename one of the tables.",
                PlannerErrorType.STRICT_CONSTRAINTS,
            )


def collective_model(topology: Topology, checkpoint: Checkpoint) -> CollectiveModel:
    """All-to-all as the checkpoint measured it, for ranks of one host of that kind; else over the topology's bandwidth:
    between hosts as soon as there are several."""
    measured = checkpoint.metadata.get("collectives")
    one_host = topology.world_size <= topology.local_world_size
    if measured is not None and one_host and measured["hardware"]["device"] == topology.compute_device:
        fit = CollectiveFit(**measured["fits"]["all_to_all"])
        ranks = f"{measured['world_size']} ranks of one {measured['hardware']['name']}"
        source = f"measured with {measured['backend']} on {ranks}, {checkpoint.name}"
        return fit.model(topology.world_size, source)
    bytes_per_ms = topology.comms_bandwidths.get_bw(
        local_world_size=topology.intra_group_size,
        world_size=topology.world_size,
        collective_type=CollectiveType.ALL_TO_ALL,
    )
    source = f"topology's {bytes_per_ms * 1e3 / 1e9:.0f} GB/s, nothing measured"
    return CollectiveModel(topology.world_size, bytes_per_ms, source=source)
