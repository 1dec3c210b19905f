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
from torchrec.distributed.embedding import get_ec_index_dedup
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
from dreamshard_planner.plan_file import TableInputs
from dreamshard_planner.plugin.grouping import KERNEL_MEMORY, group_key, known_kernels
from dreamshard_planner.plugin.legal import DP, GRID, RW, TWRW, Situation, is_mean, is_weighted, optimizer_name
from dreamshard_planner.plugin.legal_ranks import LegalRanks
from dreamshard_planner.plugin.limits import MEMORY_KINDS, available_bytes, check_needs, check_per_feature, needed_bytes
from dreamshard_planner.plugin.modules import per_feature, remaps_ids, table_configs
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import CACHE_LOAD_FACTOR, FeatureStatistics, Table, Workload, workloads_of

OUTPUT_BYTES = 4.0
"""Of one output element on the wire: TorchRec's kernels put out fp32 by default."""
_OPTIMIZERS = {"sgd": "sgd", "exact_sgd": "sgd", "exact_rowwise_adagrad": "rowwise_adagrad"}


@dataclass(frozen=True)
class Links:
    """Models of the exchanges that a topology has room for."""

    all_to_all: CollectiveModel
    """Between all ranks."""
    reduce_scatter: CollectiveModel
    """Between all ranks."""
    all_gather: CollectiveModel
    """Between all ranks."""
    all_reduce: CollectiveModel
    """Between all ranks; an n-th of the tensor counts as what a rank sends to each peer."""
    host_reduce_scatter: CollectiveModel
    """Between the ranks of one host."""
    host_all_gather: CollectiveModel
    across: CollectiveModel
    """An all-to-all between the ranks of the same place on every host."""


@dataclass(frozen=True)
class ReadProblem:
    """A sharding problem, and the TorchRec options that it was read from."""

    problem: ShardingProblem
    options: tuple[tuple[ShardingOption, ...], ...]
    """In the order of the problem's tables and options."""
    shard_P: tuple[Shard, ...]
    """A shard of each part: parts are shards of one size, of one option, that are read alike."""
    workload_P: tuple[Workload, ...]
    """What each part asks of its rank."""
    dense_elements_P: torch.Tensor
    """Elements of the table-sized gradient of data-parallel parts, zero elsewhere."""
    ssd_bytes_P: torch.Tensor
    """Bytes of the distinct rows that parts on SSDs read per batch, zero elsewhere."""

    def assign(self, sharding: Sharding) -> list[ShardingOption]:
        """The chosen options, with the ranks of their shards set."""
        chosen = []
        for options, units, option, positions in zip(
            self.options, self.problem.tables, sharding.options, sharding.positions, strict=True
        ):
            set_ranks(options[option], positions, units[option].units[0].span)
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
            index = next(
                (i for i, choice in enumerate(choices) if option is not None and same_option(choice, option)), None
            )
            if index is None:
                raise PlannerError(
                    f"the plan has no sharding of table {choices[0].fqn.removeprefix('.')!r} that could be rated",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
            places = _positions(option, units[index])
            if units[index].pinned not in (None, places):
                raise PlannerError(
                    f"table {option.fqn.removeprefix('.')!r} is pinned elsewhere than the plan has it",
                    PlannerErrorType.PARTITION,
                )
            options.append(index)
            positions.append(places)
        return Sharding(tuple(options), tuple(positions))


def same_option(one: ShardingOption, other: ShardingOption) -> bool:
    """Whether two options of one table shard it alike."""
    return (one.sharding_type, one.compute_kernel, one.num_shards) == (
        other.sharding_type,
        other.compute_kernel,
        other.num_shards,
    )


def set_ranks(option: ShardingOption, positions: Sequence[int], span: int) -> None:
    """Ranks of the shards of an option whose units, ``span`` ranks wide each, are at some positions."""
    ranks = [rank for position in positions for rank in range(position * span, (position + 1) * span)]
    for shard, rank in zip(option.shards, ranks, strict=True):
        shard.rank = rank


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


class _Parts:
    """The parts of a problem while it is read, one entry of each list per part."""

    def __init__(self) -> None:
        self.workloads: list[Workload] = []
        self.shards: list[Shard] = []
        self.fqns: list[str] = []
        self.groups: list[int] = []
        self.dense_elements: list[float] = []
        self.ssd_bytes: list[float] = []
        self.columns: dict[Collective, int] = {}
        """Column of each collective that some part takes part in."""
        self._uncounted_bytes: list[int] = []
        self._sent: list[tuple[int, int, float]] = []

    def add(
        self,
        option: ShardingOption,
        table: Table,
        shard: Shard,
        workload: Workload,
        group: int,
        exchanges: Iterable[tuple[Collective, float]],
    ) -> int:
        """A part, by one of the shards that are alike; returns its row."""
        row = len(self.workloads)
        self.workloads.append(workload)
        self.shards.append(shard)
        self.fqns.append(option.fqn.removeprefix("."))
        self.groups.append(group)
        self.dense_elements.append(workload.rows * workload.dim if option.compute_kernel == "dense" else 0.0)
        distinct_bytes = workload.distinct_rows * workload.dim * workload.weight_bytes
        self.ssd_bytes.append(distinct_bytes if workload.memory == "ssd" else 0.0)
        self._uncounted_bytes.append(_uncounted_bytes(option, table, workload))
        for collective, sent in exchanges:
            self._sent.append((row, self.columns.setdefault(collective, len(self.columns)), sent))
        return row

    def bytes_PC(self) -> torch.Tensor:
        """See :class:`ShardingProblem`; one column of zeros where nothing is exchanged."""
        bytes_PC = torch.zeros(len(self.workloads), max(1, len(self.columns)), dtype=torch.float64)
        for row, column, sent in self._sent:
            bytes_PC[row, column] = sent
        return bytes_PC

    def storage_PM(self, topology: Topology, with_storage: bool) -> torch.Tensor:
        """See :class:`ShardingProblem`; nothing before storage is estimated."""
        if not with_storage:
            return torch.zeros(len(self.shards), len(MEMORY_KINDS), dtype=torch.int64)
        storage_PM = needed_bytes(self.shards)
        kind = MEMORY_KINDS.index("DDR" if topology.compute_device == "cpu" else "HBM")
        storage_PM[:, kind] += torch.tensor(self._uncounted_bytes, dtype=torch.int64)
        return storage_PM


def _alike(shard: Shard, whole: Workload, with_storage: bool) -> tuple:
    """What shards of one option that ask for the same have in common."""
    storage = (shard.storage.hbm, shard.storage.ddr, shard.storage.ssd) if with_storage else ()
    # Where it is known which ids are read, blocks of rows differ by where they lie.
    first = (shard.offset[0],) if whole.ids is not None and shard.size[0] < whole.rows else ()
    return (*shard.size, *storage, *first)


def _units(option: ShardingOption, parts: Sequence[int], topology: Topology) -> tuple[Unit, ...]:
    span = unit_span(option, topology)
    if not parts or len(parts) % span:
        raise PlannerError(
            f"table {option.fqn.removeprefix('.')!r} is to be sharded {option.sharding_type} in {len(parts)} shards, "
            f"which do not fill units of {span} ranks",
            PlannerErrorType.PARTITION,
        )
    return tuple(Unit(tuple(parts[first : first + span])) for first in range(0, len(parts), span))


class OptionReader:
    """Reads sharding options with the user's constraints and statistics beside them.

    Args:
        constraints: TorchRec's constraints by table name.
        statistics: workload statistics by feature name; they take precedence over pooling factors.
        sharders: consulted for a fused optimizer that is set through ``fused_params``, and for quantized communication.
        legal: where tables may lie; anywhere by default.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        sharders: Iterable[ModuleSharder[nn.Module]] = (),
        legal: LegalRanks | None = None,
    ) -> None:
        self._legal = legal
        self._constraints = constraints or {}
        self._statistics = statistics
        self._configs: dict[nn.Module, dict[str, Any]] = {}
        self._weighted: dict[nn.Module, bool] = {}
        self._tables: dict[tuple, Table] = {}
        self._unplaced: dict[str, dict[str, str]] = {}
        # Estimator, proposer, partitioner and perf model ask for the same tables one after the other.
        self._workloads: dict[tuple[Table, int], Workload] = {}
        self._sharders = {sharder_name(sharder.module_type): sharder for sharder in sharders}

    def workloads(self, options: Sequence[ShardingOption], topology: Topology) -> list[Workload]:
        """What each option's *whole* table asks for, at the batch that its kernels see: the local batch of
        data-parallel ranks, the batch of all ranks elsewhere. With index dedup, each rank's batch asks for a row once.
        """
        tables = [self.table(option, topology) for option in options]
        ranks = [1 if option.sharding_type == DP else topology.world_size for option in options]
        sizes = [option.batch_size * count for option, count in zip(options, ranks, strict=True)]
        workloads = self._whole(list(zip(tables, sizes, strict=True)))
        deduped = [index for index, option in enumerate(options) if self._dedups(option)]
        of_ranks = self._whole([(tables[index], options[index].batch_size) for index in deduped])
        for index, of_rank in zip(deduped, of_ranks, strict=True):
            workloads[index] = workloads[index].deduped(of_rank, ranks[index])
        return workloads

    def _whole(self, keys: Sequence[tuple[Table, int]]) -> list[Workload]:
        """Workloads of tables at batch sizes."""
        new: dict[int, list[Table]] = {}
        for table, batch_size in dict.fromkeys(keys):
            if (table, batch_size) not in self._workloads:
                new.setdefault(batch_size, []).append(table)
        for batch_size, tables in new.items():
            for table, workload in zip(tables, workloads_of(tables, batch_size), strict=True):
                self._workloads[table, batch_size] = workload
        return [self._workloads[key] for key in keys]

    def _dedups(self, option: ShardingOption) -> bool:
        """Whether TorchRec sends a rank's repeated ids of a sequence table once, as its sharder, or a global, asks."""
        sharder = self._sharder(option)
        return hasattr(sharder, "_use_index_dedup") and (sharder._use_index_dedup or get_ec_index_dedup())

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
            PlannerError: for options that can't be placed: of an unknown kernel, or pinned where TorchRec would not run
                them.
        """
        by_table: dict[str, list[ShardingOption]] = {}
        for option in options:
            known_kernels(option.fqn, [option.compute_kernel])
            by_table.setdefault(option.fqn, []).append(option)
        flat = [option for choices in by_table.values() for option in choices]
        groups: dict[Any, int] = {}
        parts = _Parts()
        read: dict[str, list[Option]] = {fqn: [] for fqn in by_table}
        for option, whole in zip(flat, self.workloads(flat, topology), strict=True):
            table = self.table(option, topology)
            key = group_key(option, table, self._config(option), self._fused_params(option))
            group = groups.setdefault(key, len(groups))
            row_of: dict[tuple, int] = {}
            of_shards = []
            for shard in option.shards:
                alike = _alike(shard, whole, with_storage)
                if alike not in row_of:
                    workload = whole.part(*shard.size, shard.offset[0])
                    exchanges = self._exchanges(option, workload, topology, links)
                    row_of[alike] = parts.add(option, table, shard, workload, group, exchanges)
                of_shards.append(row_of[alike])
            choice = Option(_units(option, of_shards, topology), option.sharding_type, option.compute_kernel)
            read[option.fqn].append(replace(choice, pinned=_pinned(option, choice)))
        _check_hosts(flat, topology)
        if with_storage:
            check_needs(by_table.values())
        storage_PM, capacity_DM = parts.storage_PM(topology, with_storage), available_bytes(topology)
        memories = storage_PM.shape[1]
        if with_storage and self._legal is not None:
            need_PR, room_DR = self._legal.memory(parts.fqns)
            storage_PM, capacity_DM = torch.cat([storage_PM, need_PR], 1), torch.cat([capacity_DM, room_DR], 1)
        spare = [] if parts.columns else [Collective("none", "world", links.all_to_all, links.all_to_all)]
        problem = ShardingProblem(
            num_ranks=topology.world_size,
            tables=tuple(tuple(choices) for choices in read.values()),
            names=tuple(fqn.removeprefix(".") for fqn in by_table),
            features_PF=feature_matrix(parts.workloads),
            group_P=torch.tensor(parts.groups, dtype=torch.int64),
            num_groups=max(1, len(groups)),
            storage_PM=storage_PM,
            capacity_DM=capacity_DM,
            bytes_PC=parts.bytes_PC(),
            collectives=Collectives([*parts.columns, *spare], topology.intra_group_size, links.all_to_all),
            rule_kinds=storage_PM.shape[1] - memories,
        )
        return ReadProblem(
            problem,
            tuple(tuple(choices) for choices in by_table.values()),
            tuple(parts.shards),
            tuple(parts.workloads),
            torch.tensor(parts.dense_elements, dtype=torch.float64),
            torch.tensor(parts.ssd_bytes, dtype=torch.float64),
        )

    def _exchanges(
        self, option: ShardingOption, workload: Workload, topology: Topology, links: Links
    ) -> Iterable[tuple[Collective, float]]:
        """Collectives that carry a shard's output, each with the bytes that its rank sends to each peer."""
        name = f"{option.dependency or option.path or 'model'} {option.sharding_type}"
        world, host = topology.world_size, topology.intra_group_size
        sent = workload.output_elements * self._wire_bytes(option)
        if option.sharding_type == DP:
            gradient = workload.rows * workload.dim * workload.weight_bytes
            yield Collective(f"{name} all-reduce", "world", None, links.all_reduce), gradient / world
        elif (option.sharding_type in (TWRW, GRID) or option.dependency) and host > 1:
            # Between hosts a tower exchanges what it makes of its embeddings, here taken to be as much.
            inside = links.host_reduce_scatter, links.host_all_gather
            yield Collective(f"{name} reduce-scatter", "host", *inside), sent / host
            yield Collective(f"{name} all-to-all", "across", links.across, links.across), sent / world
        elif option.sharding_type == RW and option.is_pooled:
            yield Collective(f"{name} reduce-scatter", "world", links.reduce_scatter, links.all_gather), sent / world
        else:
            yield Collective(f"{name} all-to-all", "world", links.all_to_all, links.all_to_all), sent / world

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

    def declared(self, option: ShardingOption) -> TableInputs:
        """The option's table as its module declares it."""
        rows, dim = option.tensor.shape
        pooling = "mean" if is_mean(self._config(option)) else "sum"
        return TableInputs(
            rows=rows,
            dim=dim,
            data_type=str(option.tensor.dtype).removeprefix("torch."),
            features=tuple(self._feature_names(option)),
            pooling=pooling if option.is_pooled else "none",
            weighted=self._module_is_weighted(option.module[1]),
            optimizer=optimizer_name(option.tensor, self._fused_params(option)),
        )

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
        on_host = topology.compute_device == "cpu"
        load_factor = option.cache_load_factor or self._fused_params(option).get("cache_load_factor")
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
            cache_load_factor=load_factor or CACHE_LOAD_FACTOR,
            prefetched=self._prefetches(option),
        )

    def _prefetches(self, option: ShardingOption) -> bool:
        if option.compute_kernel != "fused_uvm_caching":
            return False
        own = option.cache_params and option.cache_params.prefetch_pipeline
        return bool(self._fused_params(option).get("prefetch_pipeline") if own is None else own)

    def _why_unplaced(self, option: ShardingOption, feature: FeatureStatistics) -> str | None:
        """Why nobody knows which rows a feature reads though its ids are known; None where one does."""
        if feature.ids is None:
            return None
        if remaps_ids(option.module[1]):
            return "its ids are mapped to rows as they come (managed collisions)"
        if feature.ids.end > option.tensor.shape[0]:
            return f"its ids reach up to {feature.ids.end - 1:,}, the table has {option.tensor.shape[0]:,} rows"
        return None

    def notes(self, plan: Iterable[ShardingOption]) -> tuple[str, ...]:
        """What a reader of the plan's cost should know of the tables that it splits by rows."""
        return tuple(
            f"row blocks of {option.fqn.removeprefix('.')} are taken to be read alike: feature {feature!r}, {reason}"
            for option in plan
            if option.sharding_type in (RW, TWRW, GRID)
            for feature, reason in self._unplaced.get(option.fqn, {}).items()
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


def _pinned(option: ShardingOption, units: Option) -> tuple[int, ...] | None:
    """Positions of the units of a dependent table whose shards have ranks, see
    :mod:`~dreamshard_planner.plugin.dependencies`; None for others."""
    if not option.dependency or any(shard.rank is None for shard in option.shards):
        return None
    return _positions(option, units)


def _check_hosts(options: Iterable[ShardingOption], topology: Topology) -> None:
    """PlannerError where pinned tables that depend on each other are on several hosts."""
    hosts: dict[str, dict[int, str]] = {}
    for option in options:
        for shard in option.shards if option.dependency else []:
            if shard.rank is not None:
                host = shard.rank // topology.intra_group_size
                hosts.setdefault(option.dependency, {})[host] = option.fqn.removeprefix(".")
    for dependency, tables in hosts.items():
        if len(tables) > 1:
            raise PlannerError(
                f"tables {sorted(tables.values())} of {dependency!r} are on hosts {sorted(tables)}; TorchRec wants "
                "them on one",
                PlannerErrorType.PARTITION,
            )
