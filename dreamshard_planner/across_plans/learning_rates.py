# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learning rates, where a state dict has them (``optimizer.save_param_groups(True)``). Groups of parameters are saved by
number, and the plan decides which tables one holds: rates are carried by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dreamshard_planner.across_plans.layout import paths
from dreamshard_planner.across_plans.reads import RefusedError


def read_bytes(key: str) -> ReadItem:
    """A read of what is no tensor."""
    index, zero = MetadataIndex(key), torch.Size([0])
    return ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)


def named_groups(state_dict: Any, path: tuple = ()) -> Iterator[tuple[tuple, dict[str, Any]]]:
    """Groups whose parameters have names, and where they are."""
    for key, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        for number, group in enumerate(value) if key == "param_groups" else ():
            if any(isinstance(parameter, str) for parameter in group["params"]):
                yield (*path, key, number), group
        yield from named_groups(value, (*path, str(key)))


class SavedRates:
    """Learning rates of a checkpoint, read one by one."""

    def __init__(self, metadata: Metadata) -> None:
        self._groups: dict[tuple, dict[str, Any]] = {}
        self.unread: dict[str, tuple] = {}
        """Path by key of what is to be read."""
        for key, path in paths(metadata).items():
            is_bytes = isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata)
            if is_bytes and len(path) > 2 and path[-3] == "param_groups" and path[-1] in ("params", "lr"):
                self.unread[key] = path

    def take(self, key: str, value: Any) -> None:
        path = self.unread.pop(key)
        self._groups.setdefault(path[:-1], {})[path[-1]] = value

    def fill(self, groups: dict[tuple, dict[str, Any]], name: Callable[[object], str]) -> None:
        """Give groups of a state dict their rates.

        Args:
            name: of a parameter, the same in all optimizers and plans.

        Raises:
            RefusedError: there is no rate for a parameter, or several for a group.
        """
        rates: dict[str, set[float]] = {}
        for saved in self._groups.values():
            for parameter in saved["params"]:
                rates.setdefault(name(parameter), set()).add(float(saved["lr"]))
        for group in groups.values():
            found = {rate for parameter in group["params"] for rate in rates.get(name(parameter), ())}
            lost = [parameter for parameter in group["params"] if name(parameter) not in rates]
            if lost or len(found) != 1:
                raise RefusedError(
                    f"learning rate of {', '.join(lost or group['params'])}: the checkpoint has {sorted(found) or 'none'} "
                    "(saved by plain torch.distributed.checkpoint, it has those of one rank's groups); to keep the "
                    "script's, call save_param_groups(False)"
                )
            group["lr"] = found.pop()
