# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Partitioner``: ranks by a search, or by a heuristic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torchrec.distributed.planner.types import ParameterConstraints, Partitioner, ShardingOption, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.planning.context import PlanRater, RatedPlan
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.planning.search_plan import SearchSettings, place_proposal, wide_units_laid_down
from dreamshard_planner.search.effort import DEFAULT_SEARCH, Deadline, SearchConfig
from dreamshard_planner.search.placing import HEURISTICS, place_by_heuristic
from dreamshard_planner.search_space.input_checks import checked_seed
from dreamshard_planner.search_space.usable_options import pin
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics


class DreamShardPartitioner(Partitioner):
    """Keeps a proposal's ranks if they fit, and searches for ranks of other proposals.

    Usable alone: ``EmbeddingShardingPlanner(partitioner=DreamShardPartitioner())``.

    Args:
        constraints: per table, for ``num_poolings``, ``batch_sizes`` and ``is_weighted``.
        statistics: workload statistics per feature.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoints.checkpoint.Checkpoint`.
        search: counts of candidates.
        seed: of the search.
        search_seconds: cap on the search, on top of its counts of candidates; None for no cap.
        context: shared by the components of one planner; made from the other arguments by default.
        quickly: whether a short search is enough, to compare many proposals.

    Attributes:
        placed: the last placed proposal.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        search: SearchConfig = DEFAULT_SEARCH,
        seed: int = 0,
        search_seconds: float | None = None,
        context: PlanRater | None = None,
        quickly: bool = False,
    ) -> None:
        self._arguments = (constraints, statistics, checkpoint)
        self._settings = SearchSettings(search, checked_seed(seed))
        self._seconds = search_seconds
        self._context = context
        self.quickly = quickly
        self.placed: RatedPlan | None = None

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return ``proposal`` with ``shard.rank`` set on every shard.

        Raises:
            PlannerError: the tables do not fit; names table and missing bytes.
        """
        context = self._context or PlanRater.of(storage_constraint, *self._arguments)
        with single_thread():
            settings = replace(self._settings, deadline=Deadline(self._seconds))
            placed = place_proposal(context, proposal, storage_constraint, settings, quickly=self.quickly)
        placed.read.assign(placed.sharding)
        self.placed = placed
        return proposal


class RulePartitioner(Partitioner):
    """Places shards by a greedy heuristic.

    Args:
        rule: a name of :data:`~dreamshard_planner.search.placing.HEURISTICS`, such as ``size_greedy``.
        constraints: per table, as in :class:`DreamShardPartitioner`.
        statistics: workload statistics per feature.
    """

    def __init__(
        self,
        rule: str,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
    ) -> None:
        if rule not in HEURISTICS:
            raise ValueError(f"unknown heuristic {rule!r}; known are {', '.join(HEURISTICS)}")
        self._rule = rule
        self._arguments = (constraints, statistics)

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return ``proposal`` with ranks; raises ``PlannerError`` if the heuristic runs out of memory."""
        context = PlanRater.of(storage_constraint, *self._arguments)
        if any(option.dependency for option in proposal):
            pin(proposal, storage_constraint)
        read = context.read(proposal, storage_constraint)
        chosen = wide_units_laid_down(context.cost(read))
        assignment_S = place_by_heuristic(chosen.cost.problem, self._rule)
        if assignment_S is None:
            raise infeasible(chosen.cost.problem, False, context.splitting_left_out)
        read.assign(chosen.placed(assignment_S))
        return proposal
