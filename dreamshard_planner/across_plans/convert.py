# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cut a checkpoint for another plan without its ranks, and tell what is in one."""

from __future__ import annotations

import io
import shutil
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorEntry
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType

from dreamshard_planner.across_plans import reads
from dreamshard_planner.across_plans.layout import (
    KeyPath,
    SavedTable,
    check_named,
    is_dropped,
    is_named,
    paths,
    remapped_table,
    saved_tables,
    state_of,
    tables_of,
)
from dreamshard_planner.across_plans.reading import BoundedReader
from dreamshard_planner.across_plans.rules import JOINS, Join
from dreamshard_planner.across_plans.saving import WholeWriter
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.plans.plan_file import SavedPlan, TableSharding
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES


def convert(
    source: str | Path,
    target: str | Path,
    plan: SavedPlan,
    dropped: Collection[str] = (),
    added: Collection[str] = (),
    fresh: Collection[str] = (),
) -> None:
    """Write a checkpoint as ranks under a plan would have saved it, a piece in memory at a time. States of a replicated
    table get the names that a fused optimizer gives them.

    Args:
        source: folder of a checkpoint.
        target: a folder that does not exist yet.
        dropped: as for :func:`~dreamshard_planner.across_plans.loading.load_across_plans`, as are the next two.
        added: what the checkpoint may lack is not in the new one either, and is named again when that is loaded.
        fresh: likewise.

    Raises:
        CheckpointError: no checkpoint, or one that does not go with the plan; names the table.
        FileError: the target exists, or cannot be written.
    """
    reader, writer = BoundedReader(source), WholeWriter(target)
    planned = dict(plan.tables())
    content = _Content(reader, plan)
    check_named(
        {*tables_of(dropped, content.keys), *added, *fresh},
        {*planned, *(table.name for table in content.saved.values())},
    )
    for weight in _written(plan, planned, content.saved, dropped, added):
        name = content.saved[weight].name
        try:
            content.add_table(weight, planned[name], is_named(name, fresh))
        except reads.RefusedError as problem:
            raise CheckpointError(f"table {name}: {problem}") from problem
    try:
        content.add_others(planned, dropped)
    except reads.RefusedError as problem:
        raise CheckpointError(str(problem)) from problem
    writer.set_up_storage_writer(True)
    writer.prepare_local_plan(SavePlan([]))
    try:
        plans = writer.prepare_global_plan([SavePlan(items) for items in content.of_ranks])
        results = [writer.write_data(of_rank, content).value() for of_rank in plans]
        writer.finish(Metadata(content.entries, planner_data=content.paths), results)
    finally:
        shutil.rmtree(writer.path, ignore_errors=True)


def _written(
    plan: SavedPlan,
    planned: Collection[str],
    saved: dict[str, SavedTable],
    dropped: Collection[str],
    added: Collection[str],
) -> list[str]:
    """The weights of the tables that are written."""
    found = {table.name: weight for weight, table in saved.items() if not is_named(table.name, dropped)}
    for name in planned:
        if name not in found:
            if is_named(name, added):
                continue
            help = f"if it is new, name it as added ({name})"
            raise CheckpointError(f"table {name}: in {plan.name}, not in the checkpoint; {help}")
        table = plan.inputs.tables[name]
        size, here = tuple(saved[found[name]].entry.size), (table.rows, table.dim)
        if size != here:
            raise CheckpointError(f"table {name}: of size {size} in the checkpoint, {here} in {plan.name}")
    if left := sorted(found.keys() - planned):
        raise CheckpointError(
            f"tables that are not in {plan.name}: {', '.join(left)}; if they were removed, pass them as dropped"
        )
    return list(found.values())


class _Content(DefaultSavePlanner):
    """What is written, made piece by piece when its turn comes."""

    def __init__(self, reader: BoundedReader, plan: SavedPlan) -> None:
        super().__init__()
        self._reader, self._saved = reader, reader.read_metadata()
        reader.set_up_storage_reader(self._saved, True)
        self.saved, self._where = saved_tables(self._saved, plan.sharding), paths(self._saved)
        self.keys = self._where.keys()
        fused = (
            path for path in self._where.values() if len(path) > 2 and path[-3] == "state" and "." in str(path[-1])
        )
        self._fused = next(fused, None)
        self._reads: dict[MetadataIndex, list[reads.Read]] = {}
        self._kept: set[str] = set()
        self.entries: dict[str, Any] = {}
        self.paths: dict[str, KeyPath] = {}
        self.of_ranks: list[list[WriteItem]] = [[] for _ in range(plan.inputs.topology.world_size)]

    def add_table(self, weight: str, sharding: TableSharding, fresh: bool) -> None:
        table = self.saved[weight]
        spec = SHARDING_TYPES.get(sharding.sharding_type)
        shards = sharding.shards[:1] if spec and spec.is_replicated else sharding.shards
        slices = sorted({(shard.offset[1], shard.size[1]) for shard in shards})
        self._declare(table.key, self._where[table.key], table.entry, table.entry.size)
        parts = [
            (shard, part)
            for shard in shards
            for part in reads.pieces(reads.rectangle(shard.offset, shard.size), table.entry)
        ]
        states: list[list[tuple[MetadataIndex, ChunkStorageMetadata, list[reads.Read]]]] = [[] for _ in parts]
        for name, saved_key in table.states.items():
            if JOINS.get(name) is Join.SINGLE:
                self._kept.add(saved_key)
                continue
            entry = table.state_entries[name]
            path = (*(self._fused or self._where[saved_key])[:-2], weight, f"{weight.split('.')[-2]}.{name}")
            key, found = ".".join(map(str, path)), []
            size = entry.size if entry.size == table.entry.size else (table.entry.size[0] * len(slices),)
            try:
                for _, part in parts:
                    down = slices.index((part.offsets[1], part.sizes[1])) * table.entry.size[0]
                    per_row = reads.rectangle((down + part.offsets[0],), (part.sizes[0],))
                    place = per_row if len(size) == 1 else part
                    index = MetadataIndex(key, place.offsets)
                    found.append((index, place, reads.state_reads(table, name, index, tuple(place.sizes), part)))
            except reads.RefusedError as problem:
                if fresh:
                    continue
                raise reads.RefusedError(f"state {name}: {problem}; or name the table as fresh") from problem
            self._declare(key, path, entry, size)
            for of_part, state in zip(states, found, strict=True):
                of_part.append(state)
        for (shard, part), of_part in zip(parts, states, strict=True):
            index = MetadataIndex(table.key, part.offsets)
            self._add(shard.rank, index, part, reads.overlaps(table.key, table.entry, part, index))
            for state in of_part:
                self._add(shard.rank, *state)

    def add_others(self, planned: Mapping[str, TableSharding], dropped: Collection[str]) -> None:
        """What is no table's weights or states, as it is; and what maps ids to rows of tables that are written."""
        of_tables = {key for table in self.saved.values() for key in (table.key, *table.states.values())}
        for key in sorted(self._where.keys() - (of_tables - self._kept)):
            entry, remapped = self._saved.state_dict_metadata[key], remapped_table(str(self._where[key][-1]))
            state = state_of(self._where[key], self.saved)
            of_dropped = state is not None and is_named(self.saved[state[0]].name, dropped)
            if of_dropped or is_dropped(key, self._where[key], dropped):
                continue
            if isinstance(entry, BytesStorageMetadata):
                self.entries[key], self.paths[key] = entry, self._where[key]
                self.of_ranks[0].append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            self._declare(key, self._where[key], entry, entry.size)
            if remapped and remapped in planned:
                shards = [reads.rectangle(shard.offset, shard.size) for shard in planned[remapped].shards]
                reads.check_row_blocks(key, entry, remapped, shards)
            cut = entry.chunks if remapped else [part for whole in entry.chunks for part in reads.pieces(whole, entry)]
            for part in cut:
                index = MetadataIndex(key, part.offsets)
                self._add(0, index, part, reads.overlaps(key, entry, part, index))

    def _declare(self, key: str, path: KeyPath, like: TensorEntry, size: tuple[int, ...]) -> None:
        self.entries[key], self.paths[key] = TensorEntry(like.properties, torch.Size(size), []), path

    def _add(self, rank: int, index: MetadataIndex, place: ChunkStorageMetadata, made_of: list[reads.Read]) -> None:
        entry, self._reads[index] = self.entries[index.fqn], made_of
        entry.chunks.append(place)
        data = TensorWriteData(place, entry.properties, entry.size)
        self.of_ranks[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        piece, data = _Piece(), write_item.tensor_data
        if data is None:
            items = piece.keep([reads.Read(reads.read_bytes(write_item.index.fqn))])
        else:
            piece.tensor = torch.empty(data.chunk.sizes, dtype=data.properties.dtype)
            items = piece.keep(self._reads[write_item.index])
        self._reader.read_data(piece.finish_plan(LoadPlan(items)), piece)
        return piece.other if data is None else piece.tensor


class _Piece(reads.FillingPlanner):
    """Of what is written."""

    tensor: Tensor
    other: io.BytesIO

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.other = value


def describe(path: str | Path) -> dict[str, Any]:
    """What is in a checkpoint: its tables, with their cuts and the sizes of their states, and the keys of all else.

    Raises:
        CheckpointError: there is none, or a damaged one.
    """
    metadata = BoundedReader(path).read_metadata()
    sizes: Counter[str] = Counter()
    others, tables = set(metadata.state_dict_metadata), {}
    for index, stored in metadata.storage_data.items():
        sizes[index.fqn] += stored.length
    for _, table in sorted(saved_tables(metadata).items()):
        keys = {table.key, *table.states.values()}
        others -= keys
        tables[table.name] = {
            "rows": table.entry.size[0],
            "dim": table.entry.size[1],
            "data_type": str(table.entry.properties.dtype).removeprefix("torch."),
            "column_slices": [width for _, width in table.slices],
            "row_blocks": len({part.offsets[0] for part in table.entry.chunks}),
            "states": {name: list(entry.size) for name, entry in table.state_entries.items()},
            "bytes": sum(sizes[key] for key in keys),
        }
    return {"tables": tables, "others": sorted(others), "bytes": sum(sizes.values())}
