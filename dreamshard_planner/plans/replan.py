# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The Pareto front of cost and bytes moved, and the best plan for the remaining steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Any, ClassVar

from dreamshard_planner.errors import PlanError
from dreamshard_planner.plans.plan_file import SavedPlan
from dreamshard_planner.support.formatting import checked, seconds_in_words, size_in_words

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
