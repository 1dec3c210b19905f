# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Read checkpoints of ``torch.distributed.checkpoint`` in bounded memory, and unpickle only what their metadata is made
of."""

from __future__ import annotations

import math
import os
import pickle
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dreamshard_planner.across_plans.reads import PIECE_BYTES
from dreamshard_planner.errors import CheckpointError

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
    """Reads a large saved shard by :data:`PIECE_BYTES`, where ``FileSystemReader`` holds all of it.

    Raises:
        CheckpointError: there is no whole checkpoint in the folder, or a damaged one; names it.
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
        large = [item for item in plan.items if self._is_large(item)]
        plan.items = [item for item in plan.items if not self._is_large(item)]
        try:
            for item in large:
                self._read_rows(item, planner)
            return super().read_data(plan, planner)
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"{self.path}: a file is missing or damaged: {error}") from error

    def _is_large(self, item: ReadItem) -> bool:
        stored = self.storage_data[item.storage_index]
        return item.type is LoadItemType.TENSOR and stored.length > 2 * PIECE_BYTES and not stored.transform_descriptors

    def _read_rows(self, item: ReadItem, planner: LoadPlanner) -> None:
        stored = self.storage_data[item.storage_index]
        with open(os.path.join(self.path, stored.relative_path), "rb") as file:
            with FakeTensorMode():  # all but the data
                saved = torch.load(self._slice_file(file, stored), map_location="cpu", weights_only=True)
            if not saved.is_contiguous() or saved.storage_offset():
                raise CheckpointError(f"{self.path}: {item.storage_index.fqn} is not contiguous")
            row_bytes = math.prod(saved.shape[1:]) * saved.itemsize
            file.seek(stored.offset + saved.untyped_storage()._checkpoint_offset + item.storage_offsets[0] * row_bytes)
            content = bytearray(item.lengths[0] * row_bytes)
            if file.readinto(content) != len(content):
                raise EOFError(f"{stored.relative_path} ends early")
        rows = torch.frombuffer(content, dtype=saved.dtype).view(-1, *saved.shape[1:])
        for dim in range(1, rows.dim()):
            rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
        target = planner.resolve_tensor(item)
        target.copy_(rows)
        planner.commit_tensor(item, target)
