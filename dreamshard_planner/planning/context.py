# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What all seams of one planner share, resolved once: checkpoint, cost source, exchanges, and the reader of options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.checkpoints.checkpoint import Checkpoint, resolve_for
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.model import Cost, PlacementCosts
from dreamshard_planner.planning.cost_sources import COST_SOURCES, NetworkCosts
from dreamshard_planner.plans.notes import Note, noted
from dreamshard_planner.problem.allocated import AllocatedStorage
from dreamshard_planner.problem.exchanges import Links
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.constraints import PlanningConstraints
from dreamshard_planner.search_space.enumeration import (
    FastEnumerator,
    WithLengths,
    estimate_all,
    torchrec_estimators,
    unpriced,
)
from dreamshard_planner.search_space.kernels import is_known
from dreamshard_planner.search_space.options import by_table, counted, fqn_of, type_of
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.search_space.usable_options import as_constrained, usable_options
from dreamshard_planner.search_space.variants import own_slices, without_idle_halves
from dreamshard_planner.support.formatting import first_of, size_in_words
from dreamshard_planner.support.torch_state import neutral
from dreamshard_planner.workload.statistics import TableStatistics


@dataclass(frozen=True)
class PlanRater:
    """How the plans of one topology are read and rated.

    Args:
        topology: the ranks, before any reservation.
        reader: of options.
        checkpoint: policy, and the cost network where it has one.
        cost_source: one of :data:`~dreamshard_planner.planning.cost_sources.COST_SOURCES`.
    """

    topology: Topology
    reader: OptionReader
    checkpoint: Checkpoint
    cost_source: str = "auto"
    constraints: PlanningConstraints | None = None
    """As TorchRec's estimators take them."""
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None
    """Of the model, where options are to be estimated as TorchRec does; None: they are estimated already."""
    sync_ms_per_byte: float = 0.0
    """Of averaging the replicas of other sharding groups, where there are such."""
    all_ranks: Topology | None = None
    """Of all sharding groups, where there are such."""

    @classmethod
    @neutral()
    def of(
        cls,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        cost_source: str = "auto",
    ) -> PlanRater:
        """For a seam that is used alone."""
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = resolve_for(topology, checkpoint)
        return cls(topology, OptionReader(constraints, statistics), checkpoint, cost_source)

    def with_statistics(self, statistics: TableStatistics) -> PlanRater:
        """The same by other statistics, for costs alone: no rule of placement is kept."""
        return replace(self, reader=OptionReader(self.constraints, statistics, self.sharders or ()))

    def __post_init__(self) -> None:
        if self.cost_source not in COST_SOURCES:
            raise ValueError(f"cost_source must be one of {', '.join(COST_SOURCES)}, got {self.cost_source!r}")

    @cached_property
    def _costs(self) -> NetworkCosts:
        return COST_SOURCES[self.cost_source](self.topology, self.checkpoint, self.sync_ms_per_byte, self.all_ranks)

    @cached_property
    def compute(self) -> ComputeCost:
        """The cost of sets of shards."""
        return self._costs.compute()

    @cached_property
    def links(self) -> Links:
        """The cost of exchanges."""
        return self._costs.links()

    @cached_property
    def _torchrec(self) -> list[ShardEstimator]:
        """TorchRec's estimators of perf and storage; empty without sharders."""
        if self.sharders is None:
            return []
        perf, storage = torchrec_estimators(self.topology, self.constraints)
        if self._costs.takes_estimates and self.constraints is not None:
            # Costs are TorchRec's, while memory is for the lookups that there are.
            perf = WithLengths(perf, self.constraints.torchrec_lengths)
        return [perf, AllocatedStorage(storage, self.reader, self.topology)]

    def estimate_as_torchrec(self, options: list[ShardingOption]) -> None:
        """Set the perf of every shard by TorchRec's own estimator, in place. Where such estimates are the cost source,
        and for unknown kernels, options keep those that they come with, which may be a user's."""
        estimated = (not self._costs.takes_estimates and is_known(option.compute_kernel) for option in options)
        options = [option for option, again in zip(options, estimated, strict=True) if again or _lacks_perf(option)]
        estimate_all(self._torchrec[:1], options, self.sharders or ())

    def complete(self, options: list[ShardingOption]) -> None:
        """Estimate, in place and as TorchRec does, what costs and memory are read from and nobody has estimated."""
        bare = [option for option in options if any(shard.storage is None for shard, _ in counted(option))]
        estimate_all(self._torchrec[1:], bare, self.sharders or ())
        if self._costs.takes_estimates:
            self.estimate_as_torchrec(options)

    def enumerator(self, batch_size: int, perf: ShardEstimator | None = None) -> FastEnumerator:
        """TorchRec's enumerator for a planner's model, with pooling factors per feature before anything is estimated.

        Args:
            batch_size: local.
            perf: estimator of perf where the cost source is ours; None for TorchRec's.
        """
        ours = None if self._costs.takes_estimates else perf
        estimators = [ours or self._torchrec[0], self._torchrec[1]]
        asked = {name for name, constraint in (self.constraints or {}).items() if constraint.min_partition}
        variants = partial(own_slices, asked=asked)
        return FastEnumerator(
            self.topology, batch_size, self.constraints, estimators, variants=variants, prepare=self._prepare
        )

    def searched_options(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """The options of a model that planning searches; errors as of
        :func:`~dreamshard_planner.search_space.usable_options.as_constrained` and
        :func:`~dreamshard_planner.search_space.usable_options.usable_options`."""
        allowed = as_constrained(search_space, self.constraints or {})
        return self.usable_options(without_idle_halves(allowed, self.topology.world_size))

    def usable_options(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options of :func:`~dreamshard_planner.search_space.usable_options.usable_options`."""
        return usable_options(search_space, self.topology.compute_device)

    def certain_options(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Options whose cost is no guess; all of a table that has no others."""
        tables = by_table(options).values()
        return [option for choices in tables for option in ([o for o in choices if not self.is_guess(o)] or choices)]

    def is_guess(self, option: ShardingOption) -> bool:
        """See :meth:`OptionReader.is_guess`; TorchRec's estimates assume no popularity of rows."""
        return not self._costs.takes_estimates and self.reader.is_guess(option)

    def splitting_left_out(self, table: str) -> dict[str, str]:
        """The types in parts that a table may not take, and why, by its fully qualified name; empty where that is not
        known."""
        left_out = self.constraints.left_out.get(table, {}) if self.constraints is not None else {}
        return {
            kind: left_out[kind] for kind, spec in SHARDING_TYPES.items() if spec.splits_unasked and kind in left_out
        }

    def _prepare(self, option: ShardingOption) -> None:
        option.input_lengths = self.reader.pooling_factors(option)

    def notes(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        """What a reader of a plan's cost should know of where it came from, and of how its tables were read."""
        return (
            *self._costs.notes(plan, self.reader),
            *self._price_notes(plan),
            *self._sync_note(plan),
            *noted("table", self.reader.notes(plan)),
        )

    def _sync_note(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        if not self.sync_ms_per_byte:
            return ()
        read = self.read(plan, with_storage=False)
        rank_X, part_X = read.problem.laid(read.sharding(plan))
        synced_D = torch.zeros(read.problem.num_ranks, dtype=torch.float64)
        most = float(synced_D.index_add(0, rank_X, read.column("synced_bytes")[part_X]).max())
        sync_ms = most * self.sync_ms_per_byte
        text = (
            f"the plan is for the ranks of one sharding group; averaging up to {size_in_words(int(most))} of a rank "
            f"with its replicas takes {sync_ms:.3f} ms of each batch in the mean, counted as backward, and happens in "
            "place"
        )
        if any(type_of(option).span == "host" for option in plan):
            text += f"; DMPCollection needs node_group_size={self.topology.local_world_size}"
        return (Note("source", text, {"sync_bytes": most, "sync_ms": sync_ms}),)

    def read(
        self, options: Sequence[ShardingOption], topology: Topology | None = None, with_storage: bool = True
    ) -> ReadProblem:
        """The sharding problem of some options; ``topology`` is what the storage reservation left.

        Raises:
            PlannerError: nobody prices an option's kernel, or as of :meth:`OptionReader.read`.
        """
        self._price(options)
        return self.reader.read(options, topology or self.topology, self.links, with_storage)

    def _price(self, options: Sequence[ShardingOption]) -> None:
        """Let TorchRec estimate the options of unknown kernels that no estimator has priced."""
        bare = [option for option in options if not is_known(option.compute_kernel) and _lacks_perf(option)]
        if bare and not self._torchrec:
            raise unpriced(bare[0], "its options come without perf")
        if bare:
            estimate_all(self._torchrec[:1], bare, self.sharders or ())

    def _price_notes(self, plan: Sequence[ShardingOption]) -> tuple[Note, ...]:
        """Return a note per unknown kernel."""
        priced: dict[str, list[str]] = {}
        for option in plan:
            if not is_known(option.compute_kernel) and not self._costs.takes_estimates:
                priced.setdefault(option.compute_kernel, []).append(fqn_of(option))
        return tuple(
            Note(
                "source",
                f"{len(tables)} table(s) ({first_of(tables)}) use compute kernel {kernel!r}, of which this "
                "planner has no costs: their compute is priced by the estimates of their options, which are TorchRec's "
                "unless an estimator that was given made them",
                {"tables": float(len(tables))},
            )
            for kernel, tables in sorted(priced.items())
        )

    def cost(self, read: ReadProblem) -> Cost:
        """The cost of its shardings."""
        return self._costs.cost(read, self.compute)

    def rated(self, plan: Sequence[ShardingOption]) -> PlacementCosts:
        """Costs of one plan (B = 1) whose shards have ranks, whatever memory that takes."""
        read = self.read(plan, with_storage=False)
        return self.cost(read).rate(read.sharding(plan))


def _lacks_perf(option: ShardingOption) -> bool:
    return any(shard.perf is None for shard, _ in counted(option))


class WithContext:
    """One of TorchRec's components that rates options, alone or as part of a planner.

    Args:
        topology: the ranks.
        constraints: per table, as TorchRec's estimators take them.
        statistics: per feature; precedence over the constraints' pooling factors.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoints.checkpoint.Checkpoint`.
        context: shared by the components of one planner; made from the other arguments by default.
    """

    @neutral()
    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        context: PlanRater | None = None,
    ) -> None:
        self._context = context or PlanRater.of(topology, constraints, statistics, checkpoint)
