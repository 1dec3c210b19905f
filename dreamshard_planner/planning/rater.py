# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reading and rating of plans, shared by all components of one planner."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain

import torch
from torch import nn
from torchrec.distributed.planner.constants import POOLING_FACTOR
from torchrec.distributed.planner.types import Perf, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.problem import Cost, Option, PlacementCosts, Sharding
from dreamshard_planner.planning.cost_sources import COST_SOURCES, CheckpointCosts
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.problem.estimators import (
    PerfEstimator,
    StorageEstimator,
    equal_lengths,
    estimate_all,
    own_lengths,
    unpriced,
)
from dreamshard_planner.problem.parts import Links, ReadProblem
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.search import SearchResult
from dreamshard_planner.search_space.constraints import PlanningConstraints
from dreamshard_planner.search_space.enumeration import (
    FastEnumerator,
    as_constrained,
    own_slices,
    usable_options,
    without_idle_halves,
)
from dreamshard_planner.search_space.options import by_table, counted, perf_of, total_ms
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, is_known
from dreamshard_planner.workload.statistics import TableStatistics


@dataclass(frozen=True)
class RatedPlan:
    """A plan with its ranks and costs."""

    read: ReadProblem
    cost: Cost
    sharding: Sharding
    rivals: tuple[ReportEntry, ...] = ()
    """Plans that its search started from, feasible or not."""
    result: SearchResult | None = None
    """Outcome of the search for its ranks; None if it came with ranks."""

    @cached_property
    def costs(self) -> PlacementCosts:
        """Costs of the plan (B = 1)."""
        return self.cost.rate(self.sharding)

    @property
    def total_ms(self) -> float:
        """Overall cost."""
        return float(self.costs.overall_ms_B[0])

    @property
    def placed(self) -> Iterator[tuple[str, Option, list[int]]]:
        """Name, option and ranks of each table."""
        problem, chosen = self.read.problem, zip(self.sharding.options, self.sharding.positions, strict=True)
        for name, options, (index, positions) in zip(problem.names, problem.tables, chosen, strict=True):
            yield name, options[index], options[index].ranks(positions)

    @property
    def options(self) -> list[ShardingOption]:
        """One option for every table."""
        return [options[index] for options, index in zip(self.read.options, self.sharding.options, strict=True)]


@dataclass(frozen=True)
class PlanRater:
    """Reads and rates the plans of one topology.

    Args:
        ranks: with their memory before any reservation, and the checkpoint of their costs and policy.
        reader: of options.
        cost_source: one of :data:`~dreamshard_planner.planning.cost_sources.COST_SOURCES`.
    """

    ranks: PlannedRanks
    reader: OptionReader
    cost_source: str = "auto"
    constraints: PlanningConstraints = field(default_factory=PlanningConstraints)
    """Constraints for TorchRec's estimators."""
    sharders: Sequence[ModuleSharder[nn.Module]] = ()
    """Sharders of the model; none if its options are estimated already."""

    def with_statistics(self, statistics: TableStatistics) -> PlanRater:
        """Return a rater by other statistics, for costs alone: it keeps no placement rule."""
        return replace(self, reader=OptionReader(self.constraints, statistics, self.sharders))

    @cached_property
    def costs(self) -> CheckpointCosts:
        """Costs by the cost source."""
        return COST_SOURCES[self.cost_source](self.ranks)

    @cached_property
    def compute(self) -> ComputeCost:
        """Cost of fused groups."""
        return self.costs.compute()

    @cached_property
    def links(self) -> Links:
        """Cost of exchanges."""
        return self.costs.links()

    @cached_property
    def _torchrec(self) -> list[ShardEstimator]:
        """TorchRec's estimators of perf and storage; empty without sharders."""
        if not self.sharders:
            return []
        # If costs are TorchRec's, memory alone is for the actual lookups.
        lengths = self.constraints.lengths_of_torchrec if self.costs.takes_estimates else own_lengths
        return [
            PerfEstimator(self.ranks.topology, self.constraints, lengths),
            StorageEstimator(self.ranks.topology, self.constraints, self.reader),
        ]

    @torch.no_grad()
    def alone(self, options: Sequence[ShardingOption]) -> list[list[Perf]]:
        """Return the milliseconds of each option's shards, each alone on its rank. If estimates are the cost source, or
        price an unknown kernel, they are those of the option."""
        if not options or self.costs.takes_estimates:
            return [*map(perf_of, options)]
        read = self.read(options, with_storage=False)
        cost, rates_2C = self.cost(read), read.problem.collectives.alone_ms_per_byte()
        compute_P2 = cost.compute.group_cost_ms(cost.latent_PH)
        comms_P2 = torch.stack([read.problem.bytes_PC @ rate_C for rate_C in rates_2C], dim=-1)
        perf_P = [
            Perf(fwd_compute=forward, fwd_comms=forward_comms, bwd_compute=backward, bwd_comms=backward_comms)
            for forward, backward, forward_comms, backward_comms in torch.cat([compute_P2, comms_P2], dim=-1).tolist()
        ]
        choices = zip(chain.from_iterable(read.options), chain.from_iterable(read.problem.tables), strict=True)
        alone = {id(option): [perf_P[part] for part in choice.parts] for option, choice in choices}
        return [alone[id(one)] if is_known(one.compute_kernel) else perf_of(one) for one in options]

    def alone_ms(self, options: Sequence[ShardingOption]) -> list[float]:
        """Return the sum of :meth:`alone` for each option."""
        return [*map(total_ms, self.alone(options))]

    def without_lookups(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return copies with TorchRec's estimates for one lookup per sample; none if these are the options' estimates,
        or estimates are costs."""
        given = any({*option.input_lengths} != {POOLING_FACTOR} for option in options)
        if self.costs.takes_estimates or not given or not all(is_known(option.compute_kernel) for option in options):
            return []
        copies = [copy.deepcopy(option) for option in options]
        estimator = PerfEstimator(self.ranks.topology, lengths=equal_lengths(POOLING_FACTOR))
        estimate_all([estimator], copies, self.sharders)
        return copies

    def estimate_missing(self, options: list[ShardingOption], with_perf: bool = False) -> None:
        """Estimate missing storage in place, as TorchRec does, and missing perf if asked for or the cost source."""
        bare = [option for option in options if any(shard.storage is None for shard, _ in counted(option))]
        estimate_all(self._torchrec[1:], bare, self.sharders)
        if with_perf or self.costs.takes_estimates:
            bare = [option for option in options if None in perf_of(option)]
            estimate_all(self._torchrec[:1], bare, self.sharders)

    def enumerator(self, batch_size: int) -> FastEnumerator:
        """Make TorchRec's enumerator for a planner's model and a local batch, with pooling factors per feature."""
        asked = {name for name, constraint in self.constraints.items() if constraint.min_partition}
        return FastEnumerator(
            self.ranks.topology,
            batch_size,
            self.constraints,
            self._torchrec,
            variants=partial(own_slices, asked=asked),
            lengths=self.reader.pooling_factors,
        )

    def searched_options(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options of a model that planning searches; raises PlannerError if a table has none."""
        allowed = as_constrained(search_space, self.constraints)
        return self.usable_options(without_idle_halves(allowed, self.alone_ms, self.ranks.topology.world_size))

    def usable_options(self, search_space: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options of :func:`~dreamshard_planner.search_space.enumeration.usable_options`."""
        return usable_options(search_space, self.ranks.topology.compute_device)

    def certain_options(self, options: Sequence[ShardingOption]) -> list[ShardingOption]:
        """Return the options whose cost is no guess, and all options of tables that have no others."""
        tables = by_table(options).values()
        return [option for choices in tables for option in ([o for o in choices if not self.is_guess(o)] or choices)]

    def is_guess(self, option: ShardingOption) -> bool:
        """See :meth:`OptionReader.is_guess`; TorchRec's estimates assume no popularity of rows."""
        return not self.costs.takes_estimates and self.reader.is_guess(option)

    def splitting_left_out(self, table: str) -> dict[str, str]:
        """Return the types in several parts that a table may not take, with reasons, by fully qualified name."""
        left_out = self.constraints.left_out.get(table, {})
        return {
            kind: left_out[kind] for kind, spec in SHARDING_TYPES.items() if spec.splits_unasked and kind in left_out
        }

    def read(
        self, options: Sequence[ShardingOption], topology: Topology | None = None, with_storage: bool = True
    ) -> ReadProblem:
        """Return the sharding problem of some options; ``topology`` has the memory that the reservation left.

        Raises:
            PlannerError: an option's kernel is unknown and unpriced, or as of :meth:`OptionReader.read`.
        """
        bare = [option for option in options if not is_known(option.compute_kernel) and None in perf_of(option)]
        if bare and not self._torchrec:
            raise unpriced(bare[0], "its options come without perf")
        if bare:
            estimate_all(self._torchrec[:1], bare, self.sharders)
        return self.reader.read(options, topology or self.ranks.topology, self.links, with_storage)

    def cost(self, read: ReadProblem) -> Cost:
        """Return the cost of a problem's shardings."""
        return self.costs.cost(read, self.compute)

    def rated(self, plan: Sequence[ShardingOption], left: Topology | None = None) -> RatedPlan:
        """Rate a plan whose shards have ranks.

        Args:
            plan: one option for every table.
            left: topology with the memory that the reservation left; None if memory does not matter.
        """
        read = self.read(plan, left, with_storage=left is not None)
        return RatedPlan(read, self.cost(read), read.sharding(plan))
