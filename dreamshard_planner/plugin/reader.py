# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options read as workloads and sharding problems.

Everything that depends on how TorchRec describes a table is here: features per table, pooling factors, batch sizes,
precision, optimizer, compute kernel, what each shard reads and which collectives carry its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import CommOp, ModuleSharder
from torchrec.modules.embedding_configs import data_type_to_dtype

from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.sharding import Option, Sharding, ShardingProblem, Unit
from dreamshard_planner.plugin.grouping import KERNEL_MEMORY, group_key
from dreamshard_planner.plugin.legal import DP, GRID, RW, TWRW, Situation, is_weighted, optimizer_name
from dreamshard_planner.plugin.limits import MEMORY_KINDS, available_bytes, check_needs, check_per_feature, needed_bytes
from dreamshard_planner.plugin.modules import per_feature, table_configs
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics, Table, Workload, workloads_of

OUTPUT_BYTES = 4.0
"""Of one output element on the wire: TorchRec's kernels put out fp32 by default."""
_OPTIMIZERS = {"sgd": "sgd", "exact_sgd": "sgd", "exact_rowwise_adagrad": "rowwise_adagrad"}


@dataclass(frozen=True)
class Links:
    """Models of the exchanges that a topology has room for."""

    world: CollectiveModel
    """Between all ranks."""
    host: CollectiveModel
    """Between the ranks of one host."""
    across: CollectiveModel
    """Between the ranks of the same place on every host."""


@dataclass(frozen=True)
class ReadProblem:
    """A sharding problem, and the TorchRec options that it was read from."""

    problem: ShardingProblem
    options: tuple[tuple[ShardingOption, ...], ...]
    """In the order of the problem's tables and options."""
    shard_P: tuple[Shard, ...]
    """A shard of each part: parts are shards of one size, of one option."""
    dense_elements_P: torch.Tensor
    """Elements of the table-sized gradient of data-parallel parts, zero elsewhere."""

    def assign(self, sharding: Sharding) -> list[ShardingOption]:
        """The chosen options, with the ranks of their shards set."""
        chosen = []
        for options, units, option, positions in zip(
            self.options, self.problem.tables, sharding.options, sharding.positions, strict=True
        ):
            shards = iter(options[option].shards)
            for unit, position in zip(units[option].units, positions, strict=True):
                for rank in range(position * unit.span, (position + 1) * unit.span):
                    next(shards).rank = rank
            chosen.append(options[option])
        return chosen

    def sharding(self, plan: Sequence[ShardingOption]) -> Sharding:
        """A plan with ranks, of this problem's tables.

        Raises:
            PlannerError: where a table is missing, or is sharded as no option of this problem.
        """
        given = {option.fqn: option for option in plan}
        options, positions = [], []
        for choices, units in zip(self.options, self.problem.tables, strict=True):
            option = given.get(choices[0].fqn)
            index = next((i for i, choice in enumerate(choices) if option is not None and _same(choice, option)), None)
            if index is None:
                raise PlannerError(
                    f"the plan has no sharding of table {choices[0].fqn.removeprefix('.')!r} that could be rated",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
            options.append(index)
            positions.append(_positions(option, units[index]))
        return Sharding(tuple(options), tuple(positions))


def _same(one: ShardingOption, other: ShardingOption) -> bool:
    return (one.sharding_type, one.compute_kernel, one.num_shards) == (
        other.sharding_type,
        other.compute_kernel,
        other.num_shards,
    )


def _positions(option: ShardingOption, units: Option) -> tuple[int, ...]:
    positions, ranks = [], iter([shard.rank for shard in option.shards])
    for unit in units.units:
        here = [next(ranks) for _ in range(unit.span)]
        position = (here[0] or 0) // unit.span
        if here != list(range(position * unit.span, (position + 1) * unit.span)):
            raise PlannerError(
                f"table {option.fqn.removeprefix('.')!r} is sharded {option.sharding_type} on ranks {here}, which "
                "TorchRec would not run so",
                PlannerErrorType.PARTITION,
            )
        positions.append(position)
    return tuple(positions)


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
        self._tables: dict[tuple[str, str], Table] = {}
        # Estimator, proposer, partitioner and perf model ask for the same tables one after the other.
        self._workloads: dict[tuple[Table, int], Workload] = {}
        self._sharders = {sharder_name(sharder.module_type): sharder for sharder in sharders}

    def workloads(self, options: Sequence[ShardingOption], topology: Topology) -> list[Workload]:
        """What each option's *whole* table asks for, at the batch that its kernels see: the local batch of
        data-parallel ranks, the batch of all ranks elsewhere."""
        keys = []
        for option in options:
            ranks = 1 if option.sharding_type == DP else topology.world_size
            keys.append((self.table(option, topology), option.batch_size * ranks))
        new: dict[int, list[Table]] = {}
        for table, batch_size in dict.fromkeys(keys):
            if (table, batch_size) not in self._workloads:
                new.setdefault(batch_size, []).append(table)
        for batch_size, tables in new.items():
            for table, workload in zip(tables, workloads_of(tables, batch_size), strict=True):
                self._workloads[table, batch_size] = workload
        return [self._workloads[key] for key in keys]

    def read(
        self, options: Sequence[ShardingOption], topology: Topology, links: Links, with_storage: bool = True
    ) -> ReadProblem:
        """The sharding problem of some options, of which each table must take one.

        Args:
            options: of all tables, in any order; a table's options keep theirs.
            topology: what the storage reservation left.
            links: models of its exchanges.
            with_storage: False before storage is estimated: no memory binds then.

        Raises:
            PlannerError: for options that can't be placed: of an unknown kernel, or that depend on each other.
        """
        by_table: dict[str, list[ShardingOption]] = {}
        for option in options:
            require_independent(option)
            by_table.setdefault(option.fqn, []).append(option)
        flat = [option for choices in by_table.values() for option in choices]
        columns: dict[Collective, int] = {}
        groups: dict[Any, int] = {}
        workloads: list[Workload] = []
        shard_P: list[Shard] = []
        group_P: list[int] = []
        dense_P: list[float] = []
        uncounted_P: list[int] = []
        sent: list[tuple[int, int, float]] = []
        read: dict[str, list[Option]] = {fqn: [] for fqn in by_table}
        for option, whole in zip(flat, self.workloads(flat, topology), strict=True):
            table = self.table(option, topology)
            key = group_key(option, table, self._config(option), self._fused_params(option))
            group = groups.setdefault(key, len(groups))
            part_of: dict[tuple, int] = {}
            parts = []
            for shard in option.shards:
                storage = (shard.storage.hbm, shard.storage.ddr, shard.storage.ssd) if with_storage else ()
                same = (*shard.size, *storage)
                part = part_of.get(same)
                if part is None:
                    part = part_of[same] = len(workloads)
                    workload = whole.part(*shard.size)
                    workloads.append(workload)
                    shard_P.append(shard)
                    group_P.append(group)
                    dense_P.append(workload.rows * workload.dim if option.compute_kernel == "dense" else 0.0)
                    uncounted_P.append(_uncounted_bytes(option, table, workload))
                    for collective, count in self._exchanges(option, workload, topology, links):
                        sent.append((part, columns.setdefault(collective, len(columns)), count))
                parts.append(part)
            span = unit_span(option, topology)
            if not parts or len(parts) % span:
                raise PlannerError(
                    f"table {option.fqn.removeprefix('.')!r} is to be sharded {option.sharding_type} in {len(parts)} "
                    f"shards, which do not fill units of {span} ranks",
                    PlannerErrorType.PARTITION,
                )
            units = tuple(Unit(tuple(parts[first : first + span])) for first in range(0, len(parts), span))
            read[option.fqn].append(Option(units, option.sharding_type, option.compute_kernel))
        bytes_PC = torch.zeros(len(workloads), max(1, len(columns)), dtype=torch.float64)
        for part, column, count in sent:
            bytes_PC[part, column] = count
        spare = [] if columns else [Collective("none", "world", links.world)]
        storage_PM = torch.zeros(len(shard_P), len(MEMORY_KINDS), dtype=torch.int64)
        if with_storage:
            check_needs(by_table.values())
            storage_PM = needed_bytes(shard_P)
            kind = MEMORY_KINDS.index("DDR" if topology.compute_device == "cpu" else "HBM")
            storage_PM[:, kind] += torch.tensor(uncounted_P, dtype=torch.int64)
        problem = ShardingProblem(
            num_ranks=topology.world_size,
            tables=tuple(tuple(choices) for choices in read.values()),
            names=tuple(fqn.removeprefix(".") for fqn in by_table),
            features_PF=feature_matrix(workloads),
            group_P=torch.tensor(group_P, dtype=torch.int64),
            num_groups=max(1, len(groups)),
            storage_PM=storage_PM,
            capacity_DM=available_bytes(topology),
            bytes_PC=bytes_PC,
            collectives=Collectives([*columns, *spare], topology.intra_group_size, links.world),
        )
        return ReadProblem(
            problem,
            tuple(tuple(choices) for choices in by_table.values()),
            tuple(shard_P),
            torch.tensor(dense_P, dtype=torch.float64),
        )

    def _exchanges(
        self, option: ShardingOption, workload: Workload, topology: Topology, links: Links
    ) -> Iterable[tuple[Collective, float]]:
        """Collectives that carry a shard's output, each with the bytes that its rank sends to each peer."""
        name, world = f"{option.path or 'model'} {option.sharding_type}", topology.world_size
        sent = workload.output_elements * self._wire_bytes(option)
        if option.sharding_type == DP:
            gradient = workload.rows * workload.dim * workload.weight_bytes
            yield Collective(f"{name} all-reduce", "world", links.world, forward=False), 2 * gradient / world
        elif option.sharding_type in (TWRW, GRID):
            yield Collective(f"{name} reduce-scatter", "host", links.host), sent / topology.intra_group_size
            yield Collective(f"{name} all-to-all", "across", links.across), sent / world
        elif option.sharding_type == RW and option.is_pooled:
            yield Collective(f"{name} reduce-scatter", "world", links.world), sent / world
        else:
            yield Collective(f"{name} all-to-all", "world", links.world), sent / world

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
        )

    def in_backward(self, option: ShardingOption) -> bool:
        """Whether somebody set an in-backward optimizer for the option's table."""
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

    def _feature_names(self, option: ShardingOption) -> list[str]:
        """Features of the option's table; unnamed ones where the module has no configs."""
        config = self._config(option)
        if config is not None:
            return list(config.feature_names)
        return option.feature_names or [""] * len(option.input_lengths)

    def table(self, option: ShardingOption, topology: Topology) -> Table:
        """The option's table; the same for all options of a table and kernel."""
        key = (option.fqn, option.compute_kernel)
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
            optimizer=_OPTIMIZERS.get(optimizer_name(option.tensor, self._fused_params(option)), "other"),
            memory="device" if on_host else KERNEL_MEMORY.get(option.compute_kernel, "device"),
        )

    def _sharder(self, option: ShardingOption) -> ModuleSharder[nn.Module] | None:
        return self._sharders.get(sharder_name(type(option.module[1])))

    def _fused_params(self, option: ShardingOption) -> dict[str, Any]:
        return getattr(self._sharder(option), "fused_params", None) or {}

    def _module_is_weighted(self, module: nn.Module) -> bool:
        if module not in self._weighted:
            self._weighted[module] = is_weighted(module)
        return self._weighted[module]

    def _wire_bytes(self, option: ShardingOption) -> float:
        """Of one output element on the wire, mean over forward and backward: what the sharder quantizes to, else the
        kernel's output."""
        if not option.is_pooled:
            operation = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
        elif option.sharding_type in (RW, TWRW, GRID):
            operation = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
        else:
            operation = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
        codecs = (getattr(self._sharder(option), "qcomm_codecs_registry", None) or {}).get(operation.name)
        if codecs is not None:
            return (codecs.forward.quantized_dtype.itemsize + codecs.backward.quantized_dtype.itemsize) / 2
        return OUTPUT_BYTES if option.output_dtype is None else data_type_to_dtype(option.output_dtype).itemsize


def _uncounted_bytes(option: ShardingOption, table: Table, shard: Workload) -> int:
    """What a shard needs beside TorchRec's estimate of its storage: the table-sized gradient of a dense kernel, and
    what a column slice's row-wise optimizer state, four bytes per row, exceeds its share of the whole table's."""
    if option.compute_kernel == "dense":
        return int(shard.rows * shard.dim * shard.weight_bytes)
    if table.optimizer == "rowwise_adagrad" and table.memory == "device":
        return int(shard.rows * 4 * (1 - shard.dim / table.dim))
    return 0


def unit_span(option: ShardingOption, topology: Topology) -> int:
    """How many consecutive ranks one unit of the option occupies."""
    if option.sharding_type in (RW, DP):
        return topology.world_size
    return topology.intra_group_size if option.sharding_type in (TWRW, GRID) else 1


def require_independent(option: ShardingOption) -> None:
    """Raise TorchRec's ``PlannerError`` for an option that is not ours to place alone, or whose cost nobody knows."""
    table = option.fqn.removeprefix(".")
    if option.dependency:
        raise PlannerError(
            f"table {table!r} is to be sharded {option.sharding_type} together with {option.dependency}; only tables "
            "that depend on no others can be placed so far",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    if option.compute_kernel not in KERNEL_MEMORY:
        raise PlannerError(
            f"table {table!r} may only use compute kernel {option.compute_kernel!r}, whose cost DreamShardPlanner does "
            f"not know; allow one of {sorted(KERNEL_MEMORY)} in its ParameterConstraints.compute_kernels.",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
