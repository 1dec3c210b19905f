# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which parts of a checkpoint make up a shard of another plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dreamshard_planner.across_plans.layout import SavedTable
from dreamshard_planner.across_plans.rules import JOINS, Join

PIECE_BYTES = 64 << 20
"""What is read, written or kept beside the shards at a time."""


class RefusedError(Exception):
    """What cannot be carried, and what would help."""


@dataclass(frozen=True)
class Read:
    """A part of a checkpoint that goes into a shard: copied, or, with a share, added that many times."""

    item: ReadItem
    share: float | None = None


@dataclass(frozen=True)
class StateShard:
    """A shard of an optimizer state, to be filled."""

    index: MetadataIndex
    sizes: tuple[int, ...]
    weights: ChunkStorageMetadata
    """The shard of the table that it belongs to."""

    @property
    def per_row(self) -> bool:
        """One value for each row of the shard, not one for each weight."""
        rows = self.weights.sizes[0]
        return self.sizes in ((rows,), (rows, 1)) and not self.per_weight

    @property
    def per_weight(self) -> bool:
        return self.sizes == tuple(self.weights.sizes)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def pieces(whole: ChunkStorageMetadata, element_bytes: int) -> Iterator[ChunkStorageMetadata]:
    """Blocks of rows of at most :data:`PIECE_BYTES`, one row at least."""
    if not whole.sizes:
        yield whole
        return
    (first, *offsets), (rows, *sizes) = whole.offsets, whole.sizes
    step = max(1, PIECE_BYTES // max(1, element_bytes * math.prod(sizes)))
    for start in range(0, max(rows, 1), step):
        yield chunk((first + start, *offsets), (min(step, rows - start), *sizes))


def overlaps(
    key: str,
    entry: TensorStorageMetadata,
    wanted: ChunkStorageMetadata,
    index: MetadataIndex,
    share: float | None = None,
) -> list[Read]:
    """Reads of a rectangle of a saved tensor.

    Raises:
        RefusedError: the checkpoint lacks a part of it.
    """
    items: list[ReadItem] = []
    parts = [wanted] if share is None else pieces(wanted, entry.properties.dtype.itemsize)
    for part in parts:
        found = create_read_items_for_chunk_list(key, entry, [part])
        if sum(math.prod(item.lengths) for item in found) != math.prod(part.sizes):
            raise RefusedError(f"{key}: the checkpoint does not hold all of it; save it again")
        down = part.offsets[0] - wanted.offsets[0] if part.offsets else 0
        for item in found:
            offsets = (
                torch.Size((item.dest_offsets[0] + down, *item.dest_offsets[1:])) if part.offsets else torch.Size()
            )
            items.append(replace(item, dest_index=index, dest_offsets=offsets))
    return [Read(item, share) for item in items]


def state_reads(metadata: Metadata, table: SavedTable, name: str, shard: StateShard, inexact: bool) -> list[Read]:
    """Reads that make up a shard of an optimizer state by :data:`RULES`.

    Args:
        inexact: carry also what no rule makes exact: a state of each row to each weight, or as the mean back.

    Raises:
        RefusedError: there is no exact rule, or the saved state has a shape that no optimizer gives it.
    """
    key = table.states[name]
    entry = metadata.state_dict_metadata[key]
    if JOINS.get(name) is Join.SINGLE:
        return [Read(_first_value(key, entry, shard.index))]
    rows, _ = table.entry.size
    if tuple(entry.size) == tuple(table.entry.size):
        if not shard.per_row:
            return overlaps(key, entry, shard.weights, shard.index)
        if not inexact:
            raise RefusedError("is saved for each weight, and the model has one value for each row")
        return overlaps(key, entry, shard.weights, shard.index, 1 / shard.weights.sizes[1])
    if tuple(entry.size) not in ((rows * len(table.slices),), (rows, 1)):
        raise RefusedError(f"has the size {tuple(entry.size)}, which fits no cut of {rows} rows into {table.slices}")
    if not shard.per_row and not inexact:
        raise RefusedError("is saved for each row, and the model has one value for each weight")
    return _row_reads(key, entry, table, name, shard, inexact)


def _row_reads(
    key: str, entry: TensorStorageMetadata, table: SavedTable, name: str, shard: StateShard, inexact: bool
) -> list[Read]:
    """Of a state with one value per row and column slice."""
    first, width = shard.weights.offsets[1], shard.weights.sizes[1]
    common = {
        number: min(start + columns, first + width) - max(start, first)
        for number, (start, columns) in enumerate(table.slices)
        if start < first + width and first < start + columns
    }
    as_it_was = any((first, width) == table.slices[number] for number in common)
    join = JOINS.get(name)
    if not as_it_was and join is None and not inexact:
        raise RefusedError("has one value for each row, and no rule says what column slices make of it")
    if join is Join.SAME:
        common = dict([next(iter(common.items()))])
    alone = len(common) == 1 and shard.per_row
    reads = []
    for number, columns in common.items():
        down = shard.weights.offsets[0] + number * table.entry.size[0]
        columned = (1,) * (len(entry.size) - 1)
        wanted = chunk((down, *(0 for _ in columned)), (shard.weights.sizes[0], *columned))
        reads += overlaps(key, entry, wanted, shard.index, None if alone else columns / width)
    return reads


def _first_value(key: str, entry: TensorStorageMetadata, index: MetadataIndex) -> ReadItem:
    one, zero = torch.Size([1] * len(entry.size)), torch.Size([0] * len(entry.size))
    source = MetadataIndex(key, entry.chunks[0].offsets, 0)
    return ReadItem(LoadItemType.TENSOR, index, zero, source, zero, one)


class FillingPlanner(DefaultLoadPlanner):
    """Puts reads where they belong: copied, or added by their share."""

    def keep(self, reads: list[Read]) -> list[ReadItem]:
        """The items of reads, whose shares are kept until they come back."""
        self._shares = {read.item: read.share for read in reads if read.share is not None}
        return [read.item for read in reads]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        for index in {item.dest_index for item in self._shares}:
            self.lookup_tensor(index).detach().zero_()
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        shard, lengths = self.lookup_tensor(read_item.dest_index).detach(), read_item.lengths
        if read_item in self._shares:
            return torch.empty(lengths, dtype=shard.dtype)
        if shard.dim() == len(lengths):
            return narrow_tensor_by_index(shard, read_item.dest_offsets, lengths)
        rows = shard.narrow(0, read_item.dest_offsets[0], lengths[0]) if shard.dim() and lengths else shard
        return rows.view(lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if (share := self._shares.get(read_item)) is None:
            return
        shard, rows = self.lookup_tensor(read_item.dest_index).detach(), read_item.lengths[0]
        target = shard.view(shard.shape[0], -1).narrow(0, read_item.dest_offsets[0], rows)
        value = tensor.view(rows, -1).to(shard.device)
        target.add_(value.sum(1, keepdim=True) if target.shape[1] == 1 else value, alpha=share)
