# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Joint search: how each table is split, and where its shards go.

A *re-shard* lets one table that burdens the bottleneck rank change its option: its parts are subtracted, and the units
of the new option laid down one by one where they leave the lowest peak. Many tables x options are tried side by side.
Where no re-shard helps, units of span 1 move and swap (:mod:`dreamshard_planner.placement.search`) under what spans
hosts and world, and so in turns until neither helps.

Descents start from several shardings. Those made here choose, for a height that no single part may exceed, the option
of each table that costs all ranks together least, and take the lowest height at which ranks could be level: tables that
would stick out get split, the others stay whole. Where memory is short, bytes get a price.

The budget is counted in re-shards, moves and swaps; costs are compared after rounding and ties go to the lowest index,
so the same inputs give the same sharding.

Shapes: T tables, Q queries (a table and an option that it may change to), D ranks, N positions, L span, G fused groups,
C collectives, H latent channels, M kinds of memory, K tables on the bottleneck.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.sharding import Option, Sharding, ShardingCost, WithExtras
from dreamshard_planner.placement.joint_packing import packed_start
from dreamshard_planner.placement.packing import best_fit, largest_first
from dreamshard_planner.placement.rules import greedy_by_score
from dreamshard_planner.placement.search import SearchConfig, local_search
from dreamshard_planner.placement.states import DIGITS

FILLS = (1.0, 0.5, 0.25)
"""Shares of the level height that a single part may take in a start: small parts pack better, large ones cost less."""
WORTH = 1e-3
"""Share of the cost that a kick has to bring."""
PRICE_STEPS = 24
"""Doublings of the price of memory before a start gives up."""
SMALLER = 0.7
"""Largest part of an option that makes a table's parts smaller, of the largest that it has."""
EVENED_STARTS = 2
"""Starts, the cheapest, of which some tables are tried in smaller parts."""
MAX_EVENED = 16
TABLES_EVENED = 2000
"""Numbers of tables to spread that are tried, and these times tables."""
FILLED_STARTS = 3
"""Starts, the cheapest, whose memory is filled up."""
FILL_ATTEMPTS = 24
"""Groups of tables that are tried for that."""


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """How long and how widely to search."""

    starts: int = 4
    """Best starting shardings from which to descend."""
    reshards: int = 20_000
    """Re-shards to try in all, and"""
    reshards_per_table: int = 30
    """as many more for each table."""
    tables_per_step: int = 24
    """Of the bottleneck rank, the heaviest."""
    rated_exactly: int = 8
    """Of one step, the most promising at a glance."""
    candidates: int = 6_000
    """Moves and swaps of one descent between re-shards."""
    kicks: int = 8
    """Kicked copies of the best in a row that bring little, after which the search ends."""
    kick_tables: int = 3
    """Tables that a kick shards another way at random."""


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


class JointOptions:
    """What a choice of options asks of all ranks together, their exchanges included: the numbers that starts are made
    from. Tables with fewer options than others are padded with ones that cost infinitely much.

    Shapes: O options of the table that has most.
    """

    def __init__(self, cost: ShardingCost) -> None:
        problem = cost.problem
        # An exchange holds up every rank, so a byte of it costs all of them.
        exchange_P = problem.bytes_PC @ problem.collectives.level_ms_per_byte(problem.num_ranks)
        single_P, whole_P = cost.single_ms_P.numpy(), (cost.single_ms_P + exchange_P).numpy()
        storage_PM = problem.storage_PM.double().numpy()
        shape = len(problem.tables), max(len(options) for options in problem.tables)
        self.total_ms_TO, self.largest_ms_TO = np.full(shape, np.inf), np.full(shape, np.inf)
        self.bytes_TOM = np.zeros((*shape, storage_PM.shape[1]))
        self.fits_TO = np.zeros(shape, dtype=bool)
        roomiest_M = problem.capacity_DM.amax(0).double().numpy()
        for table, options in enumerate(problem.tables):
            for index, option in enumerate(options):
                parts = [part for unit in option.units for part in unit.parts]
                self.total_ms_TO[table, index] = whole_P[parts].sum()
                self.largest_ms_TO[table, index] = single_P[parts].max()
                self.bytes_TOM[table, index] = storage_PM[parts].sum(0)
                largest_M = storage_PM[parts].max(0)
                self.fits_TO[table, index] = ((largest_M <= roomiest_M) | (largest_M == 0)).all()

    @property
    def least_ms(self) -> float:
        """Of all ranks together, whatever they need of memory: over the ranks, no sharding whose costs add up is
        cheaper."""
        return float(self.total_ms_TO.min(1).sum())

    def bytes_M(self, options: np.ndarray) -> np.ndarray:
        """Of chosen options, over all ranks."""
        return self.bytes_TOM[np.arange(len(options)), options].sum(0)


def level_choice(
    num_ranks: int, asked: JointOptions, allowed_TO: np.ndarray, fill: float, price_M: np.ndarray
) -> np.ndarray:
    """The option of each table that costs least in all, within the lowest height at which ranks could be level, [T].

    Args:
        num_ranks: that share the cost.
        asked: what options cost.
        allowed_TO: options to choose from, at least one of each table.
        fill: share of the height that a single part may take.
        price_M: milliseconds per byte of each kind of memory.
    """
    each_T = np.arange(len(allowed_TO))
    priced_TO = np.where(allowed_TO, asked.total_ms_TO + asked.bytes_TOM @ price_M, np.inf)
    largest_TO = np.where(allowed_TO, asked.largest_ms_TO, np.inf)
    narrowest_T = largest_TO.argmin(1)

    def choose(height: float) -> np.ndarray:
        within_TO = largest_TO <= fill * height
        cheapest_T = np.where(within_TO, priced_TO, np.inf).argmin(1)
        return np.where(within_TO.any(1), cheapest_T, narrowest_T)

    def level_ms(chosen_T: np.ndarray) -> float:
        return float(asked.total_ms_TO[each_T, chosen_T].sum()) / num_ranks

    finite_TO = np.where(np.isfinite(largest_TO), largest_TO, 0.0)
    low, high = 0.0, max(1e-9, level_ms(choose(np.inf)), finite_TO.max()) / fill
    for _ in range(40):
        middle = (low + high) / 2
        if level_ms(choose(middle)) <= middle:
            high = middle
        else:
            low = middle
    return choose(high)


def lay_wide(cost: ShardingCost, options: Sequence[int]) -> Sharding | None:
    """Positions for the units of chosen options that are pinned, or wider than a rank, the widest and heaviest first,
    each where the peak stays lowest; the others are on rank 0. None where memory does not allow it."""
    problem, single = cost.problem, cost.single_ms_P
    positions: list[list[int]] = [[0] * len(problem.tables[t][o].units) for t, o in enumerate(options)]
    world: list[tuple[int, ...]] = []
    wide = []
    for table, option in enumerate(options):
        free = problem.tables[table][option].pinned is None
        for index, unit in enumerate(problem.tables[table][option].units):
            if free and unit.span == problem.num_ranks > 1:  # lies everywhere
                world.append(unit.parts)
            elif unit.span > 1 or not free:
                wide.append((free, -unit.span, -float(single[list(unit.parts)].sum()), table, index))
    load_D = torch.zeros(problem.num_ranks, dtype=torch.float64)
    free_DM = problem.capacity_DM.clone()
    if world:
        part_XD = torch.tensor(world)
        load_D += single[part_XD].sum(0)
        need_DM = problem.storage_PM[part_XD].sum(0)
        if not bool(((need_DM <= free_DM) | (need_DM == 0)).all()):
            return None
        free_DM -= need_DM
    for *_, table, index in sorted(wide):
        pinned = problem.tables[table][options[table]].pinned
        parts = torch.tensor(problem.tables[table][options[table]].units[index].parts)
        need_LM = problem.storage_PM[parts]
        free_NLM = free_DM.view(-1, len(parts), free_DM.shape[1])
        fits_N = ((need_LM <= free_NLM) | (need_LM == 0)).all(-1).all(-1)
        if pinned is not None:
            fits_N &= torch.arange(len(fits_N)) == pinned[index]
        if not fits_N.any():
            return None
        peak_N = (load_D.view(-1, len(parts)) + single[parts]).amax(-1).masked_fill(~fits_N, torch.inf)
        position = int(peak_N.argmin())
        positions[table][index] = position
        span = slice(position * len(parts), (position + 1) * len(parts))
        load_D[span] += single[parts]
        free_DM[span] -= need_LM
    return Sharding(tuple(options), tuple(tuple(places) for places in positions))


def lay(cost: ShardingCost, options: Sequence[int]) -> Sharding | None:
    """Positions for chosen options: wide units first, then those of span 1 from heavy to light, or from large to small
    where that dead-ends, or packed by size alone. None where memory allows none of that."""
    sharding = lay_wide(cost, options)
    if sharding is None:
        return None
    chosen = cost.chosen(sharding)
    if not len(chosen.assignment_S):
        return sharding
    rank_problem = chosen.cost.problem
    single_S, load_D = chosen.cost.single_ms_S, chosen.cost.preload_ms_D
    assignment_S = greedy_by_score(rank_problem, single_S, load_D)
    if assignment_S is None:
        assignment_S = greedy_by_score(rank_problem, single_S, load_D, largest_first(rank_problem))
    if assignment_S is None:
        assignment_S = best_fit(rank_problem)
    return None if assignment_S is None else chosen.placed(assignment_S)


def level_starts(cost: ShardingCost) -> list[Sharding]:
    """Shardings to start from: level choices among all options, and among fewer sharding types, since each type that is
    used costs kernels and collectives of its own."""
    problem, asked = cost.problem, JointOptions(cost)
    types = sorted({option.sharding_type for options in problem.tables for option in options})
    subsets = [set(types), *({kind} for kind in types if len(types) > 1)]
    subsets += [{"table_wise", kind} for kind in types if kind != "table_wise" and {"table_wise", kind} < set(types)]
    if "data_parallel" in types:
        subsets += [{"data_parallel", kind} for kind in types if {"data_parallel", kind} < set(types)]
        subsets.append(set(types) - {"data_parallel"})
    # Options with a part that no rank could hold are none, unless a table has no others.
    kind_TO = np.full(asked.total_ms_TO.shape, "", dtype=object)
    for table, options in enumerate(problem.tables):
        kind_TO[table, : len(options)] = [option.sharding_type for option in options]
    exists_TO = np.where(asked.fits_TO.any(1, keepdims=True), asked.fits_TO, kind_TO != "")
    starts: dict[Sharding, _Start] = {}
    for subset in subsets:
        within_TO = np.isin(kind_TO, list(subset)) & exists_TO
        allowed_TO = np.where(within_TO.any(1, keepdims=True), within_TO, exists_TO)
        for fill in FILLS:
            start = _affordable(cost, asked, allowed_TO, fill)
            if start is not None:
                starts[start.sharding] = start
    cheapest = sorted(starts.values(), key=lambda start: cost.overall_ms(start.sharding))[:FILLED_STARTS]
    return list(dict.fromkeys([*starts, *(start.filled(cost, asked) for start in cheapest)]))


def evened(cost: ShardingCost, asked: JointOptions, sharding: Sharding) -> list[Sharding]:
    """The same with some tables in smaller parts: where n equal parts do not divide among the ranks (24 on 16), the
    rest of that division costs a whole part more than level, and no change of a single table helps. Tables are spread
    in the order of what that adds in all per millisecond of part that it takes away, one, two, ... and ever more."""
    each_T, now_T = np.arange(len(sharding.options)), np.array(sharding.options)
    largest_T = asked.largest_ms_TO[each_T, now_T]
    smaller_TO = (asked.largest_ms_TO < SMALLER * largest_T[:, None]) & asked.fits_TO
    spread_TO = np.where(smaller_TO, asked.total_ms_TO, np.inf)
    spread_T = spread_TO.argmin(1)
    added_T = spread_TO[each_T, spread_T] - asked.total_ms_TO[each_T, now_T]
    rate_T = np.where(smaller_TO.any(1), added_T / np.maximum(largest_T, 1e-30), np.inf)
    order = [table for table in np.argsort(rate_T, kind="stable").tolist() if rate_T[table] < np.inf]
    if not order:
        return []
    most = max(4, min(MAX_EVENED, TABLES_EVENED // len(order)))
    counts = sorted({*range(1, most // 2 + 1), *(round(len(order) ** (i / most)) for i in range(1, most))})
    variants = []
    for count in counts:
        options_T = now_T.copy()
        options_T[order[:count]] = spread_T[order[:count]]
        laid = lay(cost, options_T.tolist())
        if laid is not None:
            variants.append(laid)
    return variants


def _affordable(cost: ShardingCost, asked: JointOptions, allowed_TO: np.ndarray, fill: float) -> _Start | None:
    """A level choice that fits: memory that runs short gets a price, doubled until it does."""
    capacity_M = cost.problem.capacity_DM.clamp_min(0).double().sum(0).numpy()
    price_M = np.zeros(len(capacity_M))
    first_M = 1e-3 * max(asked.least_ms, 1e-6) / np.maximum(capacity_M, 1)
    tried_T = wanted_T = used_M = None
    for _ in range(PRICE_STEPS):
        options_T = level_choice(cost.problem.num_ranks, asked, allowed_TO, fill, price_M)
        if tried_T is None or (options_T != tried_T).any():
            wanted_T = options_T if wanted_T is None else wanted_T
            tried_T, used_M = options_T, asked.bytes_M(options_T)
            if (used_M <= capacity_M).all() and (sharding := lay(cost, options_T.tolist())) is not None:
                return _Start(sharding, wanted_T)
        # Ranks fill up before all memory does: what is nearly full gets dearer as well.
        price_M = np.where(used_M > 0.5 * capacity_M, np.maximum(2 * price_M, first_M), price_M)
    return None


@dataclass(frozen=True)
class _Start:
    """A sharding that fits, and the options that would have been chosen if memory cost nothing."""

    sharding: Sharding
    faster_T: np.ndarray

    def filled(self, cost: ShardingCost, asked: JointOptions) -> Sharding:
        """Tables take their faster options as long as that helps, those first that gain most per byte: a price alone
        treats like tables alike."""
        slow_T, each_T = np.array(self.sharding.options), np.arange(len(self.faster_T))
        gain_T = asked.total_ms_TO[each_T, slow_T] - asked.total_ms_TO[each_T, self.faster_T]
        grow_T = (asked.bytes_TOM[each_T, self.faster_T] - asked.bytes_TOM[each_T, slow_T]).clip(0).sum(-1)
        order = [table for table in np.argsort(-gain_T / (grow_T + 1), kind="stable") if gain_T[table] > 0]
        best, best_ms, taken_T = self.sharding, cost.overall_ms(self.sharding), slow_T
        waiting = [np.array(order, dtype=int)] if order else []
        for _ in range(FILL_ATTEMPTS):
            if not waiting:
                break
            some = waiting.pop()
            options_T = taken_T.copy()
            options_T[some] = self.faster_T[some]
            sharding = lay(cost, options_T.tolist())
            overall_ms = math.inf if sharding is None else cost.overall_ms(sharding)
            if overall_ms < best_ms:
                best, best_ms, taken_T = sharding, overall_ms, options_T
            elif len(some) > 1:
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
        return best


@torch.no_grad()
def joint_search(
    cost: ShardingCost,
    starts: Iterable[Sharding],
    config: JointConfig,
    search: SearchConfig,
    seed: int = 0,
    seconds: float | None = None,
) -> JointResult | None:
    """Descend from the cheapest of some feasible shardings, then from kicked copies of the best; never worse than the
    best start. None where there is no start.

    Args:
        cost: the problem and its cost.
        starts: feasible shardings; further ones are made by :func:`level_starts`.
        config: of the re-shards.
        search: of the moves and swaps.
        seed: of kicks.
        seconds: cap on the search, on top of its budget of candidates.
    """
    pool = list(dict.fromkeys([*starts, *level_starts(cost)]))
    if not pool and (packed := packed_start(cost.problem)) is not None:
        pool = [packed]
    if not pool:
        return None
    overall = {sharding: cost.overall_ms(sharding) for sharding in pool}
    order = sorted(pool, key=lambda sharding: overall[sharding])
    descents = _Descents(cost, order[0], config, search, seed, seconds)
    asked = JointOptions(cost)
    for index, start in enumerate(order[: config.starts]):
        descents.descend(start)
        variants = evened(cost, asked, start) if index < EVENED_STARTS and descents.left() else []
        if variants:
            descents.descend(min(variants, key=cost.overall_ms))
    fruitless = 0
    while descents.left() and fruitless < config.kicks:
        worth_it = descents.best_ms * (1 - WORTH)
        descents.descend(descents.kicked())
        fruitless = 0 if descents.best_ms < worth_it else fruitless + 1
    return descents.result()


class _Descents:
    """Descents one after the other, and the best that they came to."""

    def __init__(
        self,
        cost: ShardingCost,
        best: Sharding,
        config: JointConfig,
        search: SearchConfig,
        seed: int,
        seconds: float | None,
    ) -> None:
        self._cost, self._config = cost, config
        self._best, self.best_ms = best, cost.overall_ms(best)
        self._unit = max(1e-9, self.best_ms)
        self._generator = torch.Generator().manual_seed(seed)
        self._quiet = replace(search, starts=1, candidates=config.candidates, kicks=0)
        self._reshards = self._candidates = 0
        self._limit = config.reshards + config.reshards_per_table * cost.problem.num_tables
        self._deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._cut_short = False

    def left(self) -> bool:
        """Whether budget and time are left."""
        if time.monotonic() > self._deadline:
            self._cut_short = True
        return self._reshards < self._limit and not self._cut_short

    def result(self) -> JointResult:
        return JointResult(self._best, self.best_ms, self._reshards, self._candidates, self._cut_short)

    def descend(self, start: Sharding) -> None:
        """Re-shards, then moves and swaps, in turns until neither helps."""
        cost, unit = self._cost, self._unit
        state = _State(cost, start, self._config, unit)
        while self.left():
            before = _round(state.overall_ms(), unit)
            self._reshards += state.improve(self._limit - self._reshards, self.left)
            state = _State(cost, self._moved(state.sharding), self._config, unit)
            after = _round(state.overall_ms(), unit)
            if after < _round(self.best_ms, unit):
                self._best, self.best_ms = state.sharding, state.overall_ms()
            if after >= before:
                break

    def _moved(self, sharding: Sharding) -> Sharding:
        """After moves and swaps of what spans one rank."""
        chosen = self._cost.chosen(sharding)
        if not len(chosen.assignment_S):
            return sharding
        result = local_search(chosen.cost, [chosen.assignment_S], self._quiet, self._generator)
        self._candidates += result.candidates
        return chosen.placed(result.assignment_S)

    def kicked(self) -> Sharding:
        """The best with a few random tables sharded another way, each where it leaves the lowest peak."""
        state = _State(self._cost, self._best, self._config, self._unit)
        tables = self._cost.problem.tables
        changeable = [table for table in range(len(tables)) if len(tables[table]) > 1]
        for _ in range(min(len(changeable), self._config.kick_tables)):
            table = changeable[self._draw(len(changeable))]
            state.force(table, self._draw(len(tables[table])))
        return state.sharding

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self._generator))


def _round(ms: float, unit: float) -> int:
    return round(ms / unit * 10**DIGITS)


REFRESH = 100
"""Re-shards after which sums are taken afresh: differences add up rounding errors."""


class _State:
    """One sharding, with the sums that make a re-shard cheap."""

    def __init__(self, cost: ShardingCost, sharding: Sharding, config: JointConfig, unit: float) -> None:
        self.cost, self.problem, self._config, self._unit = cost, cost.problem, config, unit
        self.sharding = sharding
        self._refresh()

    def _refresh(self) -> None:
        laid = self.cost.laid(self.sharding)
        self.latent_DGH = self.cost.group_latents(*laid)
        self.group_ms_DG = self.cost.compute.group_cost_ms(self.latent_DGH).sum(-1)
        self.bytes_CD = self.cost.bytes_sent(*laid)
        self.free_DM = self.problem.capacity_DM - self.cost.used_bytes(*laid)
        self._changes = 0

    @property
    def device_ms_D(self) -> Tensor:
        return self.group_ms_DG.sum(-1)

    def overall_ms(self) -> float:
        forward, backward = self.problem.collectives.ms(self.bytes_CD)
        return float(self.device_ms_D.max() + forward + backward)

    def _change(self, table: int, option: int, positions: tuple[int, ...]) -> None:
        """Shard one table another way."""
        after = self.sharding.changed(table, option, positions)
        ranks = []
        for sharding, sign in ((self.sharding, -1), (after, 1)):
            rank_X, part_X = self._rows(sharding, table)
            group = self.problem.group_of(table, sharding.options[table])
            self.latent_DGH[:, group].index_add_(0, rank_X, self.cost.latent_PH[part_X], alpha=sign)
            self.bytes_CD.T.index_add_(0, rank_X, self.problem.bytes_PC[part_X], alpha=sign)
            self.free_DM.index_add_(0, rank_X, self.problem.storage_PM[part_X], alpha=-sign)
            ranks.append(rank_X)
        self.sharding = after
        self._changes += 1
        if self._changes >= REFRESH:
            self._refresh()
            return
        touched_X = torch.cat(ranks).unique()
        # What a group sums to where nothing is left must be nothing, not the rounding of what was there.
        self.group_ms_DG[touched_X] = self.cost.compute.group_cost_ms(self.latent_DGH[touched_X]).sum(-1)

    def force(self, table: int, option: int) -> None:
        """Shard one table another way, whatever that costs; leaves it where memory does not allow it."""
        tried = self._try([table], [(0, table, option)], self.cost.compute.glance_ms)
        if math.isfinite(float(tried.key_Q[0])):
            self._change(table, option, tried.positions[0])

    def improve(self, limit: int, left: Callable[[], bool]) -> int:
        """Re-shard tables on the bottleneck rank, and where that helps no more, those that exchange most, until neither
        helps; says how many re-shards were tried."""
        tried = 0
        while tried < limit and left():
            for tables in (self._tables_on_bottleneck, self._tables_that_exchange):
                improved, queries = self._reshard(tables())
                tried += queries
                if improved:
                    break
            else:
                break
        return tried

    def _reshard(self, tables: Sequence[int]) -> tuple[bool, int]:
        """Apply the best re-shard of one of the tables, if it lowers the cost, or the sum of squares of the ranks'
        costs at the same cost. Says whether it did, and how many it tried."""
        queries = [
            (slot, table, option)
            for slot, table in enumerate(tables)
            for option in range(len(self.problem.tables[table]))
            if option != self.sharding.options[table] or self._movable(self.problem.tables[table][option])
        ]
        if not queries:
            return False, 0
        compute = self.cost.compute
        tried = self._try(tables, queries, compute.glance_ms)
        if compute.glance_channels is not None or isinstance(compute, WithExtras):  # a glance says less than the cost
            order = torch.argsort(tried.key_Q, stable=True)[: self._config.rated_exactly].sort().values.tolist()
            queries_rated = [queries[index] for index in order]
            tried = self._try(tables, queries_rated, compute.group_cost_ms)
        else:
            queries_rated = queries
        index = int(tried.key_Q.argmin())
        before_ms, before_square = self.overall_ms(), float(self.device_ms_D.square().sum())
        after, before = float(tried.overall_Q[index]), float(_round(before_ms, self._unit))
        balances = float(tried.square_Q[index]) < before_square * (1 - 10.0**-DIGITS)
        if not (after < before or (after == before and balances)):
            return False, len(queries)
        _, table, option = queries_rated[index]
        self._change(table, option, tried.positions[index])
        return True, len(queries)

    def _movable(self, option: Option) -> bool:
        """Whether laying the same option down again may give another sharding; single units of span 1 just move."""
        if option.pinned is not None:
            return False
        return len(option.units) > 1 or 1 < option.units[0].span < self.problem.num_ranks

    def _tables_that_exchange(self) -> list[int]:
        """Tables that may change, those with the longest exchanges first."""
        exchange_P = self.problem.bytes_PC @ self.problem.collectives.level_ms_per_byte(self.problem.num_ranks)
        if not bool(exchange_P.any()):
            return []
        exchange, burden = exchange_P.tolist(), {}
        for table, option in enumerate(self.sharding.options):
            if self._changeable(table):
                units = self.problem.tables[table][option].units
                burden[table] = sum(exchange[part] for unit in units for part in unit.parts)
        return sorted(burden, key=lambda table: (-burden[table], table))[: self._config.tables_per_step]

    def _changeable(self, table: int) -> bool:
        options = self.problem.tables[table]
        return len(options) > 1 or self._movable(options[0])

    def _tables_on_bottleneck(self) -> list[int]:
        """Tables that may change and have a part on the slowest rank, the heaviest there first."""
        rank = int((self.device_ms_D / self._unit * 10**DIGITS).round().argmax())
        single, burden = self.cost.single_ms_P, {}
        for table, (option, positions) in enumerate(zip(self.sharding.options, self.sharding.positions, strict=True)):
            if not self._changeable(table):
                continue
            here = [
                float(single[unit.parts[rank - position * unit.span]])
                for unit, position in zip(self.problem.tables[table][option].units, positions, strict=True)
                if position == rank // unit.span
            ]
            if here:
                burden[table] = sum(here)
        return sorted(burden, key=lambda table: (-burden[table], table))[: self._config.tables_per_step]

    def _try(
        self, tables: Sequence[int], queries: Sequence[tuple[int, int, int]], group_cost: Callable[[Tensor], Tensor]
    ) -> _Tried:
        """Lay the units of every query down, one after the other, where they leave the lowest peak."""
        problem, latent_PH = self.problem, self.cost.latent_PH
        ranks = problem.num_ranks
        slot_Q = torch.tensor([slot for slot, _, _ in queries])
        options = [problem.tables[table][option] for _, table, option in queries]
        old_K = torch.tensor([problem.group_of(table, self.sharding.options[table]) for table in tables])
        new_Q = torch.tensor([problem.group_of(table, option) for _, table, option in queries])

        gone_KDH, gone_KCD, gone_KDM = self._without(tables)
        without_KDH = self.latent_DGH[:, old_K].transpose(0, 1) - gone_KDH
        without_KD = group_cost(without_KDH).sum(-1).double()
        touched_KD = gone_KDH[..., 0] > 0
        before_KD = torch.where(
            touched_KD, group_cost(self.latent_DGH[:, old_K].transpose(0, 1)).sum(-1).double() - without_KD, 0.0
        )
        same_Q = old_K[slot_Q] == new_Q
        device_QD = self.device_ms_D - before_KD[slot_Q]
        group_QDH = torch.where(same_Q[:, None, None], without_KDH[slot_Q], self.latent_DGH[:, new_Q].transpose(0, 1))
        base_QD = group_cost(group_QDH).sum(-1).double()
        free_QDM = self.free_DM + gone_KDM[slot_Q]
        bytes_QCD = self.bytes_CD - gone_KCD[slot_Q]
        alive_Q = torch.ones(len(queries), dtype=torch.bool)
        positions: list[list[int]] = [[] for _ in queries]

        for step in range(max(len(option.units) for option in options)):
            by_span: dict[int, list[int]] = {}
            for query, option in enumerate(options):
                if step < len(option.units):
                    by_span.setdefault(option.units[step].span, []).append(query)
            for span, some in by_span.items():
                index_X = torch.tensor(some)
                part_XL = torch.tensor([options[query].units[step].parts for query in some])
                added_XLH = latent_PH[part_XL]
                latent_XNLH = group_QDH[index_X].unflatten(1, (ranks // span, span)) + added_XLH[:, None]
                after_XNL = group_cost(latent_XNLH).sum(-1).double()
                peak_XNL = device_QD[index_X].unflatten(1, (-1, span)) + after_XNL
                peak_XNL = peak_XNL - base_QD[index_X].unflatten(1, (-1, span))
                need_XLM = problem.storage_PM[part_XL]
                free_XNLM = free_QDM[index_X].unflatten(1, (ranks // span, span))
                fits_XN = ((need_XLM[:, None] <= free_XNLM) | (need_XLM[:, None] == 0)).all(-1).all(-1)
                alive_Q[index_X] &= fits_XN.any(-1)
                position_X = peak_XNL.amax(-1).masked_fill(~fits_XN, torch.inf).argmin(-1)
                for query, position in zip(some, position_X.tolist(), strict=True):
                    positions[query].append(position)
                row_XL = position_X[:, None] * span + torch.arange(span)
                each = torch.arange(len(some))
                device_QD[index_X[:, None], row_XL] = peak_XNL[each, position_X]
                base_QD[index_X[:, None], row_XL] = after_XNL[each, position_X]
                group_QDH[index_X[:, None], row_XL] += added_XLH
                free_QDM[index_X[:, None], row_XL] -= need_XLM
                bytes_QCD.transpose(1, 2).index_put_(
                    (index_X[:, None], row_XL), problem.bytes_PC[part_XL], accumulate=True
                )

        forward_Q, backward_Q = problem.collectives.ms(bytes_QCD)
        overall_Q = ((device_QD.amax(-1) + forward_Q + backward_Q) / self._unit * 10**DIGITS).round()
        square_Q = device_QD.square().sum(-1)
        key_Q = overall_Q + square_Q / (square_Q.max() * 2).clamp_min(1e-30)
        return _Tried(
            key_Q.masked_fill(~alive_Q, torch.inf),
            overall_Q.masked_fill(~alive_Q, torch.inf),
            square_Q,
            [tuple(places) for places in positions],
        )

    def _rows(self, sharding: Sharding, table: int) -> tuple[Tensor, Tensor]:
        """Rank and part of all that one table lays down."""
        ranks: list[int] = []
        parts: list[int] = []
        units = self.problem.tables[table][sharding.options[table]].units
        for unit, position in zip(units, sharding.positions[table], strict=True):
            ranks.extend(range(position * unit.span, (position + 1) * unit.span))
            parts.extend(unit.parts)
        return torch.tensor(ranks), torch.tensor(parts)

    def _without(self, tables: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [K, D, H], bytes sent [K, C, D] and memory [K, D, M] of some tables, each as it is sharded."""
        ranks = self.problem.num_ranks
        rows = [self._rows(self.sharding, table) for table in tables]
        row_X = torch.cat([rank_Y + slot * ranks for slot, (rank_Y, _) in enumerate(rows)])
        part_X = torch.cat([part_Y for _, part_Y in rows])

        def summed(values_PY: Tensor) -> Tensor:
            sums = torch.zeros(len(tables) * ranks, values_PY.shape[1], dtype=values_PY.dtype)
            return sums.index_add_(0, row_X, values_PY[part_X]).view(len(tables), ranks, -1)

        bytes_KDC = summed(self.problem.bytes_PC)
        return summed(self.cost.latent_PH), bytes_KDC.transpose(1, 2), summed(self.problem.storage_PM)


@dataclass(frozen=True)
class _Tried:
    """Queries laid down."""

    key_Q: Tensor
    """Overall cost, rounded, and less than one for the sum of squares; infinite where memory does not allow it."""
    overall_Q: Tensor
    square_Q: Tensor
    positions: list[tuple[int, ...]]
