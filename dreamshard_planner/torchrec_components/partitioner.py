# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Partitioner``: where ranks are chosen, by policy and search or by a greedy rule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    ShardingOption,
    Topology,
)

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.sharding import Chosen, Sharding, ShardingCost
from dreamshard_planner.planning.baseline import torchrec_ranks
from dreamshard_planner.planning.collective import Together
from dreamshard_planner.planning.context import PlanningContext, identity, ranks_by_choice
from dreamshard_planner.planning.infeasible import infeasible, infeasible_wide
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.problem.units import set_ranks, unit_span
from dreamshard_planner.research.refinement import Refinement
from dreamshard_planner.search.heuristics import RULES, place_by_rule
from dreamshard_planner.search.local_search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.search.packing import PACKING_SECONDS
from dreamshard_planner.search.place import InfeasibleError, Placement, place
from dreamshard_planner.search.starts import lay_wide
from dreamshard_planner.search_space.input_checks import checked_seed
from dreamshard_planner.search_space.towers import pin
from dreamshard_planner.support.torch_state import neutral, single_thread
from dreamshard_planner.workload.statistics import TableStatistics


@dataclass(frozen=True)
class Outcome:
    """How a proposal was placed."""

    read: ReadProblem
    cost: ShardingCost
    chosen: Chosen
    """What spans hosts and world, and the placement problem of the rest."""
    placement: Placement
    """Of the rest."""
    sharding: Sharding
    """All together."""

    def refined(self, refinement: Refinement, device: str, threads: int) -> Outcome:
        """The same with the placement that measuring chooses."""
        placement = refinement(self.cost, self.chosen, self.placement, self.read.workload_P, device, threads)
        return replace(self, placement=placement, sharding=self.chosen.placed(placement.chosen.assignment_S))


def place_proposal(
    context: PlanningContext,
    proposal: list[ShardingOption],
    topology: Topology,
    search: SearchConfig | None,
    *,
    seed: int,
    seconds: float | None = None,
    packing_seconds: float = PACKING_SECONDS,
) -> Outcome:
    """Ranks for the shards of a proposal: positions that the context knows of are taken as a start; else what spans
    hosts and world is laid down first, and TorchRec's ranks are a start where there is no such thing. Only tables that
    depend on each other get their ranks.

    Raises:
        PlannerError: where the tables do not fit, naming table and missing bytes.
    """
    found = context.found.get(identity(ranks_by_choice(proposal)))
    dependent = [option for option in proposal if option.dependency]
    if found is not None:
        for option in dependent:
            set_ranks(option, found[option.fqn], unit_span(option, topology))
    elif dependent:
        pin(proposal, topology)
    read = context.read(proposal, topology)
    cost = context.cost(read)
    given: dict[str, Tensor | None] = {}
    if found is not None:
        places = tuple(found[choices[0].fqn] for choices in read.options)
        chosen = cost.chosen(Sharding((0,) * len(places), places))
        given["joint"] = chosen.assignment_S
        seconds = None if seconds is None else seconds / 3  # two thirds are spent
    else:
        chosen = _wide_laid_down(cost)
        if not dependent and all(option.num_shards == 1 for option in proposal):
            ranks_S = torchrec_ranks(proposal, topology, context.estimate_as_torchrec)
            if ranks_S is not None:  # TorchRec knows neither our rules nor all that we count
                given["torchrec"] = ranks_S if bool(chosen.cost.problem.fits(ranks_S[None])) else None
    try:
        placement = place(
            chosen.cost,
            context.checkpoint.policy,
            search,
            seed=seed,
            given=given,
            seconds=seconds,
            packing_seconds=packing_seconds,
        )
    except InfeasibleError as error:
        raise infeasible(chosen.cost.problem, error.proven) from error
    return Outcome(read, cost, chosen, placement, chosen.placed(placement.chosen.assignment_S))


def _wide_laid_down(cost: ShardingCost) -> Chosen:
    """The placement problem of what spans one rank, on top of the proposal's wider units.

    Raises:
        PlannerError: these do not fit.
    """
    laid = lay_wide(cost, (0,) * cost.problem.num_tables)
    if laid is None:
        raise infeasible_wide(cost.problem)
    return cost.chosen(laid)


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
        search_seconds: cap on the search, on top of its budget of candidates.
        refine_seconds: time for measuring plans on this machine's devices, see
            :func:`~dreamshard_planner.research.refine.refine`; 0 for none. Spent once, on the first plan.
        together: the ranks that measure; by default this one.
        context: shared by the seams of one planner; made from the other arguments by default.
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
        refine_seconds: float = 0.0,
        together: Together | None = None,
        context: PlanningContext | None = None,
    ) -> None:
        self._arguments = (constraints, statistics, checkpoint)
        self._search = search
        self._seed = checked_seed(seed)
        self._search_seconds = search_seconds
        search_of_refinement = search or DEFAULT_SEARCH
        self._refinement = Refinement(refine_seconds, seed, search_of_refinement, together) if refine_seconds else None
        self._context = context
        self._outcomes: dict[Hashable, Outcome] = {}

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank`` of every shard of ``proposal`` and return it, as TorchRec's contract has it.

        Raises:
            PlannerError: where the tables do not fit, naming table and missing bytes.
        """
        context = self._context or PlanningContext.of(storage_constraint, *self._arguments)
        threads = torch.get_num_threads()
        with single_thread():
            outcome = place_proposal(
                context,
                proposal,
                storage_constraint,
                self._search,
                seed=self._seed,
                seconds=self._search_seconds,
            )
            if self._refinement is not None:
                outcome = outcome.refined(self._refinement, storage_constraint.compute_device, threads)
        self._outcomes[identity(ranks_by_choice(proposal))] = outcome
        outcome.read.assign(outcome.sharding)
        return proposal

    def outcome(self, choices: Iterable[Hashable]) -> Outcome | None:
        """How the proposal with these tables, sharding types and kernels, as keys of
        :func:`~dreamshard_planner.planning.context.ranks_by_choice`, was placed, of those that TorchRec's planner asked
        for; it takes the one that its perf model rates best. None where there was none."""
        return self._outcomes.get(identity(choices))


class RulePartitioner(Partitioner):
    """Places shards by one of the greedy rules of :mod:`dreamshard_planner.search.heuristics`.

    Args:
        rule: ``size_greedy``, ``dim_greedy``, ``lookup_greedy`` or ``size_lookup_greedy``.
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
        if rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; known are {', '.join(RULES)}")
        self._rule = rule
        self._arguments = (constraints, statistics)

    @neutral()
    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Set ``shard.rank``; raises ``PlannerError`` where the rule dead-ends on memory."""
        context = PlanningContext.of(storage_constraint, *self._arguments)
        if any(option.dependency for option in proposal):
            pin(proposal, storage_constraint)
        read = context.read(proposal, storage_constraint)
        chosen = _wide_laid_down(context.cost(read))
        assignment_S = place_by_rule(chosen.cost.problem, self._rule)
        if assignment_S is None:
            raise infeasible(chosen.cost.problem, proven=False)
        read.assign(chosen.placed(assignment_S))
        return proposal
