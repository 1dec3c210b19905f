# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Save a sharded model for any plan: in small pieces, and whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dreamshard_planner.across_plans.loading import users_error
from dreamshard_planner.across_plans.reading import pieces, remapped_table
from dreamshard_planner.errors import FileError


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
    if dist.is_available() and dist.is_initialized():
        state_dict = _with_groups_of_all_ranks(state_dict, process_group)
    try:
        writer = WholeWriter(path)
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


class PiecesSavePlanner(DefaultSavePlanner):
    """Writes shards as blocks of rows, so that reading or writing one holds only a piece of it."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self._wholes: dict[MetadataIndex, tuple[MetadataIndex, int, int]] = {}
        return replace(plan, items=[piece for item in plan.items for piece in self._pieces(item)])

    def _pieces(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or remapped_table(item.index.fqn):  # no tensor, or one whose chunks say where it may go
            return [item]
        parts = list(pieces(data.chunk, data))
        if len(parts) < 2:
            return [item]
        result = []
        for part in parts:
            index = MetadataIndex(item.index.fqn, part.offsets)
            self._wholes[index] = (item.index, part.offsets[0] - data.chunk.offsets[0], part.sizes[0])
            result.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=part)))
        return result

    def lookup_object(self, index: MetadataIndex) -> Any:
        if index not in self._wholes:
            return super().lookup_object(index)
        whole, start, rows = self._wholes[index]
        return super().lookup_object(whole).narrow(0, start, rows)


_TOKEN_BYTES = 4
_ANY_TOKEN = "[0-9a-f]" * 2 * _TOKEN_BYTES
"""Glob of a token: a save to ``step.5`` does not match one to ``step``."""


class WholeWriter(FileSystemWriter):
    """Writes a checkpoint beside its folder, and renames it when it is complete. If two jobs save to one folder, the
    first to end gets it.

    Raises:
        FileError: the folder exists, or cannot be written; names it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = Path(os.path.abspath(path))
        super().__init__(self._target.with_name(f".{self._target.name}.{secrets.token_hex(_TOKEN_BYTES)}.part"))

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
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder that all ranks write into; runs on one rank before any writes."""
        with self._writing():
            self.fs.mkdir(self.path)
        name = Path(self.path).name
        return [replace(plan, storage_data=(name, plan.storage_data)) for plan in super().prepare_global_plan(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, prefix = plan.storage_data
        self.path = self._target.with_name(name)
        with self._writing():
            return super().write_data(replace(plan, storage_data=prefix), planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rename the folder, and remove the parts of killed or late saves to it; runs on one rank."""
        try:
            with self._writing():
                super().finish(metadata, results)
                os.rename(self.path, self._target)
        finally:
            if os.path.exists(self._target):
                for left in self._target.parent.glob(f".{escape(self._target.name)}.{_ANY_TOKEN}.part"):
                    shutil.rmtree(left, ignore_errors=True)
