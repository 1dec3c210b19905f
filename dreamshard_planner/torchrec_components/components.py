# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Components of TorchRec's loop by our costs and search: estimator, performance model, proposers and partitioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    Proposer,
    ShardEstimator,
    ShardingOption,
    Topology,
)

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.search_plan import SearchSettings, place_proposal
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.effort import Deadline
from dreamshard_planner.search_space.options import set_perf
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics

TIE_WEIGHT = 1e-6
"""Weight of the compute of all ranks, which decides between plans with equally slow bottlenecks. TorchRec keeps the
first of them, even if it moves tables to slower memory for nothing."""


@neutral()
def rater(
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    *,
    statistics: TableStatistics | None = None,
    checkpoint: str | Path | Checkpoint = "auto",
) -> PlanRater:
    """Return what rates options, for a component that is used without a ``DreamShardPlanner``.

    Args:
        topology: the ranks.
        constraints: per table, for ``num_poolings``, ``batch_sizes`` and ``is_weighted``.
        statistics: per feature; they take precedence over the constraints' pooling factors.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoints.checkpoint.Checkpoint`.
    """
    return PlanRater(PlannedRanks.of(topology, checkpoint), OptionReader(constraints, statistics))


class DreamShardEstimator(ShardEstimator):
    """Sets ``shard.perf`` to the milliseconds of each shard alone on its rank.

    Usable alone: ``EmbeddingEnumerator(topology, estimator=DreamShardEstimator(rater(topology)))``.
    """

    def __init__(self, context: PlanRater) -> None:
        self._context = context

    @neutral()
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_map: Mapping[str, object] | None = None,  # TorchRec 1.6
        sharder_data_map: Mapping[str, object] | None = None,  # TorchRec 1.7 and later
    ) -> None:
        """Set the perf of every shard, except of unknown kernels, which keep their price.

        Raises:
            PlannerError: an option cannot be rated.
        """
        for option, perf in zip(sharding_options, self._context.alone(sharding_options), strict=True):
            set_perf(option, perf)


class DreamShardPerfModel(PerfModel):
    """Rates plans by ``max over ranks of (forward + backward) + collectives``, in milliseconds.

    Usable alone: ``EmbeddingShardingPlanner(performance_model=DreamShardPerfModel(rater(topology)))``.
    """

    def __init__(self, context: PlanRater) -> None:
        self._context = context

    @neutral()
    @torch.no_grad()
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the overall cost in milliseconds, plus :data:`TIE_WEIGHT` of the compute of all ranks.

        Raises:
            PlannerError: an unpriced kernel, tables that depend on others, or impossible ranks.
        """
        with single_thread():
            costs = self._context.rated(plan).costs
        return float(costs.overall_ms_B[0] + TIE_WEIGHT * costs.device_ms_BD.sum())


class SearchProposer(Proposer):
    """Proposes one plan, with ranks that :class:`DreamShardPartitioner` keeps.

    Args:
        make: returns the plan, once TorchRec's loop asks for it.
    """

    def __init__(self, make: Callable[[], list[ShardingOption]]) -> None:
        self._make = make
        self._pending: list[ShardingOption] | None = None

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """Make the plan, from the planner's options instead of ``search_space``; raises what ``make`` raises."""
        self._pending = self._make()

    def propose(self) -> list[ShardingOption] | None:
        """Return the plan; None when done."""
        return self._pending

    def feedback(self, *given: Any, **named: Any) -> None:
        """See ``Proposer.feedback``: there is one proposal."""
        self._pending = None


class DreamShardPartitioner(Partitioner):
    """Keeps a proposal's ranks if they fit, and searches for ranks of other proposals.

    Usable alone: ``EmbeddingShardingPlanner(partitioner=DreamShardPartitioner())``.

    Args:
        context: reads and rates options; :func:`rater` of the topology of each call by default.
        settings: bounds and seed of the search for each proposal.
        seconds: cap on each search, on top of its counts of candidates; None for no cap.
        quickly: whether a short search is enough, to compare many proposals.
    """

    def __init__(
        self,
        context: PlanRater | None = None,
        settings: SearchSettings | None = None,
        seconds: float | None = None,
        quickly: bool = False,
    ) -> None:
        self._context, self._seconds, self._quickly = context, seconds, quickly
        self._settings = settings or SearchSettings()

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return ``proposal`` with ``shard.rank`` set on every shard.

        Raises:
            PlannerError: the tables do not fit; names table and missing bytes.
        """
        context = self._context or rater(storage_constraint)
        with single_thread():
            settings = replace(self._settings, deadline=Deadline(self._seconds))
            placed = place_proposal(context, proposal, storage_constraint, settings, quickly=self._quickly)
        placed.read.assign(placed.sharding)
        return proposal
