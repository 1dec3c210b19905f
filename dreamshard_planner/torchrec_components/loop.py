# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One run of TorchRec's loop (enumerate, propose, partition, rate, keep the best): and its plan loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
)

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.hot_rows.choice import HotRowsChoice, choose_hot_rows, dedup_notes
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.planning.remembered import LEAST_GAIN, Remembered, Replacement
from dreamshard_planner.planning.result import PlanResult
from dreamshard_planner.planning.search_plan import SearchSettings
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Note, ReportEntry, noted
from dreamshard_planner.search_space.options import fqn_of, perf_of, ranks_of, set_ranks
from dreamshard_planner.torchrec_components.components import (
    DreamShardEstimator,
    DreamShardPartitioner,
    DreamShardPerfModel,
    SearchProposer,
)

PATIENCE = 20
"""Proposals without a gain, one after the other, at which TorchRec's greedy proposers end."""


def kept_baseline(
    model: ModelProblem, plan: Sequence[ShardingOption], theirs: Sequence[ShardingOption] | None
) -> Replacement | None:
    """Return TorchRec's plan if the searched one is predicted to gain less than costs can tell; else None.

    Without statistics both planners assume one lookup per sample of each feature. Plans that these costs rate alike
    then differ in steps by chance, either way: see ``benchmarks/results/training-steps.md``.

    Args:
        model: the planned one.
        plan: the searched plan.
        theirs: TorchRec's plan; None without one that fits.
    """
    settings = model.settings
    guessed = settings.cost_source != "torchrec" and not any(
        settings.tells_lookups(option.name, feature)
        for option in plan
        for feature in model.context.reader.declared(option).features
    )
    least = (LEAST_GAIN if guessed else 0.0) if settings.least_gain is None else settings.least_gain
    if theirs is None or least == 0.0 or signatures(theirs) == signatures(plan):
        return None
    baseline, searched = model.rated(theirs), model.rated(plan)
    gain = 1 - searched.total_ms / max(baseline.total_ms, 1e-9)
    if gain >= least:
        return None
    text = (
        f"TorchRec's plan is kept: the searched one is predicted to gain {max(0.0, 100 * gain):.2f} %, less "
        f"than the {100 * least:.3g} % of least_gain"
    )
    if settings.least_gain is None:
        text += ", since lookups per sample are guessed; statistics would tell which plan is better"
    note = Note("search", text, {"gain": gain, "least_gain": least})
    return Replacement(baseline.options, note, ReportEntry.of("searched", searched.costs))


Signatures: TypeAlias = dict[str, tuple[Hashable, tuple[int | None, ...]]]
"""Sharding and ranks of each table, by name."""


def signatures(plan: Iterable[ShardingOption]) -> Signatures:
    """Return the sharding and the ranks of each table; equal for equal plans."""
    return {
        fqn_of(option): (
            (option.sharding_type, option.compute_kernel, option.cache_load_factor, option.num_shards),
            tuple(ranks_of(option)),
        )
        for option in plan
    }


class JsonPlanLoader(PlanLoader):
    """Loads a file of ``DreamShardPlanner.save_plan`` instead of planning: ``DreamShardPlanner(plan_loader=...)``.

    It works on every release of TorchRec that the package accepts. The file is read on the rank that plans. A plan for
    other tables, ranks, memory, batch size or constraints is refused with ``PlannerError``, which names the difference.
    Statistics, bandwidths, cost source, seed and versions may differ; the report then says so.

    Args:
        path: of the file.

    Attributes:
        loaded: the plan of the file, once it was found to fit.

    Example::

        loader = JsonPlanLoader("plan.json") if Path("plan.json").exists() else None
        planner = DreamShardPlanner(batch_size=512, plan_loader=loader)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.loaded: SavedPlan | None = None
        self.options: list[ShardingOption] = []
        """Options of the file."""
        self._matched: Callable[[SavedPlan], dict[int, ShardingOption]] | None = None

    def bind(self, matched: Callable[[SavedPlan], dict[int, ShardingOption]]) -> None:
        """Set the planner's function that returns a file's options by storage hash, or refuses the file."""
        self._matched, self.loaded, self.options = matched, None, []

    def load(self) -> dict[int, ShardingOption]:
        """See ``PlanLoader.load``.

        Raises:
            PlanError: the file can't be read.
            PlannerError: the plan is stale.
            DreamShardError: the planner is another one, which cannot recognise a stale plan.
        """
        if self._matched is None:
            raise DreamShardError(
                f"{self.path}: JsonPlanLoader needs DreamShardPlanner, which can tell whether the plan still fits; "
                "plan with it, and give its ShardingPlan to any DistributedModelParallel"
            )
        saved = SavedPlan.load(self.path)
        options = self._matched(saved)
        self.loaded, self.options = saved, list(options.values())
        return options

    def plan_context_hash(self) -> None:
        """Return None, since :meth:`load` checks more than a hash."""
        return None

    def get_plan_id(self) -> str:
        """Return the path, for TorchRec's log."""
        return str(self.path)


@dataclass(frozen=True)
class GivenComponents:
    """TorchRec's components that the user gave; None for ours."""

    enumerator: Enumerator | None = None
    proposers: list[Proposer] | None = None
    partitioner: Partitioner | None = None
    perf_model: PerfModel | None = None


class SearchLoop:
    """One run of TorchRec's loop.

    Args:
        model: the problem of the module.
        given: components to use instead of ours.
        plan_loader: of the planner; ours is bound to this problem.
        falls_back: whether TorchRec's plan is taken if ours gains too little.
        remembered: observed plans of the model's tables.

    Attributes:
        enumerator, proposers, partitioner, perf_model: the components of the loop.
        hot_rows: of the best plan; None if none were asked for, or the plan was loaded.
    """

    def __init__(
        self,
        model: ModelProblem,
        given: GivenComponents,
        plan_loader: PlanLoader | None,
        falls_back: bool,
        remembered: Remembered | None = None,
    ) -> None:
        context, settings = model.context, model.settings
        self._model, self._given, self._falls_back, self._remembered = model, given, falls_back, remembered
        self._replacements: list[Replacement] = []
        self.hot_rows: HotRowsChoice | None = None
        self._placed: Signatures = {}
        """Signatures of the plan before the user's callbacks."""
        self._loader = plan_loader if isinstance(plan_loader, JsonPlanLoader) else None
        if self._loader is not None:
            self._loader.bind(self._matched)
        self.enumerator = given.enumerator or context.enumerator(settings.batch_size)
        self.perf_model = given.perf_model or DreamShardPerfModel(context)
        search = SearchSettings(settings.search, settings.seed)
        self._proposer: SearchProposer | None = None
        self.proposers = given.proposers or []
        if given.proposers is None:
            self._proposer = SearchProposer(context, model.left, search, settings.seconds)
            self.proposers = [self._proposer]
            if given.perf_model is not None:  # it may like a plan of TorchRec's better than ours
                self.proposers += [UniformProposer(), *(GreedyProposer(depth, PATIENCE) for depth in (True, False))]
        many = given.proposers is not None or given.perf_model is not None
        self._ours = None
        if given.partitioner is None:
            self._ours = DreamShardPartitioner(context, search, settings.seconds, quickly=many)
        self.partitioner = given.partitioner or self._ours

    @property
    def search_space(self) -> Sequence[ShardingOption]:
        """All options of the module; empty before they are enumerated, or if the enumerator keeps none."""
        return getattr(self.enumerator, "last_stored_search_space", None) or ()

    @property
    def model(self) -> ModelProblem:
        """The problem, with the options enumerated so far."""
        if self._model.search_space is not self.search_space:
            self._model = replace(self._model, search_space=self.search_space)
        return self._model

    def _matched(self, saved: SavedPlan) -> dict[int, ShardingOption]:
        return self.model.matched(saved)

    def before_callbacks(self, plan: list[ShardingOption]) -> list[ShardingOption]:
        """Return the plan that the user's callbacks get for TorchRec's best plan.

        TorchRec takes only the shards of a loaded plan; load factors and promotions come from the file. TorchRec's own
        plan is taken if ours gains too little. The best of many proposals is searched again in full.
        """
        if self._loader is not None and self._loader.options:
            plan = self._loader.options
        elif self._given == GivenComponents():
            if self._falls_back and self._proposer is not None and self._proposer.found is not None:
                plan = self._replaced(plan, kept_baseline(self.model, plan, self._proposer.found.baseline))
            if self._remembered is not None:
                plan = self._replaced(plan, self._remembered.kept(self.model, plan))
        elif self._ours is not None and self._ours.placed is not None:
            plan = self._searched_again(plan, self._ours)
        if self._model.settings.hot_rows_bytes and self._loader is None:
            self.hot_rows = choose_hot_rows(self.model, plan, self._model.settings.hot_rows_bytes)
            plan = list(self.hot_rows.options)
        # TorchRec's statistics and callbacks read our costs, except of a given enumerator's options.
        bare = plan if self._given.enumerator is None else [option for option in plan if None in perf_of(option)]
        DreamShardEstimator(self._model.context).estimate(bare)
        self._placed = signatures(plan)
        return plan

    def _replaced(self, plan: list[ShardingOption], other: Replacement | None) -> list[ShardingOption]:
        """Return the plan, or the other one that takes its place."""
        if other is None:
            return plan
        self._replacements.append(other)
        return other.options

    def result(self, plan: Sequence[ShardingOption], proposals: int) -> PlanResult:
        """Return the result of the loop.

        Args:
            plan: the best plan, after callbacks.
            proposals: number of partitioned proposals; 0 if the plan was loaded.
        """
        if self._loader is not None:
            return PlanResult.of(self.model, plan, loaded=self._loader.loaded)
        found = None if self._proposer is None else self._proposer.found
        ours = self._ours if proposals else None
        searched = None if ours is None else found or ours.placed
        notes: list[Note] = []
        if ours is None:
            placed = f"placed by the {type(self.partitioner).__name__} that was given"
            how = f"the plan was {placed if proposals else 'loaded by plan_loader'}"
            notes += noted("search", [how if found else f"{how}; no other was searched for"])
        elif found is not None and found.torchrec is not None:
            notes += found.torchrec.notes()
        notes += [other.note for other in self._replacements]
        if self.hot_rows is not None:
            notes.append(self.hot_rows.note())
        notes += dedup_notes(self.model, plan)
        now = signatures(plan)
        is_changed = ours is not None and now != self._placed
        if is_changed:
            same_ways = all(now[fqn][0] == way for fqn, (way, _) in self._placed.items())
            verb = "moved tables" if same_ways else "changed options"
            text = f"callbacks {verb} after they were placed; dreamshard is the plan that they made"
            notes.append(Note("callbacks", text))
        if self._given.perf_model is not None and proposals:
            text = (
                f"plans were rated by the {type(self.perf_model).__name__} that was given, not by the costs shown "
                f"here: {proposals} proposals"
            )
            notes.append(Note("search", text))
        rivals = [one.searched for one in self._replacements if one.searched is not None]
        return PlanResult.of(
            self.model,
            plan,
            notes=notes,
            rivals=(*(() if searched is None else searched.rivals), *rivals),
            result=None if searched is None else searched.result,
            is_placed=ours is not None,
            is_changed=is_changed,
            excludes=ours is not None and self._given.enumerator is None and self._model.settings.exact_training,
        )

    def _searched_again(self, plan: list[ShardingOption], partitioner: DreamShardPartitioner) -> list[ShardingOption]:
        """Return the best of many quickly placed proposals with ranks by all of the search; unchanged if the
        performance model rates that no better."""
        again = copy.deepcopy(list(plan))
        for option in again:
            set_ranks(option, None)
        partitioner.quickly, partitioner.placed = False, None
        try:
            partitioner.partition(again, self._model.left)
        except PlannerError:  # no room is found without the proposal's own ranks
            return plan
        return again if self.perf_model.rate(again) < self.perf_model.rate(plan) else plan
