# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Components of TorchRec's loop (enumerate, propose, partition, rate, keep the best) by our costs and search; one run
of the loop, and its plan loader."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardEstimator,
    ShardingOption,
    Topology,
)

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.hot_rows.choice import choose_hot_rows, dedup_notes
from dreamshard_planner.planning.given_plans import shardings
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater, RatedPlan
from dreamshard_planner.planning.result import ChosenPlan, signatures
from dreamshard_planner.planning.search_plan import SearchedPlan, place_proposal, search_plan
from dreamshard_planner.planning.settings import Remembered, sharding_key
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.plans.report import Note, ReportEntry, noted
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.effort import DEFAULT_SETTINGS, SearchSettings
from dreamshard_planner.search_space.options import perf_of, set_perf, set_ranks
from dreamshard_planner.support.reproducible import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics

logger = logging.getLogger(__name__)

TIE_WEIGHT = 1e-6
"""Weight of the compute of all ranks, which decides between plans with equally slow bottlenecks. TorchRec keeps the
first of them, even if it moves tables to slower memory for nothing."""
PATIENCE = 20
"""Proposals without a gain, one after the other, at which TorchRec's greedy proposers end."""
SLOWER = 1.05
"""Ratio of observed steps from which on a plan is slower than another; below, steps differ by chance."""
LEAST_GAIN = 0.03
"""Share of the predicted cost that another plan must gain to take the place of an observed plan, if costs are no
further off, or of TorchRec's, if lookups per sample are guessed."""


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

    def __init__(self, rater: PlanRater) -> None:
        self._rater = rater

    @neutral()
    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_map: Mapping[str, object] | None = None,  # TorchRec 1.6
        sharder_data_map: Mapping[str, object] | None = None,  # TorchRec 1.7 and later
    ) -> None:
        """Set the perf of every shard, except of unknown kernels, which keep their price; PlannerError if an option
        cannot be rated."""
        for option, perf in zip(sharding_options, self._rater.alone(sharding_options), strict=True):
            set_perf(option, perf)


class DreamShardPerfModel(PerfModel):
    """Rates plans by ``max over ranks of (forward + backward) + collectives``, in milliseconds.

    Usable alone: ``EmbeddingShardingPlanner(performance_model=DreamShardPerfModel(rater(topology)))``.
    """

    def __init__(self, rater: PlanRater) -> None:
        self._rater = rater

    @neutral()
    @torch.no_grad()
    def rate(self, plan: list[ShardingOption]) -> float:
        """Return the overall cost in milliseconds, plus :data:`TIE_WEIGHT` of the compute of all ranks; PlannerError
        for an unpriced kernel, tables that depend on others, or impossible ranks."""
        with single_thread():
            costs = self._rater.rated(plan).costs
        return float(costs.overall_ms_B[0] + TIE_WEIGHT * costs.device_ms_BD.sum())


class SearchProposer(Proposer):
    """Proposes one plan, which ``make`` returns when TorchRec's loop loads it, with ranks that
    :class:`DreamShardPartitioner` keeps."""

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
        rater: reads and rates options; :func:`rater` of the topology of each call by default.
        settings: bounds and seed of the search for each proposal.
        quickly: whether a short search is enough, to compare many proposals.
    """

    def __init__(
        self,
        rater: PlanRater | None = None,
        settings: SearchSettings = DEFAULT_SETTINGS,
        quickly: bool = False,
    ) -> None:
        self._rater, self._settings, self._quickly = rater, settings, quickly

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Return ``proposal`` with ``shard.rank`` set on every shard.

        Raises:
            PlannerError: the tables do not fit; names table and missing bytes.
        """
        used = self._rater or rater(storage_constraint)
        with single_thread():
            placed = place_proposal(used, proposal, storage_constraint, self._settings, quickly=self._quickly)
        placed.read.assign(placed.sharding)
        return proposal


@dataclass(frozen=True)
class Replacement:
    """A plan that takes the place of the searched one."""

    options: list[ShardingOption]
    """One option for every table, with ranks."""
    note: Note
    """The reason, for the report."""
    searched: ReportEntry
    """Cost of the searched plan."""


def least_gain(checkpoint: Checkpoint) -> float:
    """Return the least predicted gain for which an observed plan is replaced, as a share of its embedding work: what
    costs are off on held-out kernels, and at least :data:`LEAST_GAIN`."""
    return max(LEAST_GAIN, checkpoint.known.learned.error or 0.0)


def kept_observed(
    model: ModelProblem, plan: Sequence[ShardingOption], remembered: Remembered | None
) -> Replacement | None:
    """Return the fastest observed plan if it should stay; None if the searched plan should take its place.

    It stays if the searched plan was observed to be slower, or was never observed and is predicted to gain less
    than costs can tell (:func:`least_gain`).
    """
    if remembered is None or (known := remembered.observed()) is None:
        return None
    steps_ms, fastest = known
    fast_ms, slow_ms = (steps_ms.get(sharding_key(one)) for one in (fastest.sharding, shardings(plan)))
    if fast_ms is None or (slow_ms is not None and slow_ms <= SLOWER * fast_ms):
        return None
    try:
        options = list(model.matched(fastest).values())
        searched, gain = _gain(model, plan, options)
    except PlannerError:  # memory, constraints or rules have changed
        return None
    least = least_gain(model.ranks.checkpoint)
    if slow_ms is not None:
        text = (
            "an earlier plan takes the place of the planned one, which was observed to be slower: "
            f"{slow_ms:.1f} ms a step, and {fast_ms:.1f} before"
        )
    elif gain < least:
        text = (
            "the plan of an earlier training is kept: the searched one is predicted to gain "
            f"{max(0, 100 * gain):.1f} %, less than the {100 * least:.0f} % by which costs may be off"
        )
    else:
        return None
    logger.log(logging.INFO if slow_ms is None else logging.WARNING, "%s", text)
    return Replacement(options, Note("search", text), searched)


@single_thread()
def _gain(
    model: ModelProblem, plan: Sequence[ShardingOption], other: Sequence[ShardingOption]
) -> tuple[ReportEntry, float]:
    """Return the cost of the searched plan, and the share of the other's cost that it gains."""
    searched, known = (model.rater.rated(one, model.room) for one in (plan, other))
    gain = 1 - searched.total_ms / max(known.total_ms, 1e-9)
    return ReportEntry.of("searched", searched.costs), gain


def kept_baseline(
    model: ModelProblem, plan: Sequence[ShardingOption], theirs: Sequence[ShardingOption] | None
) -> Replacement | None:
    """Return TorchRec's plan if the searched one is predicted to gain less than costs can tell; else None.

    Without statistics both planners assume one lookup per sample of each feature. Plans that these costs rate alike
    then differ in steps by chance, either way: see ``benchmarks/results/training-steps.md``.
    """
    settings = model.settings
    guessed = settings.cost_source != "torchrec" and not any(
        settings.tells_lookups(option.name, feature)
        for option in plan
        for feature in model.rater.reader.declared(option).features
    )
    least = (LEAST_GAIN if guessed else 0.0) if settings.least_gain is None else settings.least_gain
    if theirs is None or not settings.falls_back or least == 0.0 or signatures(theirs) == signatures(plan):
        return None
    searched, gain = _gain(model, plan, theirs)
    if gain >= least:
        return None
    text = (
        f"TorchRec's plan is kept: the searched one is predicted to gain {max(0.0, 100 * gain):.2f} %, less "
        f"than the {100 * least:.3g} % of least_gain"
    )
    if settings.least_gain is None:
        text += ", since lookups per sample are guessed; statistics would tell which plan is better"
    note = Note("search", text, {"gain": gain, "least_gain": least})
    return Replacement(list(theirs), note, searched)


class JsonPlanLoader(PlanLoader):
    """Loads a file of ``DreamShardPlanner.save_plan`` instead of planning: ``DreamShardPlanner(plan_loader=...)``.

    It works on every release of TorchRec that the package accepts. The file is read on the rank that plans. A plan for
    other tables, ranks, batch size or constraints is refused with ``PlannerError``, which names the difference. So is a
    plan that does not fit in memory. Memory, lookups per sample, bandwidths, cost source, seed and versions may differ;
    the report then says so.

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


class LoopComponents:
    """Components of one run of TorchRec's loop (``proposers``, ``partitioner``, ``perf_model``), and the plan that
    is made of the loop's. Given components replace ours; a plan loader of ours is bound to this problem."""

    def __init__(self, model: ModelProblem, given: GivenComponents, plan_loader: PlanLoader | None) -> None:
        rater, settings = model.rater, model.settings
        self.model, self._given = model, given
        self._loader = plan_loader if isinstance(plan_loader, JsonPlanLoader) else None
        if self._loader is not None:
            self._loader.bind(model.matched)
        self.perf_model = given.perf_model or DreamShardPerfModel(rater)
        own: list[Proposer] = [SearchProposer(self._proposal)]
        if given.perf_model is not None:  # it may like a plan of TorchRec's better than ours
            own += [UniformProposer(), *(GreedyProposer(depth, PATIENCE) for depth in (True, False))]
        self.proposers = given.proposers or own
        many = given.proposers is not None or given.perf_model is not None
        ours = DreamShardPartitioner(rater, settings.searching, quickly=many)
        self.partitioner = given.partitioner or ours

    @cached_property
    def found(self) -> SearchedPlan:
        """Outcome of the search over all options; raises PlannerError if constraints leave a table no option."""
        options = copy.deepcopy(self.model.searched)
        return search_plan(self.model.rater, options, self.model.room, self.model.settings.searching)

    def _proposal(self) -> list[ShardingOption]:  # a lambda would not pickle
        return self.found.proposal

    def chosen(self, plan: list[ShardingOption], proposals: int) -> ChosenPlan:
        """Return the plan that the user's callbacks get for TorchRec's best plan of so many proposals (0 if it was
        loaded).

        TorchRec takes only the shards of a loaded plan; load factors and promotions come from the file. TorchRec's
        own plan is taken if ours gains too little. The best of many proposals is searched again in full.
        """
        if self._loader is not None:
            self._estimate(self._loader.options)
            return ChosenPlan(self._loader.options, {}, loaded=self._loader.loaded)
        model, given = self.model, self._given
        is_placed = given.partitioner is None and proposals > 0
        found = self.found if given.proposers is None and proposals else None
        searched: SearchedPlan | RatedPlan | None = found
        replacements: list[Replacement] = []
        notes: list[Note] = []
        if not is_placed:
            placed = f"placed by the {type(self.partitioner).__name__} that was given"
            how = f"the plan was {placed if proposals else 'loaded by plan_loader'}"
            notes += noted("search", [how if found else f"{how}; no other was searched for"])
            searched = None
        elif found is not None and found.torchrec is not None:
            notes += found.torchrec.notes()
        if given != GivenComponents():
            if is_placed:
                plan, again = self._searched_again(plan)
                searched = found or again
        elif found is not None:
            kept = kept_baseline(model, plan, found.baseline)
            plan, replacements = (plan, []) if kept is None else (kept.options, [kept])
            if (observed := kept_observed(model, plan, model.settings.remembered)) is not None:
                plan, replacements = observed.options, [*replacements, observed]
        notes += [other.note for other in replacements]
        if model.settings.hot_rows_bytes:
            plan, note = choose_hot_rows(model, plan, model.settings.hot_rows_bytes)
            notes.append(note)
        self._estimate(plan)
        notes += dedup_notes(model, plan)
        if given.perf_model is not None and proposals:
            text = (
                f"plans were rated by the {type(self.perf_model).__name__} that was given, not by the costs shown "
                f"here: {proposals} proposals"
            )
            notes.append(Note("search", text))
        return ChosenPlan(
            plan,
            signatures(plan),
            notes,
            rivals=(*(() if searched is None else searched.rivals), *(one.searched for one in replacements)),
            result=None if searched is None else searched.result,
            is_placed=is_placed,
            excludes=is_placed and given.enumerator is None and model.settings.exact_training,
        )

    def _estimate(self, plan: list[ShardingOption]) -> None:
        """Set memory and our costs, which TorchRec's statistics and callbacks read; a given enumerator's stay."""
        self.model.rater.estimate_missing(plan)
        stay = self._given.enumerator is not None
        bare = [option for option in plan if not stay or None in perf_of(option)]
        DreamShardEstimator(self.model.rater).estimate(bare)

    def _searched_again(self, plan: list[ShardingOption]) -> tuple[list[ShardingOption], RatedPlan | None]:
        """Search ranks in full for the best of many quickly placed proposals. Return the plan with these ranks, or
        as it was if the performance model rates them no better; and the outcome of the search, None if it found no
        room."""
        again = copy.deepcopy(plan)
        for option in again:
            set_ranks(option, None)
        try:
            with single_thread():
                placed = place_proposal(self.model.rater, again, self.model.room, self.model.settings.searching)
        except PlannerError:
            return plan, None
        placed.read.assign(placed.sharding)
        return (again if self.perf_model.rate(again) < self.perf_model.rate(plan) else plan), placed
