# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Read the tables of a checkpoint from its metadata: weights, their cuts, and optimizer states.

TorchRec's state dicts (seen in 1.6.1, 1.8.0 and 1.9.2) name the weights of a table ``ebc.embedding_bags.t.weight`` and
a fused optimizer's state of it ``state`` / ``ebc.embedding_bags.t.weight`` / ``t.momentum1``, on the ranks that have a
shard. Row-wise states of column slices are concatenated: row r of slice k is element k * rows + r. A replicated table
is a plain tensor with the states of the script's optimizer: ``state`` / ``dense.ebc.embedding_bags.t.weight`` /
``sum``; here ``dense`` is the key of a ``CombinedOptimizer``.

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
    """Rules for states that lack the shape of the weights; other states are cut like the weights."""

    MEAN = "one value per row: a slice takes it as it is, slices join as the mean weighted by width"
    SAME = "one value per row, the same in every slice: as it is"
    SINGLE = "one value per table: as it is"


@dataclass(frozen=True)
class Rule:
    """The rule for a state: its name in TorchRec's fused optimizers, and aliases in optimizers of replicated tables."""

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
    """Return whether the states are Adagrad's, whose step count only decays learning rates; its kernels do not."""
    return set(states) - {STEP_COUNT} == {"momentum1"}


KeyPath = tuple[str | int, ...]
"""Keys that lead to an entry of a nested state dict."""

_WEIGHT = re.compile(r"(?:(?P<module>.+)\.)?(?:embedding_bags|embeddings)\.(?P<table>[^.]+)\.weight")
_REMAPPED = re.compile(
    r"(?:(?P<module>.+)\.)?_managed_collision_collection\._managed_collision_modules\.(?P<table>[^.]+)\..+"
)
_INNER = {
    "_embedding_bag_collection": ("_feature_processors", "_iter"),
    "_embedding_collection": ("_iter",),
    "_embedding_module": ("_managed_collision_collection",),
}
"""Collections inside TorchRec's modules, which plans name by the module, and the other members of those modules."""


def table_names(keys: Collection[str]) -> dict[str, str]:
    """Return the name in plans of each weight among the keys of a state dict: ``ebc.t`` for
    ``ebc.embedding_bags.t.weight``, and for ``ebc._embedding_bag_collection.embedding_bags.t.weight`` if ``ebc`` has
    feature processors. Tables that would share a name keep their weights' keys."""
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
    """Return the table whose ids a buffer of managed collisions maps to rows; None for any other key."""
    match = _REMAPPED.fullmatch(key)
    return match and _joined(match["module"] or "", match["table"])


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def is_named(table: str, names: Container[str]) -> bool:
    """Return whether a table is among names, as ``ebc.t`` or ``t``."""
    return table in names or table.rpartition(".")[2] in names


def is_dropped(key: str, path: KeyPath, dropped: Collection[str]) -> bool:
    """Return whether an entry that belongs to no table is dropped by its key, a prefix, or its remapped table."""
    remapped = remapped_table(str(path[-1]))
    named = any(key == name or key.startswith(f"{name}.") for name in dropped)
    return named or (remapped is not None and is_named(remapped, dropped))


def tables_of(dropped: Collection[str], keys: Collection[str]) -> set[str]:
    """Return dropped names that begin no key of a checkpoint."""
    return {name for name in dropped if not any(is_dropped(key, (key,), [name]) for key in keys)}


def check_named(names: Collection[str], tables: Collection[str]) -> None:
    """Raise CheckpointError for a name that is neither a table of the model nor of the checkpoint."""
    known = {*tables, *(name.rpartition(".")[2] for name in tables)}
    for name in sorted(set(names) - known):
        raise CheckpointError(f"neither model nor checkpoint has a table {name!r}{nearest(name, known)}")


def owner(parameter: object, weights: Container[str]) -> str | None:
    """Return the weight of an optimizer's parameter, whose name may start with the optimizer's key."""
    parts = str(parameter).split(".")
    tails = (".".join(parts[first:]) for first in range(len(parts)))
    return next((tail for tail in tails if tail in weights), None)


def state_of(path: Sequence[object], weights: Container[str]) -> tuple[str, str] | None:
    """Return weight and name, by :data:`NAMES`, of the optimizer state at a path of a state dict."""
    weight = owner(path[-2], weights) if len(path) > 2 and path[-3] == "state" else None
    if weight is None:
        return None
    name = str(path[-1]).removeprefix(weight.split(".")[-2] + ".")
    return weight, NAMES.get(name, name)


@dataclass(frozen=True)
class SavedTable:
    """A table in a checkpoint."""

    key: str
    """Key of the weights in the metadata."""
    name: str
    """Name in plans."""
    entry: TensorStorageMetadata
    """Metadata of the weights."""
    states: dict[str, str] = field(default_factory=dict)
    """Keys of tensor states by name."""
    state_entries: dict[str, TensorStorageMetadata] = field(default_factory=dict)
    """Metadata of tensor states by name."""

    @property
    def slices(self) -> tuple[tuple[int, int], ...]:
        """First columns and widths of the column slices."""
        return tuple(sorted({(part.offsets[1], part.sizes[1]) for part in self.entry.chunks if part.sizes[1]}))


def paths(metadata: Metadata) -> dict[str, KeyPath]:
    """Return each key's path in the nested state dict."""
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
