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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dreamshard_planner.cost.sharding import Option, Sharding, ShardingCost, ShardingProblem, WithExtras
from dreamshard_planner.placement.joint_packing import packed_start
from dreamshard_planner.placement.packing import best_fit
from dreamshard_planner.placement.rules import greedy_by_score
from dreamshard_planner.placement.search import DIGITS, SearchConfig, local_search

FILLS = (1.0, 0.5, 0.25)
"""Shares of the level height that a single part may take in a start: small parts pack better, large ones cost less."""
PRICE_STEPS = 24
"""Doublings of the price of memory before a start gives up."""


@dataclass(frozen=True, kw_only=True)
class JointConfig:
    """How long and how widely to search."""

    starts: int = 4
    """Best starting shardings from which to descend."""
    reshards: int = 30_000
    """Re-shards to try in all."""
    tables_per_step: int = 24
    """Of the bottleneck rank, the heaviest."""
    rated_exactly: int = 8
    """Of one step, the most promising at a glance."""
    candidates: int = 6_000
    """Moves and swaps of one descent between re-shards."""


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


class JointOptions:
    """What a choice of options asks of all ranks together, their exchanges included: the numbers that starts are made
    from."""

    def __init__(self, cost: ShardingCost) -> None:
        problem = cost.problem
        # An exchange holds up every rank, so a byte of it costs all of them.
        exchange_P = problem.bytes_PC @ problem.collectives.level_ms_per_byte(problem.num_ranks)
        single, whole = cost.single_ms_P.tolist(), (cost.single_ms_P + exchange_P).tolist()
        storage = problem.storage_PM.double()
        self.total_ms: list[list[float]] = []
        self.largest_ms: list[list[float]] = []
        self.bytes_M: list[Tensor] = []
        for options in problem.tables:
            self.total_ms.append([sum(whole[p] for u in option.units for p in u.parts) for option in options])
            self.largest_ms.append([max(single[p] for u in option.units for p in u.parts) for option in options])
            self.bytes_M.append(
                torch.stack([storage[[p for u in option.units for p in u.parts]].sum(0) for option in options])
            )


def level_choice(
    problem: ShardingProblem,
    asked: JointOptions,
    allowed: Sequence[Sequence[int]],
    fill: float,
    price_M: Tensor,
) -> tuple[int, ...]:
    """The option of each table that costs least in all, within the lowest height at which ranks could be level.

    Args:
        problem: tables and options.
        asked: their totals.
        allowed: options of each table to choose from.
        fill: share of the height that a single part may take.
        price_M: milliseconds per byte of each kind of memory.
    """
    ranked = []
    for table, options in enumerate(allowed):
        priced = (torch.tensor(asked.total_ms[table], dtype=torch.float64) + asked.bytes_M[table] @ price_M).tolist()
        ranked.append(sorted(options, key=lambda option, cost=priced: (cost[option], option)))

    def choose(height: float) -> list[int]:
        chosen = []
        for table, options in enumerate(ranked):
            largest = asked.largest_ms[table]
            low = next((option for option in options if largest[option] <= fill * height), None)
            chosen.append(min(options, key=lambda o, ms=largest: (ms[o], o)) if low is None else low)
        return chosen

    def level_ms(chosen: Sequence[int]) -> float:
        return sum(asked.total_ms[table][option] for table, option in enumerate(chosen)) / problem.num_ranks

    low, high = 0.0, max(1e-9, level_ms(choose(math.inf)), *(max(ms) for ms in asked.largest_ms)) / fill
    for _ in range(40):
        middle = (low + high) / 2
        if level_ms(choose(middle)) <= middle:
            high = middle
        else:
            low = middle
    return tuple(choose(high))


def lay_wide(cost: ShardingCost, options: Sequence[int]) -> Sharding | None:
    """Positions for the units of chosen options that are pinned, or wider than a rank, the widest and heaviest first,
    each where the peak stays lowest; the others are on rank 0. None where memory does not allow it."""
    problem, single = cost.problem, cost.single_ms_P
    load_D = torch.zeros(problem.num_ranks, dtype=torch.float64)
    free_DM = problem.capacity_DM.clone()
    positions: list[list[int]] = [[0] * len(problem.tables[t][o].units) for t, o in enumerate(options)]
    wide = [
        (problem.tables[table][option].pinned is None, -unit.span, -float(single[list(unit.parts)].sum()), table, index)
        for table, option in enumerate(options)
        for index, unit in enumerate(problem.tables[table][option].units)
        if unit.span > 1 or problem.tables[table][option].pinned is not None
    ]
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
    """Positions for chosen options: wide units first, then those of span 1 from heavy to light; packed by size where
    that dead-ends. None where memory allows neither."""
    sharding = lay_wide(cost, options)
    if sharding is None:
        return None
    chosen = cost.chosen(sharding)
    if not len(chosen.assignment_S):
        return sharding
    rank_problem = chosen.cost.problem
    assignment_S = greedy_by_score(rank_problem, chosen.cost.single_ms_S, chosen.cost.preload_ms_D)
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
    starts: dict[Sharding, None] = {}
    for subset in subsets:
        allowed = [
            [index for index, option in enumerate(options) if option.sharding_type in subset] or range(len(options))
            for options in problem.tables
        ]
        for fill in FILLS:
            start = _affordable(cost, asked, allowed, fill)
            if start is not None:
                starts[start] = None
    return list(starts)


def _affordable(
    cost: ShardingCost, asked: JointOptions, allowed: Sequence[Sequence[int]], fill: float
) -> Sharding | None:
    """A level choice that fits: memory that runs short gets a price, doubled until it does."""
    problem = cost.problem
    capacity_M = problem.capacity_DM.clamp_min(0).double().sum(0)
    least_ms = sum(min(total) for total in asked.total_ms)
    price_M = torch.zeros(len(capacity_M), dtype=torch.float64)
    first_M = 1e-3 * max(least_ms, 1e-6) / capacity_M.clamp_min(1)
    tried = None
    for _ in range(PRICE_STEPS):
        options = level_choice(problem, asked, allowed, fill, price_M)
        if options != tried:
            tried = options
            used_M = sum(asked.bytes_M[table][option] for table, option in enumerate(options))
            if bool((used_M <= capacity_M).all()):
                sharding = lay(cost, options)
                if sharding is not None:
                    return sharding
            # Ranks fill up before all memory does: what is nearly full gets dearer as well.
            scarce_M = used_M > 0.5 * capacity_M
        price_M = torch.where(scarce_M, torch.maximum(2 * price_M, first_M), price_M)
    return None


@torch.no_grad()
def joint_search(
    cost: ShardingCost,
    starts: Iterable[Sharding],
    config: JointConfig,
    search: SearchConfig,
    seed: int = 0,
    left: Callable[[], bool] = lambda: True,
) -> JointResult | None:
    """Descend from the cheapest of some feasible shardings; never worse than the best. None where there is none.

    Args:
        cost: the problem and its cost.
        starts: feasible shardings; further ones are made by :func:`level_starts`.
        config: of the re-shards.
        search: of the moves and swaps.
        seed: of their ties and kicks.
        left: whether there is time left, asked between steps.
    """
    pool = list(dict.fromkeys([*starts, *level_starts(cost)]))
    if not pool and (packed := packed_start(cost.problem)) is not None:
        pool = [packed]
    if not pool:
        return None
    overall = {sharding: cost.overall_ms(sharding) for sharding in pool}
    order = sorted(pool, key=lambda sharding: overall[sharding])
    unit = max(1e-9, overall[order[0]])
    best, best_ms = order[0], overall[order[0]]
    quiet = replace(search, starts=1, candidates=config.candidates, patience=1)
    reshards = candidates = 0
    for start in order[: config.starts]:
        state = _State(cost, start, config, unit)
        limit = reshards + config.reshards // config.starts
        while left():
            before_ms = cost.overall_ms(state.sharding)
            reshards += state.improve(limit - reshards, left)
            chosen = cost.chosen(state.sharding)
            if len(chosen.assignment_S):
                generator = torch.Generator().manual_seed(seed)
                result = local_search(chosen.cost, [chosen.assignment_S], quiet, generator)
                candidates += result.candidates
                state = _State(cost, chosen.placed(result.assignment_S), config, unit)
            after_ms = cost.overall_ms(state.sharding)
            if _round(after_ms, unit) < _round(best_ms, unit):
                best, best_ms = state.sharding, after_ms
            if reshards >= limit or not _round(after_ms, unit) < _round(before_ms, unit):
                break
    return JointResult(best, best_ms, reshards, candidates)


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
            group = self._group(table, sharding.options[table])
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
        old_K = torch.tensor([self._group(table, self.sharding.options[table]) for table in tables])
        new_Q = torch.tensor([self._group(table, option) for _, table, option in queries])

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

    def _group(self, table: int, option: int) -> int:
        return int(self.problem.group_P[self.problem.tables[table][option].units[0].parts[0]])

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
