# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options read as tables, workloads and sharding problems.

This module reads a table from an option, its module and sharder, constraints and statistics. ``parts.py`` cuts shards
into parts and units, and names the collectives that carry their outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS

from dreamshard_planner.cost.collectives import Collective, Collectives
from dreamshard_planner.cost.problem import MEMORY_KINDS, Option, Problem
from dreamshard_planner.plans.plan_file import TableInputs
from dreamshard_planner.problem.parts import (
    Links,
    Part,
    ReadProblem,
    exchanges_of,
    group_key,
    hot_bytes_of,
    num_ranks,
    parts_of,
    sent_bytes,
    set_fused_params,
    units_of,
    wire_bytes,
)
from dreamshard_planner.search_space.constraints import constraint_of, counted_factors, per_feature
from dreamshard_planner.search_space.modules import ShardableTable, TableModule, WithOptimizer
from dreamshard_planner.search_space.options import by_table, fqn_of, hot_rows_of, tower_refused, type_of
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.sharding_types import CACHING, DENSE, in_host_memory, kernel_of, serves
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import (
    CACHE_LOAD_FACTOR,
    NO_OPTIMIZER,
    Table,
    Workload,
    costed_optimizer,
    feature_matrix,
    workloads_of,
)

MAX_BYTES = 2**50
"""Most bytes of a memory that is a limit; sums of thousands fit into int64. A part that takes more does not fit."""
SCALE_BYTES = 4
"""Bytes of the scale and the bias of a quantized row, 16 bits each."""


class OptionReader:
    """Reads sharding options with the user's constraints (by key, see ``constraint_of``) and statistics by feature,
    which take precedence over pooling factors. Sharders give fused parameters and quantized communication."""

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        sharders: Iterable[ModuleSharder[nn.Module]] = (),
        legal: LegalRanks | None = None,
    ) -> None:
        self._constraints = constraints or {}
        self._statistics: Mapping[str, FeatureStatistics] = statistics or {}
        self._sharders = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        self._legal = legal
        self._owners: dict[nn.Module, TableModule] = {}
        # Estimator, proposer, partitioner and perf model ask for the same tables one after the other.
        self._tables: dict[tuple[Any, ...], Table] = {}
        self._workloads: dict[tuple[Table, int], Workload] = {}

    def read(
        self, options: Sequence[ShardingOption], topology: Topology, links: Links, with_storage: bool = True
    ) -> ReadProblem:
        """Read the sharding problem in which each table takes one of its options, given in any order; PlannerError
        if an option cannot be placed, or is of an embedding tower. The topology has the memory that the storage
        reservation left, which binds nothing before storage is estimated (``with_storage=False``)."""
        tables = by_table(options)
        flat = [option for choices in tables.values() for option in choices]
        groups: dict[Any, int] = {}
        parts: list[Part] = []
        read: dict[str, list[Option]] = {fqn: [] for fqn in tables}
        for option, whole in zip(flat, self.workloads(flat, topology), strict=True):
            if option.dependency:
                raise tower_refused(fqn_of(option))
            shardable, table = self._shardable(option), self.table(option, topology)
            group = groups.setdefault(group_key(option, shardable, table), len(groups))
            element_bytes = wire_bytes(option, shardable.owner)
            exchanges = partial(exchanges_of, option, topology=topology, links=links, element_bytes=element_bytes)
            found, indices = parts_of(option, whole, group, exchanges, with_storage, hot_bytes_of(option, table))
            units = units_of(option, [len(parts) + index for index in indices], topology)
            parts += found
            read[fqn_of(option)].append(Option(units, option.sharding_type, option.compute_kernel))
        needs_PM, limits_DM, num_rules = needed_bytes(parts, with_storage), available_bytes(topology), 0
        if with_storage and self._legal is not None:
            need_PR, room_DR = self._legal.limits([fqn_of(part.option) for part in parts])
            needs_PM, limits_DM = torch.cat([needs_PM, need_PR], 1), torch.cat([limits_DM, room_DR], 1)
            num_rules = need_PR.shape[1]
        collectives, bytes_PC = sent_bytes(parts)
        problem = Problem(
            num_ranks=topology.world_size,
            tables=tuple(tuple(choices) for choices in read.values()),
            names=tuple(tables),
            features_PF=feature_matrix([part.workload for part in parts]),
            group_P=torch.tensor([part.group for part in parts], dtype=torch.int64),
            num_groups=max(1, len(groups)),
            needs_PM=needs_PM,
            limits_DM=limits_DM,
            bytes_PC=bytes_PC,
            collectives=Collectives(
                collectives or [Collective("none", "world", links["all_to_all"], links["all_to_all"])],
                topology.intra_group_size,
                links["all_to_all"],
            ),
            num_rules=num_rules,
        )
        return ReadProblem(problem, tuple(tuple(choices) for choices in tables.values()), tuple(parts))

    def workloads(self, options: Sequence[ShardingOption], topology: Topology) -> list[Workload]:
        """Return the work of each option's whole table, at the batch that its kernels see.

        Data-parallel ranks see the local batch. All ranks serve one batch of a quantized table together. Other kernels
        see the batch of all ranks. With index dedup, each rank's batch asks for a row once.
        """
        tables = [self.table(option, topology) for option in options]
        ranks = [
            1 if serves(option.compute_kernel) else num_ranks(type_of(option).batch, topology) for option in options
        ]
        sizes = [option.batch_size * count for option, count in zip(options, ranks, strict=True)]
        workloads = self._whole(list(zip(tables, sizes, strict=True)))
        deduped = [i for i, option in enumerate(options) if compat.dedups_ids(self._shardable(option).sharder)]
        of_ranks = self._whole([(tables[index], options[index].batch_size) for index in deduped])
        for index, of_rank in zip(deduped, of_ranks, strict=True):
            workloads[index] = workloads[index].deduped(of_rank, ranks[index])
        return workloads

    def _whole(self, keys: Sequence[tuple[Table, int]]) -> list[Workload]:
        """Return the workloads of tables at batch sizes."""
        new: dict[int, list[Table]] = {}
        for table, batch_size in dict.fromkeys(keys):
            if (table, batch_size) not in self._workloads:
                new.setdefault(batch_size, []).append(table)
        for batch_size, tables in new.items():
            for table, workload in zip(tables, workloads_of(tables, batch_size), strict=True):
                self._workloads[table, batch_size] = workload
        return [self._workloads[key] for key in keys]

    def _constraint(self, option: ShardingOption) -> ParameterConstraints:
        return constraint_of(self._constraints, option.name, fqn_of(option)) or ParameterConstraints()

    def _shardable(self, option: ShardingOption) -> ShardableTable:
        path, module = option.module
        if module not in self._owners:
            self._owners[module] = TableModule(path, module, self._sharders.get(sharder_name(type(module))))
        return ShardableTable(self._owners[module], option.name, option.tensor)

    def _fused_params(self, option: ShardingOption) -> dict[str, Any]:
        return self._shardable(option).owner.fused_params(option.output_dtype)

    def in_backward(self, option: ShardingOption) -> bool:
        """Return whether the option's table was given an in-backward optimizer, which it may lose."""
        return not isinstance(option.module[1], WithOptimizer) and self._shardable(option).has_optimizer

    def assumes_sgd(self, option: ShardingOption) -> bool:
        """Return whether the option's fused kernel trains by SGD because nobody named an optimizer."""
        fused = not serves(option.compute_kernel) and option.compute_kernel != DENSE
        return fused and not self._shardable(option).has_optimizer

    def pooling_factors(self, option: ShardingOption) -> list[float]:
        """Return the pooling factor of each feature of the option's table: of the statistics, else of the option."""
        names, given = self._feature_names(option), option.input_lengths
        # TorchRec looks constraints up by table name alone. Tables of one name in two modules may differ in features,
        # and then the constraint belongs to the other table.
        if len(given) not in (1, len(names)):
            given = [POOLING_FACTOR]
        return counted_factors(given, names, self._statistics, option.name)

    def declared(self, option: ShardingOption) -> TableInputs:
        """Return the option's table as its module declares it."""
        shardable, (rows, dim) = self._shardable(option), option.tensor.shape
        return TableInputs(
            rows=rows,
            dim=dim,
            data_type=str(option.tensor.dtype).removeprefix("torch."),
            features=tuple(self._feature_names(option)),
            pooling="none" if not option.is_pooled else "mean" if shardable.is_mean else "sum",
            weighted=shardable.owner.is_weighted,
            optimizer=NO_OPTIMIZER if serves(option.compute_kernel) else shardable.optimizer,
        )

    def _feature_names(self, option: ShardingOption) -> list[str]:
        """Return the features of the option's table; unnamed ones if the module has no configs."""
        config = self._shardable(option).config
        if config is not None:
            return list(config.feature_names)
        return option.feature_names or [""] * len(option.input_lengths)

    def table(self, option: ShardingOption, topology: Topology) -> Table:
        """Return the option's table; the same for all options of a table, kernel, cache and hot rows."""
        declared = (option.module, option.name, option.batch_size)  # one reader may serve several models and planners
        lookups = (*option.input_lengths, None, *(option.num_poolings or ()))
        kernel = (option.compute_kernel, option.cache_load_factor, self._prefetches(option), hot_rows_of(option))
        key = (declared, lookups, kernel)
        if key not in self._tables:
            self._tables[key] = self._read_table(option, topology)
        return self._tables[key]

    def _read_table(self, option: ShardingOption, topology: Topology) -> Table:
        constraint, shardable, names = self._constraint(option), self._shardable(option), self._feature_names(option)
        pooling_factors = self.pooling_factors(option)
        num_poolings = constraint.num_poolings or option.num_poolings or [1.0]
        num_poolings = per_feature(num_poolings, len(names), option.name, "num_poolings")
        batch_sizes = per_feature(constraint.batch_sizes or [option.batch_size], len(names), option.name, "batch_sizes")
        features, shares, hot, hot_lookups = [], [], hot_rows_of(option), 0.0
        for name, factor, poolings, batch_size in zip(names, pooling_factors, num_poolings, batch_sizes, strict=True):
            feature = self._statistics.get(name) or FeatureStatistics(factor)
            if self._why_unplaced(option, feature):
                feature = replace(feature, ids=None)
            # Several poolings per sample, or a batch of its own, read the table more (or less) often than the pooling
            # factor says. The histogram still belongs to the lookups that it was taken from.
            share = poolings * batch_size / option.batch_size
            shares.append(share)
            if hot is not None:
                others = feature.without_rows(hot.ids)
                hot_lookups += (feature.pooling_factor - others.pooling_factor) * share
                feature = others
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
            config = shardable.config
            dim, bits = config.embedding_dim, DATA_TYPE_NUM_BITS[config.data_type]
            weight_bytes = bits / 8 + (SCALE_BYTES / dim if bits <= 8 else 0)
        return Table(
            name=fqn_of(option),
            rows=max(1, rows),
            dim=max(1, dim),
            features=tuple(features),
            hot_lookups=hot_lookups,
            output_share=sum(shares) / len(names),
            weight_bytes=weight_bytes,
            pooled=option.is_pooled,
            weighted=shardable.owner.is_weighted or bool(constraint.is_weighted),
            optimizer=costed_optimizer(NO_OPTIMIZER if is_served else shardable.optimizer),
            memory="device" if topology.compute_device == "cpu" else kernel_of(option.compute_kernel).memory,
            cache_load_factor=self.load_factor(option) or CACHE_LOAD_FACTOR,
            prefetched=self._prefetches(option),
            served=is_served,
        )

    def load_factor(self, option: ShardingOption) -> float | None:
        """Return the share of a table's rows that its cache holds; None if the user gave none."""
        return option.cache_load_factor or self._fused_params(option).get("cache_load_factor")

    def kernel_params(self, option: ShardingOption) -> dict[str, Any]:
        """Return the arguments of the option's kernel: the sharder's, the optimizer's, and the option's own."""
        of_sharder, stored = self._fused_params(option), getattr(option, "key_value_params", None)
        of_optimizer = compat.optimizer_arguments(option.tensor)
        of_store = {} if stored is None else {name: value for name, value in vars(stored).items() if value is not None}
        return {**of_sharder, **of_optimizer, **set_fused_params(option, of_sharder), **of_store}

    def _prefetches(self, option: ShardingOption) -> bool:
        if option.compute_kernel != CACHING:
            return False
        own = option.cache_params and option.cache_params.prefetch_pipeline
        return bool(self._fused_params(option).get("prefetch_pipeline") if own is None else own)

    def _why_unplaced(self, option: ShardingOption, feature: FeatureStatistics | None) -> str | None:
        """Return why the rows of a feature's known ids are unknown; None if they are known, or no ids are."""
        if feature is None or feature.ids is None:
            return None
        if self._shardable(option).owner.remaps_ids:
            return "its ids are mapped to rows as they come (managed collisions, ITEP)"
        if feature.ids.end > option.tensor.shape[0]:
            return f"its ids reach up to {feature.ids.end - 1:,}, the table has {option.tensor.shape[0]:,} rows"
        return None

    def is_guess(self, option: ShardingOption) -> bool:
        """Return whether an option's cost rests on an assumed popularity of rows, and no constraint names its
        kernel."""
        named = self._constraint(option).compute_kernels or ()
        return self.assumes_popularity(option) and option.compute_kernel not in named

    def assumes_popularity(self, option: ShardingOption) -> bool:
        """Return whether the table is in host memory and no statistics tell how often its rows are read again."""
        known = [self._statistics.get(name) for name in self._feature_names(option)]
        uncounted = any(feature is None or feature.reuse_histogram is None for feature in known)
        return in_host_memory(option.compute_kernel) and uncounted

    def notes(self, plan: Iterable[ShardingOption]) -> tuple[str, ...]:
        """Return assumptions behind the cost of the tables that a plan splits by rows."""
        return tuple(
            f"row blocks of {fqn_of(option)} are taken to be read alike: feature {name!r}, {reason}"
            for option in plan
            if type_of(option).splits_rows
            for name in dict.fromkeys(self._feature_names(option))
            if (reason := self._why_unplaced(option, self._statistics.get(name)))
        )


def check_topology(topology: Topology) -> None:
    """Raise PlannerError if there are no ranks, or, naming the rank, if a memory is no number of bytes."""
    if not topology.devices:
        raise PlannerError("the topology has no ranks: give Topology a world_size from 1", PlannerErrorType.OTHER)
    for rank, device in enumerate(topology.devices):
        for kind in MEMORY_KINDS:
            size = getattr(device.storage, kind.lower())
            if not (isinstance(size, Real) and math.isfinite(size)):
                raise PlannerError(
                    f"rank {rank} of the topology has {size!r} bytes of {kind}: give a whole number, or one as large "
                    f"as {MAX_BYTES:,} (2**50) where memory is no limit",
                    PlannerErrorType.OTHER,
                )


def available_bytes(topology: Topology) -> Tensor:
    """Return the memory of every device, int64 [D, M]; negative if the reservation exceeds it."""
    check_topology(topology)
    memories = [[getattr(device.storage, kind.lower()) for kind in MEMORY_KINDS] for device in topology.devices]
    return torch.tensor([[int(min(max(size, -MAX_BYTES), MAX_BYTES)) for size in sizes] for sizes in memories])


def needed_bytes(parts: Sequence[Part], with_storage: bool) -> Tensor:
    """Return the memory that a shard of every part needs, int64 [P, M]; zeros before storage is estimated."""
    if not with_storage:
        return torch.zeros(len(parts), len(MEMORY_KINDS), dtype=torch.int64)
    storages = (part.shard.storage for part in parts)
    needs = [[min(getattr(one, kind.lower()), 2 * MAX_BYTES) for kind in MEMORY_KINDS] for one in storages]
    return torch.tensor(needs, dtype=torch.int64).view(-1, len(MEMORY_KINDS))
