# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Save a sharded model, in small pieces and whole or not at all, and load it under any other plan of its tables."""

from __future__ import annotations

import functools
import io
import math
import operator
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dreamshard_planner.across_plans import reading
from dreamshard_planner.across_plans.reading import KeyPath, Read, RefusedError
from dreamshard_planner.errors import CheckpointError, DreamShardError, FileError
from dreamshard_planner.hot_rows.replicas import read_after_load
from dreamshard_planner.support.formatting import some_of
from dreamshard_planner.torchrec_components.compat import unread_metadata


def load_across_plans(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    process_group: dist.ProcessGroup | None = None,
    *,
    added: Collection[str] = (),
    dropped: Collection[str] = (),
    fresh: Collection[str] = (),
) -> None:
    """Load a checkpoint into a model with another plan or number of ranks; else like
    ``torch.distributed.checkpoint.load``.

    Args:
        state_dict: filled in place: state dicts of the model and its optimizers, such as
            ``{"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}``.
        path: folder of a checkpoint, made by this package or by plain ``torch.distributed.checkpoint``.
        added: tables, as ``ebc.t`` or ``t``, and keys of other entries that the checkpoint may lack. They keep their
            values.
        dropped: tables, and keys or prefixes of other entries, that the model may lack. A table in ``added`` too starts
            anew.
        fresh: tables whose optimizer states keep their values if no rule converts the saved ones.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be converted; names tables, states and fixes.
    """
    reader, planner = reading.BoundedReader(path), AcrossPlansLoadPlanner(added, dropped, fresh)
    try:
        load(state_dict, storage_reader=reader, planner=planner, process_group=process_group)
    except CheckpointException as failure:
        raise users_error(failure) from failure
    read_after_load(planner.state_dict.values())


def save_across_plans(
    state_dict: dict[str, Any], path: str | os.PathLike[str], process_group: dist.ProcessGroup | None = None
) -> None:
    """Save like ``torch.distributed.checkpoint.save``, which can load the result, but in bounded memory beside the
    shards; the folder appears when it is complete.

    Args:
        state_dict: state dicts of the model and its optimizers.
        path: a new folder that all ranks can write to.

    Raises:
        FileError: the folder exists, or cannot be written.
    """
    state_dict = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state_dict.items()}
    token = [secrets.token_hex(4)]
    if dist.is_available() and dist.is_initialized():
        state_dict = _with_groups_of_all_ranks(state_dict, process_group)
        dist.broadcast_object_list(token, group=process_group, group_src=0)
    writer = WholeWriter(path, *token)
    try:
        save(state_dict, storage_writer=writer, planner=PiecesSavePlanner(), process_group=process_group)
    except CheckpointException as failure:
        raise users_error(failure) from failure


def _with_groups_of_all_ranks(value: Any, process_group: dist.ProcessGroup | None) -> Any:
    """Return a copy whose lists ``param_groups`` hold the groups of all ranks.

    Groups are saved under their number: one rank's groups would hide another's, with the learning rates of its tables.
    """
    if not isinstance(value, dict):
        return value
    copy = {key: _with_groups_of_all_ranks(part, process_group) for key, part in value.items()}
    if "param_groups" in copy:
        of_ranks: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(of_ranks, copy["param_groups"], group=process_group)
        copy["param_groups"] = list({repr(group): group for groups in of_ranks for group in groups}.values())
    return copy


def users_error(failure: CheckpointException) -> BaseException:
    """Return the first rank's error if it is meant for users, else the failure."""
    errors = [error for error, _ in failure.failures.values()]
    if (reason := unread_metadata(errors[0])) is not None:
        return CheckpointError(reason)
    return next((error for error in errors if isinstance(error, DreamShardError)), failure)


class AcrossPlansLoadPlanner(DefaultLoadPlanner):
    """Load planner of :func:`load_across_plans`, for direct calls of ``torch.distributed.checkpoint``.

    Reads are copied into shards, or added with their share.
    """

    metadata: Metadata

    def __init__(self, added: Collection[str] = (), dropped: Collection[str] = (), fresh: Collection[str] = ()) -> None:
        super().__init__()
        self._added, self._dropped, self._fresh = frozenset(added), frozenset(dropped), frozenset(fresh)

    def create_local_plan(self) -> LoadPlan:
        self._saved = reading.saved_tables(self.metadata)
        here = reading.table_names([str(path[-1]) for path in self.mappings.values()])
        self._names = {weight: table.name for weight, table in self._saved.items()} | here
        self._weights = {str(path[-1]): key for key, path in self.mappings.items() if path[-1] in here}
        self._states: dict[str, set[str]] = {weight: set() for weight in self._weights}
        for path in self.mappings.values():
            if state := reading.state_of(path, self._weights):
                self._states[state[0]].add(state[1])
        keys = self.metadata.state_dict_metadata
        dropped = {name for name in self._dropped if not any(reading.is_dropped(key, (key,), [name]) for key in keys)}
        reading.check_named(self._added - self.mappings.keys() | dropped | self._fresh, set(self._names.values()))
        self._rates = LearningRates(self.original_state_dict, self.metadata)
        reads, problems = [reading.read_bytes(key) for key in self._rates.unread], []
        for key, value in self.state_dict.items():
            try:
                reads += self._reads(key, value, self.mappings[key])
            except RefusedError as problem:
                problems.append(str(problem))
        _raise(problems)
        states = {(weight, name) for weight, names in self._states.items() for name in names}
        optimizer, entries = _has_states(self.original_state_dict), set(self.original_state_dict)
        asked = set(self._weights), states, optimizer, set(self.mappings), entries
        return LoadPlan(list(reads), planner_data=asked)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Raise for entries that no rank asks for; runs on one rank."""
        of_ranks = zip(*(plan.planner_data for plan in global_plan), strict=True)
        weights, states, optimizer, keys, entries = (functools.reduce(operator.or_, of_rank) for of_rank in of_ranks)
        problems = [
            f"table {self._names[weight]}: in the checkpoint, not in the model; if it was removed, name it in dropped="
            for weight in sorted(self._saved.keys() - weights)
            if weights and not reading.is_named(self._names[weight], self._dropped)
        ]
        if optimizer:
            problems += self._left_over(weights, states)
        _raise([*problems, *self._others_left_over(keys, entries)])
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        for index in {item.dest_index for item in new_plan.items if _share(item) is not None}:
            self.lookup_tensor(index).detach().zero_()
        return new_plan

    def _landing(self, read_item: ReadItem) -> Tensor:
        """Return the target part of a shard in its saved shape: a row's value may have a second dimension."""
        shard, lengths = self.lookup_tensor(read_item.dest_index).detach(), read_item.lengths
        if shard.dim() == len(lengths):
            return narrow_tensor_by_index(shard, read_item.dest_offsets, lengths)
        rows = shard.narrow(0, read_item.dest_offsets[0], lengths[0]) if shard.dim() and lengths else shard
        return rows.view(lengths)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        landing = self._landing(read_item)
        return landing if _share(read_item) is None else torch.empty_like(landing, device="cpu")

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if (share := _share(read_item)) is not None:
            landing = self._landing(read_item)
            landing.add_(tensor.to(landing.device), alpha=share)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:  # an unpickler's may be any
            raise CheckpointError(f"{key}: holds what torch.load(weights_only=True) does not read: {error}") from error
        if key in self._rates.unread:
            self._rates.take(key, loaded, lambda name: reading.owner(name, self._weights) or str(name))
            return
        *container, last = self.mappings[key]
        state_dict: Any = self.original_state_dict
        functools.reduce(operator.getitem, container, state_dict)[last] = loaded

    def _reads(self, key: str, value: Any, path: KeyPath) -> list[Read]:
        if isinstance(value, Tensor) and (state := reading.state_of(path, self._weights)):
            return self._state_reads(key, value, *state)
        if path[:-1] in self._rates.groups:
            return []
        if len(path) > 2 and path[-3] == "state" and str(path[-2]).isdigit():
            self._check_numbered(key, path)
        return self._same_key_reads(key, value, path)

    def _same_key_reads(self, key: str, value: Any, path: KeyPath) -> list[Read]:
        entry = self.metadata.state_dict_metadata.get(key)
        table, remapped = self._names.get(str(path[-1])), reading.remapped_table(str(path[-1]))
        if self._is_new(table or remapped) or (entry is None and key in self._added):
            return []
        what = f"table {table}" if table else key
        if entry is None:
            raise RefusedError(f"{what}: not in the checkpoint; if it is new, pass added=[{table or key!r}]")
        if isinstance(entry, BytesStorageMetadata):
            return [reading.read_bytes(key)]
        size = tuple(value.size()) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        if tuple(entry.size) != size:
            raise RefusedError(f"{what}: of size {tuple(entry.size)} in the checkpoint, {size} here")
        shards = _create_chunk_list(value)
        if remapped:
            reading.check_row_blocks(key, entry, remapped, shards)
        return [
            read
            for number, found in enumerate(shards)
            for read in reading.overlaps(key, entry, found, MetadataIndex(key, found.offsets, number))
        ]

    def _is_new(self, table: str | None) -> bool:
        """Return whether a table is new: named as added, and absent from the checkpoint or dropped from it."""
        if table is None or not reading.is_named(table, self._added):
            return False
        return reading.is_named(table, self._dropped) or table not in {saved.name for saved in self._saved.values()}

    def _state_reads(self, key: str, value: Tensor, weight: str, name: str) -> list[Read]:
        table, named = self._saved.get(weight), self._names[weight]
        if table is None or self._is_new(named):
            return []  # its weights say so
        try:
            if name not in table.states:
                if name == reading.STEP_COUNT and reading.needs_no_step_count(self._states[weight]):
                    return []
                raise RefusedError(f"not in the checkpoint, which has of it: {', '.join(table.states) or 'no state'}")
            shards = sorted(enumerate(_create_chunk_list(value)), key=lambda numbered: numbered[1].offsets[::-1])
            weights = _create_chunk_list(self.state_dict[self._weights[weight]])
            weights.sort(key=lambda found: (found.offsets[1], found.offsets[0]))
            if len(shards) != len(weights):
                raise RefusedError(f"has {len(shards)} shards on this rank, and the weights have {len(weights)}")
            reads = []
            for (number, found), of in zip(shards, weights, strict=True):
                index = MetadataIndex(key, found.offsets, number)
                reads += reading.state_reads(table, name, index, tuple(found.sizes), of)
            return reads
        except RefusedError as problem:
            if reading.is_named(named, self._fresh):
                return []
            raise RefusedError(f"table {named}, state {name}: {problem}; or pass fresh=[{named!r}]") from problem

    def _left_over(self, weights: set[str], asked: set[tuple[str, str]]) -> Iterator[str]:
        """Yield problems of saved states that no rank asks for: training would go on differently without them."""
        saved = (reading.state_of(path, self._saved) for path in reading.paths(self.metadata).values())
        for weight, name in sorted(set(filter(None, saved)) - asked):
            table, uncounted = self._names[weight], reading.needs_no_step_count(self._saved[weight].states.keys())
            anew = reading.is_named(table, self._fresh) or self._is_new(table)
            if weight not in weights or anew or (name == reading.STEP_COUNT and uncounted):
                continue
            yield (
                f"table {table}, state {name}: in the checkpoint, not in the state dict; its optimizer belongs there "
                f"(if replicated: in a KeyedOptimizerWrapper, after init_state()), or pass fresh=[{table!r}]"
            )

    def _others_left_over(self, asked: set[str], entries: set[str]) -> Iterator[str]:
        """Yield problems of other saved entries that no rank asks for, if their part of the state dict is loaded.

        Parameter groups are left out: their numbers depend on the plan.
        """
        tables = {table.key for table in self._saved.values()}
        left: tuple[dict[str, None], dict[str, None]] = {}, {}
        for key, path in sorted(reading.paths(self.metadata).items()):
            skipped = key in asked or key in tables or path[0] not in entries or "param_groups" in path
            if skipped or reading.state_of(path, self._saved) or reading.is_dropped(key, path, self._dropped):
                continue
            is_state = "state" in path[:-1]
            left[is_state][".".join(map(str, path[: path.index("state") + 2])) if is_state else key] = None
        none = "give its optimizer states before (a KeyedOptimizer's init_state() makes them), or "
        for names, help in zip(left, ("", none), strict=True):
            if names:
                yield (
                    f"{some_of(list(names), ())}: in the checkpoint, not in the state dict; {help}name what is not "
                    "wanted, or what its key begins with, in dropped="
                )

    def _check_numbered(self, key: str, path: KeyPath) -> None:
        """Refuse states by parameter number if numbers may differ, since replicated tables take part in them."""
        here, saved = (
            {found[-2] for found in where.values() if len(found) > 2 and found[:-2] == path[:-2]}
            for where in (self.mappings, reading.paths(self.metadata))
        )
        if here != saved or any(type(self.state_dict[weight]) is Tensor for weight in self._weights.values()):
            raise RefusedError(
                f"{key}: an optimizer state by number, which changes with the tables that are replicated; save and "
                "load that optimizer by name, in a KeyedOptimizerWrapper"
            )


def _share(item: ReadItem) -> float | None:
    return item.share if isinstance(item, Read) else None


def _has_states(state_dict: Any) -> bool:
    """Return whether a nested state dict contains an optimizer's."""
    if not isinstance(state_dict, Mapping):
        return False
    return isinstance(state_dict.get("state"), Mapping) or any(map(_has_states, state_dict.values()))


def _raise(problems: list[str]) -> None:
    if problems:
        raise CheckpointError("\n- ".join(["the checkpoint cannot be loaded under this plan:", *sorted(problems)]))


def _named_groups(state_dict: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Yield parameter groups with named parameters, with their paths."""
    for key, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        for number, group in enumerate(value) if key == "param_groups" else ():
            if any(isinstance(parameter, str) for parameter in group["params"]):
                yield (*path, key, number), group
        yield from _named_groups(value, (*path, str(key)))


class LearningRates:
    """Learning rates of a state dict's groups, set from a checkpoint when the last of ``unread`` was taken."""

    def __init__(self, state_dict: dict[str, Any], metadata: Metadata) -> None:
        self.groups = dict(_named_groups(state_dict))
        self.unread: dict[str, KeyPath] = {}
        """Paths of entries to read, by key."""
        self._saved: dict[KeyPath, dict[str | int, Any]] = {}
        for key, path in reading.paths(metadata).items() if self.groups else ():
            is_bytes = isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata)
            if is_bytes and len(path) > 2 and path[-3] == "param_groups" and path[-1] in ("params", "lr"):
                self.unread[key] = path

    def take(self, key: str, value: Any, name: Callable[[object], str]) -> None:
        """Take one saved entry; ``name`` returns a parameter's name in all optimizers and plans.

        Raises:
            CheckpointError: there is no rate for a parameter, or several for a group.
        """
        path = self.unread.pop(key)
        self._saved.setdefault(path[:-1], {})[path[-1]] = value
        if self.unread:
            return
        rates: dict[str, set[float]] = {}
        for saved in self._saved.values():
            for parameter in saved["params"]:
                rates.setdefault(name(parameter), set()).add(float(saved["lr"]))
        for group in self.groups.values():
            found = {rate for parameter in group["params"] for rate in rates.get(name(parameter), ())}
            lost = [parameter for parameter in group["params"] if name(parameter) not in rates]
            if lost or len(found) != 1:
                raise CheckpointError(
                    f"learning rate of {', '.join(lost or group['params'])}: {sorted(found) or 'none'} saved; "
                    "plain torch.distributed.checkpoint keeps one rank's; save_param_groups(False) keeps the script's"
                )
            group["lr"] = found.pop()


class PiecesSavePlanner(DefaultSavePlanner):
    """Writes shards as blocks of rows, so that reading or writing one holds only a piece of it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._wholes: dict[MetadataIndex, tuple[MetadataIndex, int, int]] = {}
        return replace(plan, items=[piece for item in plan.items for piece in self._pieces(item)])

    def _pieces(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or not data.size or reading.remapped_table(item.index.fqn):  # its chunks say where it may go
            return [item]
        chunk, result = data.chunk, []
        blocks = list(reading.pieces(chunk.sizes[0], data.properties.dtype.itemsize * math.prod(data.size[1:])))
        if len(blocks) < 2:
            return [item]
        for start, rows in blocks:
            offsets = torch.Size([chunk.offsets[0] + start, *chunk.offsets[1:]])
            part = ChunkStorageMetadata(offsets, torch.Size([rows, *chunk.sizes[1:]]))
            index = MetadataIndex(item.index.fqn, offsets)
            self._wholes[index] = (item.index, start, rows)
            result.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=part)))
        return result

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index not in self._wholes:
            return super().lookup_object(index)
        whole, start, rows = self._wholes[index]
        return super().lookup_object(whole).narrow(0, start, rows)


class WholeWriter(FileSystemWriter):
    """Writes a checkpoint beside its folder, and renames it when it is complete. If two jobs save to one folder, the
    first to end gets it.

    Args:
        path: the folder.
        token: eight characters in the name of the hidden folder, the same on all ranks.

    Raises:
        FileError: the folder exists, or cannot be written; names it.
    """

    def __init__(self, path: str | os.PathLike[str], token: str) -> None:
        self._target = Path(os.path.abspath(path))
        super().__init__(self._target.with_name(f".{self._target.name}.{token}.part"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            cause = error if isinstance(error, OSError) else error.__context__  # torch's own hides the system's
            if not isinstance(cause, OSError):
                raise
            raise FileError(f"{self._target}: cannot be written: {cause.strerror or cause}") from error

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if os.path.exists(self._target):
            raise FileError(f"{self._target}: exists; save to a new folder, and remove the old one then")
        with self._writing():
            return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with self._writing():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rename the folder, and remove the parts of killed or late saves to it; runs on one rank."""
        try:
            with self._writing():
                super().finish(metadata, results)
                os.rename(self.path, self._target)
        finally:
            if os.path.exists(self._target):
                token = "[0-9a-f]" * 8  # of any other save
                for left in self._target.parent.glob(f".{escape(self._target.name)}.{token}.part"):
                    shutil.rmtree(left, ignore_errors=True)
