# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What TorchRec's loop (enumerate, propose, partition, rate, keep the best) runs with for one module: our components
where none were given, what its best plan becomes before callbacks, and what it came to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
)

from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.kept import KeptPlan
from dreamshard_planner.planning.result import CameTo, PlanResult
from dreamshard_planner.planning.search_plan import HowToSearch, PlacedProposal, SearchedPlan
from dreamshard_planner.planning.session import PlanningSession
from dreamshard_planner.plans.notes import noted
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search.effort import Deadline
from dreamshard_planner.search_space.modules import of_modules
from dreamshard_planner.search_space.options import counted, set_ranks
from dreamshard_planner.search_space.sharding_types import MIXED_MEAN
from dreamshard_planner.torchrec_components.estimates import DreamShardEstimator, DreamShardPerfModel
from dreamshard_planner.torchrec_components.partitioner import DreamShardPartitioner
from dreamshard_planner.torchrec_components.plan_loader import JsonPlanLoader
from dreamshard_planner.torchrec_components.proposer import SearchProposer, few_proposals


@dataclass(frozen=True)
class GivenComponents:
    """TorchRec's components that a user gave; None for ours."""

    enumerator: Enumerator | None = None
    proposers: list[Proposer] | None = None
    partitioner: Partitioner | None = None
    perf_model: PerfModel | None = None


class SearchLoop:
    """One run of TorchRec's loop.

    Args:
        session: the problem of the module.
        given: components to use instead of ours.
        plan_loader: the planner's; ours is bound to this problem.
        keeps: whether TorchRec's plan may be kept, where ours gains too little.
        seconds: cap on the search; None for none.

    Attributes:
        enumerator, proposers, partitioner, perf_model: what TorchRec's loop runs with.
    """

    def __init__(
        self,
        session: PlanningSession,
        given: GivenComponents,
        plan_loader: PlanLoader | None,
        keeps: bool,
        seconds: float | None,
    ) -> None:
        request, context, settings = session.request, session.context, session.request.settings
        self._session, self._given, self._keeps = session, given, keeps
        self._kept: KeptPlan | None = None
        self._deadline = Deadline(seconds)
        self._loader = plan_loader if isinstance(plan_loader, JsonPlanLoader) else None
        if self._loader is not None:
            self._loader.bind(self._matched)
        self.enumerator = given.enumerator or context.enumerator(request.batch_size, estimator_of(context))
        self.perf_model = given.perf_model or DreamShardPerfModel(request.topology, context=context)
        self._proposer: SearchProposer | None = None
        if given.proposers is None:
            how = HowToSearch(settings.search, settings.seed, seconds)
            self._proposer = SearchProposer(context, session.left, how)
            # Ours proposes what costs least by our costs; a model that is given may want something else.
            others = [] if given.perf_model is None else few_proposals(self._deadline, settings.candidates)
            self.proposers = [self._proposer, *others]
        else:
            self.proposers = given.proposers
        many = given.proposers is not None or given.perf_model is not None
        self._compares_many = many and given.partitioner is None
        self.partitioner = given.partitioner or DreamShardPartitioner(
            search=settings.search,
            seed=settings.seed,
            search_seconds=seconds,
            context=context,
            quickly=self._compares_many,
        )
        self._ours = self.partitioner if isinstance(self.partitioner, DreamShardPartitioner) else None
        if self._ours is not None:
            self._ours.placed.clear()

    @property
    def search_space(self) -> Sequence[ShardingOption]:
        """All options of the module, as the enumerator keeps them; empty before, and where it keeps none."""
        return enumerated(self.enumerator)

    @property
    def session(self) -> PlanningSession:
        """The problem, with all options that were enumerated by now."""
        return self._session.planned(self.search_space)

    def settled(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """The plan that callbacks get for the best one: of a plan that is loaded TorchRec takes no more than the
        shards, and loses load factors and promotions; types are left out whose outputs ranks could not exchange;
        TorchRec's own plan is kept where ours gains too little; the best of many proposals is searched on; and
        TorchRec's statistics read all estimates, which caches of sizes of our own lack."""
        if self._loader is not None and self._loader.options:
            plan = self._loader.options
        elif self._given == GivenComponents():
            plan = self._exchangeable(plan)
            if self._keeps:
                self._kept = self.session.kept(plan, self._found)
            if self._kept is not None:
                plan = copy.deepcopy(list(self._kept.options))
                self.enumerator.populate_estimates(plan)  # by our costs, as those of other plans are
        elif self._compares_many and self._ours is not None and self._ours.placed:
            plan = self._searched_on(plan, self._ours)
        if bare := [option for option in plan if any(shard.perf is None for shard, _ in counted(option))]:
            self.enumerator.populate_estimates(bare)
        return plan

    def result(self, plan: Sequence[ShardingOption], proposals: int) -> PlanResult:
        """What the loop came to.

        Args:
            plan: the best, after callbacks.
            proposals: that were partitioned; 0 where the plan was loaded.
        """
        made_by = "loaded by plan_loader"
        if proposals and self._ours is None:
            made_by = f"placed by the {type(self.partitioner).__name__} that was given"
        rated = []
        if self._given.perf_model is not None and proposals:
            rated.append(
                f"plans were rated by the {type(self.perf_model).__name__} that was given, not by the costs shown "
                f"here: {proposals} proposals"
            )
        if self._session.in_rows:
            named = of_modules(self._session.in_rows)
            rated.append(f"all tables {named} lie in blocks of rows, since nothing else fits: {MIXED_MEAN}")
        came_to = CameTo(
            plan=tuple(plan),
            made_by=made_by,
            found=self._found,
            placed=self._placed(),
            kept=self._kept,
            loaded=None if self._loader is None else self._loader.loaded,
            notes=noted("search", rated),
        )
        return PlanResult.of(self.session, came_to)

    def _matched(self, saved: SavedPlan) -> dict[int, ShardingOption]:
        return self.session.matched(saved)

    @property
    def _found(self) -> SearchedPlan | None:
        return None if self._proposer is None else self._proposer.found

    def _placed(self) -> Sequence[PlacedProposal]:
        return () if self._ours is None else self._ours.placed

    def _exchangeable(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """The plan, searched for again without types whose outputs ranks would send in different types, for as long as
        there are any, within what time is left; as it was, where no other plan is found."""
        again, before = plan, self._found
        while (mixed := self.session.mixed_exchanges(again)) and self._proposer is not None:
            self._leave_out([(exchange.path, exchange.sharding_type) for exchange in mixed])
            try:
                proposal = self._proposer.propose_again(self._deadline.left())
                placed = self.partitioner.partition(proposal, self._session.left)
            except PlannerError:
                self._leave_out(())
                self._proposer.found = before
                return plan
            again = copy.deepcopy(placed)
        return again

    def _leave_out(self, more: Sequence[tuple[str, str]]) -> None:
        """Sharding types, by module, in all that is searched or told of the problem from now on; none to take all
        back."""
        left_out = (*self._session.context.left_out, *more) if more else ()
        self._session.context.left_out = left_out
        for space in filter(None, (self._session.wider, self._session.unrestricted)):
            space.context.left_out = left_out

    def _searched_on(self, plan: list[ShardingOption], partitioner: DreamShardPartitioner) -> list[ShardingOption]:
        """The best of many proposals, which were placed quickly, with ranks by all of the search; as it was, where the
        performance model rates that no better."""
        again = copy.deepcopy(list(plan))
        for option in again:
            set_ranks(option, None)
        partitioner.quickly = False
        try:
            partitioner.partition(again, self._session.left)
        except PlannerError:  # no room is found without the ranks that it came with
            return plan
        return again if self.perf_model.rate(again) < self.perf_model.rate(plan) else plan


def estimator_of(context: PlanningContext) -> DreamShardEstimator:
    """Of single shards, by the costs of a context."""
    return DreamShardEstimator(context.topology, context=context)


def enumerated(enumerator: Enumerator) -> Sequence[ShardingOption]:
    """All options of the last module, as its enumerator keeps them; empty before, and where it keeps none."""
    return getattr(enumerator, "last_stored_search_space", None) or ()
