# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A planner's settings, and what earlier trainings of the same tables left in the user's folder to complete them.

``tables/KEY/statistics.json`` has statistics. A folder beside it, for each kind of hardware and number of ranks, has
``observed.json`` (milliseconds of a step by sharding), ``fastest.json`` (the fastest observed plan), and
``better.json`` (a plan that is predicted to be better than the last observed one).
"""

from __future__ import annotations

import copy
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.planner.constants import BATCH_SIZE, POOLING_FACTOR
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.checkpoints import choice
from dreamshard_planner.devices import card_of
from dreamshard_planner.errors import DreamShardError, FileError
from dreamshard_planner.planning.ranks import ShardingGroups
from dreamshard_planner.planning.rater import COST_SOURCES
from dreamshard_planner.plans.plan_file import SavedPlan, TableSharding
from dreamshard_planner.search.effort import DEFAULT_EFFORT, EFFORTS, SearchSettings
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.documents import Amount, parsed
from dreamshard_planner.support.files import read_json, write_whole
from dreamshard_planner.support.formatting import checked
from dreamshard_planner.support.reproducible import digest
from dreamshard_planner.torchrec_components.compat import dense_tensor_bytes, set_dense_tensor_bytes
from dreamshard_planner.workload.lookups import MAX_BATCH_SIZE
from dreamshard_planner.workload.statistics import TableStatistics

logger = logging.getLogger(__name__)

Component = TypeVar("Component")
Content = TypeVar("Content")
RESERVED_SHARE = 0.15
"""Share of device memory that TorchRec's planner reserves by default."""


@dataclass(frozen=True, kw_only=True)
class PlannerSettings:
    """Arguments of :class:`~dreamshard_planner.planner.DreamShardPlanner`, which explains them.

    Raises:
        ValueError, TypeError: an argument is impossible.
    """

    given_batch_size: int | None = None
    """Local batch size; None for TorchRec's default."""
    constraints: dict[str, ParameterConstraints] | None = None
    timeout_seconds: float | None = None
    """TorchRec's cap on planning."""
    statistics: TableStatistics | None = None
    seed: int = 0
    effort: str = DEFAULT_EFFORT
    search_seconds: float | None = None
    sharding_types: Sequence[str] | None = None
    exact_training: bool = True
    optimizers_attached: bool = False
    cost_source: str = "auto"
    placement_rules: PlacementRules | None = None
    sharding_groups: ShardingGroups | None = None
    least_gain: float | None = None
    hot_rows_bytes: int = 0
    vocabulary: str = ""
    remembered: Remembered | None = None
    """Files of earlier trainings whose fastest plan may stay; None without."""
    recalled: str = ""
    """Origin of statistics that the user did not give; empty if there are none."""
    falls_back: bool = True
    """True if TorchRec's plan may take the place of the searched one, see ``least_gain``."""

    def __post_init__(self) -> None:
        types = {"statistics": TableStatistics, "placement_rules": PlacementRules, "sharding_groups": ShardingGroups}
        for name, kind in types.items():
            if not isinstance(value := getattr(self, name), kind | None):
                raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__}")
        for name, least, most, number in (
            ("given_batch_size", 1, MAX_BATCH_SIZE, Integral),
            ("hot_rows_bytes", 0, math.inf, Integral),
            ("least_gain", 0, 0.999, Real),
            ("search_seconds", 1e-6, math.inf, Real),
            ("timeout_seconds", 1e-6, math.inf, Real),
            ("seed", -(2**63), 2**64 - 1, Integral),  # as torch's generators take it
        ):
            if (given := getattr(self, name)) is not getattr(PlannerSettings, name):
                object.__setattr__(self, name, checked(name.removeprefix("given_"), given, least, most, number))
        for name in ("exact_training", "optimizers_attached"):
            if (value := getattr(self, name)) not in (True, False):
                raise TypeError(f"{name} must be true or false, got {value!r}")
            object.__setattr__(self, name, bool(value))
        if not isinstance(self.vocabulary, str):
            raise TypeError(f"vocabulary must be a name, got {self.vocabulary!r}")
        if self.sharding_types is not None and (
            isinstance(self.sharding_types, str)
            or not self.sharding_types
            or not all(kind in SHARDING_TYPES for kind in self.sharding_types)
        ):
            raise ValueError(f"sharding_types must be some of {', '.join(SHARDING_TYPES)}, got {self.sharding_types!r}")
        for name, known in (("effort", EFFORTS), ("cost_source", COST_SOURCES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")

    @property
    def batch_size(self) -> int:
        """Local batch size."""
        return self.given_batch_size or BATCH_SIZE

    @property
    def searching(self) -> SearchSettings:
        """Bounds and seed of a search; its cap is the shorter of ``search_seconds`` and ``timeout_seconds``."""
        seconds = min(filter(None, (self.search_seconds, self.timeout_seconds)), default=math.inf)
        return SearchSettings(self.effort_factor, self.seed, seconds)

    @property
    def effort_factor(self) -> float:
        """Candidates of each part of planning, as a multiple of the default's."""
        return EFFORTS[self.effort]

    def tells_lookups(self, table: str, feature: str) -> bool:
        """Return whether the user gave the lookups per sample of a table's feature."""
        given = (self.constraints or {}).get(table)
        told = given is not None and list(given.pooling_factors or ()) not in ([], [POOLING_FACTOR])
        return told or feature in (self.statistics or {})


SAVED = ("cost_source", "sharding_types", "exact_training", "optimizers_attached", "seed")
"""Settings in every plan file, by which its job is planned again."""
SAVED_IF_GIVEN = ("effort", "least_gain", "hot_rows_bytes", "vocabulary")
"""Further such settings, which a plan file lacks if they have their default, as files of earlier releases do."""


class DefaultReservation(HeuristicalStorageReservation):
    """TorchRec's default reservation, with the size of the dense layers that TorchRec's warning asks for."""

    def __init__(self, percentage: float = RESERVED_SHARE) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # comes even with a dense_tensor_estimate
            super().__init__(percentage)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: Any = None,
    ) -> Topology:
        """See ``StorageReservation.reserve``."""
        dense_bytes = dense_tensor_bytes(self, module, sharders, batch_size, constraints)
        set_dense_tensor_bytes(self, max(1, dense_bytes))  # 0 would mean that none is given
        return super().reserve(topology, batch_size, module, sharders, constraints)


def answering(component: Component, method: str, answer: object) -> Component:
    """Return a copy of a component whose method gives copies of its answer: TorchRec's loop would ask once more."""
    answered = copy.copy(component)
    vars(answered)[method] = partial(_copied, answer)
    return answered


def _copied(answer: object, *_: object, **__: object) -> object:
    return copy.deepcopy(answer)


@dataclass(frozen=True)
class Remembered:
    """Files about a set of tables on some ranks."""

    folder: Path
    """Folder of the tables."""
    place: str
    """Hardware and number of ranks."""

    @classmethod
    def of_module(
        cls, module: nn.Module, sharders: Iterable[ModuleSharder[nn.Module]], topology: Topology
    ) -> Remembered:
        """Return the files about a model's tables on the ranks of a topology."""
        tables = {
            table.fqn: (*map(int, table.parameter.shape), table.feature_names)
            for table in shardable_tables(module, sharders)
        }
        hardware = choice.described_here(topology.compute_device, card_of(topology), torch.get_num_threads())
        return cls(_folder(tables), choice.place(hardware, topology.world_size))

    @classmethod
    def of_plan(cls, plan: SavedPlan, hardware: Mapping[str, Any]) -> Remembered:
        """Return the files about a plan's tables on the plan's ranks, which may be some of a training's.

        Args:
            plan: of a training.
            hardware: as :func:`~dreamshard_planner.measure.hardware.describe_hardware` returns it.
        """
        tables = {
            fqn: (table.rows, table.dim, tuple(filter(None, table.features)))
            for fqn, table in plan.inputs.tables.items()
        }
        return cls(_folder(tables), choice.place(hardware, plan.inputs.topology.world_size))

    def statistics(self) -> TableStatistics | None:
        """Return the statistics that the last training counted; None if there are none that can be read."""
        return _read(self.folder / "statistics.json", TableStatistics.from_json)

    def completed(self, settings: PlannerSettings) -> PlannerSettings:
        """Return a planner's settings with these files, and with the observed statistics, and their batch size, if the
        user gave none."""
        settings = replace(settings, remembered=self)
        statistics = None if settings.statistics is not None else self.statistics()
        if statistics is None:
            return settings
        samples = batch_size_of(statistics)
        text = f"statistics are those of the last training of these tables, in {self.folder}"
        if settings.given_batch_size is None and samples:
            text += f"; so is the local batch of {samples:,} samples"
        return replace(
            settings, statistics=statistics, given_batch_size=settings.given_batch_size or samples, recalled=text
        )

    def better(self) -> SavedPlan | None:
        """Return the plan that is predicted to be better than the last observed one, if there is one."""
        return _read(self.better_file, SavedPlan.load)

    def observed(self) -> tuple[Mapping[str, float], SavedPlan] | None:
        """Return the milliseconds of a step by sharding (:func:`sharding_key`), and the fastest observed plan."""
        steps_ms = _read(self._own / "observed.json", _steps_ms)
        fastest = _read(self._own / "fastest.json", SavedPlan.load)
        return None if fastest is None or steps_ms is None else (steps_ms, fastest)

    def remember(
        self, statistics: TableStatistics | None, observed: Mapping[str, float], fastest: SavedPlan | None = None
    ) -> None:
        """Write everything known after a training, and forget :meth:`better`; None keeps statistics or fastest plan.

        Raises:
            OSError, PlanError: a file cannot be written.
        """
        self._own.mkdir(parents=True, exist_ok=True)
        self.better_file.unlink(missing_ok=True)
        if statistics is not None:
            statistics.to_json(self.folder / "statistics.json")
        write_whole(self._own / "observed.json", json.dumps(dict(observed)))
        if fastest is not None:
            fastest.save(self._own / "fastest.json")

    @property
    def better_file(self) -> Path:
        """File of :meth:`better`."""
        return self._own / "better.json"

    @property
    def _own(self) -> Path:
        return self.folder / self.place


def _read(path: Path, read: Callable[[Path], Content]) -> Content | None:
    """Return the content of a file of an earlier training; None without the file, or if it cannot be read."""
    try:
        return read(path) if path.exists() else None
    except (DreamShardError, OSError) as error:
        logger.warning("a file of an earlier training is left out: %s", error)
        return None


def _steps_ms(path: Path) -> dict[str, float]:
    return parsed(dict[str, Amount], read_json(path, FileError), path, FileError)


def _folder(tables: Mapping[str, tuple[object, ...]]) -> Path:
    return choice.home() / "tables" / digest(tables)[:20]


def sharding_key(sharding: Mapping[str, Mapping[str, TableSharding]]) -> str:
    """Return a digest that is equal for plans that shard all tables alike."""
    return digest(sharding)


def batch_size_of(statistics: TableStatistics) -> int | None:
    """Return the samples of a local batch; None if no feature tells."""
    return max((feature.batch_size or 0 for feature in statistics.values()), default=0) or None
