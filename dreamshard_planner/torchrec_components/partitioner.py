# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Partitioner``: where ranks are chosen, by policy and search or by a heuristic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchrec.distributed.planner.types import ParameterConstraints, Partitioner, ShardingOption, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.infeasible import infeasible
from dreamshard_planner.planning.placing import Outcome, place_proposal, wide_units_laid_down
from dreamshard_planner.search.heuristics import HEURISTICS, place_by_heuristic
from dreamshard_planner.search.local_search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.search_space.input_checks import checked_seed
from dreamshard_planner.search_space.towers import pin
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics


class DreamShardPartitioner(Partitioner):
    """Places the shards of any proposal: what spans hosts or the world first, the rest on top with the policy network
    and search over the cost network.

    Usable alone: ``EmbeddingShardingPlanner(partitioner=DreamShardPartitioner())``.

    Args:
        constraints: per table, for ``num_poolings``, ``batch_sizes`` and ``is_weighted``.
        statistics: workload statistics per feature.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoints.checkpoint.Checkpoint`.
        search: search settings; None for one policy roll-out alone (the paper's procedure).
        seed: of the sampled roll-outs and the search.
        search_seconds: cap on the search, on top of the count of candidates; a third of it for a proposal that comes
            with ranks. None for no cap.
        effort: multiple of the default's work on packing tables that hardly fit.
        context: shared by the components of one planner; made from the other arguments by default.
        quickly: :meth:`partition` places each proposal only so far that many can be compared, whatever the search.

    Attributes:
        placed: how each proposal was placed, until that is cleared; thoroughly placed ones first.
    """

    def __init__(
        self,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        statistics: TableStatistics | None = None,
        checkpoint: str | Path | Checkpoint = "auto",
        search: SearchConfig | None = DEFAULT_SEARCH,
        seed: int = 0,
        search_seconds: float | None = None,
        effort: float = 1.0,
        context: PlanningContext | None = None,
        quickly: bool = False,
    ) -> None:
        self._arguments = (constraints, statistics, checkpoint)
        self._search, self._quickly = search, quickly
        self._seed = checked_seed(seed)
        self._seconds, self._effort = search_seconds, effort
        self._context = context
        self.placed: list[Outcome] = []

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank`` of every shard of ``proposal`` and return it, as TorchRec's contract has it.

        Raises:
            PlannerError: where the tables do not fit, naming table and missing bytes.
        """
        outcome = self._place(proposal, storage_constraint, self._quickly, self._seconds)
        self.placed.append(outcome)
        return proposal

    @neutral()
    def partition_thoroughly(
        self, proposal: list[ShardingOption], storage_constraint: Topology, seconds: float | None
    ) -> list[ShardingOption]:
        """:meth:`partition` with all of the search, whatever ``quickly`` says, within other ``seconds``."""
        outcome = self._place(proposal, storage_constraint, False, seconds)
        self.placed.insert(0, outcome)
        return proposal

    def _place(
        self, proposal: list[ShardingOption], storage_constraint: Topology, quickly: bool, seconds: float | None
    ) -> Outcome:
        context = self._context or PlanningContext.of(storage_constraint, *self._arguments)
        with single_thread():
            outcome = place_proposal(
                context,
                proposal,
                storage_constraint,
                self._search,
                seed=self._seed,
                seconds=None if quickly else seconds,
                packing=self._effort,
                quickly=quickly,
            )
        outcome.read.assign(outcome.sharding)
        return outcome


class RulePartitioner(Partitioner):
    """Places shards by a greedy heuristic.

    Args:
        rule: a name of :data:`~dreamshard_planner.search.heuristics.HEURISTICS`, such as ``size_greedy``.
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
        """Set ``shard.rank``; raises ``PlannerError`` where the heuristic dead-ends on memory."""
        context = PlanningContext.of(storage_constraint, *self._arguments)
        if any(option.dependency for option in proposal):
            pin(proposal, storage_constraint)
        read = context.read(proposal, storage_constraint)
        chosen = wide_units_laid_down(context.cost(read))
        assignment_S = place_by_heuristic(chosen.cost.problem, self._rule)
        if assignment_S is None:
            raise infeasible(chosen.cost.problem, False, context.splitting_left_out)
        read.assign(chosen.placed(assignment_S))
        return proposal
