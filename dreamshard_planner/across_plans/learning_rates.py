# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learning rates, where a state dict has them (``optimizer.save_param_groups(True)``). Groups are saved by number, and
the plan decides which tables one holds: rates are carried by the names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dreamshard_planner.across_plans.layout import KeyPath, paths
from dreamshard_planner.errors import CheckpointError


def _named_groups(state_dict: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Groups whose parameters have names, and where they are."""
    for key, value in state_dict.items() if isinstance(state_dict, Mapping) else ():
        for number, group in enumerate(value) if key == "param_groups" else ():
            if any(isinstance(parameter, str) for parameter in group["params"]):
                yield (*path, key, number), group
        yield from _named_groups(value, (*path, str(key)))


class LearningRates:
    """Of the groups of a state dict, filled from those of a checkpoint when the last of ``unread`` was taken."""

    def __init__(self, state_dict: dict[str, Any], metadata: Metadata) -> None:
        self.groups = dict(_named_groups(state_dict))
        self.unread: dict[str, KeyPath] = {}
        """Path by key of what is to be read."""
        self._saved: dict[KeyPath, dict[str | int, Any]] = {}
        for key, path in paths(metadata).items() if self.groups else ():
            is_bytes = isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata)
            if is_bytes and len(path) > 2 and path[-3] == "param_groups" and path[-1] in ("params", "lr"):
                self.unread[key] = path

    def take(self, key: str, value: Any, name: Callable[[object], str]) -> None:
        """Of the checkpoint; ``name`` is that of a parameter in all optimizers and plans.

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
