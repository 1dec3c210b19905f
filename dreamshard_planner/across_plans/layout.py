# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables in a checkpoint of ``torch.distributed.checkpoint``: their weights, how those were cut, and the states of
their optimizers, all read from its metadata.

TorchRec's state dicts (seen in 1.6.1, 1.8.0 and 1.9.2) name the weights of a table ``ebc.embedding_bags.t.weight`` and
a fused optimizer's state of it ``state`` / ``ebc.embedding_bags.t.weight`` / ``t.momentum1``, on the ranks that have a
shard. Row-wise states of column slices follow on each other: row r of slice k is element k * rows + r. A replicated
table is a plain tensor with the states of the script's optimizer: ``state`` / ``dense.ebc.embedding_bags.t.weight`` /
``sum``, where ``dense`` is the key of a ``CombinedOptimizer``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dreamshard_planner.across_plans.rules import NAMES
from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.support.formatting import nearest

KeyPath = tuple[str | int, ...]
"""Where something is in a nested state dict."""

_WEIGHT = re.compile(r"(?:(?P<module>.+)\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight")


def table_name(parameter: object) -> str | None:
    """``ebc.t`` of ``ebc.embedding_bags.t.weight``, as plans name it; None for what is no table's weight."""
    match = _WEIGHT.fullmatch(str(parameter))
    return match and ".".join(filter(None, (match["module"], match["table"])))


def is_named(parameter: str, names: Container[str]) -> bool:
    """Whether the table is among names such as ``ebc.t`` or ``t``."""
    name = table_name(parameter) or parameter
    return name in names or name.rpartition(".")[2] in names


def check_named(names: Collection[str], tables: Collection[str]) -> None:
    """Whoever names a table that neither side has, misspelt it."""
    known = {*tables, *(name.rpartition(".")[2] for name in tables)}
    for name in sorted(set(names) - known):
        raise CheckpointError(f"neither model nor checkpoint has a table {name!r}{nearest(name, known)}")


def owner(parameter: object, weights: Container[str]) -> str | None:
    """The table's weight that an optimizer's parameter is: its name may have the optimizer's key in front."""
    parts = str(parameter).split(".")
    tails = (".".join(parts[first:]) for first in range(len(parts)))
    return next((tail for tail in tails if tail in weights), None)


def state_of(path: Sequence[object], weights: Container[str]) -> tuple[str, str] | None:
    """The weight and the name, as :data:`NAMES` has it, of an optimizer state at this path of a state dict."""
    weight = owner(path[-2], weights) if len(path) > 2 and path[-3] == "state" else None
    if weight is None:
        return None
    name = str(path[-1]).removeprefix(weight.split(".")[-2] + ".")
    return weight, NAMES.get(name, name)


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint."""

    key: str
    """Of the weights, in the metadata."""
    entry: TensorStorageMetadata
    """Of the weights."""
    states: dict[str, str] = field(default_factory=dict)
    """Key in the metadata by name of the state; of those that are tensors."""
    state_entries: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    """By name of the state."""

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """First column and width of each column slice."""
        return tuple(sorted({(part.offsets[1], part.sizes[1]) for part in self.entry.chunks if part.sizes[1]}))


def paths(metadata: Metadata) -> dict[str, KeyPath]:
    """Of every key, where it was in the nested state dict."""
    known: Mapping[str, Any] = metadata.planner_data or {}
    return {key: tuple(known.get(key, (key,))) for key in metadata.state_dict_metadata}


def saved_tables(metadata: Metadata) -> dict[str, SavedTable]:
    """By the name of their weights in the model's state dict."""
    where = paths(metadata)
    found: dict[str, SavedTable] = {}
    for key, entry in metadata.state_dict_metadata.items():
        weight = str(where[key][-1])
        if isinstance(entry, TensorStorageMetadata) and len(entry.size) == 2 and table_name(weight):
            found.setdefault(weight, SavedTable(key, entry))
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and (state := state_of(where[key], found)):
            weight, name = state
            found[weight].states.setdefault(name, key)
            found[weight].state_entries.setdefault(name, entry)
    return found
