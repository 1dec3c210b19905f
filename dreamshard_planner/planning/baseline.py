# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's own plan over the same options: a rival of the searched plan, and its fallback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, TypeAlias

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Perf, PlannerError, Shard, ShardingOption, Topology

from dreamshard_planner.planning.context import RatedPlan
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search_space.options import counted, fqn_of, ranks_of

BASELINE = "torchrec"
"""Name of TorchRec's plan in reports."""
MAX_PROPOSALS = 64
SHARDS_PROPOSED = 200_000
"""Tables x ranks x proposals to try, about a second; a count, so that plans repeat."""
LEAST_PROPOSALS = 4
SHARDS_OF_ONE = 2_000_000
"""Tables x ranks from which on a single proposal is tried."""
LEAST_GAIN = 0.03
"""Share of TorchRec's predicted cost that a searched plan must gain if lookups per sample are guessed."""


@dataclass(frozen=True)
class TorchRecPlan:
    """The best plan that TorchRec found."""

    options: list[ShardingOption]
    """One option for every table, with ranks."""
    proposals: int
    """Number of proposals tried."""
    finished: bool
    """True if the proposers had no further proposals."""

    def notes(self) -> tuple[Note, ...]:
        """Return the report's note on an unfinished search."""
        text = f"TorchRec's plan is the best of its first {self.proposals} proposals"
        return () if self.finished else (Note("search", text),)


def torchrec_plan(
    search_space: Sequence[ShardingOption],
    topology: Topology,
    estimate: Callable[[list[ShardingOption]], None],
    effort: float = 1.0,
) -> TorchRecPlan | None:
    """Return the plan that TorchRec's planner would choose among the options; None if no proposal fits.

    Args:
        search_space: options with storage; not changed.
        topology: with the memory that the storage reservation left.
        estimate: sets TorchRec's perf on options.
        effort: number of proposals, as a multiple of the default's.
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
    """An option as TorchRec's proposers read it: one score when they load it, the storage of all shards afterwards."""

    def __init__(self, option: ShardingOption) -> None:
        self.option, self.fqn, self.sharding_type = option, option.fqn, option.sharding_type
        self.shards: list[Shard] = []

    def show_score(self, score: Callable[[Iterable[float]], float]) -> None:
        """Show the largest or the sum of the shards' estimates, as one shard's."""
        each_ms = (repeat(shard.perf.total, count) for shard, count in counted(self.option))
        self.shards = [Shard([], [], perf=Perf(score(chain.from_iterable(each_ms)), 0, 0, 0))]

    def show_shards(self) -> None:
        """Show all shards, without ranks."""
        self.shards = [*chain.from_iterable(repeat(shard, count) for shard, count in counted(self.option))]


def _rating(proposal: list[ShardingOption], topology: Topology) -> float | None:
    """Partition and rate a proposal; return None if it does not fit."""
    try:
        return NoopPerfModel(topology).rate(GreedyPerfPartitioner().partition(proposal, topology))
    except PlannerError:
        return None


@dataclass(frozen=True)
class BaselineFallback:
    """TorchRec's plan, taken because the searched plan is predicted to gain less than costs can tell.

    Without statistics both planners assume one lookup per sample of each feature. Plans that these costs rate alike
    then differ in steps by chance, either way: see ``benchmarks/default_steps.py``.
    """

    options: list[ShardingOption]
    """TorchRec's plan, with ranks."""
    searched: ReportEntry
    note: Note
    """For the report."""

    @classmethod
    def of(cls, theirs: RatedPlan, searched: RatedPlan, least_gain: float | None) -> BaselineFallback | None:
        """Return the fallback; None if the searched plan gains enough, or is TorchRec's own.

        Args:
            theirs: TorchRec's plan.
            searched: the searched plan.
            least_gain: as the user gave it; None if lookups per sample are guessed.
        """
        least = LEAST_GAIN if least_gain is None else least_gain
        gain = 1 - searched.total_ms / max(theirs.total_ms, 1e-9)
        if gain >= least or signatures(theirs.options) == signatures(searched.options):
            return None
        text = (
            f"TorchRec's plan is kept: the searched one is predicted to gain {max(0.0, 100 * gain):.2f} %, less "
            f"than the {100 * least:.3g} % of least_gain"
        )
        if least_gain is None:
            text += ", since lookups per sample are guessed; statistics would tell which plan is better"
        note = Note("search", text, {"gain": gain, "least_gain": least})
        return cls(theirs.options, ReportEntry.of("searched", searched.costs), note)


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
