# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's own plan over the same options, as a rival: its estimates, its proposers, its partitioner, its rating."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import PlannerError, Proposer, ShardingOption, Topology
from torchrec.distributed.planner.utils import reset_shard_rank

MAX_PROPOSALS = 512
SHARDS_PROPOSED = 300_000
"""Tables x ranks x proposals to try: about a second or two. Counted, and not timed, so that plans repeat."""


@dataclass(frozen=True)
class TorchRecPlan:
    """The best that TorchRec found."""

    options: list[ShardingOption]
    """With ranks."""
    perf_rating: float
    """By TorchRec's perf model, milliseconds."""
    proposals: int
    """Tried."""
    finished: bool
    """Whether its proposers had no more to propose."""


def torchrec_plan(
    search_space: Sequence[ShardingOption],
    topology: Topology,
    estimate: Callable[[list[ShardingOption]], None] | None = None,
    proposals: int | None = None,
) -> TorchRecPlan | None:
    """What TorchRec's planner would choose among the options, None where it finds no plan in so many proposals.

    Args:
        search_space: options with storage; not changed.
        topology: what the storage reservation left.
        estimate: sets TorchRec's perf on options; without it they hold that already.
        proposals: to try at most, shared evenly by TorchRec's four proposers; by the size of the task by default.
    """
    space = [copy.deepcopy(option) for option in search_space]
    if estimate is not None:
        estimate(space)
    tables = len({option.fqn for option in space})
    if proposals is None:
        proposals = max(4, min(MAX_PROPOSALS, SHARDS_PROPOSED // (tables * topology.world_size)))
    best: tuple[float, list[ShardingOption]] | None = None
    proposers = [GreedyProposer(), UniformProposer(), GreedyProposer(use_depth=False), GridSearchProposer()]
    tried, finished = 0, True
    rated: dict[tuple[int, ...], float | None] = {}
    for index, proposer in enumerate(proposers):
        limit = tried + -(-(proposals - tried) // (len(proposers) - index))
        proposer.load(search_space=space)
        while proposal := proposer.propose():
            if tried >= limit:
                finished = False
                break
            # Proposals that another proposer has made already cost nothing, as in TorchRec's planner.
            key = tuple(sorted(map(hash, proposal)))
            if key not in rated:
                rated[key] = _rating(proposal, topology)
                tried += 1
            rating = rated[key]
            if rating is not None and (best is None or rating < best[0]):
                best = rating, [copy.deepcopy(option) for option in proposal]
            _feedback(proposer, proposal, rating, topology)
            reset_shard_rank(proposal)
    return None if best is None else TorchRecPlan(best[1], best[0], tried, finished)


def _rating(proposal: list[ShardingOption], topology: Topology) -> float | None:
    """Partition and rate; None where it does not fit."""
    try:
        return NoopPerfModel(topology).rate(GreedyPerfPartitioner().partition(proposal, topology))
    except PlannerError:
        return None


def _feedback(proposer: Proposer, proposal: list[ShardingOption], rating: float | None, topology: Topology) -> None:
    proposer.feedback(partitionable=rating is not None, plan=proposal, perf_rating=rating, storage_constraint=topology)
