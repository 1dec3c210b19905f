# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placements of units, and shardings to start a search from: level, within memory, with as little split as that takes;
and group moves, in which many tables change their sharding type together.

A greedy heuristic sorts shards by a score and gives each to the rank with the lowest sum of scores.

For a height that no single part may exceed, every table takes the option that costs all ranks together least; the
lowest height at which ranks could be level is the start's. Tables that would stick out get split, the others stay
whole. Where memory is short, bytes get a price.

The first table of a sharding type opens kernels and collectives, and the last one closes them: what pays for many
tables pays for none of them alone. Sets of tables are the first few in the order of what each gains by itself, of all
tables, and of those that one collective carries (a module's of one type), up to all of them. Smaller parts of the same
type are a target as well: where n equal parts do not divide among the ranks (24 on 16), the rest of that division
costs a whole part more than level, and no change of a single table helps.

Shapes: T tables, O options of the table that has most, P parts, U units of an option, L span, N positions, D ranks,
M limits, S shards or units of span 1, F features, X units.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Cost, Problem, Sharding, has_room
from dreamshard_planner.search.effort import portion
from dreamshard_planner.workload.tables import FEATURE_INDEX

FILLS = (1.0, 0.5)
"""Shares of the level height that a single part may take in a start: small parts pack better, large ones cost less."""
PRICE_STEPS = 24
"""Doublings of the price of memory before a start gives up."""
SMALLER = 0.7
"""Largest part of an option that makes a table's parts smaller, of the largest that it has."""
MAX_COUNTS = 8
"""Sizes of sets of tables that are tried, ever larger."""
TABLES_MOVED = 2000
"""Upper bound on sizes x tables."""
ATTEMPTS = 100
"""Attempts to stack tables, of each way to choose positions."""
TABLES_STACKED = 4000
"""Upper bound on attempts x tables."""
LEAST_ATTEMPTS = 12
"""Fewer attempts find no height worth having."""
LOWERED = 0.99
"""Target after a success, over the height that was reached."""
PACKING_ATTEMPTS = 100
"""Attempts to pack by bytes alone, of each way to choose positions, and"""
PARTS_PACKED = 10_000
"""these times parts. Of 140 random problems that need 99 % of the memory, this solves 101."""


def _column(features_SF: Tensor, name: str) -> Tensor:
    return features_SF[:, FEATURE_INDEX[name]].double()


def _size_lookup(features_SF: Tensor) -> Tensor:
    lookup = _column(features_SF, "dim") * _column(features_SF, "pooling_factor")
    return lookup * _column(features_SF, "rows").clamp_min(1).log10()


HEURISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "size_greedy": lambda features_SF: _column(features_SF, "size"),
    "dim_greedy": lambda features_SF: _column(features_SF, "dim"),
    "lookup_greedy": lambda features_SF: _column(features_SF, "dim") * _column(features_SF, "pooling_factor"),
    "size_lookup_greedy": _size_lookup,
}
"""Scores [S] from features [S, F]: the baselines of DreamShard's appendix. Each is a start and a baseline of every
plan. Heuristics that need more than features are in :func:`heuristic_placements`."""


def greedy_by_score(
    problem: Problem, score_S: Tensor, load_D: Tensor | None = None, order_S: Tensor | None = None
) -> Tensor | None:
    """Place shards in descending order of score, each on the rank with the lowest sum that can store it.

    Args:
        problem: the task.
        score_S: added by each shard to the sum of its rank.
        load_D: sums to start from, in the unit of the scores; nothing by default.
        order_S: shards in another order, int64; for example the largest first, if memory is tight.

    Returns:
        Rank of each shard, int64 [S], or None if a shard fits on no rank. Ties go to the lowest index.
    """
    free_DM, scores = problem.limits_DM.tolist(), score_S.tolist()
    # A shard that needs nothing has room even if a reservation left less than nothing.
    needs_S = [[(kind, need) for kind, need in enumerate(need_M) if need] for need_M in problem.needs_PM.tolist()]
    loads = [0.0] * problem.num_ranks if load_D is None else load_D.tolist()
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    assignment = [0] * problem.num_parts
    for shard in (torch.argsort(-score_S, stable=True) if order_S is None else order_S).tolist():
        full, needs = [], needs_S[shard]
        while heap:
            load, rank = heapq.heappop(heap)
            free_M = free_DM[rank]
            if not [kind for kind, need in needs if need > free_M[kind]]:
                break
            full.append((load, rank))
        else:
            return None
        assignment[shard] = rank
        for kind, need in needs:
            free_M[kind] -= need
        for entry in (*full, (load + scores[shard], rank)):
            heapq.heappush(heap, entry)
    return torch.tensor(assignment, dtype=torch.int64)


def place_by_heuristic(problem: Problem, name: str) -> Tensor | None:
    """Return a placement [S] by one of :data:`HEURISTICS`, or None if it dead-ends."""
    if name not in HEURISTICS:
        raise ValueError(f"unknown heuristic {name!r}; known are {', '.join(HEURISTICS)}")
    return greedy_by_score(problem, HEURISTICS[name](problem.features_PF))


def heuristic_placements(cost: Cost) -> dict[str, Tensor | None]:
    """Return placements [S] by :data:`HEURISTICS`, and ``cost_greedy`` by predicted cost on top of the preload; None if
    one dead-ends."""
    plans = {name: place_by_heuristic(cost.problem, name) for name in HEURISTICS}
    return plans | {"cost_greedy": greedy_by_score(cost.problem, cost.single_ms_P, cost.preload_ms_D)}


def largest_first(problem: Problem) -> Tensor:
    """Return shards in descending order of their largest share of any limit, int64 [S]."""
    unit_M = problem.needs_PM.sum(0).clamp_min(1).double()
    return torch.argsort(-(problem.needs_PM / unit_M).amax(-1), stable=True)


class Ranks:
    """Loads and free memory of all ranks, on which units are laid down one by one.

    In numpy, whose calls cost a third of torch's.

    Args:
        load_D: milliseconds to start from.
        free_DM: free memory to start from.
    """

    def __init__(self, load_D: np.ndarray, free_DM: np.ndarray) -> None:
        self.load_D, self.free_DM = load_D.copy(), free_DM.copy()

    def lay(
        self, load_UL: np.ndarray, need_ULM: np.ndarray, key: Callable[[np.ndarray], np.ndarray] = np.positive
    ) -> tuple[int, ...] | None:
        """Lay units of one span down in turn, each where it has room and the key of its highest rank's load is lowest
        and finite.

        Args:
            load_UL: load that each adds to each rank of its span.
            need_ULM: memory that it takes of each.
            key: of the highest rank's load at each position.

        Returns:
            Their positions, the first of equal ones; None, with nothing laid down, if a unit has none.
        """
        before, span = (self.load_D.copy(), self.free_DM.copy()), load_UL.shape[1]
        load_NL, free_NLM = self.load_D.reshape(-1, span), self.free_DM.reshape(-1, span, self.free_DM.shape[1])
        positions = []
        for load_L, need_LM in zip(load_UL, need_ULM, strict=True):
            key_N = key((load_NL + load_L).max(1))
            position = int(key_N.argmin())
            if not has_room(need_LM, free_NLM[position]).all():  # the quicker question first
                key_N = np.where(has_room(need_LM, free_NLM).all(-1), key_N, np.inf)
                position = int(key_N.argmin())
            if key_N[position] == np.inf:
                self.load_D[:], self.free_DM[:] = before
                return None
            load_NL[position] += load_L
            free_NLM[position] -= need_LM
            positions.append(position)
        return tuple(positions)


def place_wide_units(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Place units wider than a rank, the widest and heaviest first, each where the peak stays lowest.

    Other units are on rank 0. None if memory does not allow it.
    """
    problem, every = cost.problem, cost.problem.option_rows
    single_P, needs_PM, limits_DM = cost.single_ms_P.numpy(), problem.needs_PM.numpy(), problem.limits_DM.numpy()
    row_T = every.rows(range(problem.num_tables), options)
    span_T, positions = every.span_O[row_T], [(0,) * units for units in every.units_O[row_T].tolist()]
    everywhere_T = (span_T == problem.num_ranks) & (span_T > 1)
    part_UD = every.parts(row_T[everywhere_T]).reshape(-1, problem.num_ranks)
    taken_DM = needs_PM[part_UD].sum(0)
    if not has_room(taken_DM, limits_DM).all():
        return None
    ranks = Ranks(single_P[part_UD].sum(0), limits_DM - taken_DM)
    wide = ((span_T > 1) & ~everywhere_T).nonzero()[0].tolist()
    part_of = {table: problem.tables[table][options[table]].part_UL for table in wide}
    for table in sorted(wide, key=lambda table: (-span_T[table], -single_P[part_of[table]].sum(1).max())):
        laid = ranks.lay(single_P[part_of[table]], needs_PM[part_of[table]])
        if laid is None:
            return None
        positions[table] = laid
    return Sharding(tuple(options), tuple(positions))


def place_units(cost: Cost, options: Sequence[int]) -> Sharding | None:
    """Place the units of chosen options: wide ones first, then those of span 1 from heavy to light.

    Heavy is by compute, or by compute and exchanges, whichever ends cheaper. If that dead-ends, units go from large to
    small. None if memory does not allow that either.
    """
    sharding = place_wide_units(cost, options)
    if sharding is None:
        return None
    chosen = cost.chosen(sharding)
    problem, single_S, load_D = chosen.cost.problem, chosen.cost.single_ms_P, chosen.cost.preload_ms_D
    assignment_S = greedy_by_score(problem, single_S, load_D)
    exchange_S = problem.exchange_ms_P
    if assignment_S is not None and bool(exchange_S.any()):
        level_S = greedy_by_score(problem, single_S + exchange_S, load_D)
        if level_S is not None:
            both_BS = torch.stack([assignment_S, level_S])
            assignment_S = both_BS[int(chosen.cost.rate(both_BS).overall_ms_B.argmin())]
    if assignment_S is None:
        assignment_S = greedy_by_score(problem, single_S, load_D, largest_first(problem))
    return None if assignment_S is None else chosen.placed(assignment_S)


class OptionTotals:
    """Totals over all ranks of each option, exchanges included."""

    def __init__(self, cost: Cost) -> None:
        problem, rows = cost.problem, cost.problem.option_rows
        single_P, needs_PM = cost.single_ms_P.numpy(), problem.needs_PM.double().numpy()
        whole_P = single_P + problem.exchange_ms_P.numpy()
        count_T = np.array([*map(len, problem.tables)])
        self._exists_TO = np.arange(count_T.max()) < count_T[:, None]
        self.total_ms_TO = self.by_table(rows.reduced(np.add, whole_P), np.inf)
        self.largest_ms_TO = self.by_table(rows.reduced(np.maximum, single_P), np.inf)
        self.needs_TOM = self.by_table(rows.reduced(np.add, needs_PM), 0.0)
        roomiest_M = problem.limits_DM.amax(0).double().numpy()
        self.fits_TO = self.by_table(has_room(rows.reduced(np.maximum, needs_PM), roomiest_M), False)
        self.kind_TO = self.by_table([option.sharding_type for option in chain.from_iterable(problem.tables)], "")
        self.limits_M = problem.limits_DM.clamp_min(0).double().sum(0).numpy()

    def by_table(self, values_O: Sequence[str | bool] | np.ndarray, padding: float | str) -> np.ndarray:
        """Return values of all options, one row for each table, padded, [T, O, ...]."""
        values = np.asarray(values_O)
        padded = np.full((*self._exists_TO.shape, *values.shape[1:]), padding, dtype=values.dtype)
        padded[self._exists_TO] = values
        return padded

    @property
    def least_ms(self) -> float:
        """Lower bound on the cost of all ranks together, if costs add up."""
        return float(self.total_ms_TO.min(1).sum())

    @property
    def may_fit(self) -> bool:
        """False if even the smallest options exceed some memory of all ranks together."""
        least_M = np.where(np.isfinite(self.total_ms_TO)[..., None], self.needs_TOM, np.inf).min(1).sum(0)
        return bool(has_room(least_M, self.limits_M))


def level_choice(
    num_ranks: int, asked: OptionTotals, allowed_TO: np.ndarray, fill: float, price_M: np.ndarray
) -> np.ndarray:
    """The option of each table that costs least in all, within the lowest height at which ranks could be level, [T].

    Args:
        num_ranks: that share the cost.
        asked: what options cost.
        allowed_TO: options to choose from, at least one of each table.
        fill: share of the height that a single part may take.
        price_M: milliseconds for one of each limit: a byte of memory, or a part under a rule.
    """
    each_T = np.arange(len(allowed_TO))
    priced_TO = np.where(allowed_TO, asked.total_ms_TO + asked.needs_TOM @ price_M, np.inf)
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


def level_starts(
    cost: Cost, asked: OptionTotals, has_time: Callable[[], bool] = lambda: True, effort: float = 1.0
) -> list[Sharding]:
    """Shardings to start from: level choices among all options, and among fewer sharding types, since each type that is
    used costs kernels and collectives of its own.

    Args:
        cost: the problem and its cost.
        asked: what its options cost.
        has_time: whether to go on after the first start.
        effort: share of the choices to make; all from 1 on.
    """
    problem = cost.problem
    types = sorted({option.sharding_type for options in problem.tables for option in options})
    subsets = [set(types), *({kind} for kind in types if len(types) > 1)]
    # Options with a part that no rank could hold are none, unless a table has no others.
    exists_TO = np.where(asked.fits_TO.any(1, keepdims=True), asked.fits_TO, asked.kind_TO != "")
    starts: dict[Sharding, None] = {}
    for subset in subsets[: portion(len(subsets), effort)]:
        if starts and not has_time():
            break
        within_TO = np.isin(asked.kind_TO, list(subset)) & exists_TO
        allowed_TO = np.where(within_TO.any(1, keepdims=True), within_TO, exists_TO)
        found = (_affordable(cost, asked, allowed_TO, fill) for fill in FILLS[: portion(len(FILLS), effort)])
        starts |= dict.fromkeys(start for start in found if start is not None)
    return list(starts)


def _affordable(cost: Cost, asked: OptionTotals, allowed_TO: np.ndarray, fill: float) -> Sharding | None:
    """Find a level choice that fits: memory that runs short gets a price, doubled until it does."""
    limits_M = asked.limits_M
    price_M = used_M = np.zeros(len(limits_M))
    first_M = 1e-3 * max(asked.least_ms, 1e-6) / np.maximum(limits_M, 1)
    tried_T = None
    for _ in range(PRICE_STEPS):
        options_T = level_choice(cost.problem.num_ranks, asked, allowed_TO, fill, price_M)
        if tried_T is None or (options_T != tried_T).any():
            tried_T, used_M = options_T, asked.needs_TOM[np.arange(len(options_T)), options_T].sum(0)
            if (used_M <= limits_M).all() and (sharding := place_units(cost, options_T.tolist())) is not None:
                return sharding
        # Ranks fill up before all memory does: what is nearly full gets dearer as well.
        price_M = np.where(used_M > 0.5 * limits_M, np.maximum(2 * price_M, first_M), price_M)
    return None


def group_moves(cost: Cost, asked: OptionTotals, sharding: Sharding, effort: float = 1.0) -> list[Sharding]:
    """Shardings in which sets of tables are sharded another way, and all tables laid down afresh.

    Args:
        cost: the problem and its cost.
        asked: what its options cost.
        sharding: to start from.
        effort: share of the moves to lay down, evenly over all of them; all from 1 on.
    """
    now_T = np.array(sharding.options)
    chosen = list(dict.fromkeys(options for options in _chosen(cost, asked, now_T) if options != sharding.options))
    few = min(len(chosen), portion(len(chosen), effort))
    laid = (place_units(cost, chosen[index * len(chosen) // few]) for index in range(few))
    return [moved for moved in laid if moved is not None]


def _chosen(cost: Cost, asked: OptionTotals, now_T: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Options of all tables after each move."""
    each_T = np.arange(len(now_T))
    largest_T, total_T = asked.largest_ms_TO[each_T, now_T], asked.total_ms_TO[each_T, now_T]
    smaller_TO = (asked.largest_ms_TO < SMALLER * largest_T[:, None]) & asked.fits_TO
    now_kind_T = asked.kind_TO[each_T, now_T]
    kinds = dict.fromkeys(asked.kind_TO[asked.fits_TO].tolist())
    others = [(asked.kind_TO == kind) & asked.fits_TO & (now_kind_T != kind)[:, None] for kind in kinds]
    collective_T = _collectives(cost, now_T)
    for within_TO in (smaller_TO, *others):
        option_T = np.where(within_TO, asked.total_ms_TO, np.inf).argmin(1)
        added_T = np.where(within_TO.any(1), asked.total_ms_TO[each_T, option_T] - total_T, np.inf)
        spreads = within_TO is smaller_TO  # by what that adds per millisecond of part that it takes away
        rate_T = added_T / np.maximum(largest_T, 1e-30) if spreads else added_T
        order = np.argsort(rate_T, kind="stable")[: int(np.isfinite(added_T).sum())]
        gaining = int((added_T < 0).sum())
        sets = [order[:count] for count in _counts(len(order), () if spreads else (gaining - 1, gaining, gaining + 1))]
        if not spreads:
            sets += [order[collective_T[order] == one] for one in np.unique(collective_T[order])]
        for moved in sets:
            options_T = now_T.copy()
            options_T[moved] = option_T[moved]
            yield tuple(options_T.tolist())


def _counts(tables: int, others: Sequence[int]) -> list[int]:
    """One, two, ... and ever more of so many tables, and other counts that there are."""
    most = max(4, min(MAX_COUNTS, TABLES_MOVED // max(1, tables)))
    growing = {round(tables ** (step / (most - 1))) for step in range(most)}
    return sorted(count for count in {*growing, *others} if 0 < count <= tables)


def _collectives(cost: Cost, now_T: np.ndarray) -> np.ndarray:
    """The first collective that each table takes part in, which tables of its module and type share."""
    parts = [options[option].parts[0] for options, option in zip(cost.problem.tables, now_T, strict=True)]
    return (cost.problem.bytes_PC[parts].numpy() > 0).argmax(-1)


def stacked_starts(cost: Cost, asked: OptionTotals, effort: float = 1.0) -> list[Sharding]:
    """Return up to two shardings within memory; none of many tables, whose level starts are good.

    They serve few tables on many ranks, where options and places must be chosen together. Below a target height, each
    table in turn takes the option that costs all ranks together least and still fits. A table that fits nowhere goes
    first in the next attempt (Joslin & Clements, "Squeaky Wheel" Optimization, JAIR 1999). Each success lowers the
    target. Milliseconds of compute and exchange add up here.

    Args:
        cost: the problem and its cost.
        asked: totals of its options.
        effort: share of the attempts to make; all from 1 on.
    """
    tables = cost.problem.num_tables
    attempts = portion(min(ATTEMPTS, TABLES_STACKED // tables), min(1.0, effort))
    if attempts < LEAST_ATTEMPTS:
        return []
    stack = _Stack(cost.problem, (cost.single_ms_P + cost.problem.exchange_ms_P).numpy())
    found = [_lowest(cost, stack, asked.total_ms_TO.min(1), attempts, fullest) for fullest in (True, False)]
    return [sharding for sharding in found if sharding is not None]


def _lowest(cost: Cost, stack: _Stack, least_ms_T: np.ndarray, attempts: int, fullest: bool) -> Sharding | None:
    """Lower the target from success to success; return the cheapest sharding found."""
    low, high = float(least_ms_T.sum()) / cost.problem.num_ranks, float(least_ms_T.sum())
    order = np.argsort(-least_ms_T, kind="stable").tolist()
    found: dict[Sharding, float] = {}
    for _ in range(attempts):
        height = min((low + high) / 2, LOWERED * high)
        if (sharding := stack.fill(order, height, fullest)) is not None:
            high, found[sharding] = height, cost.overall_ms(sharding)
        else:
            low = height
    return min(found, key=found.__getitem__, default=None)


def packed_start(problem: Problem) -> Sharding | None:
    """Find a sharding within memory, by bytes alone; None if no attempt does.

    Tables whose smallest possible part is largest come first. Each takes the option of fewest bytes that fits.
    """
    # Bytes as shares of the roomiest rank.
    kinds = problem.needs_PM.shape[1] - problem.num_rules
    roomiest_M = problem.limits_DM[:, :kinds].amax(0).double().clamp_min(1e-3)
    share_P = (problem.needs_PM[:, :kinds] / roomiest_M).amax(-1).numpy()
    stack = _Stack(problem, share_P)
    least_T = [min(share_P[option.parts].max() for option in options) for options in problem.tables]
    order = np.argsort(np.negative(least_T), kind="stable").tolist()
    attempts = min(PACKING_ATTEMPTS, 1 + PARTS_PACKED // len(share_P))
    found = (stack.fill(order, np.inf, fullest) for fullest in (True, False) for _ in range(attempts))
    return next((sharding for sharding in found if sharding is not None), None)


class _Stack:
    """Options of each table as index, loads and needs of units, the one of least load in all first.

    Args:
        problem: tables and ranks.
        load_P: milliseconds, or shares of memory, that add up on a rank.
    """

    def __init__(self, problem: Problem, load_P: np.ndarray) -> None:
        self._problem, needs_PM = problem, problem.needs_PM.numpy()
        self._tables = [
            sorted(
                ((at, load_P[one.part_UL], needs_PM[one.part_UL]) for at, one in enumerate(options)),
                key=lambda option: float(option[1].sum()),
            )
            for options in problem.tables
        ]

    def fill(self, order: list[int], height: float, fullest: bool) -> Sharding | None:
        """Place tables in this order; without success, put the first that fits nowhere first.

        Args:
            order: tables.
            height: load that no rank may exceed.
            fullest: whether units go where the rank ends fullest, or emptiest.
        """

        def key(peak_N: np.ndarray) -> np.ndarray:
            return np.where(peak_N <= height, -peak_N if fullest else peak_N, np.inf)

        ranks = Ranks(np.zeros(self._problem.num_ranks), self._problem.limits_DM.numpy())
        options = [0] * len(order)
        positions: list[tuple[int, ...]] = [()] * len(order)
        for table in order:
            for index, load_UL, need_ULM in self._tables[table]:
                if load_UL.max() <= height and (laid := ranks.lay(load_UL, need_ULM, key)) is not None:
                    options[table], positions[table] = index, laid
                    break
            else:
                order.remove(table)
                order.insert(0, table)
                return None
        return Sharding(tuple(options), tuple(positions))
