# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Observed training steps as files: one of each rank, merged over ranks and runs.

A file holds, by run and rank, what the kept steps took, what each fused kernel computes, statistics of the batches, and
the plan with what it was predicted to cost, where a planner of ours made it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import AfterValidator, Field
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.cost.dataset import hardware_key, same_hardware
from dreamshard_planner.devices import make_topology
from dreamshard_planner.errors import ObservationError, StatisticsError
from dreamshard_planner.planning.plan_inputs import topology_arguments
from dreamshard_planner.plans.plan_file import SavedPlan, without_dropped
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.documents import (
    STRICT,
    Count,
    Several,
    document_of,
    entries_of,
    one_of,
    parsed,
)
from dreamshard_planner.support.files import brief, write_whole
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import (
    MEMORIES,
    OPTIMIZERS,
    FeatureStatistics,
    Table,
    Workload,
    lookup_bytes,
    workloads_of,
)

FORMAT = "dreamshard_planner observation"
VERSION = 3
OLDEST_VERSION = 2
"""Read as well; the plans in these files lack pods and TorchRec's own figures."""
WARM_UP = 3
"""First steps of a run, in which memory is asked for and caches are empty; left out where others follow."""
OUTPUTS = "outputs"
"""How names of their exchanges begin."""
DEVICES = ("cpu", "cuda", "mtia")
"""That training steps run on."""
MOST_BESIDE, LEAST_BESIDE = 0.5, 0.1
"""Share of the time of exchanges, and of the step, up to which a rank may do other work meanwhile."""


@dataclass(frozen=True)
class ObservedTable:
    """A table, or the part of it, that a kernel has."""

    __pydantic_config__: ClassVar = STRICT
    name: str
    """Fully qualified."""
    features: Annotated[tuple[str, ...], Field(min_length=1)]
    rows: Several
    dim: Several
    """Both of the whole table."""
    offset: tuple[Count, Count]
    """First row and column of the part."""
    size: tuple[Count, Count]
    """Its rows and columns."""


@dataclass(frozen=True)
class ObservedKernel:
    """A fused kernel of one rank."""

    __pydantic_config__: ClassVar = STRICT
    sharding_type: Annotated[str, one_of(SHARDING_TYPES)]
    kernel: str
    """TorchRec's compute kernel."""
    optimizer: Annotated[str, one_of(OPTIMIZERS)]
    """As costs tell them apart."""
    memory: Annotated[str, one_of(MEMORIES)]
    pooled: bool
    weighted: bool
    weight_bytes: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    samples: Count
    """Of the batch that it sees."""
    tables: Annotated[tuple[ObservedTable, ...], Field(min_length=1)]

    @property
    def module(self) -> str:
        """Path of the sharded module that it belongs to."""
        return self.tables[0].name.rpartition(".")[0]

    @property
    def bags(self) -> int:
        """Of a step, whether it pools them or not."""
        return self.samples * sum(len(table.features) for table in self.tables)

    def lookup_bytes(self, lookups: float) -> float:
        """Of so many lookups in a step."""
        return lookup_bytes(lookups, self.bags, self.weighted)

    def workloads(self, statistics: Mapping[str, FeatureStatistics]) -> list[Workload]:
        """What it asks for, by statistics of the batches; ObservationError where they lack a feature."""
        if missing := sorted({name for table in self.tables for name in table.features} - set(statistics)):
            raise ObservationError(f"no sampled batch has samples of feature {missing[0]!r}: observe more steps")
        whole = workloads_of([self._table(table, statistics) for table in self.tables], self.samples)
        return [one.part(*table.size, table.offset[0]) for one, table in zip(whole, self.tables, strict=True)]

    def _table(self, table: ObservedTable, statistics: Mapping[str, FeatureStatistics]) -> Table:
        return Table(
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


@dataclass(frozen=True)
class RankSteps:
    """What one rank saw."""

    __pydantic_config__: ClassVar = STRICT
    rank: Count
    steps: Count
    """Of the run."""
    kept: tuple[int, ...]
    """Indices of those that are told of below."""
    columns: dict[str, tuple[float, ...]]
    """Milliseconds of each kept step: ``step``, ``forward`` and ``backward`` of the whole model; ``kernel 0 forward``
    (processor time on a CPU) and so on; ``kernels``, all of them by the host's clock; ``outputs all_to_all forward
    span`` and ``waited`` of collectives, and ``kernels`` that ran within the span; ``input_dist``, all that lookups
    take to get to their kernels, in modules that wait for it. Their ``calls``, and ``bytes`` to other ranks;
    ``lookups`` and ``samples`` of kernels."""
    kernels: tuple[ObservedKernel, ...]
    statistics: dict[str, FeatureStatistics]
    """Of this rank's batches."""

    def __post_init__(self) -> None:
        if odd := next((name for name, values in self.columns.items() if len(values) != len(self.kept)), None):
            raise ValueError(f"{odd!r} has {len(self.columns[odd])} values of {len(self.kept)} steps")

    def column(self, name: str) -> tuple[float, ...]:
        """Of the kept steps; zeros where there is none."""
        return self.columns.get(name) or (0.0,) * len(self.kept)

    def median(self, name: str) -> float:
        """Of a column over the kept steps, without the first ones; 0 where there is none."""
        values = self.column(name)
        late = [value for index, value in zip(self.kept, values, strict=True) if index >= WARM_UP]
        return float(np.median(late or values or [0.0]))

    def kernel_ms(self, way: str) -> float:
        """All fused kernels of a step, ``forward`` or ``backward``."""
        return sum(self.median(f"kernel {index} {way}") for index in range(len(self.kernels)))


@dataclass(frozen=True)
class ObservedRun:
    """Some steps of one job under one plan."""

    __pydantic_config__: ClassVar = STRICT
    id: str
    """The same on all ranks."""
    started: str
    world_size: Several
    hosts: Several
    backend: str
    """Of the process group."""
    plan: SavedPlan | None
    """With what was predicted of it; None on ranks that did not plan, and where no planner of ours was given."""
    planned_lookups: dict[str, float]
    """Per sample, by feature, that the prediction counts on."""
    ranks: tuple[RankSteps, ...] = ()

    def __post_init__(self) -> None:
        if self.hosts > self.world_size or any(rank.rank >= self.world_size for rank in self.ranks):
            raise ValueError(f"run {brief(self.id)} has hosts or ranks beyond its {self.world_size}")

    @property
    def steps(self) -> int:
        return max(rank.steps for rank in self.ranks)

    @cached_property
    def statistics(self) -> TableStatistics:
        """Of the batches of all ranks."""
        return TableStatistics.merge(TableStatistics(rank.statistics) for rank in self.ranks)

    @cached_property
    def collectives(self) -> dict[str, ObservedCollective]:
        """Each by name, as ``outputs all_to_all forward``."""
        names = {name.removesuffix(" span") for rank in self.ranks for name in rank.columns if name.endswith(" span")}
        return {name: self._collective(name) for name in sorted(names)}

    @property
    def outputs(self) -> dict[str, ObservedCollective]:
        """The collectives that carry outputs and their gradients."""
        return {name: one for name, one in self.collectives.items() if name.startswith(OUTPUTS)}

    @cached_property
    def outputs_ms(self) -> float:
        """All exchanges of outputs, as :attr:`ObservedCollective.ms`; several on their way together count once."""
        return self._outputs_together[0]

    @cached_property
    def hides_outputs(self) -> bool:
        """Whether a rank does other work than fused kernels for much of the time that outputs are on their way: how
        long they take by themselves is then not told."""
        ms, beside_ms = self._outputs_together
        return beside_ms > max(MOST_BESIDE * ms, LEAST_BESIDE * min(rank.median("step") for rank in self.ranks))

    @cached_property
    def _outputs_together(self) -> tuple[float, float]:
        """What they take, and what of that is beside other work."""
        waited = [f"{name} waited" for name in self.outputs]
        return self._last(f"{OUTPUTS} span together", f"{OUTPUTS} kernels together", waited)

    @cached_property
    def lookups_ms(self) -> float | None:
        """All that lookups take to get to their kernels, sorting included, of the rank that came to it last in each
        step; None where some module did not wait for it, as in a pipeline, or was not seen to."""
        modules = {kernel.module for rank in self.ranks for kernel in rank.kernels}
        if not modules or any(rank.median("input_dist calls") != len(modules) for rank in self.ranks):
            return None
        return self._last("input_dist")[0]

    def _last(self, column: str, without: str = "", waited: Sequence[str] = ()) -> tuple[float, float]:
        """Of the rank that came to it last, in each step, since who was early has waited: the column without another;
        and that without what it waited, nothing where no waits were told."""
        together = set.intersection(*(set(rank.kept) for rank in self.ranks))
        late = sorted(index for index in together if index >= WARM_UP) or sorted(together)
        if not late:
            return 0.0, 0.0
        own_RX, beside_RX = [], []
        for rank in self.ranks:
            at = [rank.kept.index(index) for index in late]
            own_X = (np.array(rank.column(column)) - np.array(rank.column(without)))[at]
            waits = [np.array(rank.columns[name])[at] for name in waited if name in rank.columns]
            own_RX.append(own_X)
            beside_RX.append(own_X - sum(waits) if waits else 0 * own_X)
        last_1X = np.argmin(own_RX, 0)[None]
        ms, beside_ms = (np.median(np.take_along_axis(np.array(each), last_1X, 0)) for each in (own_RX, beside_RX))
        return float(ms), float(beside_ms)

    def _collective(self, name: str) -> ObservedCollective:
        return ObservedCollective(
            ms=self._last(f"{name} span", f"{name} kernels")[0],
            span_ms=tuple(rank.median(f"{name} span") for rank in self.ranks),
            waited_ms=tuple(rank.median(f"{name} waited") for rank in self.ranks),
            bytes=tuple(rank.median(f"{name} bytes") for rank in self.ranks),
            calls=max(rank.median(f"{name} calls") for rank in self.ranks),
        )


@dataclass(frozen=True)
class ObservedCollective:
    """One kind of collective of a step; several of a kind are added."""

    ms: float
    """Of the rank that came to it last, in each step, without the kernels that ran meanwhile, as of another sharding
    type: what the exchange adds to a step. Exact only where all ranks were observed."""
    span_ms: tuple[float, ...]
    """Of each rank, from its start until the rank had its result."""
    waited_ms: tuple[float, ...]
    """Of that, what the rank could do nothing else in."""
    bytes: tuple[float, ...]
    """That each rank sends to the others."""
    calls: float
    """In a step."""


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
    """Of the first rank; all have the same device, threads and FBGEMM."""
    runs: tuple[ObservedRun, ...]

    def __post_init__(self) -> None:
        if not self.runs or not all(run.ranks for run in self.runs):
            raise ValueError("holds no run, or one without ranks")

    @property
    def steps(self) -> int:
        """Of all runs."""
        return sum(run.steps for run in self.runs)

    @property
    def title(self) -> str:
        """As ``3 runs, 1,240 steps``."""
        return f"{len(self.runs)} run{'s' * (len(self.runs) > 1)}, {self.steps:,} steps"

    @property
    def topology(self) -> Topology:
        """The ranks of the first run, with bandwidths and pods of the first plan that was kept, else TorchRec's."""
        first = self.runs[0]
        plans = (run.plan for run in self.runs if run.plan is not None)
        known = next((topology_arguments(plan.inputs.topology) for plan in plans), {})
        ranks, device = first.world_size, str(self.hardware["device"])
        cards = (str(self.hardware["name"]),) if device == "cuda" and "name" in self.hardware else ()
        return make_topology(ranks, device, ranks // first.hosts, cards=cards, **known)

    def save(self, path: str | Path) -> None:
        """Write a file that :meth:`load` reads back; FileError says why not."""
        write_whole(path, json.dumps({"format": FORMAT, "version": VERSION, **document_of(self)}))

    @classmethod
    def load(cls, path: str | Path) -> Observation:
        """Read a file; ObservationError names the file and what is wrong with it."""
        known = range(OLDEST_VERSION, VERSION + 1)
        document = entries_of(path, FORMAT, known, "observe again", ObservationError)
        runs = document.get("runs")
        for run in runs if isinstance(runs, list) else ():
            without_dropped(run.get("plan") if isinstance(run, dict) else None)
        return parsed(cls, document, path, ObservationError)

    @classmethod
    def load_all(cls, paths: Sequence[str | Path]) -> Observation:
        """Files merged. Where one is missing, those of its ranks are taken, as :func:`observe` writes them.

        Raises:
            ObservationError: a file can't be read, or is of other hardware than the first; those of a name's ranks are
                of several runs. Names the files.
        """
        named: dict[str, Observation] = {}
        for given in paths:
            of_ranks = {str(path): cls.load(path) for path in files_of(Path(given))}
            runs = {tuple(run.id for run in one.runs) for one in of_ranks.values()}
            if len(runs) > 1:
                raise ObservationError(
                    f"{', '.join(of_ranks)}: not of one run: name the files, delete those of an earlier job, or "
                    "observe into this one as often on all ranks"
                )
            named |= of_ranks
        return cls.merge(named)

    @classmethod
    def merge(cls, named: Mapping[str, Observation]) -> Observation:
        """Of several ranks and runs, by the names of their files; a rank of a run that is there twice, as saved twice,
        counts once, with the most steps. Runs may have batches of different sizes.

        Raises:
            ObservationError: hardware differs; ranks of one run have batches of different sizes.
        """
        first, *others = named
        for name in others:
            hardware = [named[file].hardware for file in (first, name)]
            if not same_hardware(*hardware):
                keys = [hardware_key(one) for one in hardware]
                raise ObservationError(
                    f"{name}: observed on {keys[1]}, and {first} on {keys[0]}: learn from each kind of hardware apart"
                )
        runs: dict[str, ObservedRun] = {}
        for run in (run for one in named.values() for run in one.runs):
            runs[run.id] = _joined(runs[run.id], run) if run.id in runs else run
        try:
            for run in runs.values():
                run.statistics  # noqa: B018 (fails here, where files are read)
        except StatisticsError as error:
            raise ObservationError(f"{', '.join(named)}: {error}") from error
        return cls(named[first].hardware, tuple(runs.values()))


def rank_file(path: Path, rank: int) -> Path:
    """``observation.json`` of one rank: ``observation.1.json``."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}")


def files_of(path: Path) -> list[Path]:
    """A file, or those of ranks where it is missing."""
    ranks = path.parent.glob(f"{escape(path.stem)}.*{escape(path.suffix)}") if not path.exists() else ()
    number = slice(len(path.stem) + 1, -len(path.suffix) or None)
    return sorted(file for file in ranks if file.name[number].isdecimal()) or [path]


def _joined(run: ObservedRun, other: ObservedRun) -> ObservedRun:
    every = sorted((*other.ranks, *run.ranks), key=lambda one: one.steps)
    ranks: dict[int, RankSteps] = {rank.rank: rank for rank in every}
    return replace(run if run.plan is not None else other, ranks=tuple(ranks[rank] for rank in sorted(ranks)))
