# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Models from shipped collections, lists of tables and functions of users, and jobs to plan them offline.

People write lists of tables in JSON by hand: docs/file_formats.md has the schema.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from pydantic import BeforeValidator, Field
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner.devices import Machine
from dreamshard_planner.errors import TaskError
from dreamshard_planner.planner import DreamShardPlanner
from dreamshard_planner.search_space.modules import shardable_tables, table_configs
from dreamshard_planner.search_space.sharding_types import KERNELS, SHARDING_TYPES
from dreamshard_planner.support.documents import STRICT, one_of, parsed
from dreamshard_planner.support.files import read_json
from dreamshard_planner.support.formatting import brief, checked, nearest
from dreamshard_planner.workload.lookups import MAX_BATCH_SIZE, FeatureStatistics
from dreamshard_planner.workload.pools import POOLS, named_pool
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import Table, costed_optimizer

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
class TableSpec:
    """One table of a list."""

    __pydantic_config__: ClassVar = STRICT
    name: Text
    num_embeddings: Count
    embedding_dim: Count
    feature_names: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Default: one feature with the table's name."""
    pooling_factor: float | tuple[float, ...] | None = None
    """One factor for all features, or one for each; None: TorchRec's default."""
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
        factors = self.pooling_factor
        if len(set(self.features)) < len(self.features):
            raise TaskError(f"feature_names must differ, got {', '.join(self.features)}")
        if isinstance(factors, tuple) and len(factors) != len(self.features):
            raise TaskError(f"has {len(self.features)} feature_names and {len(factors)} pooling factors")
        if self.weighted and self.pooling == "none":
            raise TaskError("lookups of sequence tables (pooling 'none') take no weights")
        _ = self.statistics  # refuses impossible pooling factors

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its features."""
        return self.feature_names or (self.name,)

    @property
    def statistics(self) -> dict[str, FeatureStatistics]:
        """Pooling factors by feature; empty if none are given."""
        if self.pooling_factor is None:
            return {}
        given = self.pooling_factor
        factors = given if isinstance(given, tuple) else (given,) * len(self.features)
        return {name: FeatureStatistics(factor) for name, factor in zip(self.features, factors, strict=True)}


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
    general = {entry.name for entry in fields(TableSpec)} - {"name", "feature_names"}
    if odd := sorted(content.defaults.keys() - general):
        raise TaskError(f"{path}: defaults: unknown key {brief(odd[0])}{nearest(odd[0], general)}")
    specs: dict[str, TableSpec] = {}
    for index, given in enumerate(content.tables):
        where = f"{path}: tables[{index}] {brief(given.get('name'))}"
        spec = parsed(TableSpec, {**content.defaults, **given}, where, TaskError)
        if spec.name in specs:
            raise TaskError(f"{where}: has the name of tables[{list(specs).index(spec.name)}]")
        specs[spec.name] = spec
    return list(specs.values())


@dataclass(frozen=True)
class OfflineModel:
    """A model with constraints and statistics of its tables."""

    name: str
    module: nn.Module
    constraints: Mapping[str, ParameterConstraints]
    statistics: TableStatistics | None

    @classmethod
    def of_specs(
        cls, specs: Sequence[TableSpec], name: str = "tables", statistics: Mapping[str, FeatureStatistics] | None = None
    ) -> OfflineModel:
        """Make collections on the meta device: for pooled tables, for weighted ones, and for sequence tables by dim.

        Args:
            specs: the tables.
            name: of the model, for messages.
            statistics: by feature; they take precedence over pooling factors.

        Raises:
            TaskError: tables give a shared feature different statistics.
        """
        of_kinds = {kind: list(group) for kind, group in groupby(sorted(specs, key=_kind), key=_kind)}
        constraints = {
            spec.name: ParameterConstraints(
                list(spec.sharding_types or ()) or None, list(spec.compute_kernels or ()) or None, spec.min_partition
            )
            for spec in specs
            if any((spec.sharding_types, spec.compute_kernels, spec.min_partition))
        }
        told = {**_told(specs, name), **(statistics or {})}
        return cls.of_modules(of_kinds, constraints, TableStatistics(told) if told else None, name)

    @classmethod
    def of_modules(
        cls,
        tables: Mapping[str, Sequence[TableSpec]],
        constraints: Mapping[str, ParameterConstraints],
        statistics: TableStatistics | None,
        name: str,
    ) -> OfflineModel:
        """Make one collection per module, by its path in the model; "" is the model itself."""
        root = nn.Module()
        for path, specs in tables.items():
            made = _collection(specs)
            if not path:
                return cls(name, made, constraints, statistics)
            *above, last = path.split(".")
            parent = root
            for part in above:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(last, made)
        return cls(name, root, constraints, statistics)

    def tables(self) -> list[Table]:
        """Return its tables, with one lookup per sample for features without statistics."""
        known, once = dict(self.statistics or {}), FeatureStatistics(POOLING_FACTOR)
        return [
            Table(
                name=table.fqn,
                rows=table.parameter.shape[0],
                dim=table.parameter.shape[1],
                features=tuple(known.get(name, once) for name in table.feature_names) or (once,),
                optimizer=costed_optimizer(table.optimizer),
            )
            for table in shardable_tables(self.module, get_default_sharders())
        ]

    def with_statistics(self, statistics: TableStatistics | None) -> OfflineModel:
        """Return the model with other statistics, if any, over its own; StatisticsError if they have none of its
        features."""
        if statistics is None:
            return self
        statistics.unused(name for table in table_configs(self.module).values() for name in table.feature_names)
        return replace(self, statistics=TableStatistics({**(self.statistics or {}), **statistics}))


@dataclass(frozen=True, kw_only=True)
class Job:
    """All inputs of a plan; ``dataclasses.replace`` makes another. TaskError for an impossible batch or reservation."""

    model: OfflineModel
    machine: Machine
    batch_size: int
    """Samples in the batch of one rank."""
    reserve: float | None = None
    """Share of the memory kept for all but tables; None: TorchRec's estimate."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of :class:`~dreamshard_planner.planner.DreamShardPlanner`."""

    def __post_init__(self) -> None:
        checked("batch_size", self.batch_size, most=MAX_BATCH_SIZE, error=TaskError)
        if self.reserve is not None:
            checked("reserve", self.reserve, 0, 1, Real, TaskError)

    def planner(self) -> DreamShardPlanner:
        """Make a planner for the job."""
        reservation = None if self.reserve is None else ShareReservation(self.reserve)
        return DreamShardPlanner(
            topology=self.machine.topology(),
            batch_size=self.batch_size,
            constraints=dict(self.model.constraints) or None,
            storage_reservation=reservation,
            statistics=self.model.statistics,
            **self.settings,
        )

    def plan(self) -> DreamShardPlanner:
        """Return a planner that has planned the job; PlannerError if tables do not fit."""
        planner = self.planner()
        planner.plan(self.model.module, get_default_sharders())
        return planner

    def read(self) -> DreamShardPlanner:
        """Return a planner that has read the model, for existing plans."""
        planner = self.planner()
        planner.read(self.model.module, get_default_sharders())
        return planner


class ShareReservation(FixedPercentageStorageReservation):
    """Reserves a share of every rank's own memory, also on CPUs, where TorchRec's reserves none."""

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self._share = share

    def reserve(self, topology: Topology, *arguments: Any, **named: Any) -> Topology:
        """See ``StorageReservation.reserve``."""
        left = super().reserve(topology, *arguments, **named)
        kind = "ddr" if topology.compute_device == "cpu" else "hbm"
        for before, after in zip(topology.devices, left.devices, strict=True):
            # Rounded, so that a plan file's share leaves the same bytes.
            setattr(after.storage, kind, round((1 - self._share) * getattr(before.storage, kind)))
        return left


def read_model(source: str) -> OfflineModel:
    """Return a model from a list of tables (``tables.json``), a function (``package.module:function``) or a collection.

    Raises:
        TaskError: there is none, or it cannot be read.
    """
    if ":" in source and not os.path.exists(source):
        return OfflineModel(source, _called(source), {}, None)
    if source.endswith(".json"):
        return OfflineModel.of_specs(read_table_list(source), source)
    if source in POOLS:
        return _of_pool(source)
    if os.path.exists(source):
        raise TaskError(f"{source}: a list of tables is a JSON file whose name ends in .json")
    raise TaskError(
        f"unknown tables {source!r}{nearest(source, POOLS)}: give a .json list, a function as module:function, or one "
        f"of {', '.join(POOLS)}"
    )


def _of_pool(name: str) -> OfflineModel:
    """Return the model of a shipped collection; several features of a table are numbered."""
    specs, statistics = [], dict[str, FeatureStatistics]()
    for table in named_pool(name):
        several = len(table.features) > 1
        names = tuple(f"{table.name}_{i}" if several else table.name for i in range(len(table.features)))
        specs.append(
            TableSpec(name=table.name, num_embeddings=table.rows, embedding_dim=table.dim, feature_names=names)
        )
        statistics |= dict(zip(names, table.features, strict=True))
    return OfflineModel.of_specs(specs, name, statistics)


def _called(source: str) -> nn.Module:
    """Call a user's function, which may be in the current folder."""
    path, _, function = source.rpartition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(path)
        for name in function.split("."):
            found = getattr(found, name)
        module = found()
    except Exception as error:
        raise TaskError(f"{source}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise TaskError(f"{source} must return the model, a torch.nn.Module, got {type(module).__name__}")
    return module


def _told(specs: Sequence[TableSpec], source: str) -> dict[str, FeatureStatistics]:
    """Return the pooling factors in specifications, by feature."""
    told: dict[str, tuple[str, FeatureStatistics]] = {}
    for spec in specs:
        for feature, statistics in spec.statistics.items():
            table, known = told.setdefault(feature, (spec.name, statistics))
            if known != statistics:
                raise TaskError(
                    f"{source}: tables {table!r} and {spec.name!r} read feature {feature!r} with other lookups each "
                    f"({known.pooling_factor:g} and {statistics.pooling_factor:g} for a sample): a batch has one number"
                )
    return {feature: statistics for feature, (_, statistics) in told.items()}


def _kind(spec: TableSpec) -> str:
    """Name the collection of a table."""
    if spec.pooling == "none":
        return f"sequences_{spec.embedding_dim}"
    return "weighted" if spec.weighted else "pooled"


def _collection(specs: Sequence[TableSpec]) -> nn.Module:
    """Make the collection of tables of one kind."""
    pooled, meta = specs[0].pooling != "none", torch.device("meta")
    configs: list[Any] = [
        (EmbeddingBagConfig if pooled else EmbeddingConfig)(
            name=spec.name,
            num_embeddings=spec.num_embeddings,
            embedding_dim=spec.embedding_dim,
            feature_names=list(spec.features),
            data_type=DataType[spec.data_type.upper()],
            **({"pooling": PoolingType[spec.pooling.upper()]} if pooled else {}),
        )
        for spec in specs
    ]
    made: Any = (
        EmbeddingBagCollection(configs, specs[0].weighted, meta) if pooled else EmbeddingCollection(configs, meta)
    )
    tables = made.embedding_bags if pooled else made.embeddings
    for spec in specs:
        rule, arguments = _optimizer(spec.optimizer)
        apply_optimizer_in_backward(rule, tables[spec.name].parameters(), {"lr": 0.01, **arguments})
    return made


def _optimizer(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return class and arguments of an optimizer by its name in lists or FBGEMM's; the class decides memory."""
    kind = OPTIMIZERS.get(name.removeprefix("exact_"))
    if kind is not None:
        return kind, {}
    # TorchRec counts one state per weight for all others; the argument decides what FBGEMM runs.
    return Adagrad, {"optimizer": EmbOptimType.__members__.get(name.upper())}
