# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What TorchRec's loop (enumerate, propose, partition, rate, keep the best) runs with for one module: our components
where none were given, what its best plan becomes before callbacks, and what it came to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
)

from dreamshard_planner.planning.baseline import BaselineFallback
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.planning.result import PlanResult, SearchRecord
from dreamshard_planner.planning.search_plan import PlacedProposal, SearchedPlan, SearchSettings
from dreamshard_planner.plans.notes import noted
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.search.effort import Deadline
from dreamshard_planner.search_space.options import counted, set_ranks
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
        model: the problem of the module.
        given: components to use instead of ours.
        plan_loader: the planner's; ours is bound to this problem.
        keeps: whether TorchRec's plan may be kept, where ours gains too little.

    Attributes:
        enumerator, proposers, partitioner, perf_model: what TorchRec's loop runs with.
    """

    def __init__(
        self,
        model: ModelProblem,
        given: GivenComponents,
        plan_loader: PlanLoader | None,
        keeps: bool,
    ) -> None:
        context, settings, seconds = model.context, model.settings, model.settings.seconds
        self._model, self._given, self._keeps = model, given, keeps
        self._kept: BaselineFallback | None = None
        self._loader = plan_loader if isinstance(plan_loader, JsonPlanLoader) else None
        if self._loader is not None:
            self._loader.bind(self._matched)
        self.enumerator = given.enumerator or context.enumerator(
            settings.batch_size, DreamShardEstimator(context.topology, context=context)
        )
        self.perf_model = given.perf_model or DreamShardPerfModel(context.topology, context=context)
        self._proposer: SearchProposer | None = None
        if given.proposers is None:
            deadline = Deadline(seconds)
            how = SearchSettings(settings.search, settings.seed, deadline)
            self._proposer = SearchProposer(context, model.left, how)
            # Ours proposes what costs least by our costs; a model that is given may want something else.
            others = [] if given.perf_model is None else few_proposals(deadline, settings.candidates)
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
        return getattr(self.enumerator, "last_stored_search_space", None) or ()

    @property
    def model(self) -> ModelProblem:
        """The problem, with all options that were enumerated by now."""
        if self._model.search_space is not self.search_space:
            self._model = replace(self._model, search_space=self.search_space)
        return self._model

    def settled(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Return the plan that callbacks get for the best one.

        Of a loaded plan TorchRec takes the shards alone: load factors and promotions come from the file. TorchRec's own
        plan is kept if ours gains too little. The best of many proposals is searched on. Caches of sizes of our own get
        the estimates that TorchRec's statistics read.
        """
        if self._loader is not None and self._loader.options:
            plan = self._loader.options
        elif self._given == GivenComponents():
            if self._keeps:
                self._kept = self.model.kept(plan, self._found)
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
        record = SearchRecord(
            plan=tuple(plan),
            made_by=made_by,
            found=self._found,
            placed=self._placed(),
            kept=self._kept,
            loaded=None if self._loader is None else self._loader.loaded,
            notes=noted("search", rated),
        )
        return PlanResult.of(self.model, record)

    def _matched(self, saved: SavedPlan) -> dict[int, ShardingOption]:
        return self.model.matched(saved)

    @property
    def _found(self) -> SearchedPlan | None:
        return None if self._proposer is None else self._proposer.found

    def _placed(self) -> Sequence[PlacedProposal]:
        return () if self._ours is None else self._ours.placed

    def _searched_on(self, plan: list[ShardingOption], partitioner: DreamShardPartitioner) -> list[ShardingOption]:
        """The best of many proposals, which were placed quickly, with ranks by all of the search; as it was, where the
        performance model rates that no better."""
        again = copy.deepcopy(list(plan))
        for option in again:
            set_ranks(option, None)
        partitioner.quickly = False
        try:
            partitioner.partition(again, self._model.left)
        except PlannerError:  # no room is found without the ranks that it came with
            return plan
        return again if self.perf_model.rate(again) < self.perf_model.rate(plan) else plan
