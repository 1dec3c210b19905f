# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Read checkpoints in bounded memory: their tables, and the parts that make up a shard of another plan.

Unpickles only the classes of metadata of ``torch.distributed.checkpoint``.

TorchRec's state dicts (seen in 1.6.1, 1.8.0 and 1.9.2) name the weights of a table ``ebc.embedding_bags.t.weight`` and
a fused optimizer's state of it ``state`` / ``ebc.embedding_bags.t.weight`` / ``t.momentum1``, on the ranks that have a
shard. Row-wise states of column slices are concatenated: row r of slice k is element k * rows + r. A replicated table
is a plain tensor with the states of the script's optimizer: ``state`` / ``dense.ebc.embedding_bags.t.weight`` /
``sum``; here ``dense`` is the key of a ``CombinedOptimizer``.

:data:`RULES` says how each optimizer state is carried to another plan, for the code and for the documentation.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.support.formatting import first_of, nearest


class Join(Enum):
    """Rules for states that lack the shape of the weights; other states are cut like the weights."""

    MEAN = "one value per row: a slice takes it as it is, slices join as the mean weighted by width"
    SAME = "one value per row, the same in every slice: as it is"
    SINGLE = "one value per table: as it is"


@dataclass(frozen=True)
class Rule:
    """The rule for a state: its name in TorchRec's fused optimizers, and aliases in optimizers of replicated tables."""

    name: str
    aliases: tuple[str, ...]
    join: Join
    why: str


RULES = (
    Rule("momentum1", ("sum", "exp_avg"), Join.MEAN, "row-wise Adagrad sums the mean square of a row's gradient"),
    Rule("exp_avg_sq", ("momentum2",), Join.MEAN, "row-wise Adam and LAMB average the same mean square"),
    Rule("prev_iter", (), Join.SAME, "every slice sees the same lookups"),
    Rule("row_counter", (), Join.SAME, "every slice sees the same lookups"),
    Rule("iter", ("step",), Join.SINGLE, "steps done"),
)
NAMES = {alias: rule.name for rule in RULES for alias in (rule.name, *rule.aliases)}
JOINS = {rule.name: rule.join for rule in RULES}
STEP_COUNT = "iter"


def needs_no_step_count(states: Set[str]) -> bool:
    """Return whether the states are Adagrad's, whose step count only decays learning rates; its kernels do not."""
    return set(states) - {STEP_COUNT} == {"momentum1"}


KeyPath = tuple[str | int, ...]
"""Keys that lead to an entry of a nested state dict."""

_WEIGHT = re.compile(r"(?:(?P<module>.+)\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight")
_REMAPPED = re.compile(
    r"(?:(?P<module>.+)\.)?_managed_collision_collection\._managed_collision_modules\.(?P<table>[^.]+)\..+"
)
_INNER = {
    "_embedding_bag_collection": ("_feature_processors", "_iter"),
    "_embedding_collection": ("_iter",),
    "_embedding_module": ("_managed_collision_collection",),
}
"""Collections inside TorchRec's modules, which plans name by the module, and the other members of those modules."""


def table_names(keys: Collection[str]) -> dict[str, str]:
    """Return the name in plans of each weight among the keys of a state dict: ``ebc.t`` for
    ``ebc.embedding_bags.t.weight``, and for ``ebc._embedding_bag_collection.embedding_bags.t.weight`` if ``ebc`` has
    feature processors. Tables that would share a name keep their weights' keys."""
    paths = {path for key in keys for path in accumulate(key.split("."), lambda path, part: f"{path}.{part}")}
    names = {}
    for key, match in ((key, match) for key in keys if (match := _WEIGHT.fullmatch(key))):
        module, table = match["module"] or "", match["table"]
        outer, _, inner = module.rpartition(".")
        if any(_joined(outer, name) in paths for name in _INNER.get(inner, ())):
            module = outer
        names[key] = _joined(module, table)
    count = Counter(names.values())
    return {key: name if count[name] == 1 else key for key, name in names.items()}


def remapped_table(key: str) -> str | None:
    """Return the table whose ids a buffer of managed collisions maps to rows; None for any other key."""
    match = _REMAPPED.fullmatch(key)
    return match and _joined(match["module"] or "", match["table"])


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def is_named(table: str, names: Container[str]) -> bool:
    """Return whether a table is among names, as ``ebc.t`` or ``t``."""
    return table in names or table.rpartition(".")[2] in names


def is_dropped(key: str, path: KeyPath, dropped: Collection[str]) -> bool:
    """Return whether an entry that belongs to no table is dropped by its key, a prefix, or its remapped table."""
    remapped = remapped_table(str(path[-1]))
    named = any(key == name or key.startswith(f"{name}.") for name in dropped)
    return named or (remapped is not None and is_named(remapped, dropped))


def check_named(names: Collection[str], tables: Collection[str]) -> None:
    """Raise CheckpointError for a name that is neither a table of the model nor of the checkpoint."""
    known = {*tables, *(name.rpartition(".")[2] for name in tables)}
    for name in sorted(set(names) - known):
        raise CheckpointError(f"neither model nor checkpoint has a table {name!r}{nearest(name, known)}")


def owner(parameter: object, weights: Container[str]) -> str | None:
    """Return the weight of an optimizer's parameter, whose name may start with the optimizer's key."""
    parts = str(parameter).split(".")
    tails = (".".join(parts[first:]) for first in range(len(parts)))
    return next((tail for tail in tails if tail in weights), None)


def state_of(path: Sequence[object], weights: Container[str]) -> tuple[str, str] | None:
    """Return weight and name, by :data:`NAMES`, of the optimizer state at a path of a state dict."""
    weight = owner(path[-2], weights) if len(path) > 2 and path[-3] == "state" else None
    if weight is None:
        return None
    name = str(path[-1]).removeprefix(weight.split(".")[-2] + ".")
    return weight, NAMES.get(name, name)


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint."""

    key: str
    """Key of the weights in the metadata."""
    name: str
    """Name in plans."""
    entry: TensorStorageMetadata
    """Metadata of the weights."""
    states: dict[str, tuple[str, TensorStorageMetadata]] = field(default_factory=dict)
    """Keys and metadata of tensor states by name."""

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """First columns and widths of the column slices."""
        return tuple(sorted({(part.offsets[1], part.sizes[1]) for part in self.entry.chunks if part.sizes[1]}))


def paths(metadata: Metadata) -> dict[str, KeyPath]:
    """Return each key's path in the nested state dict."""
    known: Mapping[str, Any] = metadata.planner_data or {}
    return {key: tuple(known.get(key, (key,))) for key in metadata.state_dict_metadata}


def saved_tables(metadata: Metadata) -> dict[str, SavedTable]:
    """Return tables by the name of their weights in the model's state dict."""
    where = paths(metadata)
    names = table_names([str(path[-1]) for path in where.values()])
    found: dict[str, SavedTable] = {}
    for key, entry in metadata.state_dict_metadata.items():
        weight = str(where[key][-1])
        if isinstance(entry, TensorStorageMetadata) and len(entry.size) == 2 and weight in names:
            found.setdefault(weight, SavedTable(key, names[weight], entry))
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and (state := state_of(where[key], found)):
            weight, name = state
            found[weight].states.setdefault(name, (key, entry))
    return found


PIECE_BYTES = 64 << 20
"""Bytes that are read, written or kept beside the shards at a time."""


def pieces(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first row and rows of blocks of at most :data:`PIECE_BYTES`, and at least one row."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    return ((start, min(step, rows - start)) for start in range(0, rows, step))


_WITHOUT_ROWS = ("._output_segments_tensor", "._current_iter_tensor", "._scalar_logger_steps", "._hash_zch_bucket")
"""Ends of the names of managed collisions' buffers that every rank has whole."""


class RefusedError(Exception):
    """An entry cannot be converted; names a fix."""


@dataclass(frozen=True)
class Read(ReadItem):
    """Part of a checkpoint to copy into a shard, or to add with a factor, its share."""

    share: float | None = None


def read_bytes(key: str) -> Read:
    """Return a read of an entry that is no tensor."""
    index, zero = MetadataIndex(key), torch.Size([0])
    return Read(LoadItemType.BYTE_IO, index, zero, index, zero, zero)


def check_row_blocks(key: str, entry: TensorStorageMetadata, table: str, here: Iterable[ChunkStorageMetadata]) -> None:
    """Raise RefusedError if this rank's row blocks are not among the saved ones.

    Managed collisions map ids to rows in each row block by itself.
    """
    if key.endswith(_WITHOUT_ROWS):
        return
    was, now = ({(part.offsets[0], part.sizes[0]) for part in parts if part.sizes[0]} for parts in (entry.chunks, here))
    if not now <= was:
        saved, own = (first_of([f"{row}-{row + rows - 1}" for row, rows in sorted(of)], 4) for of in (was, now))
        raise RefusedError(
            f"table {table}: {key} maps ids to rows in each row block by itself, which were rows {saved} in the "
            f"checkpoint and are {own} here; keep the table's sharding type and number of ranks, or start it anew: "
            f"pass dropped=[{table!r}] and added=[{table!r}]"
        )


def overlaps(
    key: str,
    entry: TensorStorageMetadata,
    wanted: ChunkStorageMetadata,
    index: MetadataIndex,
    share: float | None = None,
) -> list[Read]:
    """Return reads of a rectangle of a saved tensor into a shard; raises RefusedError if a part is missing."""
    found = create_read_items_for_chunk_list(key, entry, [wanted])
    if sum(math.prod(item.lengths) for item in found) != math.prod(wanted.sizes):
        raise RefusedError(f"the checkpoint does not hold all of {key}")
    return [Read(**{**vars(item), "dest_index": index}, share=share) for item in found]


def state_reads(
    table: SavedTable, name: str, index: MetadataIndex, sizes: tuple[int, ...], weights: ChunkStorageMetadata
) -> list[Read]:
    """Return reads that make up a shard of an optimizer state by :data:`RULES`.

    Args:
        table: saved table.
        name: of the state.
        index: of the shard.
        sizes: of the shard.
        weights: the shard of the table's weights.

    Raises:
        RefusedError: no rule converts the saved state.
    """
    (key, entry), rows = table.states[name], table.entry.size[0]
    if JOINS.get(name) is Join.SINGLE:
        zeros, ones = torch.Size([0] * len(entry.size)), torch.Size([1] * len(entry.size))
        saved = MetadataIndex(key, entry.chunks[0].offsets, 0)
        return [Read(LoadItemType.TENSOR, index, zeros, saved, zeros, ones)]
    if sizes == tuple(weights.sizes) and entry.size == table.entry.size:
        return overlaps(key, entry, weights, index)
    per_row = tuple(entry.size) in ((rows * len(table.slices),), (rows, 1))
    if not per_row or sizes not in ((weights.sizes[0],), (weights.sizes[0], 1)):
        raise RefusedError(
            f"of size {tuple(entry.size)} for weights of {tuple(table.entry.size)} in the checkpoint, of {sizes} for "
            f"{tuple(weights.sizes)} here, and no rule makes one of the other"
        )
    reads, slices = [], _slices_in_common(table, name, weights)
    width = sum(slices.values())
    for number, columns in slices.items():
        offsets, lengths = torch.Size([number * rows + weights.offsets[0], 0]), torch.Size([weights.sizes[0], 1])
        wanted = ChunkStorageMetadata(offsets[: len(entry.size)], lengths[: len(entry.size)])
        reads += overlaps(key, entry, wanted, index, columns / width if len(slices) > 1 else None)
    return reads


def _slices_in_common(table: SavedTable, name: str, weights: ChunkStorageMetadata) -> dict[int, int]:
    """Return the columns that a shard shares with each saved column slice, by the slice's number."""
    first, width = weights.offsets[1], weights.sizes[1]
    common = {
        number: min(start + columns, first + width) - max(start, first)
        for number, (start, columns) in enumerate(table.slices)
        if start < first + width and first < start + columns
    }
    join = JOINS.get(name)
    if join is None and (first, width) not in table.slices:
        raise RefusedError("has one value for each row, and no rule says what other column slices make of it")
    return dict(list(common.items())[:1]) if join is Join.SAME else common


_OWN = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_OTHERS = {("builtins", "set"), ("collections", "OrderedDict"), ("pathlib", "PosixPath"), ("torch", "Size")}
_OTHERS |= {("torch.serialization", "_get_layout"), ("pathlib._local", "PosixPath")}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if "." not in name and module in (*_OWN, "torch"):
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or getattr(found, "__module__", None) in _OWN:
                return found
        if (module, name) not in _OTHERS:
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint's metadata has")
        return super().find_class(module, name)


class BoundedReader(FileSystemReader):
    """``FileSystemReader`` that reads large saved shards by :data:`PIECE_BYTES`.

    Raises:
        CheckpointError: the folder holds no whole checkpoint, or a damaged one; names it.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with open(os.path.join(self.path, ".metadata"), "rb") as file:
                metadata = _MetadataUnpickler(file).load()
            metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path}: no whole checkpoint there: no file .metadata") from error
        except Exception as error:  # a damaged pickle may raise any
            raise CheckpointError(f"{self.path}/.metadata: not the metadata of a checkpoint: {error}") from error
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            plan.items = [item for item in plan.items if not self._read_rows(item, planner)]
            return super().read_data(plan, planner)
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{self.path}: a file is missing or damaged: {error}") from error

    def _read_rows(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read part of a large shard in pieces; return False for any other shard."""
        stored = self.storage_data[item.storage_index]
        if item.type is not LoadItemType.TENSOR or stored.length <= 2 * PIECE_BYTES or stored.transform_descriptors:
            return False
        with open(os.path.join(self.path, stored.relative_path), "rb") as file:
            with FakeTensorMode():  # all but the data
                saved = torch.load(self._slice_file(file, stored), map_location="cpu", weights_only=True)
            if not saved.is_contiguous() or saved.storage_offset():
                return False
            first, row_bytes = item.storage_offsets[0], math.prod(saved.shape[1:]) * saved.itemsize
            file.seek(stored.offset + saved.untyped_storage()._checkpoint_offset + first * row_bytes)
            for start, count in pieces(item.lengths[0], row_bytes):
                content = bytearray(count * row_bytes)
                if file.readinto(content) != len(content):
                    raise EOFError(f"{stored.relative_path} ends early")
                rows = torch.frombuffer(content, dtype=saved.dtype).view(-1, *saved.shape[1:])
                for dim in range(1, rows.dim()):
                    rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
                offsets = torch.Size([item.dest_offsets[0] + start, *item.dest_offsets[1:]])
                part = replace(item, dest_offsets=offsets, lengths=rows.shape)
                target = planner.resolve_tensor(part)
                target.copy_(rows)
                planner.commit_tensor(part, target)
        return True


def describe(path: str | Path) -> dict[str, Any]:
    """Return the tables of a checkpoint, with their cuts and the sizes of their states, and the keys of all else.

    Raises:
        CheckpointError: the folder holds no checkpoint, or a damaged one.
    """
    metadata = BoundedReader(path).read_metadata()
    sizes: Counter[str] = Counter()
    others, tables = set(metadata.state_dict_metadata), {}
    for index, stored in metadata.storage_data.items():
        sizes[index.fqn] += stored.length
    for _, table in sorted(saved_tables(metadata).items()):
        keys = {table.key, *(key for key, _ in table.states.values())}
        others -= keys
        tables[table.name] = {
            "rows": table.entry.size[0],
            "dim": table.entry.size[1],
            "data_type": str(table.entry.properties.dtype).removeprefix("torch."),
            "column_slices": [width for _, width in table.slices],
            "row_blocks": len({part.offsets[0] for part in table.entry.chunks}),
            "states": {name: list(entry.size) for name, (_, entry) in table.states.items()},
            "bytes": sum(sizes[key] for key in keys),
        }
    return {"tables": tables, "others": sorted(others), "bytes": sum(sizes.values())}
