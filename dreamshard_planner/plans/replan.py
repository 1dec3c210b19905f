# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The Pareto front of cost and bytes moved, and the best plan for the remaining steps.

Shapes: N shards before, P shards after, D ranks, H hosts, L ranks of a host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from dreamshard_planner.errors import PlanError
from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableSharding
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.formatting import seconds_in_words, size_in_words
from dreamshard_planner.support.numbers import checked

FORBIDDEN = -1e18
"""Bytes that stay between ranks of other memory: worse than any."""
SHOWN = 0.005
"""Share of the cost that a row of the curve gains at least."""


@dataclass(frozen=True)
class Moving:
    """Rates that give the time to continue under another plan.

    Raises:
        ValueError: a time or rate that cannot be.
    """

    bytes_per_s: float
    """Rate of weights and optimizer states to one rank: its link, or its share of a disk."""
    restart_seconds: float = 60.0
    """From the last step before to the first one after, without moving anything."""

    def __post_init__(self) -> None:
        checked("bytes_per_s", self.bytes_per_s, kind=Real)
        checked("restart_seconds", self.restart_seconds, 0, sys.float_info.max, Real)

    def seconds(self, most_bytes: int) -> float:
        """Return the seconds of a restart in which no rank gets more than these bytes."""
        return self.restart_seconds + most_bytes / self.bytes_per_s


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
        """Index on the curve."""
        return best(self.curve, self.steps, self.max_bytes_moved)

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
        known = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "make"}
        curve = [asdict(move) for move in self.curve]
        told = {"stays": self.stays, "saved_seconds": self.saved_seconds, "sentence": self.sentence}
        return {**known, "curve": curve, "afresh": asdict(self.afresh), "chosen": asdict(self.chosen), **told}

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
        lines = [
            self.sentence,
            f"{'tables':>7}{'moved':>12}{'to one rank':>13}{'ms per step':>13}{'seconds in all':>17}",
        ]
        lines += [
            f"{tables:>7}{moved:>12}{to_one:>13}{ms:>13.3f}{seconds:>17,.1f}"
            for tables, moved, to_one, ms, seconds in self.rows()
        ]
        return "\n".join(lines)


def best(curve: Sequence[Move], steps: int, max_bytes_moved: int | None) -> int:
    """The index of the move that takes least time over so many steps; among equals the one that moves least.

    Raises:
        PlanError: each moves more bytes than may move.
        ValueError: a negative limit.
    """
    if max_bytes_moved is not None:
        checked("max_bytes_moved", max_bytes_moved, 0, kind=Real)
    allowed = [
        index for index, move in enumerate(curve) if max_bytes_moved is None or move.bytes_moved <= max_bytes_moved
    ]
    if not allowed:
        raise PlanError(
            f"no plan is reached with max_bytes_moved={max_bytes_moved:,}: the current one cannot stay, and the least "
            f"that must move is {curve[0].bytes_moved:,} bytes"
        )
    return min(allowed, key=lambda index: (curve[index].seconds(steps), index))


def names_that_keep_most(held: Mapping[str, Sequence[ShardPlace]], after: SavedPlan) -> tuple[int, ...]:
    """Name each rank of ``after`` so that most bytes of weights and optimizer states stay where they are.

    Ranks of one pod (by default of one host) remain in one pod. Ranks of other memory, and all ranks if placement rules
    name some, keep their names.

    Args:
        held: shards that ranks hold, by fully qualified name of the table.
        after: the other plan.
    """
    other = after.inputs.topology
    ranks, per_pod = other.world_size, other.pod_ranks
    if ranks % per_pod or after.inputs.placement_rules.get("on_ranks"):
        return tuple(range(ranks))
    rank_DD, host_HH = _bytes_that_stay(held, after, per_pod)
    memory_D = list(zip(*(sizes for _, sizes in sorted(other.memory_bytes.items())), strict=True))
    rank_DD[np.array([[mine != its for its in memory_D] for mine in memory_D])] = FORBIDDEN
    blocks_HHLL = rank_DD.reshape(len(host_HH), per_pod, len(host_HH), per_pod).swapaxes(1, 2)
    pairs = [[_assigned(block_LL) for block_LL in row_HLL] for row_HLL in blocks_HHLL]
    host_HH += [[kept for _, kept in row] for row in pairs]
    host_names, _ = _assigned(host_HH)
    return tuple(name * per_pod + place for host, name in enumerate(host_names) for place in pairs[host][name][0])


def renamed(plan: SavedPlan, names: Sequence[int]) -> SavedPlan:
    """Return the plan with its shards on ranks of other names; its predicted costs stay as they are.

    Tables on all ranks, or on all ranks of a host, keep the order of ranks, which TorchRec needs.
    """
    if list(names) == list(range(len(names))):
        return plan
    per_pod = plan.inputs.topology.pod_ranks
    sharding = {
        path: {name: _table(table, names, per_pod) for name, table in module.items()}
        for path, module in plan.sharding.items()
    }
    return replace(plan, sharding=sharding)


def _bytes_that_stay(
    held: Mapping[str, Sequence[ShardPlace]], after: SavedPlan, per_host: int
) -> tuple[np.ndarray, np.ndarray]:
    """If a rank [D, D], or a host [H, H], of ``after`` had the name of the other; half a byte more for its own."""
    ranks = after.inputs.topology.world_size
    rank_DD, host_HH = np.eye(ranks) / 2, np.eye(ranks // per_host) / 2
    for fqn, table in after.tables():
        declared, span = after.inputs.tables[fqn], _span(table)
        if span == "world" or not held.get(fqn):
            continue
        was_N2, start_N2, end_N2 = _places(held[fqn])
        is_P, start_P2, end_P2 = _places(table.shards)
        sides_PN2 = np.minimum(end_P2[:, None], end_N2) - np.maximum(start_P2[:, None], start_N2)
        width_P1 = (end_P2 - start_P2)[:, 1:].clip(1)
        bytes_PN = declared.trained_bytes(sides_PN2.clip(0).prod(-1), width_P1)
        if span == "rank":
            np.add.at(rank_DD, (is_P[:, None], was_N2), bytes_PN)
        else:
            bytes_PN[is_P[:, None] % per_host != was_N2 % per_host] = 0
            np.add.at(host_HH, (is_P[:, None] // per_host, was_N2 // per_host), bytes_PN)
    return rank_DD, host_HH


def _places(shards: Sequence[ShardPlace]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks, first row and column, last ones plus one."""
    start = np.array([shard.offset for shard in shards])
    return np.array([shard.rank for shard in shards]), start, start + np.array([shard.size for shard in shards])


def _assigned(kept: np.ndarray) -> tuple[list[int], float]:
    """The column of each row for the most in all, and that."""
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return columns.tolist(), float(kept[rows, columns].sum())


def _span(table: TableSharding) -> str:
    known = SHARDING_TYPES.get(table.sharding_type)
    return "world" if known is None else known.span


def _table(table: TableSharding, names: Sequence[int], per_host: int) -> TableSharding:
    def name(rank: int) -> int:
        place = rank % per_host
        return names[rank] if span == "rank" else names[rank - place] // per_host * per_host + place

    span = _span(table)
    if span == "world":
        return table
    return replace(table, shards=tuple(replace(shard, rank=name(shard.rank)) for shard in table.shards))
