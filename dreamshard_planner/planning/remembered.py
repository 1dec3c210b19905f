# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Statistics and plans that trainings of the same tables observed, in the user's folder.

``tables/KEY/statistics.json`` has the statistics. A folder beside it, for each kind of hardware and number of ranks,
has ``observed.json`` (milliseconds of a step by sharding), ``fastest.json`` (the fastest observed plan), and
``better.json`` (a plan that is predicted to be better than the last observed one).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.checkpoints import choice
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.devices import card_of
from dreamshard_planner.errors import DreamShardError, FileError
from dreamshard_planner.planning.given_plans import shardings
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.planning.plan_inputs import PlannerSettings
from dreamshard_planner.plans.plan_file import SavedPlan, TableSharding
from dreamshard_planner.plans.report import Note, ReportEntry
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.support.documents import Amount, parsed
from dreamshard_planner.support.files import read_json, write_whole
from dreamshard_planner.support.reproducible import digest
from dreamshard_planner.workload.statistics import TableStatistics

logger = logging.getLogger(__name__)

Content = TypeVar("Content")
SLOWER = 1.05
"""Ratio of observed steps from which on a plan is slower than another; below, steps differ by chance."""
LEAST_GAIN = 0.03
"""Share of the predicted cost that another plan must gain to take the place of an observed plan, if costs are no
further off, or of TorchRec's, if lookups per sample are guessed."""


@dataclass(frozen=True)
class Replacement:
    """A plan that takes the place of the searched one."""

    options: list[ShardingOption]
    """One option for every table, with ranks."""
    note: Note
    """The reason, for the report."""
    searched: ReportEntry
    """Cost of the searched plan."""


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
        """Return a planner's settings with the observed statistics, and their batch size, if the user gave none."""
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

    def kept(self, model: ModelProblem, plan: Sequence[ShardingOption]) -> Replacement | None:
        """Return the fastest observed plan if it should stay; None if the searched plan should take its place.

        It stays if the searched plan was observed to be slower, or was never observed and is predicted to gain less
        than costs can tell (:func:`least_gain`).
        """
        observed = _read(self._own / "observed.json", _steps_ms)
        fastest = _read(self._own / "fastest.json", SavedPlan.load)
        if fastest is None or observed is None:
            return None
        fast_ms, slow_ms = (observed.get(sharding_key(one)) for one in (fastest.sharding, shardings(plan)))
        if fast_ms is None or (slow_ms is not None and slow_ms <= SLOWER * fast_ms):
            return None
        try:
            options = list(model.matched(fastest).values())
            known, searched = model.rated(options), model.rated(plan)
        except PlannerError:  # memory, constraints or rules have changed
            return None
        least, gain = least_gain(model.ranks.checkpoint), 1 - searched.total_ms / max(known.total_ms, 1e-9)
        if slow_ms is not None:
            text = (
                "an earlier plan takes the place of the planned one, which was observed to be slower: "
                f"{slow_ms:.1f} ms a step, and {fast_ms:.1f} before"
            )
        elif gain < least:
            text = (
                "the plan of an earlier training is kept: the searched one is predicted to gain "
                f"{max(0, 100 * gain):.1f} %, less than the {100 * least:.0f} % by which costs may be off"
            )
        else:
            return None
        logger.log(logging.INFO if slow_ms is None else logging.WARNING, "%s", text)
        return Replacement(options, Note("search", text), ReportEntry.of("searched", searched.costs))

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


def least_gain(checkpoint: Checkpoint) -> float:
    """Return the least predicted gain for which an observed plan is replaced, as a share of its embedding work: what
    costs are off on held-out kernels, and at least :data:`LEAST_GAIN`."""
    return max(LEAST_GAIN, checkpoint.known.learned.error or 0.0)


def _folder(tables: Mapping[str, tuple[object, ...]]) -> Path:
    return choice.home() / "tables" / digest(tables)[:20]


def sharding_key(sharding: Mapping[str, Mapping[str, TableSharding]]) -> str:
    """Return a digest that is equal for plans that shard all tables alike."""
    return digest(sharding)


def batch_size_of(statistics: TableStatistics) -> int | None:
    """Return the samples of a local batch; None if no feature tells."""
    return max((feature.batch_size or 0 for feature in statistics.values()), default=0) or None
