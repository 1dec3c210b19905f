# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Joint search: how each table is split, and where its shards go.

Descents start from several shardings (:mod:`dreamshard_planner.search.starts`). Tables that burden the bottleneck
rank change their option (:mod:`dreamshard_planner.search.reshards`); where none helps, units of span 1 move
and swap (:mod:`dreamshard_planner.search.local_search`) under what spans hosts and world, and so in turns until neither
helps.

The budget is counted in re-shards, moves and swaps; costs are compared after rounding and ties go to the lowest index,
so the same inputs give the same sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.group_moves import group_moves
from dreamshard_planner.search.laying import packed_start
from dreamshard_planner.search.local_search import Budget, SearchConfig, local_search
from dreamshard_planner.search.reshards import ShardingState
from dreamshard_planner.search.settling import settled
from dreamshard_planner.search.starts import JointOptions, level_starts
from dreamshard_planner.search.states import in_steps
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

WORTH = 1e-3
"""Share of the cost by which a perturbation has to lower it to count as a gain."""
TURNS = 0.5
"""Share of the budget in which all starts, and the best group move of each, have one turn each."""
CONTINUED = 2
"""Of the descents that their turn interrupted, the best, which go on."""
BESIDE = 0.85
"""Share of the time left that further starts may take: of many tables on many ranks, descents from others end dearer
than these are."""


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """How long and how widely to search."""

    starts: int = 4
    """Starting shardings to descend from: the cheapest."""
    reshards: int = 20_000
    """Re-shards that the whole search may try, besides :attr:`reshards_per_table`."""
    reshards_per_table: int = 10
    """Re-shards that it may try more for each table of the model."""
    tables_per_step: int = 24
    """Tables of the bottleneck rank that one step tries to re-shard: the heaviest."""
    rated_exactly: int = 8
    """Re-shards of one step that are rated exactly: the most promising by the approximate cost."""
    candidates: int = 6_000
    """Moves and swaps of one descent between re-shards."""
    patience: int = 8
    """Perturbations without a gain worth having, one after the other, at which the search ends."""
    perturbed_tables: int = 3
    """Tables that a perturbation shards another way at random."""
    effort: float = 1.0
    """Share of the level starts, roll-outs and group moves to make; all of them from 1 on."""

    def times(self, effort: float) -> JointConfig:
        """Return the same settings with this multiple of starts, re-shards, moves and patience."""
        return replace(
            self,
            starts=portion(self.starts, effort),
            reshards=portion(self.reshards, effort),
            reshards_per_table=portion(self.reshards_per_table, effort),
            candidates=portion(self.candidates, effort),
            patience=portion(self.patience, effort),
            effort=self.effort * effort,
        )


DEFAULT_JOINT = JointConfig()


@dataclass(frozen=True)
class JointResult:
    """The best sharding found."""

    sharding: Sharding
    overall_ms: float
    reshards: int
    """Tried."""
    candidates: int
    """Moves and swaps rated."""
    cut_short: bool = False
    """Whether the time cap ended the search before its budget."""


@torch.inference_mode()
def joint_search(
    cost: Cost,
    starts: Iterable[Sharding],
    config: JointConfig,
    search: SearchConfig,
    seed: int = 0,
    seconds: float | None = None,
    further: Callable[[Cost, JointOptions, Sequence[Sharding], float | None], Iterable[Sharding]] | None = None,
) -> JointResult | None:
    """Descend from the cheapest of some feasible shardings, then from perturbed copies of the best; never worse
    than the best start. None where there is no start.

    Args:
        cost: the problem and its cost.
        starts: feasible shardings; others are made by :func:`level_starts`.
        config: of the re-shards.
        search: of the moves and swaps.
        seed: of perturbations.
        seconds: cap on the search, its starts included, on top of its budget of candidates.
        further: makes feasible starts from these level starts, few, from all of which there are descents as well, in so
            many seconds; TimeoutError where that takes more.
    """
    budget = _budget(cost, config, seconds)
    asked = JointOptions(cost)
    if not asked.may_fit:
        return None
    level = level_starts(cost, asked, budget.left, config.effort)
    beside: list[Sharding] = []
    in_time = True
    if further is not None and budget.left():
        left = budget.seconds_left()
        try:
            beside += further(cost, asked, level, None if left is None else BESIDE * left)
        except TimeoutError:
            in_time = False
    pool = list(dict.fromkeys([*starts, *level, *beside]))
    if not pool and (packed := packed_start(cost.problem)) is not None:
        pool = [packed]
    if not pool:
        return None
    overall = {sharding: cost.overall_ms(sharding) for sharding in pool}
    order = sorted(pool, key=overall.__getitem__)
    # Those beside take no other's place: what a start costs says little of where it leads.
    cheapest = [start for start in order if start not in beside][: config.starts]
    first = sorted([*cheapest, *beside], key=overall.__getitem__)
    descents = _Descents(cost, order[0], config, search, seed, budget)
    # For the same reason each has its turn before the best may use up the budget.
    turn = int(TURNS * budget.limit / (2 * len(first)))
    for start in first:
        descents.descend(start, turn)
        variants = group_moves(cost, asked, start, config.effort) if budget.left() else []
        if variants:
            descents.descend(min(variants, key=cost.overall_ms), turn)
    for sharding in sorted(descents.unfinished, key=cost.overall_ms)[:CONTINUED]:
        descents.descend(sharding)
    fruitless = 0
    while budget.left() and fruitless < config.patience:
        worth_it = descents.best_ms * (1 - WORTH)
        descents.descend(descents.perturbed())
        fruitless = 0 if descents.best_ms < worth_it else fruitless + 1
    # Replicas relieve a rank by little at a time, and past some of them no change of whole tables helps.
    for kind in (kind for kind, spec in SHARDING_TYPES.items() if spec.is_replicated):
        unreplicated = [start for start in order if kind not in _types(cost, start)]
        if 0 < len(unreplicated) < len(order) and budget.left():
            descents.descend(descents.descend(unreplicated[0], without=kind))
    found = descents.result()
    return found if in_time else replace(found, cut_short=True)


def _budget(cost: Cost, config: JointConfig, seconds: float | None) -> Budget:
    return Budget(config.reshards + config.reshards_per_table * cost.problem.num_tables, seconds)


def _types(cost: Cost, sharding: Sharding) -> set[str]:
    """Sharding types that tables take."""
    chosen = zip(cost.problem.tables, sharding.options, strict=True)
    return {options[option].sharding_type for options, option in chosen}


@torch.inference_mode()
def descended(cost: Cost, start: Sharding, config: JointConfig, search: SearchConfig) -> Sharding:
    """Where one descent from a feasible sharding ends: near it, as such searches go."""
    descents = _Descents(cost, start, config, search, 0, _budget(cost, config, None))
    descents.descend(start)
    return descents.result().sharding


class _Descents:
    """Descents one after the other, and the best that they came to."""

    def __init__(
        self, cost: Cost, best: Sharding, config: JointConfig, search: SearchConfig, seed: int, budget: Budget
    ) -> None:
        self._cost, self._config = cost, config
        self._best, self.best_ms = best, cost.overall_ms(best)
        self._unit = max(1e-9, self.best_ms)
        self._generator = torch.Generator().manual_seed(seed)
        self._quiet = replace(search, starts=1, candidates=config.candidates, perturbed=0)
        self._candidates = 0
        self.budget = budget
        self.unfinished: dict[Sharding, None] = {}
        """Where descents were when their turn ended, while they still gained."""
        self._turns: dict[Sharding, int] = {}
        """What a turn from each start took of the budget."""

    def result(self) -> JointResult:
        """The best, in the cheapest kernels that there is room for."""
        best, budget = settled(self._cost, self._best), self.budget
        return JointResult(best, self._cost.overall_ms(best), budget.used, self._candidates, budget.cut_short)

    def _state(self, sharding: Sharding, without: str | None = None) -> ShardingState:
        config = self._config
        return ShardingState(self._cost, sharding, self._unit, config.tables_per_step, config.rated_exactly, without)

    def descend(self, start: Sharding, turn: int | None = None, without: str | None = None) -> Sharding:
        """Re-shards, then moves and swaps, in turns until neither helps, or so many re-shards are tried; where that
        ends. No table takes the sharding type ``without``."""
        unit, budget = self._unit, self.budget
        if turn is not None and start in self._turns:  # several starts lead to one group move
            budget.spend(self._turns[start])
            return start
        state, began = self._state(start, without), budget.used
        end = budget.limit if turn is None else min(budget.limit, budget.used + turn)
        ended: Sharding | None = None
        while budget.left():
            before = in_steps(float(state.overall_ms()), unit)
            budget.spend(state.improve(end - budget.used, budget.left))
            if state.sharding is ended:
                break
            moved, has_ended = self._moved(state.sharding)
            ended = moved if has_ended else None
            state = self._state(moved, without)
            after = in_steps(float(state.overall_ms()), unit)
            if after < in_steps(self.best_ms, unit):
                self._best, self.best_ms = state.sharding, float(state.overall_ms())
            if after >= before:
                break
            if budget.used >= end:
                self.unfinished[state.sharding] = None
                break
        if turn is not None:
            self._turns[start] = budget.used - began
        return state.sharding

    def _moved(self, sharding: Sharding) -> tuple[Sharding, bool]:
        """After moves and swaps of what spans one rank; and whether there were no more to find."""
        chosen = self._cost.chosen(sharding)
        if not len(chosen.assignment_S):
            return sharding, True
        seconds = self.budget.seconds_left()
        result = local_search(chosen.cost, [chosen.assignment_S], self._quiet, self._generator, seconds)
        self._candidates += result.candidates
        return chosen.placed(result.assignment_S), result.candidates < self._quiet.candidates

    def perturbed(self) -> Sharding:
        """The best with a few random tables sharded another way, each where it leaves the lowest peak."""
        state = self._state(self._best)
        tables = self._cost.problem.tables
        changeable = [table for table in range(len(tables)) if len(tables[table]) > 1]
        for _ in range(min(len(changeable), self._config.perturbed_tables)):
            table = changeable[self._draw(len(changeable))]
            state.force(table, self._draw(len(tables[table])))
        return state.sharding

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))
