# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Proposer``: the searched plan, and beside it a few of TorchRec's proposals where a user rates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from dreamshard_planner.planning.context import PlanRater
from dreamshard_planner.planning.search_plan import SearchedPlan, SearchSettings, search_plan, with_cache_sizes
from dreamshard_planner.search.effort import Deadline, portion

TABLES_PLACED = 1000
"""Tables x proposals of each of TorchRec's proposers: some seconds for all."""
LEAST_PROPOSALS = 20
"""Where there are many tables."""


class SearchProposer(Proposer):
    """Proposes the plan that a search of all options finds, with its ranks, which
    :class:`~dreamshard_planner.torchrec_components.partitioner.DreamShardPartitioner` keeps.

    Args:
        context: reads and rates options.
        topology: what the storage reservation leaves.
        how: settings of the search.

    Attributes:
        found: the outcome of the last search; None where there was none.
    """

    def __init__(self, context: PlanRater, topology: Topology, how: SearchSettings) -> None:
        self._context, self._topology, self._how = context, topology, how
        self._pending: list[ShardingOption] | None = None
        self._options: list[ShardingOption] = []
        self.found: SearchedPlan | None = None

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """See ``Proposer.load``; raises ``PlannerError`` where a table has no option of a type that the context's
        constraints leave it."""
        self._options, self.found = self._context.searched_options(search_space), None
        self._pending = self._searched()

    def propose(self) -> list[ShardingOption] | None:
        """See ``Proposer.propose``; None when done."""
        return self._pending

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """See ``Proposer.feedback``: there is one proposal."""
        self._pending = None

    def _searched(self) -> list[ShardingOption]:
        """Without options whose cost is a guess, and among all only where nothing fits otherwise."""
        options = self._context.certain_options(self._options)
        self.found = search_plan(self._context, options, self._topology, self._how)
        if self.found.result is None and len(options) < len(self._options):
            options = self._options
            self.found = search_plan(self._context, options, self._topology, self._how)
        self.found = with_cache_sizes(self._context, options, self._topology, self._how, self.found)
        return self.found.proposal


class FewProposals(Proposer):
    """Another proposer's first proposals, the fewer the more tables there are.

    Args:
        proposer: the other one.
        deadline: no more than one proposal after it.
        effort: multiple of the default's number of proposals.
    """

    def __init__(self, proposer: Proposer, deadline: Deadline, effort: float) -> None:
        self._proposer, self._deadline, self._effort = proposer, deadline, effort
        self._proposed = self._most = 0

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """See ``Proposer.load``."""
        tables = len({option.fqn for option in search_space})
        most = max(LEAST_PROPOSALS, TABLES_PLACED // max(1, tables))
        self._proposed, self._most = 0, portion(most, self._effort)
        self._proposer.load(search_space=search_space, enumerator=enumerator)

    def propose(self) -> list[ShardingOption] | None:
        """See ``Proposer.propose``."""
        if self._proposed == self._most or (self._proposed and self._deadline.left() == 0.0):
            return None
        self._proposed += 1
        return self._proposer.propose()

    def feedback(self, *given: Any, **named: Any) -> None:
        """See ``Proposer.feedback``."""
        self._proposer.feedback(*given, **named)


def few_proposals(deadline: Deadline, effort: float) -> list[Proposer]:
    """Return TorchRec's proposers by default, but for the grid, for a performance model that may like another plan
    better than ours; proposals of one kind for all tables come first.

    Args:
        deadline: which all share.
        effort: multiple of the default's number of proposals.
    """
    theirs = (UniformProposer(), GreedyProposer(), GreedyProposer(use_depth=False))
    return [FewProposals(proposer, deadline, effort) for proposer in theirs]
