# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Lists of tables in JSON, as people write them by hand: docs/file_formats.md has the schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamshard_planner.errors import StatisticsError, TaskError
from dreamshard_planner.search_space.kernels import FUSED, KERNELS
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.files import brief, check_readable
from dreamshard_planner.support.formatting import nearest
from dreamshard_planner.workload.pools import TABLES_SCHEMA, load_tables
from dreamshard_planner.workload.tables import FeatureStatistics, Table

SCHEMA = "dreamshard_planner.table_list/1"
POOLINGS = ("sum", "mean", "none")
"""``none``: a sequence table, of an EmbeddingCollection."""
DATA_TYPES = ("fp32", "fp16", "bf16")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
LISTED_KERNELS = tuple(name for name, kernel in KERNELS.items() if not kernel.virtual)


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table of a list."""

    name: str
    num_embeddings: int
    embedding_dim: int
    features: Mapping[str, FeatureStatistics]
    """Names of the features that it serves, and how each reads it."""
    pooling: str = "sum"
    data_type: str = "fp32"
    weighted: bool = False
    """Whether lookups carry per-sample weights."""
    optimizer: str = "sgd"
    sharding_types: tuple[str, ...] | None = None
    """Allowed ones; None: all."""
    compute_kernels: tuple[str, ...] | None = None
    min_partition: int | None = None
    """Columns of the narrowest slice."""

    @classmethod
    def of_table(cls, table: Table) -> TableSpec:
        """A table of a pool: its features are called like it, numbered where they are several."""
        several = len(table.features) > 1
        kernel = next(name for name, kernel in KERNELS.items() if kernel.memory == table.memory)
        return cls(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            features={f"{table.name}_{i}" if several else table.name: f for i, f in enumerate(table.features)},
            pooling="sum" if table.pooled else "none",
            data_type="fp32" if table.weight_bytes == 4 else "fp16",
            weighted=table.weighted,
            optimizer=table.optimizer if table.optimizer in OPTIMIZERS else "rowwise_adagrad",
            compute_kernels=None if kernel == FUSED else (kernel,),
        )


def read_table_list(path: str | Path) -> list[TableSpec]:
    """Tables of a JSON file: a list of this module's schema, or a pool of
    :func:`~dreamshard_planner.workload.pools.save_tables`.

    Raises:
        TaskError: names the file, the table and the mistake.
    """
    check_readable(path, TaskError, "list of tables")
    try:
        document = json.loads(Path(path).read_bytes(), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise TaskError(f"{path}: line {error.lineno}, column {error.colno}: no JSON, {error.msg}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path}: cannot be read: {brief(error)}") from error
    if isinstance(document, dict) and document.get("schema") == TABLES_SCHEMA:
        return [TableSpec.of_table(table) for table in load_tables(path)]
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise TaskError(f'{path}: no list of tables: it must be an object with "schema": "{SCHEMA}"')
    _check_keys(document, ("schema", "defaults", "tables"), str(path))
    entries, defaults = document.get("tables"), document.get("defaults", {})
    if not isinstance(entries, list) or not entries:
        raise TaskError(f"{path}: 'tables' must be a list of at least one table")
    if not isinstance(defaults, dict):
        raise TaskError(f"{path}: 'defaults' must be an object with what holds for tables that don't say")
    _check_keys(defaults, tuple(set(_FIELDS) - {"name", "feature_names"}), f"{path}: defaults")
    specs = [_spec(entry, defaults, path, index) for index, entry in enumerate(entries)]
    first: dict[str, int] = {}
    for index, spec in enumerate(specs):
        if first.setdefault(spec.name, index) != index:
            raise TaskError(f"{path}: tables[{index}] has the name of tables[{first[spec.name]}], {spec.name!r}")
    return specs


def _spec(entry: Any, defaults: dict[str, Any], path: str | Path, index: int) -> TableSpec:
    where = f"{path}: tables[{index}]"
    if not isinstance(entry, dict):
        raise TaskError(f"{where} must be an object, got {brief(entry)}")
    if isinstance(entry.get("name"), str):
        where = f"{where} {entry['name']!r}"
    _check_keys(entry, tuple(_FIELDS), where)
    given = {**defaults, **entry}
    missing = [name for name, entry_field in _FIELDS.items() if entry_field.required and name not in given]
    if missing:
        raise TaskError(f"{where} lacks {' and '.join(map(repr, missing))}")
    values = {}
    for name, value in given.items():
        try:
            values[name] = _FIELDS[name].read(value)
        except ValueError as error:
            raise TaskError(f"{where}: {name} {error}, got {brief(value)}") from error
    names = values.pop("feature_names", (values["name"],))
    factors = values.pop("pooling_factor", 1.0)
    factors = factors if isinstance(factors, tuple) else (factors,) * len(names)
    if len(factors) != len(names):
        raise TaskError(f"{where}: has {len(names)} feature_names and {len(factors)} pooling factors")
    try:
        features = {name: FeatureStatistics(factor) for name, factor in zip(names, factors, strict=True)}
    except StatisticsError as error:
        raise TaskError(f"{where}: pooling_factor: {error}") from error
    if values.get("weighted") and values.get("pooling") == "none":
        raise TaskError(f"{where}: lookups of sequence tables (pooling 'none') take no weights")
    return TableSpec(features=features, **values)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return seen


def _check_keys(entry: dict[str, Any], known: Sequence[str], where: str) -> None:
    for key in entry:
        if key not in known:
            hint = nearest(key, known) or f" (known are {', '.join(sorted(known))})"
            raise TaskError(f"{where}: unknown key {brief(key)}{hint}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be a whole number from 1")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number, or one per feature")
    return float(value)


def _numbers(value: Any) -> float | tuple[float, ...]:
    return tuple(map(_number, value)) if isinstance(value, list) else _number(value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be a list of texts")
    if len(set(value)) < len(value):
        raise ValueError("must differ")
    return tuple(value)


def _one_of(choices: Sequence[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return read


def _some_of(choices: Sequence[str]) -> Callable[[Any], tuple[str, ...]]:
    def read(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not value or not set(map(str, value)) <= set(choices):
            raise ValueError(f"must be a list of some of {', '.join(choices)}")
        return tuple(value)

    return read


@dataclass(frozen=True)
class _Field:
    read: Callable[[Any], Any]
    required: bool = field(default=False)


_FIELDS = {
    "name": _Field(_text, required=True),
    "num_embeddings": _Field(_whole, required=True),
    "embedding_dim": _Field(_whole, required=True),
    "feature_names": _Field(_names),
    "pooling_factor": _Field(_numbers),
    "pooling": _Field(_one_of(POOLINGS)),
    "data_type": _Field(_one_of(DATA_TYPES)),
    "weighted": _Field(_flag),
    "optimizer": _Field(_one_of(OPTIMIZERS)),
    "sharding_types": _Field(_some_of(tuple(SHARDING_TYPES))),
    "compute_kernels": _Field(_some_of(LISTED_KERNELS)),
    "min_partition": _Field(_whole),
}
"""How each key of a table is read."""
