# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's ``Partitioner``: where ranks are chosen, by policy and search or by a greedy rule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)

from dreamshard_planner.ambient import neutral
from dreamshard_planner.checkpoint import Checkpoint
from dreamshard_planner.collective import Together
from dreamshard_planner.cost.model import PlacementProblem
from dreamshard_planner.cost.sharding import Chosen, Sharding, ShardingCost, ShardingProblem
from dreamshard_planner.placement.packing import PACKING_SECONDS, shortage, total_room
from dreamshard_planner.placement.place import InfeasibleError, Placement, place
from dreamshard_planner.placement.rules import RULES, place_by_rule
from dreamshard_planner.placement.search import DEFAULT_SEARCH, SearchConfig
from dreamshard_planner.placement.starts import lay_wide
from dreamshard_planner.plugin.baseline import torchrec_ranks
from dreamshard_planner.plugin.context import PlanningContext, identity, ranks_by_choice
from dreamshard_planner.plugin.dependencies import pin
from dreamshard_planner.plugin.limits import MEMORY_KINDS, checked_seed
from dreamshard_planner.plugin.read_problem import ReadProblem
from dreamshard_planner.plugin.refinement import Refinement
from dreamshard_planner.plugin.units import set_ranks, unit_span
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
        laid = lay_wide(cost, (0,) * read.problem.num_tables)
        if laid is None:
            raise infeasible_wide(read.problem)
        chosen = cost.chosen(laid)
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


class DreamShardPartitioner(Partitioner):
    """Places the shards of any proposal: what spans hosts or the world first, the rest on top with the policy network
    and search over the cost network.

    Usable alone: ``EmbeddingShardingPlanner(partitioner=DreamShardPartitioner())``.

    Args:
        constraints: per table, for ``num_poolings``, ``batch_sizes`` and ``is_weighted``.
        statistics: workload statistics per feature.
        checkpoint: ``"auto"``, a path, or a :class:`~dreamshard_planner.checkpoint.Checkpoint`.
        search: search settings; None for one policy roll-out alone (the paper's procedure).
        seed: of the sampled roll-outs and the search.
        search_seconds: cap on the search, on top of its budget of candidates.
        refine_seconds: time for measuring plans on this machine's devices, see
            :func:`~dreamshard_planner.placement.refine.refine`; 0 for none. Spent once, on the first plan.
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
        :func:`~dreamshard_planner.plugin.context.ranks_by_choice`, was placed, of those that TorchRec's planner asked
        for; it takes the one that its perf model rates best. None where there was none."""
        return self._outcomes.get(identity(choices))


class RulePartitioner(Partitioner):
    """Places shards by one of the greedy rules of :mod:`dreamshard_planner.placement.rules`.

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
        cost = context.cost(read)
        laid = lay_wide(cost, (0,) * read.problem.num_tables)
        if laid is None:
            raise infeasible_wide(read.problem)
        chosen = cost.chosen(laid)
        assignment_S = place_by_rule(chosen.cost.problem, self._rule)
        if assignment_S is None:
            raise infeasible(chosen.cost.problem, proven=False)
        read.assign(chosen.placed(assignment_S))
        return proposal


def infeasible(problem: PlacementProblem, proven: bool) -> PlannerError:
    """TorchRec's error for tables that do not fit, saying which and by how much."""
    reason = shortage(problem, MEMORY_KINDS)
    if not reason:
        largest = int(problem.storage_SM[:, : len(MEMORY_KINDS)].double().sum(-1).argmax())
        need = problem.storage_SM[largest, : len(MEMORY_KINDS)]
        free = [room - int(used) for room, used in zip(total_room(problem), problem.storage_SM.sum(0), strict=True)]
        how = "No placement of whole tables fits (proven)" if proven else "No placement of whole tables was found"
        kinds = [
            f"{free[kind]:,} bytes of {name} would be left over all ranks"
            for kind, name in enumerate(MEMORY_KINDS)
            if need[kind] > 0
        ]
        reason = (
            f"{how}, although {' and '.join(kinds)}; the largest table, {problem.names[largest]!r}, needs "
            f"{int(need.sum()):,} bytes on one rank"
        )
    return PlannerError(
        f"Tables do not fit{_under_rules(problem)}: {reason}. More or larger devices, a smaller storage reservation, "
        "or smaller tables would help.",
        PlannerErrorType.INSUFFICIENT_STORAGE,
    )


def _under_rules(problem: PlacementProblem | ShardingProblem) -> str:
    return " where placement_rules leave them" if problem.rule_kinds else ""


def infeasible_wide(problem: ShardingProblem) -> PlannerError:
    """The same for tables that span hosts or the world."""
    capacity_DM, reasons = problem.capacity_DM, []
    for name, options in zip(problem.names, problem.tables, strict=True):
        for unit in options[0].units:
            need_M = problem.storage_PM[list(unit.parts)].amax(0)
            for kind, memory in enumerate(MEMORY_KINDS):
                need, room = int(need_M[kind]), max(0, int(capacity_DM[:, kind].max()))
                if unit.span > 1 and need > room:
                    reasons.append(
                        f"table {name!r} needs {need:,} bytes of {memory} on each of {unit.span} ranks "
                        f"({options[0].sharding_type}), the roomiest rank has {room:,}: {need - room:,} bytes are "
                        "missing"
                    )
    if not reasons:
        wide = [
            (name, problem.storage_PM[list(unit.parts)].sum(0))
            for name, options in zip(problem.names, problem.tables, strict=True)
            for unit in options[0].units
            if unit.span > 1
        ]
        need_M = torch.stack([need_M for _, need_M in wide]).sum(0)
        largest, most_M = max(wide, key=lambda named: int(named[1].sum()))
        asked = [
            f"{int(need):,} bytes of {memory}, of {room:,}"
            for need, room, memory in zip(need_M, total_room(problem), MEMORY_KINDS, strict=False)  # rules follow
            if need > 0
        ]
        reasons.append(
            f"those that span a host or all ranks need {' and '.join(asked)}, and some rank has too little; the "
            f"largest is {largest!r}, with {int(most_M.sum()):,} bytes"
        )
    return PlannerError(
        f"Tables do not fit{_under_rules(problem)}: {'; '.join(reasons[:5])}. More or larger devices, a smaller "
        "storage reservation, or smaller tables would help.",
        PlannerErrorType.INSUFFICIENT_STORAGE,
    )


@contextmanager
def single_thread() -> Iterator[None]:
    """One intra-op thread: tiny matrices gain nothing from more, and rounding must not depend on them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
