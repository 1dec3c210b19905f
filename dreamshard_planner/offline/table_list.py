# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Lists of tables in JSON, as people write them by hand: docs/file_formats.md has the schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner.errors import StatisticsError, TaskError
from dreamshard_planner.search_space.sharding_types import KERNELS, SHARDING_TYPES
from dreamshard_planner.support.documents import STRICT, one_of, parsed
from dreamshard_planner.support.files import brief, read_json
from dreamshard_planner.support.formatting import nearest
from dreamshard_planner.workload.tables import FeatureStatistics, Table, costed_optimizer

SCHEMA = "dreamshard_planner.table_list/1"
OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
MAX_WEIGHTS, MAX_DIM = 2**53, 2**20
"""Bounds of a table."""
LISTED_KERNELS = tuple(name for name, kernel in KERNELS.items() if not kernel.virtual and not kernel.serves)


def _whole(value: Any) -> Any:
    """Convert ``1e6``, a fraction in JSON, to a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Kernels = Annotated[tuple[Annotated[str, one_of(LISTED_KERNELS)], ...], Field(min_length=1)]
ShardingTypes = Annotated[tuple[Annotated[str, one_of(SHARDING_TYPES)], ...], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]


@dataclass(frozen=True, kw_only=True)
class _Declared:
    """Properties of a table that lists and models have in common."""

    __pydantic_config__: ClassVar = STRICT
    name: Text
    num_embeddings: Count
    embedding_dim: Count
    pooling: Literal["sum", "mean", "none"] = "sum"
    """``none``: a sequence table, of an EmbeddingCollection."""
    data_type: Literal["fp32", "fp16", "bf16"] = "fp32"
    weighted: bool = False
    """True if lookups carry per-sample weights."""
    optimizer: Annotated[str, one_of(OPTIMIZERS)] = "sgd"
    sharding_types: ShardingTypes | None = None
    """Allowed types; None: all."""
    compute_kernels: Kernels | None = None
    min_partition: Count | None = None
    """Columns of the narrowest slice."""

    def __post_init__(self) -> None:
        if "." in self.name or hasattr(nn.ModuleDict(), self.name):
            raise TaskError(
                f"no table of a module can be called {self.name!r}: leave out dots, and names of its methods"
            )
        if self.embedding_dim > MAX_DIM:
            raise TaskError(
                f"table {self.name!r}: embedding_dim must be up to {MAX_DIM:,}, got {self.embedding_dim:,}: perhaps "
                "rows and dim have changed places"
            )
        if self.num_embeddings * self.embedding_dim > MAX_WEIGHTS:
            raise TaskError(f"table {self.name!r}: rows times dim must be up to {MAX_WEIGHTS:,}")


@dataclass(frozen=True, kw_only=True)
class TableSpec(_Declared):
    """One table of a list."""

    features: Mapping[str, FeatureStatistics | None]
    """Statistics of its features by name; None if unknown."""

    @classmethod
    def of_table(cls, table: Table) -> TableSpec:
        """Convert a table of a named pool; several features are numbered."""
        several = len(table.features) > 1
        return cls(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            features={f"{table.name}_{i}" if several else table.name: f for i, f in enumerate(table.features)},
        )

    def table(self, statistics: Mapping[str, FeatureStatistics]) -> Table:
        """Return the table that workloads are made of; ``statistics`` take precedence over the list's."""
        return Table(
            name=self.name,
            rows=self.num_embeddings,
            dim=self.embedding_dim,
            features=tuple(
                statistics.get(name, told or FeatureStatistics(POOLING_FACTOR)) for name, told in self.features.items()
            ),
            optimizer=costed_optimizer(self.optimizer),
        )


@dataclass(frozen=True, kw_only=True)
class ListedTable(_Declared):
    """One table as a list has it."""

    feature_names: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Default: one feature with the table's name."""
    pooling_factor: float | tuple[float, ...] | None = None
    """One factor for all features, or one for each; None: TorchRec's default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names, factors = self.feature_names or (self.name,), self.pooling_factor
        if len(set(names)) < len(names):
            raise ValueError(f"feature_names must differ, got {', '.join(names)}")
        if isinstance(factors, tuple) and len(factors) != len(names):
            raise ValueError(f"has {len(names)} feature_names and {len(factors)} pooling factors")
        if self.weighted and self.pooling == "none":
            raise ValueError("lookups of sequence tables (pooling 'none') take no weights")

    def spec(self) -> TableSpec:
        """Return its specification; StatisticsError for impossible pooling factors."""
        names, factors = self.feature_names or (self.name,), self.pooling_factor
        each = factors if isinstance(factors, tuple) else (factors,) * len(names)
        features = {
            name: None if factor is None else FeatureStatistics(factor)
            for name, factor in zip(names, each, strict=True)
        }
        return TableSpec(features=features, **{entry.name: getattr(self, entry.name) for entry in fields(_Declared)})


@dataclass(frozen=True, kw_only=True)
class _TableList:
    """A file."""

    __pydantic_config__: ClassVar = STRICT
    schema: str
    tables: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    defaults: dict[str, Any] = field(default_factory=dict)
    """Defaults of all tables."""


def read_table_list(path: str | Path) -> list[TableSpec]:
    """Read a JSON list of tables.

    Raises:
        TaskError: names the file, the table and the mistake.
    """
    document = read_json(path, TaskError)
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise TaskError(
            f'{path}: no list of tables: it must be an object {{"schema": "{SCHEMA}", "tables": [...]}}, got '
            f"{'a bare list: put it under tables' if isinstance(document, list) else brief(document)}"
        )
    content = parsed(_TableList, document, path, TaskError)
    general = {entry.name for entry in fields(ListedTable)} - {"name", "feature_names"}
    if odd := sorted(content.defaults.keys() - general):
        raise TaskError(f"{path}: defaults: unknown key {brief(odd[0])}{nearest(odd[0], general)}")
    specs: dict[str, TableSpec] = {}
    for index, given in enumerate(content.tables):
        where = f"{path}: tables[{index}] {brief(given.get('name'))}"
        entry = parsed(ListedTable, {**content.defaults, **given}, where, TaskError)
        if entry.name in specs:
            raise TaskError(f"{where}: has the name of tables[{list(specs).index(entry.name)}]")
        try:
            specs[entry.name] = entry.spec()
        except StatisticsError as error:
            raise TaskError(f"{where}: pooling_factor: {error}") from error
    return list(specs.values())
