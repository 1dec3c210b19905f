# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cut a checkpoint for another plan without its ranks, and tell what is in one."""

from __future__ import annotations

import io
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from dreamshard_planner.across_plans.layout import (
    SavedTable,
    is_named,
    paths,
    saved_tables,
    state_of,
    table_name,
)
from dreamshard_planner.across_plans.learning_rates import read_bytes
from dreamshard_planner.across_plans.reading import BoundedReader
from dreamshard_planner.across_plans.reads import (
    FillingPlanner,
    Read,
    RefusedError,
    StateShard,
    chunk,
    overlaps,
    pieces,
    state_reads,
)
from dreamshard_planner.across_plans.rules import JOINS, STEP_COUNT, Join, needs_no_step_count
from dreamshard_planner.across_plans.saving import WholeWriter
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableSharding


def convert(
    source: str | Path,
    target: str | Path,
    plan: SavedPlan,
    dropped: Collection[str] = (),
    inexact: Collection[str] = (),
) -> None:
    """Write a checkpoint as ranks under a plan would have saved it; for a replicated table, with states named as a
    fused one's.

    Args:
        source: folder of a checkpoint.
        target: a folder that does not exist yet.
        dropped: see :func:`load_across_plans`.
        inexact: see :func:`load_across_plans`.

    Raises:
        CheckpointError: no checkpoint, or one that does not go with the plan; names the table.
        FileError: the target exists, or cannot be written.
    """
    reader, writer = BoundedReader(source), WholeWriter(target)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    content = _Content(reader, metadata, plan, frozenset(dropped), frozenset(inexact))
    try:
        writer.set_up_storage_writer(True)
        writer.prepare_local_plan(SavePlan([]))
        plans = writer.prepare_global_plan([SavePlan(items) for items in content.of_ranks])
        results = [writer.write_data(of_rank, content).value() for of_rank in plans]
        writer.finish(Metadata(content.entries, planner_data=content.paths), results)
    finally:
        shutil.rmtree(writer.path, ignore_errors=True)


class _Content(DefaultSavePlanner):
    """What is written, made piece by piece when its turn comes."""

    def __init__(
        self,
        reader: BoundedReader,
        metadata: Metadata,
        plan: SavedPlan,
        dropped: frozenset[str],
        inexact: frozenset[str],
    ) -> None:
        super().__init__()
        self._reader, self._metadata, self._inexact = reader, metadata, inexact
        self._reads: dict[MetadataIndex, list[Read]] = {}
        self.entries: dict[str, Any] = {}
        self.paths: dict[str, tuple] = {}
        self.of_ranks: list[list[WriteItem]] = [[] for _ in range(plan.inputs.topology.world_size)]
        saved, where = saved_tables(metadata), paths(metadata)
        shardings = _shardings(plan, saved, dropped)
        fused = (path[:-2] for path in where.values() if (state := state_of(path, saved)) and "." in str(path[-1]))
        self._states_path = next(fused, None)
        for weight, sharding in shardings.items():
            self._add_table(weight, saved[weight], sharding, where)
        tables = {key for table in saved.values() for key in (table.key, *table.states.values())}
        for key in where.keys() - tables:
            self._add_other(key, where[key])

    def _add_table(self, weight: str, table: SavedTable, sharding: TableSharding, where: dict[str, tuple]) -> None:
        shards = sharding.shards if sharding.sharding_type != "data_parallel" else sharding.shards[:1]
        slices = sorted({(shard.offset[1], shard.size[1]) for shard in shards if min(shard.size)})
        self._declare(table.key, where[table.key], table.entry, tuple(table.entry.size))
        keys = {}
        for name, key in table.states.items():
            entry = self._metadata.state_dict_metadata[key]
            if name == STEP_COUNT and needs_no_step_count(table.states.keys()):
                continue
            per_weight = tuple(entry.size) == tuple(table.entry.size)
            single = JOINS.get(name) is Join.SINGLE
            size = tuple(entry.size) if per_weight else (len(shards) if single else table.entry.size[0] * len(slices),)
            path = (*(self._states_path or where[key][:-2]), weight, f"{weight.split('.')[-2]}.{name}")
            keys[name] = ".".join(map(str, path))
            self._declare(keys[name], path, entry, size)
        for number, shard in enumerate(shards):
            if min(shard.size):
                self._add_shard(number, shard, slices, weight, table, keys)

    def _add_shard(
        self,
        number: int,
        shard: ShardPlace,
        slices: list[tuple[int, int]],
        weight: str,
        table: SavedTable,
        keys: dict[str, str],
    ) -> None:
        down = slices.index((shard.offset[1], shard.size[1])) * table.entry.size[0]
        for part in pieces(chunk(shard.offset, shard.size), table.entry.properties.dtype.itemsize):
            index = MetadataIndex(table.key, part.offsets)
            self._add(shard.rank, index, part, overlaps(table.key, table.entry, part, index))
            for name, key in keys.items():
                place = part
                if JOINS.get(name) is Join.SINGLE:
                    place = chunk((number,), (1,))
                elif len(self.entries[key].size) == 1:
                    place = chunk((down + part.offsets[0],), (part.sizes[0],))
                index = MetadataIndex(key, place.offsets)
                if index in self._reads:
                    continue
                state = StateShard(index, tuple(place.sizes), part)
                try:
                    reads = state_reads(self._metadata, table, name, state, is_named(weight, self._inexact))
                except RefusedError as problem:
                    raise CheckpointError(f"table {table_name(weight)}, state {name}: {problem}") from problem
                self._add(shard.rank, index, place, reads)

    def _add_other(self, key: str, path: tuple) -> None:
        entry = self._metadata.state_dict_metadata[key]
        if isinstance(entry, BytesStorageMetadata):
            self.entries[key], self.paths[key] = entry, path
            self.of_ranks[0].append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            return
        self._declare(key, path, entry, tuple(entry.size))
        for whole in entry.chunks:
            for part in pieces(whole, entry.properties.dtype.itemsize):
                index = MetadataIndex(key, part.offsets)
                self._add(0, index, part, overlaps(key, entry, part, index))

    def _declare(self, key: str, path: tuple, like: TensorStorageMetadata, size: tuple[int, ...]) -> None:
        self.entries[key] = TensorStorageMetadata(like.properties, torch.Size(size), [])
        self.paths[key] = path

    def _add(self, rank: int, index: MetadataIndex, place: Any, reads: list[Read]) -> None:
        entry = self.entries[index.fqn]
        entry.chunks.append(place)
        self._reads[index] = reads
        data = TensorWriteData(place, entry.properties, entry.size)
        self.of_ranks[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        index = write_item.index
        filling = _Filling()
        if write_item.type is WriteItemType.BYTE_IO:
            items = [read_bytes(index.fqn)]
        else:
            data = write_item.tensor_data
            filling.content = torch.empty(data.chunk.sizes, dtype=data.properties.dtype)
            items = filling.keep(self._reads[index])
        self._reader.read_data(filling.finish_plan(LoadPlan(items)), filling)
        return filling.content


class _Filling(FillingPlanner):
    """Of one piece."""

    content: Tensor | io.BytesIO

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.content

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.content = value


def _shardings(plan: SavedPlan, saved: dict[str, SavedTable], dropped: frozenset[str]) -> dict[str, TableSharding]:
    """Of every table that is written, by its weight."""
    left = {weight for weight in saved if not is_named(weight, dropped)}
    result = {}
    for module, tables in plan.sharding.items():
        for name, sharding in tables.items():
            fqn = f"{module}.{name}".removeprefix(".")
            found = [w for w in left if w.startswith(module) and w.split(".")[-2] == name]
            if len(found) != 1:
                raise CheckpointError(f"table {fqn}: in the plan {plan.name}, not in the checkpoint")
            inputs, size = plan.inputs.tables[fqn], tuple(saved[found[0]].entry.size)
            if size != (inputs.rows, inputs.dim):
                raise CheckpointError(
                    f"table {fqn}: of size {size} in the checkpoint, {inputs.rows, inputs.dim} in the plan"
                )
            result[found[0]] = sharding
            left.remove(found[0])
    if left:
        names = ", ".join(sorted(str(table_name(weight)) for weight in left))
        raise CheckpointError(f"not in the plan {plan.name}: {names}; drop them by name if they were removed")
    return result


def describe(path: str | Path) -> dict[str, Any]:
    """What is in a checkpoint: its tables with their cuts and states, and all else.

    Raises:
        CheckpointError: there is none, or a damaged one.
    """
    metadata = BoundedReader(path).read_metadata()
    saved, entries = saved_tables(metadata), metadata.state_dict_metadata
    sizes = defaultdict(int)
    for index, stored in metadata.storage_data.items():
        sizes[index.fqn] += stored.length
    keys = {weight: (table.key, *table.states.values()) for weight, table in saved.items()}
    return {
        "tables": {
            str(table_name(weight)): dict(_told(table, entries)) | {"bytes": sum(sizes[key] for key in keys[weight])}
            for weight, table in sorted(saved.items())
        },
        "others": sorted(entries.keys() - {key for found in keys.values() for key in found}),
        "bytes": sum(sizes.values()),
    }


def _told(table: SavedTable, entries: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "rows", table.entry.size[0]
    yield "dim", table.entry.size[1]
    yield "data_type", str(table.entry.properties.dtype).removeprefix("torch.")
    yield "column_slices", [width for _, width in table.slices]
    yield "row_blocks", len({part.offsets[0] for part in table.entry.chunks})
    yield (
        "states",
        {
            name: "per weight"
            if entries[key].size == table.entry.size
            else "per table"
            if JOINS.get(name) is Join.SINGLE
            else "per row"
            for name, key in table.states.items()
        },
    )
