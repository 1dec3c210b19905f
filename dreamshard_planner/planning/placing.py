# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ranks for the shards of one proposal: one option for every table, as TorchRec's planner asks for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology

from dreamshard_planner.cost.model import Chosen, Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.planning.baseline import BASELINE, torchrec_ranks
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.infeasible import infeasible, infeasible_wide
from dreamshard_planner.policy.place import InfeasibleError, Placement, place
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.search.laying import lay_wide
from dreamshard_planner.search.local_search import SearchConfig
from dreamshard_planner.search_space.options import ranks_of, same_options
from dreamshard_planner.search_space.towers import pin

QUICK_SEARCH = SearchConfig(starts=1, candidates=100, perturbed=0)
"""A few steps of one descent."""


def stage_seconds(seconds: float | None) -> float | None:
    """For each stage of a joint search: the plan of whole tables that it starts from, how tables are split, and where
    shards go once that is chosen. None for no cap."""
    return None if seconds is None else seconds / 3


class Countdown:
    """Seconds that several searches share, from the first one on; None for no cap."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end: float | None = None

    def left(self) -> float | None:
        """Seconds, from now on."""
        if self._seconds is None:
            return None
        if self._end is None:
            self._end = time.monotonic() + self._seconds
        return max(0.0, self._end - time.monotonic())


@dataclass(frozen=True)
class Outcome:
    """How a proposal was placed."""

    read: ReadProblem
    cost: Cost
    chosen: Chosen
    """The units that span several ranks, and the placement problem of the rest."""
    placement: Placement
    """Of the rest."""
    sharding: Sharding
    """All together."""

    def is_plan(self, plan: Sequence[ShardingOption]) -> bool:
        """Whether a plan has the same options on the same ranks."""
        try:
            return self.has_options_of(plan) and self.read.sharding(plan) == self.sharding
        except PlannerError:
            return False

    def has_options_of(self, plan: Sequence[ShardingOption]) -> bool:
        """Whether a plan shards the same tables in the same way, on whatever ranks."""
        return same_options([options[0] for options in self.read.options], plan)


def place_proposal(
    context: PlanningContext,
    proposal: list[ShardingOption],
    topology: Topology,
    search: SearchConfig | None,
    *,
    seed: int,
    seconds: float | None = None,
    packing: float = 1.0,
    quickly: bool = False,
) -> Outcome:
    """Ranks for the shards of a proposal. Ranks that it comes with are the start of the search, and what spans hosts or
    the world keeps them; without any, that is laid down first, and TorchRec's ranks are a start where there is nothing
    of the kind. Ranks are set on no option but on those of tables that depend on each other.

    Args:
        context: reads and rates options.
        proposal: one option for every table.
        topology: what the storage reservation leaves.
        search: of moves and swaps; None for one policy roll-out alone.
        seed: of the sampled roll-outs and the search.
        seconds: cap on the search, on top of its budget of candidates; a third of it where the search starts from ranks
            that the proposal comes with.
        packing: effort of an exact packing, where nothing else finds room; 0 for none.
        quickly: only so far that many proposals can be compared: from heuristics, by :data:`QUICK_SEARCH`.

    Raises:
        PlannerError: the tables do not fit, naming table and missing bytes.
    """
    has_ranks = all(rank is not None for option in proposal for rank in ranks_of(option))
    dependent = any(option.dependency for option in proposal)
    if dependent and not has_ranks:
        pin(proposal, topology)
    read = context.read(proposal, topology)
    cost = context.cost(read)
    start = read.sharding(proposal) if has_ranks else None
    given: dict[str, Tensor | None] = {}
    if start is not None and cost.problem.fits(start):
        chosen = cost.chosen(start)
        given["joint"] = chosen.assignment_S
    else:
        chosen = wide_units_laid_down(cost)
        if not dependent and all(option.num_shards == 1 for option in proposal):
            ranks_S = torchrec_ranks(proposal, topology, context.estimate_as_torchrec)
            if ranks_S is not None:  # TorchRec knows neither our rules nor all that we count
                given[BASELINE] = ranks_S if bool(chosen.cost.problem.fits(ranks_S[None])) else None
    try:
        placement = place(
            chosen.cost,
            None if quickly else context.checkpoint.policy,
            QUICK_SEARCH if quickly else search,
            seed=seed,
            given=given,
            seconds=seconds if start is None else stage_seconds(seconds),
            packing=packing,
        )
    except InfeasibleError as error:
        raise infeasible(chosen.cost.problem, error.proven, context.splitting_left_out) from error
    return Outcome(read, cost, chosen, placement, chosen.placed(placement.assignment_S))


def wide_units_laid_down(cost: Cost) -> Chosen:
    """The placement problem of the units that span one rank, on top of a proposal's wider ones.

    Raises:
        PlannerError: the wider ones do not fit.
    """
    laid = lay_wide(cost, (0,) * cost.problem.num_tables)
    if laid is None:
        raise infeasible_wide(cost.problem)
    return cost.chosen(laid)
