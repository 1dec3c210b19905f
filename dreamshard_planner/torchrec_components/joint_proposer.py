# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Proposer`` for all sharding types: how tables are split, searched together with where shards go."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption, Topology

from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.joint_plan import (
    HowToSearch,
    JointPlan,
    as_found,
    fastest_whole,
    joint_plan,
    with_cache_sizes,
)
from dreamshard_planner.planning.placing import Countdown, stage_seconds
from dreamshard_planner.search.local_search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.search_space.options import by_table, refused, set_ranks
from dreamshard_planner.search_space.sharding_types import TW
from dreamshard_planner.search_space.variants import uses_host_memory
from dreamshard_planner.torchrec_components.proposer import TableWiseProposer


class JointProposer(Proposer):
    """Proposes what :func:`~dreamshard_planner.planning.joint_plan.joint_plan` makes of all options, with its ranks,
    which :class:`~dreamshard_planner.torchrec_components.partitioner.DreamShardPartitioner` starts from.

    TorchRec tells a proposer what the storage reservation left only with the feedback on its first proposal. Where that
    is not given beforehand, whole tables are proposed first, and the search follows. Where every table can only be
    placed whole, :class:`~dreamshard_planner.torchrec_components.proposer.TableWiseProposer` proposes kernels, and the
    search follows where caches of other sizes may serve better.

    Args:
        context: reads and rates options.
        topology: what the storage reservation leaves, where that is known.
        search: of moves and swaps; None to leave whole tables as ``TableWiseProposer`` proposes them.
        effort: multiple of the default's candidates, for all but moves and swaps.
        seed: of the search.
        search_seconds: cap on the search, a third of it for each stage; None for none.

    Attributes:
        found: what the last search came to; None where there was none.
    """

    def __init__(
        self,
        context: PlanningContext,
        topology: Topology | None = None,
        search: SearchConfig | None = DEFAULT_SEARCH,
        seed: int = 0,
        search_seconds: float | None = None,
        effort: float = 1.0,
    ) -> None:
        self._context = context
        self._topology = topology
        self._sizes_caches = search is not None
        self._search, self._seed = search or DEFAULT_SEARCH.times(effort), seed
        self._stage_seconds = stage_seconds(search_seconds)
        self._effort = effort
        self._table_wise: TableWiseProposer | None = None
        self._best: tuple[float, list[ShardingOption]] | None = None
        self._pending: list[ShardingOption] | None = None
        self._options: list[ShardingOption] = []
        self.found: JointPlan | None = None

    def load(self, search_space: Sequence[ShardingOption], enumerator: Enumerator | None = None) -> None:
        """See ``Proposer.load``; raises ``PlannerError`` where a table has no option of a type that the context's
        constraints leave it."""
        self._options = self._context.searched_options(search_space)
        self.found, self._pending, self._table_wise, self._best = None, None, None, None
        if all(option.sharding_type == TW for option in self._options):
            self._table_wise = TableWiseProposer()
            self._table_wise.load(self._options, enumerator)
        elif self._topology is None:
            self._pending = fastest_whole(self._options)
        else:
            self._pending = self._searched(self._topology)

    def propose(self) -> list[ShardingOption] | None:
        """See ``Proposer.propose``; None when done."""
        if self._table_wise is not None and (proposal := self._table_wise.propose()) is not None:
            return proposal
        if self._table_wise is not None:
            self._table_wise, self._pending = None, self._with_cache_sizes()
        return self._pending

    def feedback(
        self,
        partitionable: bool,
        plan: list[ShardingOption] | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        """See ``Proposer.feedback``: the joint search, where it has not been."""
        if self._table_wise is not None:
            self._table_wise.feedback(partitionable, plan, perf_rating, storage_constraint)
            self._topology = self._topology or storage_constraint
            if plan is not None and perf_rating is not None and (self._best is None or perf_rating < self._best[0]):
                self._best = perf_rating, copy.deepcopy(plan)
            return
        self._pending = None
        if self.found is None and storage_constraint is not None:
            self._pending = self._searched(storage_constraint)

    def propose_again(self, topology: Topology, seconds: float | None) -> list[ShardingOption]:
        """The proposal of another search, without what the context leaves out by now; rivals are those of the first.

        Args:
            topology: what the storage reservation leaves.
            seconds: cap on the search; None for none.

        Raises:
            PlannerError: a table has no option left, or nothing fits.
        """
        before, everything = self.found, by_table(self._options)
        self._options = self._context.without_left_out(self._options)
        if before is None or by_table(self._options).keys() != everything.keys():
            raise refused("a table has no other sharding type")
        for option in self._options:
            set_ranks(option, None)
        self._stage_seconds = stage_seconds(seconds)
        proposal = self._searched(topology)
        if self.found is None or self.found.result is None:
            raise refused("nothing fits without what is left out")
        self.found = replace(self.found, rivals=before.rivals, torchrec=before.torchrec)
        return proposal

    def _searched(self, topology: Topology) -> list[ShardingOption]:
        """Without options whose cost is a guess, and among all only where nothing fits otherwise."""
        options, how = self._context.certain_options(self._options), self._how()
        self.found = joint_plan(self._context, options, topology, how)
        if self.found.result is None and len(options) < len(self._options):
            options = self._options
            self.found = joint_plan(self._context, options, topology, how)
        self.found = with_cache_sizes(self._context, options, topology, how, self.found)
        return self.found.proposal

    def _with_cache_sizes(self) -> list[ShardingOption] | None:
        """After whole tables with caches of TorchRec's size: the best of them with others; None where that is it."""
        plan = None if self._best is None else self._best[1]
        if not self._sizes_caches or self._topology is None or (plan is not None and not uses_host_memory(plan)):
            return None
        start = as_found(self._context, self._options, self._topology, plan)
        found = with_cache_sizes(self._context, self._options, self._topology, self._how(), start)
        if found is start or found.result is None:
            return None
        self.found = found
        return found.proposal

    def _how(self) -> HowToSearch:
        """With all of the time from now on."""
        return HowToSearch(self._search, self._effort, self._seed, self._stage_seconds, Countdown(self._stage_seconds))
