# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Load a checkpoint of a sharded model under any other plan of the same tables."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_read_items
from torch.distributed.checkpoint.storage import StorageReader

from dreamshard_planner.across_plans.layout import is_named, owner, paths, saved_tables, state_of, table_name
from dreamshard_planner.across_plans.reading import BoundedReader
from dreamshard_planner.across_plans.reads import Read, RefusedError, StateShard, add_share, landing, state_reads
from dreamshard_planner.across_plans.rules import JOINS, STEP_COUNT, Join, needs_no_step_count
from dreamshard_planner.errors import CheckpointError, DreamShardError
from dreamshard_planner.support.formatting import nearest

MAX_PROBLEMS = 10
"""Named in one message."""


def load_across_plans(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike | None = None,
    *,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    added: Collection[str] = (),
    dropped: Collection[str] = (),
    inexact: Collection[str] = (),
) -> None:
    """``torch.distributed.checkpoint.load`` for a model whose plan, or number of ranks, is not that of the checkpoint.

    Args:
        state_dict: as for ``load``, filled in place: the model's state dict and its optimizers' in one, such as
            ``{"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}``.
        checkpoint_id: folder of a checkpoint, made by this package or by plain ``torch.distributed.checkpoint``.
        storage_reader: for what is no folder; then what is held in memory at a time is up to it.
        added: tables, as ``ebc.t`` or ``t``, that the checkpoint may lack: they stay as they are.
        dropped: tables that the checkpoint has and the model may lack.
        inexact: tables whose optimizer states may be carried although no rule makes that exact.

    Raises:
        CheckpointError: no checkpoint, or one that cannot be carried; names tables, states, and what would help. Some
            shards may have been filled by then.
    """
    reader = BoundedReader(checkpoint_id) if storage_reader is None and checkpoint_id is not None else storage_reader
    planner = AcrossPlansLoadPlanner(added, dropped, inexact)
    try:
        dcp.load(state_dict, storage_reader=reader, planner=planner, process_group=process_group)
    except CheckpointException as failure:
        raise users_error(failure) from failure


def users_error(failure: CheckpointException) -> BaseException:
    """The first rank's own error, where it is meant for users."""
    errors = [error for error, _ in failure.failures.values()]
    return next((error for error in errors if isinstance(error, DreamShardError)), failure)


@dataclass(frozen=True)
class Asked:
    """What a rank's state dict has."""

    weights: frozenset[str]
    states: frozenset[tuple[str, str]]
    optimizer: bool


class AcrossPlansLoadPlanner(DefaultLoadPlanner):
    """The load planner behind :func:`load_across_plans`, for those who call ``torch.distributed.checkpoint`` themselves."""

    def __init__(
        self, added: Collection[str] = (), dropped: Collection[str] = (), inexact: Collection[str] = ()
    ) -> None:
        super().__init__()
        for consent in (added, dropped, inexact):
            if isinstance(consent, str):
                raise TypeError(f"give a list of tables, not the text {consent!r}")
        self._added, self._dropped, self._inexact = frozenset(added), frozenset(dropped), frozenset(inexact)
        self._shares: dict[ReadItem, float] = {}
        self._groups: dict[tuple, dict[str, Any]] = {}
        self._group_keys: dict[str, tuple] = {}

    def create_local_plan(self) -> LoadPlan:
        self._saved = saved_tables(self.metadata)
        self._weights = {path[-1]: key for key, path in self.mappings.items() if table_name(path[-1])}
        self._states: dict[str, dict[str, str]] = {weight: {} for weight in self._weights}
        for key, path in self.mappings.items():
            if state := state_of(path, self._weights):
                self._states[state[0]][state[1]] = key
        self._check_consent()
        reads, problems = [], []
        for key, value in self.state_dict.items():
            try:
                reads += self._reads(key, value)
            except RefusedError as problem:
                problems.append(str(problem))
        _raise(problems)
        self._shares = {read.item: read.share for read in reads if read.share is not None}
        states = {(weight, name) for weight, names in self._states.items() for name in names}
        asked = Asked(frozenset(self._weights), frozenset(states), _has_states(self.original_state_dict))
        return LoadPlan([read.item for read in reads], planner_data=asked)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = [plan.planner_data for plan in global_plan]
        weights = frozenset().union(*(rank.weights for rank in asked))
        states = frozenset().union(*(rank.states for rank in asked))
        problems = [
            f"table {table_name(weight)}: in the checkpoint, not in the model; if it was removed, pass dropped="
            for weight in sorted(self._saved.keys() - weights)
            if weights and not is_named(weight, self._dropped)
        ]
        if any(rank.optimizer for rank in asked):
            for weight in sorted(weights & self._saved.keys()):
                asked_of = frozenset(name for owner_, name in states if owner_ == weight)
                problems += self._left_over(weight, asked_of)
        _raise(problems)
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        for index in {item.dest_index for item in new_plan.items if item in self._shares}:
            self.lookup_tensor(index).detach().zero_()
        return new_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        shard = self.lookup_tensor(read_item.dest_index).detach()
        return landing(shard, read_item, self._shares.get(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        share = self._shares.get(read_item)
        if share is not None:
            add_share(self.lookup_tensor(read_item.dest_index).detach(), read_item, share, tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{key}: holds an object that is not read unseen: {error}") from error
        path = self._group_keys.pop(key, None)
        if path is None:
            self._set(self.mappings[key], loaded)
            return
        self._groups.setdefault(path[:-1], {})[path[-1]] = loaded
        if not self._group_keys:
            self._carry_learning_rates()

    def _set(self, path: tuple, value: Any) -> None:
        container = self.original_state_dict
        for part in path[:-1]:
            container = container[part]
        container[path[-1]] = value

    def _check_consent(self) -> None:
        known = {table_name(weight) for weight in (*self._saved, *self._weights)}
        names = known | {name.rpartition(".")[2] for name in known}
        for name in sorted((self._added | self._dropped | self._inexact) - names):
            raise CheckpointError(f"neither model nor checkpoint has a table {name!r}{nearest(name, names)}")

    def _reads(self, key: str, value: Any) -> Iterator[Read]:
        path = self.mappings[key]
        if state := state_of(path, self._weights):
            return self._state_reads(key, value, *state)
        if len(path) > 2 and path[-3] == "param_groups" and self._by_name(path):
            return self._group_reads(path)
        if len(path) > 2 and path[-3] == "state" and str(path[-2]).isdigit():
            self._check_numbered(key, path)
        return self._same_key_reads(key, value, path)

    def _same_key_reads(self, key: str, value: Any, path: tuple) -> list[Read]:
        entry = self.metadata.state_dict_metadata.get(key)
        table = table_name(path[-1])
        if entry is None and table:
            if is_named(path[-1], self._added):
                return []
            raise RefusedError(f"table {table}: not in the checkpoint; if it is new, pass added=[{table!r}]")
        if entry is None:
            raise RefusedError(f"{key}: not in the checkpoint")
        if not isinstance(entry, BytesStorageMetadata):
            if not isinstance(value, Tensor):
                raise RefusedError(f"{key}: a tensor in the checkpoint, a {type(value).__name__} in the state dict")
            if tuple(entry.size) != tuple(value.size()):
                what = f"table {table}" if table else key
                raise RefusedError(f"{what}: of size {tuple(entry.size)} in the checkpoint, {tuple(value.size())} here")
        return [Read(item) for item in _create_read_items(key, entry, value)]

    def _state_reads(self, key: str, value: Tensor, weight: str, name: str) -> list[Read]:
        what = f"table {table_name(weight)}, state {name}"
        table = self._saved.get(weight)
        if table is None:
            return []  # its weights say so
        inexact = is_named(weight, self._inexact)
        if name not in table.states:
            if inexact or (name == STEP_COUNT and needs_no_step_count(frozenset(self._states[weight]))):
                return []
            had = ", ".join(sorted(table.states)) or "none"
            raise RefusedError(f"{what}: not in the checkpoint, whose states of it are: {had}. {_consent(weight)}")
        single = JOINS.get(name) is Join.SINGLE
        chunks = sorted(enumerate(_create_chunk_list(value)), key=lambda found: found[1].offsets)
        of_weights = _create_chunk_list(self.state_dict[self._weights[weight]])
        of_weights.sort(key=lambda found: (found.offsets[1], found.offsets[0]))
        if len(chunks) != len(of_weights):
            raise RefusedError(f"{what}: has {len(chunks)} shards on this rank, and the weights {len(of_weights)}")
        reads = []
        for (number, found), weights in zip(chunks, of_weights, strict=True):
            shard = StateShard(MetadataIndex(key, found.offsets, number), tuple(found.sizes), weights)
            if not (single or shard.per_row or shard.sizes == tuple(weights.sizes)):
                raise RefusedError(f"{what}: a shard of size {shard.sizes} has neither a value for each row nor weight")
            try:
                reads += state_reads(self.metadata, table, name, shard, inexact)
            except RefusedError as problem:
                raise RefusedError(f"{what}: {problem}. {_consent(weight)}") from problem
        return reads

    def _left_over(self, weight: str, asked: frozenset[str]) -> Iterator[str]:
        """Saved states of a table that no rank asks for: loaded without them, its training would go on differently."""
        for name in sorted(self._saved[weight].states.keys() - asked):
            exempt = name == STEP_COUNT and needs_no_step_count(frozenset(self._saved[weight].states))
            if not exempt and not is_named(weight, self._inexact):
                yield (
                    f"table {table_name(weight)}, state {name}: in the checkpoint, not in the state dict. A replicated "
                    "table's state is in its own optimizer's state dict, by name (KeyedOptimizerWrapper) and after "
                    f"init_state(); {_consent(weight)}"
                )

    def _by_name(self, path: tuple) -> bool:
        group: Any = self.original_state_dict
        for part in path[:-1]:
            group = group[part]
        return any(isinstance(parameter, str) for parameter in group.get("params", ()))

    def _group_reads(self, path: tuple) -> list[Read]:
        """Of all learning rates in the checkpoint, once: which groups hold a table depends on the plan."""
        if self._group_keys or path[-1] != "lr":
            return []
        for key, found in paths(self.metadata).items():
            entry = self.metadata.state_dict_metadata[key]
            if len(found) > 2 and found[-3] == "param_groups" and isinstance(entry, BytesStorageMetadata):
                if found[-1] in ("params", "lr"):
                    self._group_keys[key] = found
        if not self._group_keys:
            raise RefusedError(
                f"{'.'.join(map(str, path))}: the checkpoint has no learning rates; save_param_groups(False)"
            )
        zero = torch.Size([0])
        indices = map(MetadataIndex, self._group_keys)
        return [Read(ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)) for index in indices]

    def _carry_learning_rates(self) -> None:
        """Each group of the state dict takes the rate that the checkpoint has for its parameters."""
        saved = [group for group in self._groups.values() if "lr" in group and "params" in group]
        rates: dict[str, set[float]] = {}
        for group in saved:
            for parameter in group["params"]:
                rates.setdefault(self._plain(parameter), set()).add(float(group["lr"]))
        problems = []
        for path in self.mappings.items():
            pass
        for path in [path for path in self.mappings.values() if len(path) > 2 and path[-3] == "param_groups"]:
            if path[-1] != "lr" or not self._by_name(path):
                continue
            group: Any = self.original_state_dict
            for part in path[:-1]:
                group = group[part]
            names = [self._plain(parameter) for parameter in group["params"]]
            names = [name for name in names if not is_named(name, self._added)]
            found = {rate for name in names for rate in rates.get(name, ())}
            lost = [name for name in names if name not in rates]
            if len(found) > 1 or lost:
                told = f"several learning rates {sorted(found)}" if len(found) > 1 else f"no learning rate of {lost[0]}"
                problems.append(f"{'.'.join(map(str, path))}: the checkpoint has {told}")
            elif found:
                group["lr"] = found.pop()
        _raise(problems)

    def _plain(self, parameter: str) -> str:
        return owner(parameter, self._weights.keys() | self._saved.keys()) or parameter

    def _check_numbered(self, key: str, path: tuple) -> None:
        """Parameters that are numbered have other numbers where other tables are replicated."""
        replicated = [w for w, k in self._weights.items() if type(self.state_dict[k]) in (Tensor, torch.nn.Parameter)]
        numbers = {
            where: {p[-2] for p in found.values() if len(p) > 2 and p[:-2] == path[:-2]}
            for where, found in (("here", self.mappings), ("saved", paths(self.metadata)))
        }
        if replicated or numbers["here"] != numbers["saved"]:
            raise RefusedError(
                f"{key}: an optimizer state by number, and numbers change with the tables that are replicated; save and "
                "load the optimizer in a KeyedOptimizerWrapper, which names its parameters"
            )


def _has_states(state_dict: Any) -> bool:
    """Whether an optimizer's state dict is in it, empty though its states may be."""
    if not isinstance(state_dict, Mapping):
        return False
    return isinstance(state_dict.get("state"), Mapping) or any(map(_has_states, state_dict.values()))


def _consent(weight: str) -> str:
    return f"To go on without an exact state, pass inexact=[{table_name(weight)!r}]"


def _raise(problems: list[str]) -> None:
    if problems:
        more = f" (and {len(problems) - MAX_PROBLEMS} more)" if len(problems) > MAX_PROBLEMS else ""
        shown = "\n- ".join(problems[:MAX_PROBLEMS])
        raise CheckpointError(f"the checkpoint cannot be loaded under this plan:\n- {shown}{more}")
