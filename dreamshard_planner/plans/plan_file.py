# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans as files: JSON that reads well in a diff, one line per shard.

A file holds how every table is sharded, what the plan was made from, and what it was predicted to cost::

    {
      "format": "dreamshard_planner plan", "version": 8,
      "libraries":  {name: version},
      "predicted":  {"chosen" and "rivals" with their "name", "total_ms", "collectives_ms", "forward_ms" and
                     "backward_ms" per rank; sources, memory per rank, "collectives", "notes", ...},
      "alone_ms":   {table: milliseconds},
      "inputs":     {"batch_size", "topology", "tables", "constraints", "placement_rules", "statistics" (a digest),
                     "settings", "features": their statistics},
      "sharding":   {module: {table: {"sharding_type", "kernel", "shards": [{"rank", "offset", "size"}],
                                      "cache_load_factor", "hot_rows": their ids}}}
    }

This module knows neither models nor planners: it reads, checks and writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torchrec.distributed.types import ShardingType

from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.errors import FileError, PlanError
from dreamshard_planner.plans.report import Predicted, Report, ReportEntry, TableEntry
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, sharding_in_words
from dreamshard_planner.support.documents import (
    STRICT,
    Amount,
    Count,
    Several,
    Share,
    Unbounded,
    adapter,
    document_of,
    entries_of,
    one_of,
    parsed,
)
from dreamshard_planner.support.files import write_whole
from dreamshard_planner.support.formatting import brief, layout, ranks_in_words
from dreamshard_planner.workload.lookups import MAX_BATCH_SIZE, FeatureStatistics, HotRows
from dreamshard_planner.workload.tables import NO_OPTIMIZER, OPTIMIZERS, STATE_BYTES, States, costed_optimizer

FORMAT = "dreamshard_planner plan"
VERSION = 8
BANDWIDTHS = {
    "HBM": "hbm_mem_bw",
    "DDR": "ddr_mem_bw",
    "HBM to DDR": "hbm_to_ddr_mem_bw",
    "SSD": "ssd_mem_bw",
    "within hosts": "comms_bandwidths.intra_host_bw",
    "between hosts": "comms_bandwidths.inter_host_bw",
}
"""Attributes of TorchRec's topology, by name in files."""


@dataclass(frozen=True)
class ShardPlace:
    """A rectangle of a table, and the rank that has it."""

    __pydantic_config__: ClassVar = STRICT
    rank: int
    offset: tuple[int, int]
    """First row and column."""
    size: tuple[int, int]
    """Rows and columns."""


@dataclass(frozen=True)
class TableSharding:
    """Sharding type, kernel and shards of one table."""

    __pydantic_config__: ClassVar = STRICT
    sharding_type: Annotated[str, one_of(SHARDING_TYPES)]
    """TorchRec's name of it."""
    kernel: Annotated[str, Field(min_length=1)]
    """TorchRec's compute kernel."""
    shards: tuple[ShardPlace, ...]
    cache_load_factor: Share | None = None
    """Share of the rows that the device's cache holds; None where nobody chose one."""
    hot_rows: tuple[int, ...] = ()
    """Ascending ids of the rows that every rank holds beside its shard."""

    @property
    def label(self) -> str:
        """In words, such as ``column_wise on ranks 0, 2-3``."""
        ranks = ranks_in_words(shard.rank for shard in self.shards)
        cached = "" if self.cache_load_factor is None else f" of load factor {self.cache_load_factor:.3g}"
        hot = f" with {len(self.hot_rows):,} hot rows" if self.hot_rows else ""
        return f"{sharding_in_words(self.sharding_type, self.kernel)}{cached} on {ranks}{hot}"

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns up to which the shards reach."""
        ends = [(shard.offset[0] + shard.size[0], shard.offset[1] + shard.size[1]) for shard in self.shards]
        return max((row for row, _ in ends), default=0), max((column for _, column in ends), default=0)


Weights = TypeVar("Weights", int, np.ndarray)


@dataclass(frozen=True)
class TableInputs:
    """A table as the model declared it."""

    __pydantic_config__: ClassVar = STRICT
    rows: Count
    dim: Count
    data_type: str
    """Torch's name of the weights' dtype."""
    features: Annotated[tuple[str, ...], Field(min_length=1)]
    pooling: Literal["sum", "mean", "none"]
    """``sum``, ``mean``, or ``none`` for sequences."""
    weighted: bool
    optimizer: str
    """FBGEMM's name of the in-backward optimizer; :data:`NO_OPTIMIZER` where the table is quantized and only served."""

    def __post_init__(self) -> None:
        dtype, served = getattr(torch, self.data_type, None), self.optimizer == NO_OPTIMIZER
        if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or served and not dtype.is_complex):
            raise ValueError(
                f"{brief(self.data_type)} is no dtype of torch that weights {'have' if served else 'train in'}"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight."""
        return getattr(torch, self.data_type).itemsize

    @property
    def weights(self) -> tuple[int, int, str]:
        """Fields that must match for weights to be reused."""
        return self.rows, self.dim, self.data_type

    def trained_bytes(self, weights: Weights, width: Any) -> Weights:
        """Return the bytes of weights in shards of this width, with their part of the optimizer's states."""
        known = costed_optimizer(self.optimizer)
        # As TorchRec counts of optimizers that it has no kernel of.
        states = States(per_weight=1, per_row=0) if known == "other" else OPTIMIZERS[known]
        number = weights * states.per_weight - (-weights * states.per_row // width)
        return weights * self.weight_bytes + number * STATE_BYTES


@dataclass(frozen=True)
class GroupsInputs:
    """Sharding groups (2D parallelism); each has all tables and follows the plan."""

    __pydantic_config__: ClassVar = STRICT
    count: Several
    host_ranks: Several
    """Ranks of all groups on one host."""
    consecutive: bool
    """True if consecutive ranks form a group; else a group takes every n-th."""


@dataclass(frozen=True)
class TopologyInputs:
    """The ranks that a plan was made for: of one sharding group, where there are several."""

    __pydantic_config__: ClassVar = STRICT
    compute_device: Literal["cpu", "cuda", "mtia"]
    world_size: Several
    local_world_size: Several
    """Ranks of a host. The last one may have fewer, and there may be fewer ranks than that."""
    memory_bytes: dict[str, tuple[Count, ...]]
    """Bytes of every rank, by :data:`~dreamshard_planner.cost.problem.MEMORY_KINDS`, before any reservation."""
    bandwidths: dict[str, Unbounded]
    """Bytes per millisecond, by :data:`BANDWIDTHS`."""
    groups: GroupsInputs | None = None
    """None for one group."""
    pod_size: Several = 1
    """Hosts whose ranks reach each other at the bandwidth within hosts."""
    multipliers: dict[str, Unbounded] = field(default_factory=dict)
    """Factors of TorchRec's estimates that are not at TorchRec's default, by argument of its ``Topology``."""
    collective_bandwidths: dict[str, Unbounded] = field(default_factory=dict)
    """Bytes per millisecond of TorchRec's ``GeneralizedCommsBandwidth``, by collective; empty for its basic one."""
    cards: tuple[str, ...] = ()
    """Driver's names of the different cards, slowest first; none if no driver names any."""
    cores: Unbounded | None = None
    """CPU ranks of a host that can compute at once; None if all can, or that is unknown."""

    @property
    def own_memory(self) -> str:
        """The kind of memory that its ranks compute from."""
        return "DDR" if self.compute_device == "cpu" else "HBM"

    @property
    def on_host(self) -> int:
        """Ranks, of all sharding groups."""
        return self.groups.host_ranks if self.groups else min(self.local_world_size, self.world_size)

    @property
    def num_groups(self) -> int:
        return self.groups.count if self.groups else 1

    @property
    def all_ranks(self) -> int:
        """Number of ranks of all sharding groups."""
        return self.world_size * self.num_groups

    @property
    def pod_ranks(self) -> int:
        """Ranks of the plan in a pod: table_row_wise shards lie in one pod."""
        ranks = self.pod_size * self.on_host
        if self.groups is not None and not self.groups.consecutive:
            ranks //= self.groups.count
        return min(self.world_size, max(1, ranks))

    def replicas(self, rank: int) -> range:
        """Out of :attr:`all_ranks`, those that hold what ``rank`` of the plan holds, one of each group."""
        if self.groups is not None and self.groups.consecutive:
            return range(rank, self.all_ranks, self.world_size)
        return range(rank * self.num_groups, (rank + 1) * self.num_groups)

    def __str__(self) -> str:
        in_groups = f" in {self.groups.count:,} sharding groups of {self.world_size:,}" if self.groups else ""
        in_pods = f", {self.pod_size:,} hosts in a pod" if self.pod_size > 1 else ""
        return f"{self.all_ranks:,} {self.compute_device} ranks{in_groups}, {self.on_host:,} on a host{in_pods}"

    def __post_init__(self) -> None:
        sizes = {kind: len(of_D) for kind, of_D in self.memory_bytes.items()}
        if sizes != dict.fromkeys(MEMORY_KINDS, self.world_size):
            raise ValueError(f"memory_bytes must have the {', '.join(MEMORY_KINDS)} of all {self.world_size} ranks")
        if self.bandwidths.keys() != BANDWIDTHS.keys():
            raise ValueError(f"bandwidths must be of {', '.join(BANDWIDTHS)}")
        if not self.bandwidths[self.own_memory]:
            raise ValueError(f"bandwidths: {self.own_memory} must be greater than 0 on {self.compute_device}")


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a plan."""

    __pydantic_config__: ClassVar = STRICT
    batch_size: Annotated[int, Field(ge=1, le=MAX_BATCH_SIZE)]
    """Samples of a rank."""
    topology: TopologyInputs
    tables: dict[str, TableInputs]
    """By fully qualified name."""
    constraints: dict[str, dict[str, Any]]
    """Fields of each table's constraint that differ from TorchRec's defaults."""
    placement_rules: dict[str, Any]
    """As :meth:`PlacementRules.to_dict` has them; empty where there are none."""
    statistics: str | None
    """Digest of the table statistics; None where there were none."""
    settings: dict[str, Any]
    """Arguments of the planner: cost source, checkpoint, seed, and so on."""
    features: dict[str, FeatureStatistics]
    """Statistics, without hot ids unless the feature's table has hot rows."""


@dataclass(frozen=True)
class SavedPlan:
    """A plan with all that it was made from; what :meth:`save` writes, and :meth:`load` reads.

    Raises:
        ValueError: shards that leave their table or each other uncovered, on ranks that there are not, or of tables
            that are not among the inputs; names the table.
    """

    __pydantic_config__: ClassVar = STRICT
    libraries: dict[str, str]
    """Versions."""
    predicted: Predicted
    alone_ms: dict[str, Amount | tuple[Amount, ...]]
    """Milliseconds of each shard of a table alone on its rank, or their sum if they are alike."""
    inputs: PlanInputs
    sharding: dict[str, dict[str, TableSharding]]
    """By the fully qualified name of a module and the name of a table, as in TorchRec's ``ShardingPlan``."""
    name: str = field(default="plan")
    """For people; of the file, where it was loaded."""

    def __post_init__(self) -> None:
        sharded = dict(self.tables())
        if odd := sorted(sharded.keys() ^ self.inputs.tables.keys()):
            raise ValueError(f"inputs and sharding name different tables: {', '.join(odd[:5])}")
        world_size = self.inputs.topology.world_size
        for fqn, sharding in sharded.items():
            table = self.inputs.tables[fqn]
            check_shards(fqn, sharding, table.rows, table.dim, world_size)
        predicted = self.predicted
        rivals = [rival for rival in predicted.rivals if rival != ReportEntry.of(rival.name, None)]
        for cost in (predicted.chosen, *rivals):
            if not math.isfinite(cost.total_ms + cost.collectives_ms):
                raise ValueError(f"a cost of {cost.name} is infinite")
            for of_ranks in (cost.forward_ms, cost.backward_ms):
                if len(of_ranks) != world_size:
                    raise ValueError(f"costs of {len(of_ranks)} ranks are predicted, the topology has {world_size}")
        for entry in predicted.memory:
            if not len(entry.used_bytes) == len(entry.limit_bytes) == world_size:
                raise ValueError(f"{entry.kind} of other ranks is predicted than the topology's {world_size}")
        if odd := sorted(sharded.keys() ^ self.alone_ms.keys()):
            raise ValueError(f"predicted costs and sharding name different tables: {', '.join(odd[:5])}")
        for fqn, known in self.alone_ms.items():
            if isinstance(known, tuple) and len(known) != len(sharded[fqn].shards):
                raise ValueError(f"table {fqn!r} has {len(sharded[fqn].shards)} shards, and alone_ms of {len(known)}")

    def tables(self) -> Iterator[tuple[str, TableSharding]]:
        """Every table's fully qualified name, and how it is sharded."""
        for path, module in self.sharding.items():
            for name, sharding in module.items():
                yield f"{path}.{name}".removeprefix("."), sharding

    def report(self) -> Report:
        """As it was when the plan was made."""
        known = {entry.name: getattr(self.predicted, entry.name) for entry in fields(Predicted)}
        tables = []
        for fqn, table in self.tables():
            alone_ms, ranks = self.alone_ms[fqn], tuple(shard.rank for shard in table.shards)
            shard_ms = alone_ms if isinstance(alone_ms, tuple) else (alone_ms / len(ranks),) * len(ranks)
            tables.append(TableEntry(fqn, table.sharding_type, table.kernel, ranks, shard_ms))
        return Report(**known, tables=tuple(tables))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        document = {"format": FORMAT, "version": VERSION, **document_of(self)}
        del document["name"]
        ways = adapter(dict[str, dict[str, TableSharding]])
        return {**document, "sharding": ways.dump_python(self.sharding, mode="json", exclude_defaults=True)}

    def save(self, path: str | Path) -> None:
        """Write a file that :meth:`load` reads back without loss; an existing one is replaced as a whole.

        Raises:
            PlanError: where it can't be written; names the file.
        """
        try:
            write_whole(path, layout(self.to_dict()) + "\n")
        except FileError as error:
            raise PlanError(str(error)) from error

    @classmethod
    def load(cls, path: str | Path) -> SavedPlan:
        """Read a file.

        Raises:
            PlanError: missing, truncated, foreign, of another version, or damaged; names the file, the entry and what
                is wrong with it.
        """
        document = entries_of(path, FORMAT, VERSION, "plan and save again", PlanError)
        return parsed(cls, {**document, "name": Path(path).name}, path, PlanError)


def check_shards(fqn: str, sharding: TableSharding, rows: int, dim: int, world_size: int) -> None:
    """ValueError, naming the table, unless its shards are on ranks that there are, one on each where its sharding type
    takes all of them, and cover it: once all together, or each the whole table where it is data-parallel."""
    for shard in sharding.shards:
        if not 0 <= shard.rank < world_size:
            raise ValueError(
                f"table {fqn!r} has a shard on rank {shard.rank}, and the topology has ranks 0 to {world_size - 1}"
            )
        (row, column), (height, width) = shard.offset, shard.size
        leaves = row + height > rows or column + width > dim
        if min(row, column, height, width) < 0 or (leaves and height * width):
            raise ValueError(
                f"table {fqn!r}: a shard of size {shard.size} at {shard.offset} leaves its {rows} rows of dim {dim}"
            )
    spec = SHARDING_TYPES.get(sharding.sharding_type)
    replicated = spec and spec.is_replicated and all(shard.size == (rows, dim) for shard in sharding.shards)
    if not sharding.shards or not (replicated or _cover(sharding.shards, rows, dim)):
        raise ValueError(
            f"table {fqn!r}: {len(sharding.shards)} {sharding.sharding_type} shard(s) do not cover its {rows} rows of "
            f"dim {dim}, each weight once"
        )
    if spec and spec.span == "world" and [shard.rank for shard in sharding.shards] != [*range(world_size)]:
        raise ValueError(
            f"table {fqn!r} is {sharding.label}: TorchRec runs {sharding.sharding_type} tables with a shard on each of "
            f"{world_size} ranks, in their order"
        )
    if sharding.hot_rows:
        if sharding.sharding_type != ShardingType.ROW_WISE.value:
            raise ValueError(f"table {fqn!r} is {sharding.label}: hot rows need a row_wise table")
        try:
            HotRows(torch.tensor(sharding.hot_rows), rows)
        except PlanError as error:
            raise ValueError(f"table {fqn!r}: {error}") from error


def _cover(shards: Sequence[ShardPlace], rows: int, dim: int) -> bool:
    """Return whether shards are consecutive blocks of rows of consecutive blocks of columns."""
    next_row = next_column = block_width = 0
    for (column, row), (width, height) in sorted((shard.offset[::-1], shard.size[::-1]) for shard in shards):
        if width * height:
            block_width = block_width if next_row else width
            if (column, row, width) != (next_column, next_row, block_width):
                return False
            next_row = (next_row + height) % rows
            next_column += 0 if next_row else width
    return next_row == 0 and next_column == (dim if rows else 0)
