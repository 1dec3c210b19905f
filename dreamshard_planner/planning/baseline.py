# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's own plan over the same options, by its estimates, proposers, partitioner and rating: a rival of the
searched plan, and the fallback if that gains too little."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Perf, PlannerError, Shard, ShardingOption, Topology

from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.report import Report, ReportEntry
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search_space.options import counted, fqn_of, ranks_of, same_options

BASELINE = "torchrec"
"""What reports call TorchRec's plan."""
MAX_PROPOSALS = 64
SHARDS_PROPOSED = 200_000
"""Tables x ranks x proposals to try: about a second. Counted, and not timed, so that plans repeat."""
LEAST_PROPOSALS = 4
SHARDS_OF_ONE = 2_000_000
"""Tables x ranks from which on not so many are tried, but one."""
LEAST_GAIN = 0.03
"""Share of the predicted cost of TorchRec's plan that a searched plan has to gain if lookups per sample are guessed."""


@dataclass(frozen=True)
class TorchRecPlan:
    """The best that TorchRec found."""

    options: list[ShardingOption]
    """With ranks."""
    proposals: int
    """Tried."""
    finished: bool
    """Whether its proposers had no more to propose."""


def torchrec_plan(
    search_space: Sequence[ShardingOption],
    topology: Topology,
    estimate: Callable[[list[ShardingOption]], None],
    effort: float = 1.0,
) -> TorchRecPlan | None:
    """What TorchRec's planner would choose among the options, None where no proposal tried is a plan.

    Args:
        search_space: options with storage; not changed.
        topology: what the storage reservation left.
        estimate: sets TorchRec's perf on options.
        effort: multiple of the default's number of proposals.
    """
    space = [copy.deepcopy(option) for option in search_space]
    estimate(space)
    size = len({option.fqn for option in space}) * topology.world_size
    least = LEAST_PROPOSALS if size < SHARDS_OF_ONE else 1
    # Shared evenly by TorchRec's four proposers.
    proposals = portion(max(least, min(MAX_PROPOSALS, SHARDS_PROPOSED // size)), effort)
    read: list[Any] = [_AsRead(option) for option in space]
    best: tuple[float, list[ShardingOption]] | None = None
    proposers = [
        (GreedyProposer(), max),
        (UniformProposer(), max),
        (GreedyProposer(use_depth=False), sum),
        (GridSearchProposer(), max),
    ]
    tried, finished = 0, True
    rated: dict[tuple[int, ...], float | None] = {}
    for index, (proposer, score) in enumerate(proposers):
        limit = tried + -(-(proposals - tried) // (len(proposers) - index))
        if tried == proposals:
            finished = False
            break
        for one in read:
            one.show_score(score)
        proposer.load(search_space=read)
        for one in read:
            one.show_shards()
        while proposal := proposer.propose():
            if tried >= limit:
                finished = False
                break
            # Proposals that another proposer has made already cost nothing, as in TorchRec's planner.
            key = tuple(sorted(map(id, proposal)))
            if key not in rated:
                plan = [copy.deepcopy(one.option) for one in proposal]
                rated[key] = rating = _rating(plan, topology)
                tried += 1
                if rating is not None and (best is None or rating < best[0]):
                    best = rating, plan
            rating = rated[key]
            proposer.feedback(rating is not None, proposal, rating, topology)
    return None if best is None else TorchRecPlan(best[1], tried, finished)


class _AsRead:
    """An option as TorchRec's proposers read it: when they load it, the largest or the sum of its shards' estimates;
    afterwards the storage of all shards. They ask for no more of them."""

    def __init__(self, option: ShardingOption) -> None:
        self.option, self.fqn, self.sharding_type = option, option.fqn, option.sharding_type
        self.shards: list[Shard] = []

    def show_score(self, score: Callable[[Iterable[float]], float]) -> None:
        """As a single shard's."""
        each_ms = (repeat(shard.perf.total, count) for shard, count in counted(self.option))
        self.shards = [Shard([], [], perf=Perf(score(chain.from_iterable(each_ms)), 0, 0, 0))]

    def show_shards(self) -> None:
        """All, without ranks."""
        self.shards = [*chain.from_iterable(repeat(shard, count) for shard, count in counted(self.option))]


def _rating(proposal: list[ShardingOption], topology: Topology) -> float | None:
    """Partition and rate; None where it does not fit."""
    try:
        return NoopPerfModel(topology).rate(GreedyPerfPartitioner().partition(proposal, topology))
    except PlannerError:
        return None


@dataclass(frozen=True)
class BaselineFallback:
    """TorchRec's plan, taken since a searched one is predicted to gain less than costs can tell.

    Without statistics both planners take one lookup per sample of each feature. Plans that these costs rate alike then
    differ in steps by chance, either way: see ``benchmarks/default_steps.py``.
    """

    options: tuple[ShardingOption, ...]
    """With ranks."""
    searched: PlacementCosts
    gain: float
    """Of the searched one, as a share of what TorchRec's costs."""
    least_gain: float
    """That was asked for."""
    guessed: bool
    """Whether it was asked for since lookups per sample are guessed."""

    def is_plan(self, plan: Sequence[ShardingOption]) -> bool:
        """Whether a plan is this one."""
        mine, given = ({fqn_of(option): ranks_of(option) for option in options} for options in (self.options, plan))
        return mine == given and same_options(self.options, plan)

    def beside(self, report: Report) -> Report:
        """The report with the searched plan among the rivals."""
        rivals = [*report.rivals, ReportEntry.of("searched", self.searched)]
        return replace(report, rivals=tuple(sorted(rivals, key=lambda rival: rival.total_ms)))

    def note(self) -> Note:
        """For the report."""
        text = (
            f"TorchRec's plan is kept: the searched one is predicted to gain {max(0.0, 100 * self.gain):.2f} %, less "
            f"than the {100 * self.least_gain:.3g} % of least_gain"
        )
        if self.guessed:
            text += ", since lookups per sample are guessed; statistics would tell which plan is better"
        return Note("search", text, {"gain": self.gain, "least_gain": self.least_gain})
