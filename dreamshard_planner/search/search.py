# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The search: how each table is split, and where its shards go.

Descents start from several shardings, those given and those of :mod:`dreamshard_planner.search.starts`, which also
moves groups of like tables to another option. Each start has a first turn, then the cheapest go on. Tables that burden
the bottleneck rank change their option (:mod:`dreamshard_planner.search.reshards`). If no re-shard helps, units of
span 1 move and swap (:mod:`dreamshard_planner.search.moves`), while wider units stay. The two alternate until neither
helps. The best plan is perturbed, first by re-shards, at last by moves. If every table has one option, only moves and
swaps are left.

The budget is counted in re-shards, moves and swaps; costs are compared after rounding and ties go to the lowest index,
so the same inputs give the same sharding.

:func:`few_moves` searches between the current plan and a fresh one, for the Pareto front of cost and bytes moved. One
walk starts from what lies now, and takes the move or swap of units that lowers the cost most for each byte it moves;
the other one starts from a plan that was made afresh, and undoes what loses least for each byte that then stays.

Shapes of :func:`few_moves`: Q trials, T tables, D ranks, U units of an option, N positions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Change, Cost, Problem, Sharding, compute_ms, overall_ms
from dreamshard_planner.search.effort import DEFAULT_SETTINGS, Budget, SearchSettings, portion
from dreamshard_planner.search.moves import LAST_PATIENCE, local_search
from dreamshard_planner.search.reshards import ShardingState, in_steps
from dreamshard_planner.search.starts import OptionTotals, group_moves, level_starts, packed_start, stacked_starts

STARTS = 4
"""Starting shardings to descend from: the cheapest."""
RESHARDS = 20_000
"""Re-shards that a search may try, whatever the number of tables."""
RESHARDS_PER_TABLE = 10
"""Further re-shards per table."""
MOVES = 6_000
"""Moves, and swaps rated exactly, of one descent between re-shards."""
LAST_MOVES = 40_000
"""Moves and swaps of the last descents, from copies of the best plan with shards moved at random."""
PATIENCE = 8
"""Perturbations without a gain worth having, one after the other, at which re-sharding ends."""
WORTH = 1e-3
"""Share of the cost by which a perturbation has to lower it to count as a gain."""
TURNS = 0.5
"""Share of the budget in which all starts, and the best group move of each, have one turn each."""
PERTURBED_TABLES = 3
"""Tables that a perturbation shards another way at random."""
FURTHER_SHARE = 0.85
"""Share of the time left that further starts may take: with many tables on many ranks, they cost less than the plans
at which descents from other starts end."""


Further = Callable[[Cost, OptionTotals, float], Iterable[Sharding]]
"""Makes feasible starts from a cost and what its options ask, within some seconds; raises TimeoutError where that takes
more."""


@dataclass(frozen=True)
class SearchResult:
    """The best sharding found."""

    sharding: Sharding
    overall_ms: float
    reshards: int
    """Tried."""
    candidates: int
    """Moves and swaps rated."""
    cut_short: bool
    """True if the deadline ended the search before its budget."""
    further: tuple[Sharding, ...]
    """Further starts, in the order in which they were made."""


@torch.inference_mode()
def search(
    cost: Cost,
    starts: Iterable[Sharding],
    settings: SearchSettings = DEFAULT_SETTINGS,
    further: Further | None = None,
) -> SearchResult | None:
    """Descend from the cheapest of some feasible shardings, then from perturbed copies of the best; never worse
    than the best start. None where there is no start.

    Args:
        cost: the problem and its cost.
        starts: feasible shardings; others are made by :func:`level_starts` and :func:`stacked_starts`.
        settings: bounds and seed.
        further: makes a few starts more, from all of which there are descents as well.
    """
    effort, asked = settings.effort, OptionTotals(cost)
    budget = _budget(cost, effort, time.monotonic() + settings.seconds)
    if not asked.may_fit:
        return None
    made = level_starts(cost, asked, budget.left, effort)
    if budget.left() and _can_reshard(cost.problem):
        made += stacked_starts(cost, asked, effort)
    extra: list[Sharding] = []
    in_time = True
    if further is not None and budget.left():
        try:
            extra += further(cost, asked, FURTHER_SHARE * (budget.until - time.monotonic()))
        except TimeoutError:
            in_time = False
    pool = list(dict.fromkeys([*starts, *made, *extra]))
    if not pool and (packed := packed_start(cost.problem)) is not None:
        pool = [packed]
    if not pool:
        return None
    order = sorted(pool, key=cost.overall_ms)
    # Further starts replace none of the others: the cost of a start says little about the end of its descent.
    cheapest = [start for start in order if start not in extra][: portion(STARTS, effort)]
    first = sorted([*cheapest, *extra], key=cost.overall_ms)
    descents = _Descents(cost, first[0], effort, settings.seed, budget)
    if not _can_reshard(cost.problem):
        return descents.finish(first, in_time, extra)
    # For the same reason each start has a turn before one may use up the budget.
    turn = int(TURNS * budget.limit / (2 * len(first)))
    for start in first:
        descents.descend(start, turn)
        if budget.left() and (variants := group_moves(cost, asked, start, effort)):
            descents.descend(min(variants, key=cost.overall_ms), turn)
    fruitless = 0
    while budget.left() and fruitless < portion(PATIENCE, effort):
        worth_it = descents.best_ms * (1 - WORTH)
        descents.descend(descents.perturbed())
        fruitless = 0 if descents.best_ms < worth_it else fruitless + 1
    return descents.finish([descents.best], in_time, extra)


def _can_reshard(problem: Problem) -> bool:
    """Return whether anything but moves and swaps of units of span 1 can change a sharding."""
    every = problem.option_rows
    wide_O = (every.span_O > 1) & (every.span_O < problem.num_ranks)
    return len(every.span_O) > problem.num_tables or bool(wide_O.any())


def _budget(cost: Cost, effort: float, until: float = math.inf) -> Budget:
    return Budget(portion(RESHARDS, effort) + portion(RESHARDS_PER_TABLE, effort) * cost.problem.num_tables, until)


@torch.inference_mode()
def descended(cost: Cost, start: Sharding, effort: float) -> Sharding:
    """Return where one descent from a feasible sharding ends: near it, as such searches go."""
    descents = _Descents(cost, start, effort, 0, _budget(cost, effort))
    descents.descend(start)
    return descents.with_cheaper_kernels(descents.best)


class _Descents:
    """Descents one after the other, and the best that they came to."""

    def __init__(self, cost: Cost, best: Sharding, effort: float, seed: int, budget: Budget) -> None:
        self._cost, self._effort = cost, effort
        self.best, self.best_ms = best, cost.overall_ms(best)
        self._unit = max(1e-9, self.best_ms)
        self._generator = torch.Generator().manual_seed(seed)
        self._candidates = 0
        self.budget = budget

    def finish(self, starts: Sequence[Sharding], in_time: bool, extra: Iterable[Sharding]) -> SearchResult:
        """Run the last moves from starts with equal options, and from perturbed copies; return the best plan, with the
        cheapest kernels that fit. ``in_time`` is True if all starts were made."""
        chosen, budget = self._cost.chosen(starts[0]), self._moves(LAST_MOVES)
        starts_BS = torch.stack([self._cost.chosen(start).assignment_S for start in starts])
        patience = portion(LAST_PATIENCE, self._effort)
        best_S = local_search(chosen.cost, starts_BS, budget, self._generator, patience)
        best = self.with_cheaper_kernels(chosen.placed(best_S))
        best_ms, candidates = self._cost.overall_ms(best), self._candidates + budget.used
        cut_short = self.budget.cut_short or budget.cut_short or not in_time
        return SearchResult(best, best_ms, self.budget.used, candidates, cut_short, tuple(extra))

    def with_cheaper_kernels(self, sharding: Sharding) -> Sharding:
        """Return a sharding with the cheapest kernels that fit."""
        state = self._state(sharding)
        state.prefer_cheaper_kernels()
        return state.sharding

    def _moves(self, count: int) -> Budget:
        return Budget(portion(count, self._effort), self.budget.until)

    def _state(self, sharding: Sharding) -> ShardingState:
        return ShardingState(self._cost, sharding, self._unit)

    def descend(self, start: Sharding, turn: int | None = None) -> None:
        """Re-shards, then moves and swaps, alternately until neither helps, or so many re-shards are tried."""
        unit, budget = self._unit, self.budget
        end = budget.limit if turn is None else min(budget.limit, budget.used + turn)
        state = self._state(start)
        ended: Sharding | None = None
        while budget.left():
            before = in_steps(state.overall_ms(), unit)
            budget.used += state.improve(end - budget.used, budget.left)
            if state.sharding is ended:
                break
            moved, has_ended = self._moved(state.sharding)
            ended = moved if has_ended else None
            state = self._state(moved)
            after = in_steps(state.overall_ms(), unit)
            if after < in_steps(torch.tensor(self.best_ms, dtype=torch.float64), unit):
                self.best, self.best_ms = state.sharding, float(state.overall_ms())
            if after >= before or budget.used >= end:
                break

    def _moved(self, sharding: Sharding) -> tuple[Sharding, bool]:
        """After moves and swaps of what spans one rank; and whether there were no more to find."""
        chosen = self._cost.chosen(sharding)
        if not len(chosen.assignment_S):
            return sharding, True
        budget = self._moves(MOVES)
        moved_S = local_search(chosen.cost, chosen.assignment_S[None], budget)
        self._candidates += budget.used
        return chosen.placed(moved_S), budget.used < budget.limit

    def perturbed(self) -> Sharding:
        """The best with a few random tables sharded another way, each where it leaves the lowest peak."""
        state = self._state(self.best)
        tables = self._cost.problem.tables
        changeable = [table for table in range(len(tables)) if len(tables[table]) > 1]
        for _ in range(min(len(changeable), PERTURBED_TABLES)):
            table = changeable[self._draw(len(changeable))]
            state.force(table, self._draw(len(tables[table])))
        return state.sharding

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))


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
