# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learning rates in a state dict (``optimizer.save_param_groups(True)``): which group of parameters holds a table depends
on the plan, and groups are saved by number, so rates are carried by the names of parameters."""

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
        if key == "param_groups" and isinstance(value, list):
            for number, group in enumerate(value):
                if any(isinstance(parameter, str) for parameter in group.get("params", ())):
                    yield (*path, key, number), group
        else:
            yield from named_groups(value, (*path, str(key)))


class LearningRates:
    """Fills the rates of a state dict's groups when all groups of the checkpoint were read.

    Args:
        table: the weight that a parameter is, or the parameter.
        is_new: whether a parameter may be missing.
    """

    def __init__(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata,
        table: Callable[[str], str],
        is_new: Callable[[str], bool],
    ) -> None:
        self.groups = dict(named_groups(state_dict))
        self._table, self._is_new = table, is_new
        self._saved: dict[tuple, dict[str, Any]] = {}
        self._unread: dict[str, tuple] = {}
        for key, path in paths(metadata).items() if self.groups else ():
            is_bytes = isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata)
            if is_bytes and len(path) > 2 and path[-3] == "param_groups" and path[-1] in ("params", "lr"):
                self._unread[key] = path
        if self.groups and not self._unread:
            raise RefusedError("learning rates: not in the checkpoint; leave them out with save_param_groups(False)")

    def reads(self) -> list[ReadItem]:
        return [read_bytes(key) for key in self._unread]

    def take(self, key: str, value: Any) -> bool:
        """Whether this was one of the reads; the last one fills the groups.

        Raises:
            RefusedError: no rate of some parameter, or several for one group.
        """
        path = self._unread.pop(key, None)
        if path is None:
            return False
        self._saved.setdefault(path[:-1], {})[path[-1]] = value
        if not self._unread:
            self._fill()
        return True

    def _fill(self) -> None:
        rates: dict[str, set[float]] = {}
        for group in self._saved.values():
            for parameter in group.get("params", ()):
                rates.setdefault(self._table(str(parameter)), set()).add(float(group["lr"]))
        for group in self.groups.values():
            names = [name for name in map(self._table, group["params"]) if not self._is_new(name)]
            if lost := [name for name in names if name not in rates]:
                raise RefusedError(
                    f"learning rate of {lost[0]}: not in the checkpoint, which has the groups of one rank where plain "
                    "torch.distributed.checkpoint saved it; leave rates out with save_param_groups(False)"
                )
            found = {rate for name in names for rate in rates[name]}
            if len(found) > 1:
                raise RefusedError(f"learning rates {sorted(found)} of {', '.join(names)}: one group has only one")
            group["lr"] = found.pop() if found else group["lr"]
