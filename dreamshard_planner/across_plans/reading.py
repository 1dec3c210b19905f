# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Read checkpoints of ``torch.distributed.checkpoint`` in bounded memory, unpickling nothing but their metadata's own
types."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from dreamshard_planner.across_plans.reads import PIECE_BYTES
from dreamshard_planner.errors import CheckpointError

_KNOWN = {
    ("builtins", "set"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_OURS = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what checkpoints' metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module == "torch" or module in _OURS else None
        plain = isinstance(found, (torch.dtype, torch.layout))
        own = isinstance(found, type) and found.__module__ in _OURS
        if "." in name or not (plain or own or (module, name) in _KNOWN):
            raise pickle.UnpicklingError(f"names {module}.{name}, which no checkpoint's metadata has")
        return super().find_class(module, name)


class BoundedReader(FileSystemReader):
    """Reads at most :data:`PIECE_BYTES` at a time of shards of any size.

    Raises:
        CheckpointError: there is no whole checkpoint in the folder; names it.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        super().__init__(path)
        if not os.path.isdir(path):
            raise CheckpointError(f"{path}: no such folder")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = self._get_metadata_path(None)
        try:
            with open(path, "rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path}: no whole checkpoint: it has no file .metadata") from error
        except Exception as error:  # whatever a damaged pickle raises
            raise CheckpointError(f"{path}: not the metadata of a checkpoint: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: not the metadata of a checkpoint, but a {type(metadata).__name__}")
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        large = [item for item in plan.items if self._is_large(item)]
        plan.items = [item for item in plan.items if not self._is_large(item)]
        for item in large:
            self._read_large(item, planner)
        try:
            return super().read_data(plan, planner)
        except (OSError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{self.path}: a file is missing or damaged: {error}") from error

    def _is_large(self, item: ReadItem) -> bool:
        stored = self.storage_data[item.storage_index]
        return item.type is LoadItemType.TENSOR and stored.length > PIECE_BYTES and not stored.transform_descriptors

    def _read_large(self, item: ReadItem, planner: LoadPlanner) -> None:
        """Block of rows by block of rows: ``torch.load`` would hold a whole saved shard."""
        stored = self.storage_data[item.storage_index]
        with open(self.fs.concat_path(self.path, stored.relative_path), "rb") as file:
            with FakeTensorMode():
                saved = torch.load(self._slice_file(file, stored), map_location="cpu", weights_only=True)
            if not saved.is_contiguous():
                raise CheckpointError(f"{self.path}: {item.storage_index.fqn} is not contiguous")
            row_bytes = saved[0].numel() * saved.itemsize if saved.dim() else saved.itemsize
            begin = stored.offset + saved.untyped_storage()._checkpoint_offset + saved.storage_offset() * saved.itemsize
            target = planner.resolve_tensor(item).detach()
            step = max(1, PIECE_BYTES // row_bytes)
            for done in range(0, item.lengths[0], step):
                count = min(step, item.lengths[0] - done)
                file.seek(begin + (item.storage_offsets[0] + done) * row_bytes)
                block = _rows(file.read(count * row_bytes), saved, count)
                for dim in range(1, saved.dim()):
                    block = block.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
                target.narrow(0, done, count).copy_(block)
            planner.commit_tensor(item, target)


def _rows(content: bytes, like: Tensor, count: int) -> Tensor:
    values = torch.frombuffer(bytearray(content), dtype=like.dtype)
    return values.view(count, *like.shape[1:])
