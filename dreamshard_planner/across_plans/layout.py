# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables in a checkpoint of ``torch.distributed.checkpoint``: their weights, how those were cut, and the states of
their optimizers, all read from its metadata.

TorchRec's state dicts (seen in 1.6.1, 1.8.0 and 1.9.2) name the weights of a table ``ebc.embedding_bags.t.weight`` and
a fused optimizer's state of it ``state`` / ``ebc.embedding_bags.t.weight`` / ``t.momentum1``, on the ranks that have a
shard. Row-wise states of column slices follow on each other: row r of slice k is element k * rows + r. A replicated
table is a plain tensor with the states of the script's optimizer: ``state`` / ``dense.ebc.embedding_bags.t.weight`` /
``sum``, where ``dense`` is the key of a ``CombinedOptimizer``.

:data:`RULES` says how each optimizer state is carried to another plan, for the code and for the documentation.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dreamshard_planner.errors import CheckpointError
from dreamshard_planner.support.formatting import nearest


class Join(Enum):
    """What becomes of a state that is not of the shape of the weights; one that is, is cut like them."""

    MEAN = "one value per row: a slice takes it as it is, slices join as the mean weighted by width"
    SAME = "one value per row, the same in every slice: as it is"
    SINGLE = "one value per table: as it is"


@dataclass(frozen=True)
class Rule:
    """``name`` is what TorchRec's fused optimizers call a state; ``aliases`` are the names in optimizers of torch and
    TorchRec, which train replicated tables."""

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
    """Adagrad counts steps to decay its learning rate, which its fused kernels do not do: nothing hangs on it."""
    return set(states) - {STEP_COUNT} == {"momentum1"}


KeyPath = tuple[str | int, ...]
"""Where something is in a nested state dict."""

_WEIGHT = re.compile(r"(?:(?P<module>.+)\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight")
_REMAPPED = re.compile(
    r"(?:(?P<module>.+)\.)?_managed_collision_collection\._managed_collision_modules\.(?P<table>[^.]+)\..+"
)
_INNER = {
    "_embedding_bag_collection": ("_feature_processors", "_iter"),
    "_embedding_collection": ("_iter",),
    "_embedding_module": ("_managed_collision_collection",),
}
"""The collection within a module of TorchRec's that plans name in its place, and what such a module has beside it."""


def table_names(keys: Collection[str]) -> dict[str, str]:
    """Of tables, by their weights among the keys of a state dict, as plans name them: ``ebc.t`` of
    ``ebc.embedding_bags.t.weight``, and of ``ebc._embedding_bag_collection.embedding_bags.t.weight`` where ``ebc`` has
    feature processors.

    Returns:
        No name twice: tables that would share one keep their weights'.
    """
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
    """The table whose ids are mapped to rows by a buffer of managed collisions; None for any other key."""
    match = _REMAPPED.fullmatch(key)
    return match and _joined(match["module"] or "", match["table"])


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def is_named(table: str, names: Container[str]) -> bool:
    """Whether a table such as ``ebc.t`` is among names, as that or as ``t``."""
    return table in names or table.rpartition(".")[2] in names


def is_dropped(key: str, path: KeyPath, dropped: Collection[str]) -> bool:
    """Whether what is no table's weights or states is named, by its key, by what begins that, or by its table."""
    remapped = remapped_table(str(path[-1]))
    named = any(key == name or key.startswith(f"{name}.") for name in dropped)
    return named or (remapped is not None and is_named(remapped, dropped))


def tables_of(dropped: Collection[str], keys: Collection[str]) -> set[str]:
    """Of what is dropped, what begins no key of a checkpoint."""
    return {name for name in dropped if not any(is_dropped(key, (key,), [name]) for key in keys)}


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
    name: str
    """In plans."""
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
            found[weight].states.setdefault(name, key)
            found[weight].state_entries.setdefault(name, entry)
    return found
