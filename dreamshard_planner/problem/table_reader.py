# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables as TorchRec describes them: features, pooling factors, precision, optimizer, memory; by an option, its module
and sharder, the user's constraints and statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS
from torchrec.types import DataType

from dreamshard_planner.plans.plan_file import NO_OPTIMIZER, TableInputs
from dreamshard_planner.search_space.input_checks import check_per_feature
from dreamshard_planner.search_space.kernels import CACHING, in_host_memory, memory_of, serves
from dreamshard_planner.search_space.legality import Situation, is_mean, is_weighted, optimizer_name
from dreamshard_planner.search_space.modules import (
    Quantized,
    brings_optimizer,
    fused_params,
    per_feature,
    remaps_ids,
    table_configs,
)
from dreamshard_planner.search_space.options import fqn_of, type_of
from dreamshard_planner.search_space.replica_rules import replicas_follow
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import CACHE_LOAD_FACTOR, FeatureStatistics, Table, costed_optimizer

SCALE_BYTES = 4
"""Of the scale and the bias of a quantized row, of 16 bits each."""


def quantized_bytes(data_type: DataType, dim: int) -> float:
    """Bytes of one weight of a quantized table, with its share of the row's scale and bias."""
    bits = DATA_TYPE_NUM_BITS[data_type]
    return bits / 8 + (SCALE_BYTES / dim if bits <= 8 else 0)


class TableReader:
    """Reads tables with the user's constraints and statistics beside them.

    Args:
        constraints: TorchRec's constraints by table name.
        statistics: workload statistics by feature name; they take precedence over pooling factors.
        sharders: consulted for a fused optimizer that is set through ``fused_params``.
        optimizers_attached: to the replicas of data-parallel tables.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        sharders: Iterable[ModuleSharder[nn.Module]] = (),
        optimizers_attached: bool = False,
    ) -> None:
        self._constraints = constraints or {}
        self._statistics = statistics
        self._optimizers_attached = optimizers_attached
        self._sharders = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        self._configs: dict[nn.Module, dict[str, Any]] = {}
        self._weighted: dict[nn.Module, bool] = {}
        self._tables: dict[tuple[Any, ...], Table] = {}
        self._unplaced: dict[str, dict[str, str]] = {}

    def _config(self, option: ShardingOption) -> Any:
        module = option.module[1]
        if module not in self._configs:
            self._configs[module] = table_configs(module)
        return self._configs[module].get(option.name)

    def situation(self, option: ShardingOption, compute_device: str) -> Situation:
        """Of the option's table, for what its type changes in training."""
        return Situation(
            option.module[1],
            self._config(option),
            compute_device,
            optimizer_name(option.tensor, self._fused_params(option)),
            self._optimizers_attached,
            replicas_follow(option.tensor, self._fused_params(option), option.module[1]),
            Quantized.of(option.module[1], self._sharder(option), option.tensor, self._config(option)),
        )

    def in_backward(self, option: ShardingOption) -> bool:
        """Whether somebody set an in-backward optimizer for the option's table, which it may lose."""
        if brings_optimizer(option.module[1]):
            return False
        return bool(getattr(option.tensor, "_optimizer_classes", None) or self._fused_params(option).get("optimizer"))

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

    def declared(self, option: ShardingOption) -> TableInputs:
        """The option's table as its module declares it."""
        rows, dim = option.tensor.shape
        return TableInputs(
            rows=rows,
            dim=dim,
            data_type=str(option.tensor.dtype).removeprefix("torch."),
            features=tuple(self._feature_names(option)),
            pooling="none" if not option.is_pooled else "mean" if is_mean(self._config(option)) else "sum",
            weighted=self._module_is_weighted(option.module[1]),
            optimizer=self._optimizer(option),
        )

    def _optimizer(self, option: ShardingOption) -> str:
        if serves(option.compute_kernel):
            return NO_OPTIMIZER
        return optimizer_name(option.tensor, self._fused_params(option))

    def _feature_names(self, option: ShardingOption) -> list[str]:
        """Features of the option's table; unnamed ones where the module has no configs."""
        config = self._config(option)
        if config is not None:
            return list(config.feature_names)
        return option.feature_names or [""] * len(option.input_lengths)

    def table(self, option: ShardingOption, topology: Topology) -> Table:
        """The option's table; the same for all options of a table, kernel and cache."""
        key = (option.fqn, option.compute_kernel, option.cache_load_factor, self._prefetches(option))
        if key not in self._tables:
            self._tables[key] = self._read_table(option, topology)
        return self._tables[key]

    def _read_table(self, option: ShardingOption, topology: Topology) -> Table:
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
            if reason := self._why_unplaced(option, feature):
                self._unplaced.setdefault(option.fqn, {})[names[index]] = reason
                feature = replace(feature, ids=None)
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
        rows, dim = option.tensor.shape
        weight_bytes: float = option.tensor.element_size()
        if is_served := serves(option.compute_kernel):
            config = self._config(option)
            dim = config.embedding_dim
            weight_bytes = quantized_bytes(config.data_type, dim)
        on_host = topology.compute_device == "cpu"
        return Table(
            name=fqn_of(option),
            rows=max(1, rows),
            dim=max(1, dim),
            features=tuple(features),
            output_share=sum(shares) / count,
            weight_bytes=weight_bytes,
            pooled=option.is_pooled,
            weighted=bool(self._module_is_weighted(option.module[1]) or (constraint and constraint.is_weighted)),
            optimizer="sgd" if is_served else costed_optimizer(self._optimizer(option)),
            memory="device" if on_host else memory_of(option.compute_kernel),
            cache_load_factor=self.load_factor(option) or CACHE_LOAD_FACTOR,
            prefetched=self._prefetches(option),
            served=is_served,
        )

    def load_factor(self, option: ShardingOption) -> float | None:
        """The share of a table's rows that its cache holds, where somebody gave one."""
        return option.cache_load_factor or self._fused_params(option).get("cache_load_factor")

    def _prefetches(self, option: ShardingOption) -> bool:
        if option.compute_kernel != CACHING:
            return False
        own = option.cache_params and option.cache_params.prefetch_pipeline
        return bool(self._fused_params(option).get("prefetch_pipeline") if own is None else own)

    def _why_unplaced(self, option: ShardingOption, feature: FeatureStatistics) -> str | None:
        """Why the rows that a feature looks up are unknown although its ids are known; None where that is not so."""
        if feature.ids is None:
            return None
        if remaps_ids(option.module[1]):
            return "its ids are mapped to rows as they come (managed collisions)"
        if feature.ids.end > option.tensor.shape[0]:
            return f"its ids reach up to {feature.ids.end - 1:,}, the table has {option.tensor.shape[0]:,} rows"
        return None

    def is_guess(self, option: ShardingOption) -> bool:
        """Whether an option that nobody asked for keeps the table in host memory, where its cost is that of a
        popularity of rows that is assumed."""
        constraint = self._constraints.get(option.name)
        return self.assumes_popularity(option) and option.compute_kernel not in (
            (constraint and constraint.compute_kernels) or ()
        )

    def assumes_popularity(self, option: ShardingOption) -> bool:
        """Whether the table is in host memory and no statistics tell how often its rows are read again."""
        statistics: Mapping[str, FeatureStatistics] = self._statistics or {}
        known = [statistics.get(name) for name in self._feature_names(option)]
        uncounted = any(feature is None or feature.reuse_histogram is None for feature in known)
        return in_host_memory(option.compute_kernel) and uncounted

    def notes(self, plan: Iterable[ShardingOption]) -> tuple[str, ...]:
        """Assumptions behind the cost of the tables that a plan splits by rows."""
        return tuple(
            f"row blocks of {fqn_of(option)} are taken to be read alike: feature {feature!r}, {reason}"
            for option in plan
            if type_of(option).splits_rows
            for feature, reason in self._unplaced.get(option.fqn, {}).items()
        )

    def _sharder(self, option: ShardingOption) -> ModuleSharder[nn.Module] | None:
        return self._sharders.get(sharder_name(type(option.module[1])))

    def _fused_params(self, option: ShardingOption) -> dict[str, Any]:
        return fused_params(option.module[1], self._sharder(option))

    def _module_is_weighted(self, module: nn.Module) -> bool:
        if module not in self._weighted:
            self._weighted[module] = is_weighted(module)
        return self._weighted[module]
