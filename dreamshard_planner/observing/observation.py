# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Observed training steps as files: one for each rank, merged over ranks and runs.

A file holds, by run and rank, times of the kept steps, the fused kernels, statistics of the batches, and the plan with
its predicted costs if a ``DreamShardPlanner`` made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from statistics import fmean
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, Field
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.cost.dataset import other_hardware
from dreamshard_planner.devices import make_topology
from dreamshard_planner.errors import ObservationError
from dreamshard_planner.planning.plan_inputs import topology_arguments
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.documents import STRICT, Count, Several, document_of, entries_of, one_of, parsed
from dreamshard_planner.support.files import write_whole
from dreamshard_planner.support.formatting import brief
from dreamshard_planner.workload.counting import by_feature, merge_features, of_like_batches
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import MEMORIES, OPTIMIZERS, Table, Workload, lookup_bytes, workloads_of

FORMAT = "dreamshard_planner observation"
VERSION = 4
WARM_UP = 3
"""First steps of a run, which allocate memory and fill caches; left out if others follow."""
OUTPUTS = "outputs"
"""Start of the names of exchanges of outputs and their gradients."""
DEVICES = ("cpu", "cuda", "mtia")
MOST_BESIDE, LEAST_BESIDE = 0.5, 0.1
"""Share of the time of exchanges, and of the step, up to which a rank may do other work meanwhile."""


@dataclass(frozen=True)
class ObservedTable:
    """A kernel's table, or part of one."""

    __pydantic_config__: ClassVar = STRICT
    name: str  # fully qualified
    features: Annotated[tuple[str, ...], Field(min_length=1)]
    rows: Several  # of the whole table
    dim: Several
    offset: tuple[Count, Count]  # first row and column of the part
    size: tuple[Count, Count]


@dataclass(frozen=True)
class ObservedKernel:
    """A fused kernel of one rank."""

    __pydantic_config__: ClassVar = STRICT
    sharding_type: Annotated[str, one_of(SHARDING_TYPES)]
    kernel: str  # TorchRec's name
    optimizer: Annotated[str, one_of(OPTIMIZERS)]
    memory: Annotated[str, one_of(MEMORIES)]
    pooled: bool
    weighted: bool
    weight_bytes: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    samples: Count  # of a batch that the kernel sees
    tables: Annotated[tuple[ObservedTable, ...], Field(min_length=1)]

    @property
    def module(self) -> str:
        """Path of the sharded module."""
        return self.tables[0].name.rpartition(".")[0]

    @property
    def bags(self) -> int:
        """Bags of a step."""
        return self.samples * sum(len(table.features) for table in self.tables)

    def lookup_bytes(self, lookups: float) -> float:
        """Return the bytes of a step's lookups."""
        return lookup_bytes(lookups, self.bags, self.weighted)

    def workloads(self, statistics: Mapping[str, FeatureStatistics]) -> list[Workload]:
        """Return the kernel's workloads by statistics of the batches; ObservationError names a feature they lack."""
        if missing := sorted({name for table in self.tables for name in table.features} - set(statistics)):
            raise ObservationError(f"no sampled batch has samples of feature {missing[0]!r}: observe more steps")
        tables = [
            Table(
                table.name,
                table.rows,
                table.dim,
                tuple(statistics[name] for name in table.features),
                weight_bytes=self.weight_bytes,
                pooled=self.pooled,
                weighted=self.weighted,
                optimizer=self.optimizer,
                memory=self.memory,
            )
            for table in self.tables
        ]
        whole = workloads_of(tables, self.samples)
        return [one.part(*table.size, table.offset[0]) for one, table in zip(whole, self.tables, strict=True)]


@dataclass(frozen=True)
class RankSteps:
    """One rank's record of a run."""

    __pydantic_config__: ClassVar = STRICT
    rank: Count
    steps: Count  # of the run
    kept: tuple[int, ...]  # indices of the recorded steps
    columns: dict[str, tuple[float, ...]]
    """Values of each recorded step, times in milliseconds:

    * ``step``, and ``forward`` and ``backward`` of the whole model;
    * ``kernel 0 forward`` and so on, processor time on a CPU, with ``lookups`` and ``samples``; ``kernels``, all of
      them by the host's clock;
    * ``outputs all_to_all forward`` and other collectives: their ``span``, the rank's wait (``waited``), ``kernels``
      that ran within the span, ``calls``, and ``bytes`` to other ranks;
    * ``input_dist``, the way of lookups to the kernels, in modules that wait for them, with ``calls``."""
    kernels: tuple[ObservedKernel, ...]
    statistics: dict[str, FeatureStatistics]
    """Statistics of this rank's batches."""

    def __post_init__(self) -> None:
        if odd := next((name for name, values in self.columns.items() if len(values) != len(self.kept)), None):
            raise ValueError(f"{odd!r} has {len(self.columns[odd])} values of {len(self.kept)} steps")

    def values(self, name: str, steps: Sequence[int]) -> np.ndarray:
        """Return a column's values of some recorded steps; zeros for an unknown column."""
        known = dict(zip(self.kept, self.columns.get(name, ()), strict=False))
        return np.array([known.get(step, 0.0) for step in steps])

    def median(self, name: str) -> float:
        """Return a column's median after the warm-up; 0 for an unknown column, or without steps."""
        steps = _after_warm_up(self.kept)
        return float(np.median(self.values(name, steps))) if steps else 0.0

    def kernel_ms(self, *ways: str, sharding_type: str | None = None) -> float:
        """Return the time of a step's kernels, ``forward``, ``backward`` or both, of one sharding type or all."""
        some = [n for n, kernel in enumerate(self.kernels) if sharding_type in (None, kernel.sharding_type)]
        return sum(self.median(f"kernel {index} {way}") for way in ways for index in some)


@dataclass(frozen=True)
class ObservedRun:
    """Steps of one job under one plan."""

    __pydantic_config__: ClassVar = STRICT
    id: str  # equal on all ranks
    started: str
    world_size: Several
    hosts: Several
    backend: str  # of the process group
    plan: SavedPlan | None
    """Plan with its prediction; None on all ranks but 0, and without a ``DreamShardPlanner``."""
    planned_lookups: dict[str, float]
    """Lookups per sample that the plan counts on, by feature."""
    ranks: tuple[RankSteps, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts > self.world_size or any(rank.rank >= self.world_size for rank in self.ranks):
            raise ValueError(f"run {brief(self.id)} has hosts or ranks beyond its {self.world_size}")

    @property
    def steps(self) -> int:
        return max(rank.steps for rank in self.ranks)

    def medians(self, *columns: str) -> tuple[float, ...]:
        """Return the sum of the medians of columns, by rank."""
        return tuple(sum(rank.median(column) for column in columns) for rank in self.ranks)

    @cached_property
    def statistics(self) -> TableStatistics:
        """Statistics of all ranks' batches. If batch sizes differ by more than a quarter, each feature has those of the
        ranks whose sizes are alike, since reuse belongs to a batch size."""
        parts = by_feature(rank.statistics for rank in self.ranks)
        return TableStatistics({name: merge_features(name, of_like_batches(some)) for name, some in parts.items()})

    @cached_property
    def collectives(self) -> dict[str, ObservedCollective]:
        """Collectives by name, as ``outputs all_to_all forward``."""
        names = {name.removesuffix(" span") for rank in self.ranks for name in rank.columns if name.endswith(" span")}
        return {
            name: ObservedCollective(
                ms=self._last(f"{name} span", f"{name} kernels")[0],
                span_ms=self.medians(f"{name} span"),
                waited_ms=self.medians(f"{name} waited"),
                bytes=self.medians(f"{name} bytes"),
                calls=max(self.medians(f"{name} calls")),
            )
            for name in sorted(names)
        }

    @property
    def outputs(self) -> dict[str, ObservedCollective]:
        """Collectives of outputs and their gradients."""
        return {name: one for name, one in self.collectives.items() if name.startswith(OUTPUTS)}

    @property
    def outputs_ms(self) -> float:
        """Time of all exchanges of outputs, as :attr:`ObservedCollective.ms`; overlapping ones count once."""
        return self._outputs_together[0]

    @property
    def step_ms(self) -> float:
        """Time of a step on the slowest rank."""
        return max(self.medians("step"))

    @property
    def hides_outputs(self) -> bool:
        """Overlap of outputs with other work than fused kernels, so large that their own time is unknown."""
        ms, beside_ms = self._outputs_together
        return beside_ms > max(MOST_BESIDE * ms, LEAST_BESIDE * min(self.medians("step")))

    @cached_property
    def _outputs_together(self) -> tuple[float, float]:
        waited = [f"{name} waited" for name in self.outputs]
        return self._last(f"{OUTPUTS} span together", f"{OUTPUTS} kernels together", waited)

    @cached_property
    def lookups_ms(self) -> float | None:
        """Time of lookups to the kernels, with sorting; None if a module did not wait for them, as in a pipeline."""
        modules = {kernel.module for rank in self.ranks for kernel in rank.kernels}
        if not modules or any(calls != len(modules) for calls in self.medians("input_dist calls")):
            return None
        return self._last("input_dist")[0]

    @property
    def embedding_share(self) -> float | None:
        """Share of kernels, outputs and lookups in a step, the mean of the ranks; None without times of steps."""
        step_ms = fmean(self.medians("step"))
        kernels_ms = fmean(rank.kernel_ms("forward", "backward") for rank in self.ranks)
        known_ms = kernels_ms + self.outputs_ms + (self.lookups_ms or 0.0)
        return min(1.0, known_ms / step_ms) if step_ms else None

    def _last(self, column: str, without: str = "", waited: Sequence[str] = ()) -> tuple[float, float]:
        """Return medians over steps, each of the rank that came last, since ranks that come early wait for it.

        The first is a column minus another; the second subtracts the rank's waits too, and is 0 without any.
        """
        steps = _after_warm_up(set.intersection(*(set(rank.kept) for rank in self.ranks)))
        if not steps:
            return 0.0, 0.0
        own_RX = np.array([rank.values(column, steps) - rank.values(without, steps) for rank in self.ranks])
        waits_RX = np.array([sum((rank.values(name, steps) for name in waited), 0 * own_RX[0]) for rank in self.ranks])
        last_X = own_RX.argmin(0), np.arange(len(steps))
        beside_RX = np.where(waits_RX > 0, own_RX - waits_RX, 0.0)
        return float(np.median(own_RX[last_X])), float(np.median(beside_RX[last_X]))


@dataclass(frozen=True)
class ObservedCollective:
    """One kind of collective; several calls in a step add up."""

    ms: float
    """Time that it adds to a step: that of the last rank in each step, without kernels that ran meanwhile. Exact only
    if all ranks were observed."""
    span_ms: tuple[float, ...]  # from start to result, by rank
    waited_ms: tuple[float, ...]  # idle part of the span, by rank
    bytes: tuple[float, ...]  # to other ranks, by rank
    calls: float  # in a step


def _after_warm_up(steps: Iterable[int]) -> list[int]:
    """Return the steps after the warm-up, in order; all if no others follow it."""
    known = sorted(steps)
    return [index for index in known if index >= WARM_UP] or known


def _told(hardware: dict[str, str | int]) -> dict[str, str | int]:
    threads, name = hardware.get("threads"), hardware.get("name")
    if hardware.get("device") not in DEVICES or not isinstance(threads, int) or threads < 1 or not name:
        raise ValueError(f"must tell the device, one of {', '.join(DEVICES)}, what it is called, and how many threads")
    return hardware


@dataclass(frozen=True)
class Observation:
    """Runs on one kind of hardware.

    Raises:
        ValueError: there is no run.
    """

    __pydantic_config__: ClassVar = STRICT
    hardware: Annotated[dict[str, str | int], AfterValidator(_told)]
    """Hardware of the first rank; all have the same device, threads and FBGEMM."""
    runs: tuple[ObservedRun, ...]

    def __post_init__(self) -> None:
        if not self.runs or not all(run.ranks for run in self.runs):
            raise ValueError("holds no run, or one without ranks")

    @property
    def steps(self) -> int:
        """Steps of all runs."""
        return sum(run.steps for run in self.runs)

    @property
    def title(self) -> str:
        """Size, as ``3 runs, 1,240 steps``."""
        return f"{len(self.runs)} run{'s' * (len(self.runs) > 1)}, {self.steps:,} steps"

    @property
    def topology(self) -> Topology:
        """Ranks of the first run, with bandwidths and pods of the first kept plan, else TorchRec's."""
        first = self.runs[0]
        plans = (run.plan for run in self.runs if run.plan is not None)
        known = next((topology_arguments(plan.inputs.topology) for plan in plans), {})
        ranks, device = first.world_size, str(self.hardware["device"])
        cards = (str(self.hardware["name"]),) if device == "cuda" else ()
        return make_topology(ranks, device, -(-ranks // first.hosts), **{**known, "cards": cards})

    def save(self, path: str | Path) -> None:
        """Write a file for :meth:`load`; raises FileError if it cannot be written."""
        write_whole(path, json.dumps({"format": FORMAT, "version": VERSION, **document_of(self)}))

    @classmethod
    def load(cls, path: str | Path) -> Observation:
        """Read a file; raises ObservationError, which names file and mistake."""
        document = entries_of(path, FORMAT, VERSION, "observe again", ObservationError)
        return parsed(cls, document, path, ObservationError)

    @classmethod
    def load_all(cls, paths: Sequence[str | Path]) -> Observation:
        """Read and merge files; the name of a missing one stands for the files of its ranks.

        Raises:
            ObservationError: a file cannot be read, or is of other hardware than the first; the ranks' files of a name
                are of several runs. Names the files.
        """
        named: dict[str, Observation] = {}
        for given in paths:
            of_ranks = {str(path): cls.load(path) for path in files_of(Path(given))}
            if len({tuple(run.id for run in one.runs) for one in of_ranks.values()}) > 1:
                raise ObservationError(
                    f"{', '.join(of_ranks)}: not of one run: name the files, delete those of an earlier job, or "
                    "observe into this one as often on all ranks"
                )
            named |= of_ranks
        return cls.merge(named)

    @classmethod
    def merge(cls, named: Mapping[str, Observation]) -> Observation:
        """Merge ranks and runs, by the names of their files. A rank that was saved twice counts with the most steps.

        Raises:
            ObservationError: hardware differs.
        """
        first, *others = named
        for name in others:
            if differing := other_hardware(named[name].hardware, named[first].hardware):
                raise ObservationError(
                    f"{name}: observed on {differing}, as {first}: learn from each kind of hardware apart"
                )
        runs: dict[str, ObservedRun] = {}
        for run in (run for one in named.values() for run in one.runs):
            known = runs.setdefault(run.id, run)
            ranks = {rank.rank: rank for rank in sorted((*run.ranks, *known.ranks), key=lambda one: one.steps)}
            with_plan = run if known.plan is None else known
            runs[run.id] = replace(with_plan, ranks=tuple(ranks[rank] for rank in sorted(ranks)))
        return cls(named[first].hardware, tuple(runs.values()))


def rank_file(path: Path, rank: int) -> Path:
    """Return a rank's file: ``observation.1.json`` for ``observation.json``."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


def files_of(path: Path) -> list[Path]:
    """Return the file, or the files of ranks if it is missing."""
    ranks = path.parent.glob(f"{escape(path.stem)}.*{escape(path.suffix)}") if not path.exists() else ()
    number = slice(len(path.stem) + 1, -len(path.suffix) or None)
    return sorted(file for file in ranks if file.name[number].isdecimal()) or [path]
