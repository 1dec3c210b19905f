# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Re-planning: from the running plan to one that takes less time over the remaining steps, moving included.

What runs is read as what the ranks that are left hold of each table. Tables that are new, or were cut for other ranks,
have to go somewhere; all others may stay. :mod:`dreamshard_planner.search.search` makes the curve.

Shapes: S shards of a table, D ranks, U units, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.cost.problem import Change, Sharding
from dreamshard_planner.errors import PlanError
from dreamshard_planner.planning.given_plans import as_option, enumerated_as, sharding_of, tables_of
from dreamshard_planner.planning.model_problem import ModelProblem
from dreamshard_planner.plans.comparison import names_that_keep_most, received_SD, renamed, stale_differences
from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableSharding
from dreamshard_planner.problem.parts import positions_of
from dreamshard_planner.search.search import few_moves
from dreamshard_planner.search_space.options import fqn_of, hot_rows_of, places_of, type_of
from dreamshard_planner.support.documents import document_of
from dreamshard_planner.support.formatting import checked, ranks_in_words, seconds_in_words, size_in_words, some_of
from dreamshard_planner.support.reproducible import neutral, single_thread

SHOWN = 0.005
"""Share of the cost that a row of the curve gains at least."""


@dataclass(frozen=True)
class Move:
    """A plan on the curve."""

    tables: int
    """That the current plan has and that change; 0 where all stay."""
    bytes_moved: int
    """Weights, and their optimizer states, that ranks hold after and did not hold before, all ranks together."""
    bytes_to_one_rank: int
    """Bytes moved to the rank that gets most."""
    step_ms: float
    """Predicted milliseconds of embedding work per training step."""
    moving_seconds: float

    def seconds(self, steps: int) -> float:
        """Until so many more steps are done, moving included."""
        return self.moving_seconds + steps * self.step_ms / 1e3


@dataclass(frozen=True)
class Replan:
    """Result of :meth:`~dreamshard_planner.planner.DreamShardPlanner.replan`.

    Raises:
        PlanError: every plan of the curve moves more bytes than may move.
        ValueError: the limit of bytes is negative.
    """

    before: str
    """Name of the current plan."""
    curve: tuple[Move, ...]
    """By bytes; each plan costs less than all before it."""
    make: Callable[[int], SavedPlan] = field(repr=False, compare=False)
    """Makes the plan of a point of the curve, by its index: on many ranks that takes a second."""
    afresh: Move
    """The plan as it would be made if nothing moved for free or at cost, with ranks named so that most bytes stay."""
    steps: int
    """That remain."""
    max_bytes_moved: int | None
    forced: tuple[str, ...] = ()
    """Why the current plan cannot stay as it is, in words; empty where it can."""
    stale: tuple[str, ...] = ()
    """Other inputs (then -> now) for which ``JsonPlanLoader`` refuses its file; :attr:`plan` is the one to load."""

    COLUMNS: ClassVar = ("tables", "moved", "to one rank", "ms per step", "seconds in all")
    """Headings of :meth:`rows`."""

    def __post_init__(self) -> None:
        self._best()

    def _best(self) -> int:
        """Return the index of the allowed move that takes least time over the steps; of equals, the one that moves
        least."""
        limit = math.inf
        if self.max_bytes_moved is not None:
            limit = checked("max_bytes_moved", self.max_bytes_moved, 0, kind=Real)
        allowed = [index for index, move in enumerate(self.curve) if move.bytes_moved <= limit]
        if not allowed:
            raise PlanError(
                f"no plan is reached with max_bytes_moved={limit:,}: the current one cannot stay, and the least that "
                f"must move is {self.now.bytes_moved:,} bytes"
            )
        return min(allowed, key=lambda index: (self.curve[index].seconds(self.steps), index))

    def over(self, steps: int, max_bytes_moved: int | None = None) -> Replan:
        """Return the curve for other remaining steps or another limit of bytes; nothing is searched."""
        return replace(self, steps=steps, max_bytes_moved=max_bytes_moved)

    @property
    def plan(self) -> SavedPlan:
        """The one that takes least time over the steps that remain."""
        return self.make(self._best())

    @property
    def chosen(self) -> Move:
        """The move to :attr:`plan`."""
        return self.curve[self._best()]

    @property
    def stays(self) -> bool:
        """True if the current plan's sharding is the best."""
        return not self.forced and self.chosen.tables == 0

    @property
    def now(self) -> Move:
        """The smallest move: none if the current plan can stay."""
        return self.curve[0]

    @property
    def saved_seconds(self) -> float:
        """Over the steps that remain, against :attr:`now`, moving included."""
        return self.now.seconds(self.steps) - self.chosen.seconds(self.steps)

    @property
    def sentence(self) -> str:
        """Recommendation in words."""
        chosen, steps = self.chosen, f"{self.steps:,} steps"
        if self.stays:
            stay = f"Stay with {self.before}"
            if self.stale:
                stay = (
                    f"Keep the sharding of {self.before}, but save and load this plan ({self.before} was made for "
                    f"something else, then -> now: {'; '.join(self.stale)})"
                )
            return (
                f"{stay}: {chosen.step_ms:.3f} ms per step. Over {steps}, moving to any other plan costs more time "
                "than it saves."
            )
        because = f"{self.before} cannot stay ({'; '.join(self.forced)}). " if self.forced else ""
        move = f"{because}Move {chosen.tables} table(s), {size_in_words(chosen.bytes_moved)}: {chosen.step_ms:.3f} ms"
        if self.forced and chosen == self.now:
            return f"{move} per step."
        return (
            f"{move} per step instead of {self.now.step_ms:.3f}, which saves "
            f"{seconds_in_words(self.saved_seconds)} over {steps}, with {seconds_in_words(chosen.moving_seconds)} of "
            "moving counted."
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without plans, which are documents of their own."""
        known = {name: value for name, value in vars(self).items() if name != "make"}
        told = {name: getattr(self, name) for name in ("chosen", "stays", "saved_seconds", "sentence")}
        return dict(document_of({**known, **told}))

    def rows(self) -> list[tuple[int, str, str, float, float]]:
        """Return rows of :attr:`COLUMNS`, without moves that gain less than half a percent over the last row."""
        shown = [self.now]
        for move in self.curve:
            if move.step_ms < shown[-1].step_ms - SHOWN * self.now.step_ms or move == self.chosen != self.now:
                shown.append(move)
        words = size_in_words
        return [
            (one.tables, words(one.bytes_moved), words(one.bytes_to_one_rank), one.step_ms, one.seconds(self.steps))
            for one in shown
        ]

    def __str__(self) -> str:
        rows = [(f"{tables:,}", moved, to_one, f"{ms:.3f}", f"{seconds:,.1f}")
                for tables, moved, to_one, ms, seconds in self.rows()]  # fmt: skip
        cells = ("{:>7}{:>12}{:>13}{:>13}{:>17}".format(*row) for row in (self.COLUMNS, *rows))
        return "\n".join([self.sentence, *cells])


def link_bytes_per_s(topology: Topology) -> float:
    """Return the rate of a topology's slowest link."""
    links, one_host = topology.comms_bandwidths, topology.world_size <= topology.intra_group_size
    return 1e3 * float(links.intra_host_bw if one_host else min(links.intra_host_bw, links.inter_host_bw))


@torch.no_grad()
def replanned(
    model: ModelProblem,
    current: ShardingPlan | SavedPlan,
    fresh: Sequence[ShardingOption],
    steps: int,
    bytes_per_s: float,
    restart_seconds: float,
    max_bytes_moved: int | None,
    lost: Sequence[int],
) -> Replan:
    """Return the plan that takes least time over so many steps, see
    :meth:`~dreamshard_planner.planner.DreamShardPlanner.replan`; ``fresh`` was made without a thought of moving."""
    held = Held.of(model, current, lost)
    with single_thread():
        ways = _Ways(model, held, fresh)
        effort = model.settings.effort_factor
        walked = few_moves(ways.cost, ways.starts, ways.kept, ways.fresh, ways.received_UP, max_bytes_moved, effort)
        found = [point.sharding for point in walked if ways.runs(point.sharding)] or [ways.fresh]
        now, step_ms = (ways.starts or found)[0], ways.cost.overall_ms
        points = [now, *(sharding for sharding in found if step_ms(sharding) < step_ms(now))]

    def move(sharding: Sharding) -> Move:
        tables, to_rank_D = ways.moved(sharding)
        return Move(
            tables=tables,
            bytes_moved=int(to_rank_D.sum()),
            bytes_to_one_rank=int(to_rank_D.max()),
            step_ms=step_ms(sharding),
            moving_seconds=restart_seconds + int(to_rank_D.max()) / bytes_per_s if tables or ways.forced else 0.0,
        )

    @neutral()
    @torch.no_grad()
    def saved(index: int) -> SavedPlan:
        return model.saved(ways.read.assign(points[index]), "plan")

    return Replan(
        before=held.name,
        curve=tuple(map(move, points)),
        make=saved,
        afresh=move(ways.fresh),
        steps=steps,
        max_bytes_moved=max_bytes_moved,
        forced=ways.forced,
        stale=held.stale,
    )


@dataclass(frozen=True)
class Held:
    """Shards that the remaining ranks hold of the model's tables."""

    name: str
    shards: Mapping[str, tuple[ShardPlace, ...]]
    """Shards of tables that the plan has with the same shape and data type."""
    whole: Mapping[str, TableSharding]
    """Tables of these of which no shard is lost, as they are sharded."""
    forced: tuple[str, ...]
    """Why not all can stay as it is."""
    stale: tuple[str, ...] = ()
    """Other differences of the plan's inputs, for which its file does not load."""

    @classmethod
    def of(cls, model: ModelProblem, current: ShardingPlan | SavedPlan, lost: Sequence[int]) -> Held:
        """Ranks that are left take the numbers from 0 on, in their order; those past the planned model's are lost.
        ValueError for lost ranks that there are not."""
        tables, given, saved = (
            model.inputs.tables,
            tables_of(current),
            current if isinstance(current, SavedPlan) else None,
        )
        known = {
            fqn: sharding_of(fqn, given[fqn], (declared.rows, declared.dim))
            for fqn, declared in tables.items()
            if fqn in given
        }
        used = [1 + shard.rank for table in known.values() for shard in table.shards]
        ranks = range(saved.inputs.topology.world_size if saved else max([model.room.world_size, *used]))
        if odd := sorted(set(lost) - {*ranks}):
            raise ValueError(f"there is no rank {odd[0]!r} to be lost: the plan that runs is for {len(ranks)} ranks")
        left = [rank for rank in ranks if rank not in lost][: model.room.world_size]
        before, numbers = saved.inputs.tables if saved else tables, dict(zip(left, range(len(left)), strict=True))
        shards, whole = {}, {}
        for fqn, table in known.items():
            declared = tables[fqn]
            if before[fqn].weights == declared.weights and table.extent == (declared.rows, declared.dim):
                held = [shard for shard in table.shards if shard.rank in numbers]
                shards[fqn] = tuple(replace(shard, rank=numbers[shard.rank]) for shard in held)
                if len(held) == len(table.shards):
                    whole[fqn] = replace(table, shards=shards[fqn])
        kinds = {"new": tables.keys() - known.keys(), "changed": known.keys() - shards.keys()}
        forced = [f"{what}: {some_of(sorted(of), ())}" for what, of in kinds.items() if of]
        if gone := {*ranks} - {*left}:
            forced.append(f"{ranks_in_words(gone)} lost")
        if saved is None:
            return cls("the plan", shards, whole, tuple(forced))
        was, now = saved.inputs.topology, model.inputs.topology
        shape = attrgetter("world_size", "local_world_size", "pod_size")
        if shape(was) != shape(now) and not gone:
            more_or_less = f"{was.all_ranks} -> {now.all_ranks} ranks"
            forced.append(f"{was} -> {now}" if was.all_ranks == now.all_ranks else more_or_less)
        stale = tuple(stale_differences(saved.inputs, model.inputs))
        return cls(saved.name, shards, whole, tuple(forced), stale)


class _Ways:
    """The problem whose tables may take what the search space has, what they are sharded as, or the fresh plan's way.

    Args:
        model: the planned one.
        held: what ranks hold.
        fresh: with ranks.
    """

    def __init__(self, model: ModelProblem, held: Held, fresh: Sequence[ShardingOption]) -> None:
        self._model, self._held, saved = model, held, model.saved(fresh, "plan")
        named = model.options(renamed(saved, names_that_keep_most(held.shards, saved)))
        guessed = any(map(model.rater.is_guess, named))
        searched = model.searched if guessed else model.rater.certain_options(model.searched)
        known = {fqn: table for fqn, table in held.whole.items() if enumerated_as(model.by_table[fqn], table)}
        ranks = model.room.world_size
        now = [as_option(fqn, table, model.by_table[fqn], ranks) for fqn, table in known.items()]
        ways = set(map(_way, searched))
        now = [option for option in now if _may_stay(option, ways)]
        options = list({_way(option): option for option in [*now, *named, *searched]}.values())
        model.rater.estimate_missing(options)
        self.read = model.rater.read(options, model.room)
        self.cost = model.rater.cost(self.read)
        self._index = {_way(option): (table, index) for table, choices in enumerate(self.read.options)
                       for index, option in enumerate(choices)}  # fmt: skip
        _, chosen, positions = zip(*sorted(map(self._change, named)), strict=True)
        self.fresh = mixed = Sharding(chosen, positions)
        self.kept: list[Change] = []
        for option in now:
            with suppress(PlannerError):  # its ranks do not lie as TorchRec needs them
                self.kept.append(self._change(option))
        for change in self.kept:
            mixed = mixed.changed(*change)
        self.starts = [mixed] if bool(self.cost.problem.fits(mixed)) else []
        self._received_SD = cache(self._received)

    def runs(self, sharding: Sharding) -> bool:
        """Return whether ranks can exchange the outputs of its tables."""
        return not self._model.mixed_exchanges(self.read.assign(sharding))

    @property
    def forced(self) -> tuple[str, ...]:
        """Why the current plan cannot stay."""
        kept = {self.cost.problem.names[table] for table, *_ in self.kept}
        cut = [fqn for fqn in self._held.whole if fqn not in kept]
        forced = [*self._held.forced, *([f"may not be sharded as they are: {some_of(cut, ())}"] if cut else ())]
        return tuple(forced or ([] if self.starts else ["it does not keep within memory and rules"]))

    def received_UP(self, table: int, option: int) -> np.ndarray:
        """See :data:`~dreamshard_planner.search.search.Received`."""
        received_SD = self._received_SD(table, option)
        span = self.cost.problem.tables[table][option].span
        units, positions = len(received_SD) // span, received_SD.shape[1] // span
        return received_SD.reshape(units, span, positions, span).diagonal(axis1=1, axis2=3).sum(-1)

    def _received(self, table: int, option: int) -> np.ndarray:
        sharded, ranks = self.read.options[table][option], self.cost.problem.num_ranks
        fqn = fqn_of(sharded)
        return received_SD(self._model.inputs.tables[fqn], places_of(sharded), self._held.shards.get(fqn), ranks)

    def moved(self, sharding: Sharding) -> tuple[int, np.ndarray]:
        """Return the number of tables that change, and the bytes that each rank gets."""
        to_rank_D = np.zeros(self.cost.problem.num_ranks, dtype=np.int64)
        tables = self.cost.problem.tables
        chosen = [*zip(range(len(tables)), sharding.options, sharding.positions, strict=True)]
        for table, option, positions in chosen:
            ranks = tables[table][option].ranks(positions)
            np.add.at(to_rank_D, ranks, self._received_SD(table, option)[range(len(ranks)), ranks])
        return len(self._held.shards) - len({*chosen} & {*self.kept}), to_rank_D

    def _change(self, option: ShardingOption) -> Change:
        table, index = self._index[_way(option)]
        return table, index, positions_of(option, self.cost.problem.tables[table][index].span)


def _may_stay(option: ShardingOption, searched: Collection[Hashable]) -> bool:
    """Unless an EmbeddingCollection could come to have column slices of two widths, which TorchRec cannot mix."""
    mixes = type_of(option).splits_columns and isinstance(option.module[1], EmbeddingCollection)
    return not mixes or _way(option) in searched


def _way(option: ShardingOption) -> Hashable:
    """Return a key that is equal for options that shard a table alike, shard by shard."""
    way = option.sharding_type, option.compute_kernel, option.cache_load_factor, hot_rows_of(option)
    return fqn_of(option), *way, tuple(places_of(option))
