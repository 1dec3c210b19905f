# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans between the current one and a fresh one: the Pareto front of cost and bytes moved.

Two walks. One starts from what lies now, and takes the move or swap of units that lowers the cost most for each byte it
moves; the other one starts from a plan that was made afresh, and undoes what loses least for each byte that then stays.
Returned is the Pareto front of all plans on the way, by bytes and cost.

Shapes: Q trials, T tables, D ranks, U units of an option, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Change, Cost, Sharding, compute_ms, overall_ms
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.reshards import ShardingState
from dreamshard_planner.search.search import descended

Received = Callable[[int, int], np.ndarray]
"""Bytes that the ranks of a position would get, int64 [U, N], were a table sharded by this option."""
ROUNDS = 60
"""Rounds of undoing; if more tables differ, one round undoes several."""
SHARPNESS = 40
"""Exponent of the mean of the ranks' costs that stands for the slowest one: nearly as slow ranks have to become faster
as well."""
LIGHTEST = 16
"""Ranks that a unit may move to, in one step: the cheapest."""
MAX_SWAPS = 400
"""Swaps of one step: those that would level both ranks best."""


@dataclass(frozen=True)
class Waypoint:
    """A plan on the Pareto front."""

    bytes_moved: int
    overall_ms: float
    sharding: Sharding


@torch.no_grad()
def few_moves(
    cost: Cost,
    starts: Sequence[Sharding],
    kept: Sequence[Change],
    fresh: Sharding,
    received: Received,
    limit: int | None = None,
    effort: float = 1.0,
) -> list[Waypoint]:
    """Plans of which each costs less than all that move fewer bytes, those with fewest first.

    Args:
        cost: the problem and its cost.
        starts: feasible shardings that move little, if there are any.
        kept: how tables are sharded now, those that may stay so.
        fresh: a feasible sharding, made without a thought of bytes.
        received: bytes that move.
        limit: of bytes; the first walk is repeated within it.
        effort: multiple of the default's trials.
    """
    walk = _Walk(cost, fresh, kept, received, effort)
    walk.back()
    for start in starts:
        walk.restart(descended(cost, start, effort))
        walk.back()
    for start in [*starts, *([] if starts else [walk.sharding])]:
        for most in (walk.most_bytes, *([] if limit is None else [limit])):
            walk.restart(start)
            walk.forward(most)
    return walk.front()


class _Walk:
    """One sharding that changes, and all that it has been."""

    def __init__(
        self, cost: Cost, fresh: Sharding, kept: Sequence[Change], received: Received, effort: float = 1.0
    ) -> None:
        self._effort = effort
        self._cost, self._problem, self._received = cost, cost.problem, received
        self._fresh, self._kept = fresh, {change[0]: change for change in kept}
        self._unit = max(1e-9, cost.overall_ms(fresh))
        self._known: dict[Change, int] = {}
        self._seen: dict[Sharding, Waypoint] = {}
        self.restart(fresh)
        self.most_bytes = self._bytes

    @property
    def sharding(self) -> Sharding:
        return self._state.sharding

    def restart(self, sharding: Sharding) -> None:
        """Go on from there."""
        self._state = ShardingState(self._cost, sharding, self._unit)
        self._bytes = sum(self._bytes_of(self.sharding.now(table)) for table in range(self._problem.num_tables))
        self._note()

    def front(self) -> list[Waypoint]:
        """Return the Pareto front of all plans seen."""
        front: list[Waypoint] = []
        for point in sorted(self._seen.values(), key=lambda point: (point.bytes_moved, point.overall_ms)):
            if not front or point.overall_ms < front[-1].overall_ms * (1 - 1e-9):
                front.append(point)
        return front

    def back(self) -> None:
        """Undo all that memory allows, the cheapest for its bytes first."""
        while True:
            trials = [[change] for table, change in self._kept.items() if change != self.sharding.now(table)]
            if not trials:
                return
            overall_Q, _, bytes_Q = self._rated(trials)
            ratio_Q = (overall_Q - float(self._state.overall_ms())) / (-bytes_Q).clamp_min(1)
            order = torch.argsort(ratio_Q, stable=True)[: max(1, len(trials) // portion(ROUNDS, self._effort))]
            taken = [self._take(trials[index]) for index in order.tolist() if ratio_Q[index].isfinite()]
            if not any(taken):
                return

    def forward(self, limit: int) -> None:
        """Take the change that lowers the cost most for each byte, while no more bytes than the limit move."""
        for _ in range(portion(4 * self._problem.num_tables, self._effort)):
            trials = list(self._candidates())
            if not trials:
                return
            _, smooth_Q, bytes_Q = self._rated(trials)
            collectives_ms = self._problem.collectives.ms(self._state.bytes_CD)
            gain_Q = overall_ms(self._smooth(self._state.device_ms_D), collectives_ms) - smooth_Q
            gain_Q[(gain_Q < 1e-5 * self._unit) | (self._bytes + bytes_Q > limit)] = -torch.inf
            ratio_Q = gain_Q / bytes_Q.clamp_min(1)
            index = int(ratio_Q.argmax())
            if not ratio_Q[index].isfinite():
                return
            self._apply(trials[index])

    def _take(self, trial: list[Change]) -> bool:
        """Apply it, if memory still allows that."""
        fits = bool(self._rated([trial])[0].isfinite())
        if fits:
            self._apply(trial)
        return fits

    def _apply(self, trial: list[Change]) -> None:
        self._bytes += self._more_bytes(trial)
        for change in trial:
            self._state.change(*change)
        self._note()

    def _note(self) -> None:
        if self.sharding not in self._seen:
            self._seen[self.sharding] = Waypoint(self._bytes, float(self._state.overall_ms()), self.sharding)

    def _bytes_of(self, change: Change) -> int:
        """Return the bytes that one table has to move."""
        if change not in self._known:
            table, option, positions = change
            received_UN = self._received(table, option)
            self._known[change] = int(received_UN[range(len(positions)), list(positions)].sum())
        return self._known[change]

    def _more_bytes(self, trial: Sequence[Change]) -> int:
        """Return the bytes that move after a trial beyond those that move now."""
        return sum(self._bytes_of(change) - self._bytes_of(self.sharding.now(change[0])) for change in trial)

    def _candidates(self) -> Iterator[list[Change]]:
        """Moves of units of the tables that burden the slowest rank, or exchange most; and swaps with that rank."""
        load_D, sharding = self._state.device_ms_D, self.sharding
        lightest = torch.argsort(load_D, stable=True)[:LIGHTEST].tolist()
        for table in self._state.heaviest():
            if self._problem.tables[table][sharding.options[table]].span == 1:
                for unit, at in enumerate(sharding.positions[table]):
                    yield from ([sharding.move(table, unit, to)] for to in lightest if to != at)
        yield from self._state.swaps(int(load_D.argmax()), lambda span_T: span_T == 1, MAX_SWAPS)

    def _rated(self, trials: Sequence[Sequence[Change]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cost after each trial, with the slowest rank and with :meth:`_smooth`, infinite if memory does not
        allow it; and the bytes that move beyond those that move now."""
        device_QD, bytes_QCD, fits_Q = self._state.after(trials)
        collectives_Q = self._problem.collectives.ms(bytes_QCD)
        computed = compute_ms(device_QD, self._problem.shared_cores), self._smooth(device_QD)
        exact_Q, smooth_Q = (overall_ms(ms_Q, collectives_Q).masked_fill(~fits_Q, torch.inf) for ms_Q in computed)
        return exact_Q, smooth_Q, torch.tensor([self._more_bytes(trial) for trial in trials])

    def _smooth(self, device_ms_XD: Tensor) -> Tensor:
        """Return a mean over ranks, [...], that leans to the slowest."""
        most_X1, power = device_ms_XD.amax(-1, keepdim=True).clamp_min(1e-30), SHARPNESS
        return ((device_ms_XD / most_X1) ** power).mean(-1) ** (1 / power) * most_X1[..., 0]
