# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Re-shards, by which a table changes its option, and swaps of wide units, over sums that make many trials cheap.

A table's parts are subtracted, and the units of another option laid down one by one where they leave the lowest peak.
Many tables x options are tried side by side. A re-shard lays one table down where there is room; where all hosts are
full, two tables have to change places: a unit that spans several ranks, the slowest among them, and another of that
span.

Shapes: T tables, Q queries (a table and an option that it may change to), D ranks, N positions, L span, G fused groups,
C collectives, H latent channels, M limits, K tables that may change, X parts laid down, or some queries,
Z fused groups of ranks that trials change, W wide units, V those on the slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.compute import both_passes, compute_ms, overall_ms
from dreamshard_planner.cost.problem import Cost, Option, Sharding, counted_up, summed
from dreamshard_planner.search.placing import best_position
from dreamshard_planner.search.states import DIGITS, Change, State, Tried, in_steps

REFRESH = 100
"""Re-shards after which sums are taken afresh: differences add up rounding errors."""
TABLES_TRIED = 24
"""Tables of the slowest rank that one step tries to re-shard: the heaviest."""
RATED_EXACTLY = 8
"""Re-shards of one step that are rated exactly: the most promising by the approximate cost."""
MAX_PAIRS = 128
"""Pairs of one step: those that would be best if costs added up."""


class ShardingState(State):
    """One sharding, re-sharded table by table.

    Args:
        cost: the problem and its cost.
        sharding: to start from.
        unit: milliseconds in which costs are compared, after rounding.
        without: a sharding type that no table is to take; none by default.
    """

    def __init__(self, cost: Cost, sharding: Sharding, unit: float, without: str | None = None) -> None:
        super().__init__(cost, *cost.problem.laid(sharding))
        self._unit, self._left_out = unit, without
        self.sharding, self._changes = sharding, 0
        problem = self.problem
        self._changeable_T = np.array([self._changeable(table) for table in range(problem.num_tables)])
        self._burden_TD = np.full((problem.num_tables, problem.num_ranks), -np.inf)
        """Milliseconds of each table's parts, each alone, on each rank; less than nothing where it has none."""
        self._exchange_T = np.zeros(problem.num_tables)
        """Milliseconds of exchange that each table adds."""
        self._weigh(range(problem.num_tables))

    def _weigh(self, tables: Sequence[int]) -> None:
        """Refresh the burden of some tables on each rank and on the exchanges."""
        problem = self.problem
        rank_X, part_X = (laid_X.numpy() for laid_X in problem.laid(self.sharding, tables))
        table_X = np.repeat(tables, problem.option_rows.parts_O[self._rows(tables)])
        self._burden_TD[tables], self._exchange_T[tables] = -np.inf, 0.0
        self._burden_TD[table_X, rank_X] = 0.0
        np.add.at(self._burden_TD, (table_X, rank_X), self.cost.single_ms_P.numpy()[part_X])
        np.add.at(self._exchange_T, table_X, problem.exchange_ms_P.numpy()[part_X])

    def _rows(self, tables: Sequence[int]) -> np.ndarray:
        """Return the rows of the options that some tables have now."""
        return self.problem.option_rows.rows(tables, [self.sharding.options[table] for table in tables])

    def change(self, table: int, option: int, positions: tuple[int, ...]) -> None:
        """Shard one table another way."""
        after = self.sharding.changed(table, option, positions)
        ranks = []
        for sharding, sign in ((self.sharding, -1), (after, 1)):
            rank_X, part_X = self.problem.laid(sharding, [table])
            group = self.problem.group_P[part_X[0]]
            self.latent_DGH[:, group].index_add_(0, rank_X, self.cost.latent_PH[part_X], alpha=sign)
            self.bytes_CD.T.index_add_(0, rank_X, self.problem.bytes_PC[part_X], alpha=sign)
            self.free_DM.index_add_(0, rank_X, self.problem.needs_PM[part_X], alpha=-sign)
            ranks.append(rank_X)
        self.sharding = after
        self._weigh([table])
        self._changes += 1
        if self._changes >= REFRESH:
            super().__init__(self.cost, *self.problem.laid(after))
            self._changes = 0
            return
        touched_X = torch.cat(ranks).unique()
        # What a group sums to where nothing is left must be nothing, not the rounding of what was there.
        self.group_ms_DG[touched_X] = both_passes(self.cost.compute.group_cost_ms(self.latent_DGH[touched_X]))

    def now(self, table: int) -> Change:
        """Return how a table is sharded, as a change that changes nothing."""
        return table, self.sharding.options[table], self.sharding.positions[table]

    def after(self, trials: Sequence[Sequence[Change]]) -> tuple[Tensor, Tensor, Tensor]:
        """Rate trials, each of which changes some tables.

        Returns:
            Compute of each rank, float64 [Q, D]; bytes that it sends to each peer, float64 [Q, C, D]; and whether
            memory allows it, bool [Q]. What grows by nothing always fits.
        """
        problem, count = self.problem, len(trials)
        ranks, groups = problem.num_ranks, problem.num_groups
        rank, part, query, sign = [], [], [], []
        for number, trial in enumerate(trials):
            for change in trial:
                for times, (table, option, positions) in ((-1, self.now(change[0])), (1, change)):
                    laid = problem.tables[table][option].ranks(positions)
                    rank += laid
                    part.append(problem.tables[table][option].parts)
                    query += [number] * len(laid)
                    sign += [times] * len(laid)
        part_X, sign_X1 = torch.from_numpy(np.concatenate(part)), torch.tensor(sign)[:, None]
        row_X = torch.tensor(query) * ranks + torch.tensor(rank)
        slot_Z, at_X = (row_X * groups + problem.group_P[part_X]).unique(return_inverse=True)
        now_Z = slot_Z % (ranks * groups)
        latent_ZH = self.latent_DGH.flatten(0, 1)[now_Z]
        latent_ZH.index_add_(0, at_X, sign_X1 * self.cost.latent_PH[part_X])
        after_ms_Z = both_passes(self.cost.compute.group_cost_ms(latent_ZH))
        change_Z = (after_ms_Z - self.group_ms_DG.flatten()[now_Z]).double()
        device_QD = self.device_ms_D.double().expand(count, -1).clone()
        device_QD.view(-1).index_add_(0, slot_Z // groups, change_Z)

        bytes_QDC = self.bytes_CD.T.repeat(count, 1, 1)
        bytes_QDC.flatten(0, 1).index_add_(0, row_X, sign_X1 * problem.bytes_PC[part_X])
        more_QDM = summed(sign_X1 * problem.needs_PM[part_X], row_X, count * ranks).view(count, ranks, -1)
        fits_Q = ((more_QDM <= self.free_DM) | (more_QDM <= 0)).flatten(1).all(-1)
        return device_QD, bytes_QDC.transpose(1, 2), fits_Q

    def force(self, table: int, option: int) -> None:
        """Shard one table another way, whatever that costs; leaves it where memory does not allow it."""
        tried = self._try([table], [(table, option)], self.cost.compute.approximate_ms)
        if math.isfinite(float(tried.key_Q[0])):
            self.change(*tried.changes[0][0])

    def tried(self, ways: Sequence[tuple[int, int]]) -> Tried:
        """Options of tables, each laid down where it leaves the lowest peak; changes nothing."""
        tables = list(dict.fromkeys(table for table, _ in ways))
        return self._try(tables, ways, self.cost.compute.group_cost_ms)

    def heaviest(self) -> list[int]:
        """Tables that burden the slowest rank, or the exchanges, most, whether or not they may be split otherwise."""
        exchange_T = np.where(self._exchange_T > 0, self._exchange_T, -np.inf)
        burdens = self._burden_TD[:, self._bottleneck], exchange_T
        return list(dict.fromkeys(table for burden_T in burdens for table in self._first(burden_T)))

    def improve(self, limit: int, left: Callable[[], bool]) -> int:
        """Re-shard tables on the bottleneck rank, where that helps no more those that exchange most, then swap what
        spans several ranks, until nothing helps; says how many changes were tried."""
        steps: tuple[Callable[[], tuple[bool, int]], ...] = (
            lambda: self._reshard(self._tables_that_compute()),
            lambda: self._reshard(self._tables_that_exchange()),
            self._swap,
        )
        tried = 0
        while tried < limit and left():
            for step in steps:
                improved, changes = step()
                tried += changes
                if improved:
                    break
            else:
                break
        return tried

    def _reshard(self, tables: Sequence[int]) -> tuple[bool, int]:
        """Apply the best re-shard of one of the tables, if it lowers the cost, or the sum of squares at the same cost.
        Says whether it did, and how many it tried."""
        queries = [
            (table, option)
            for table in tables
            for option, one in enumerate(self.problem.tables[table])
            if one.sharding_type != self._left_out and (option != self.sharding.options[table] or self._movable(one))
        ]
        if not queries:
            return False, 0
        compute = self.cost.compute
        tried = self._try(tables, queries, compute.approximate_ms if compute.approximates else compute.group_cost_ms)
        if compute.approximates:
            order = torch.argsort(tried.key_Q, stable=True)[:RATED_EXACTLY].sort().values.tolist()
            tried = self._try(tables, [queries[index] for index in order], compute.group_cost_ms)
        return self._taken(tried), len(queries)

    def _swap(self) -> tuple[bool, int]:
        """Apply the best swap of wide units on the bottleneck rank, if it helps. Counts the re-shards that would
        take as long: a re-shard is tried on all ranks, a swap on those of two places."""
        swaps = wide_swaps(self, self._bottleneck, self._unit)
        if swaps is None:
            return False, 0
        return self._taken(swaps[0]), math.ceil(swaps[1] / self.problem.num_ranks)

    def _taken(self, tried: Tried) -> bool:
        """Apply the best of some trials, if its cost, rounded, is lower than now; or as low with a lower sum of
        squares. Says whether it did."""
        index = int(tried.key_Q.argmin())
        after, now = float(tried.overall_Q[index]), in_steps(float(self.overall_ms()), self._unit)
        least_square = float(self.square(self.device_ms_D, self.bytes_CD)) * (1 - 10.0**-DIGITS)
        if after > now or (after == now and float(tried.square_Q[index]) >= least_square):
            return False
        for change in tried.changes[index]:
            self.change(*change)
        return True

    @property
    def _bottleneck(self) -> int:
        return int(in_steps(self.device_ms_D, self._unit).argmax())

    def _movable(self, option: Option) -> bool:
        """Return whether placing the same option again may give another sharding; single units of span 1 just move."""
        return option.units > 1 or 1 < option.span < self.problem.num_ranks

    def _tables_that_exchange(self) -> list[int]:
        """Tables that may change, those with the longest exchanges first."""
        exchange_P = self.problem.exchange_ms_P
        return self._heaviest(self._exchange_T) if bool(exchange_P.any()) else []

    def _tables_that_compute(self) -> list[int]:
        """Tables that may change, the heaviest first: those on the slowest rank, or of all ranks if these share
        cores."""
        alone = self.problem.shared_cores is None
        return self._heaviest(self._burden_TD[:, self._bottleneck] if alone else self._burden_TD.clip(0).sum(1))

    def _heaviest(self, burden_T: np.ndarray) -> list[int]:
        """Return the tables with the largest burdens among those that may change."""
        return self._first(np.where(self._changeable_T, burden_T, -np.inf))

    def _first(self, burden_T: np.ndarray) -> list[int]:
        """Return the tables with the largest finite burdens."""
        order_T = np.argsort(-burden_T, kind="stable")[:TABLES_TRIED]
        return order_T[np.isfinite(burden_T[order_T])].tolist()

    def _changeable(self, table: int) -> bool:
        options = self.problem.tables[table]
        return len(options) > 1 or self._movable(options[0])

    def _try(
        self, tables: Sequence[int], queries: Sequence[tuple[int, int]], group_cost: Callable[[Tensor], Tensor]
    ) -> Tried:
        """Lay the units of every query down, one after the other, where they leave the lowest peak."""
        problem, started = self.problem, self._started(tables, queries, group_cost)
        options = [problem.tables[table][option] for table, option in queries]
        device_QD = self.device_ms_D.new_empty(len(queries), problem.num_ranks)
        bytes_QCD = self.bytes_CD.new_empty(len(queries), *self.bytes_CD.shape)
        fits_Q = torch.empty(len(queries), dtype=torch.bool)
        positions: list[list[int]] = [[] for _ in queries]
        for span in {option.span for option in options}:
            some = [query for query, option in enumerate(options) if option.span == span]
            some.sort(key=lambda query: -options[query].units)  # those with units left are always the first
            parts = [options[query].part_UL for query in some]
            trials = started(some, span)
            steps = len(parts[0])
            for step in range(steps):
                part_XL = torch.from_numpy(np.stack([part_UL[step] for part_UL in parts if step < len(part_UL)]))
                what = self.cost.latent_PH[part_XL], problem.needs_PM[part_XL], problem.bytes_PC[part_XL]
                trials.lay(*what, is_last=step == steps - 1)
            device_QD[some], fits_Q[some] = trials.device_ms_QNL.flatten(1), trials.fits_Q
            bytes_QCD[some] = trials.bytes_QNLC.flatten(1, 2).transpose(1, 2)
            for query, places in zip(some, trials.positions, strict=True):
                positions[query] = places
        computed_Q = compute_ms(device_QD, problem.shared_cores)
        overall_Q = in_steps(overall_ms(computed_Q, problem.collectives.ms(bytes_QCD)), self._unit)
        changes = [[(table, option, tuple(places))] for (table, option), places in zip(queries, positions, strict=True)]
        return Tried(changes, overall_Q.masked_fill(~fits_Q, torch.inf), self.square(device_QD, bytes_QCD))

    def _started(
        self, tables: Sequence[int], queries: Sequence[tuple[int, int]], group_cost: Callable[[Tensor], Tensor]
    ) -> Callable[[list[int], int], _Trials]:
        """Return a maker of trials for queries of one span: the sums without the queries' tables, before any unit is
        placed. Y are fused groups, each with or without one of the tables."""
        slots, slot_of = len(tables), {table: slot for slot, table in enumerate(tables)}
        slot_Q = torch.tensor([slot_of[table] for table, _ in queries])
        every = self.problem.option_rows
        row_K, row_Q = self._rows(tables), every.rows(*zip(*queries, strict=True))
        old_K, new_Q = (torch.from_numpy(every.group_O[row_X]) for row_X in (row_K, row_Q))
        gone_KDH, gone_KDC, gone_KDM = self._without(tables)
        # Each group as it is, and each that a table leaves without that table: few, whatever many options join them.
        group_Z, place_X = torch.cat([old_K, new_Q]).unique(return_inverse=True)
        latent_ZDH = self.latent_DGH.transpose(0, 1)[group_Z]
        latent_YDH = torch.cat([latent_ZDH[place_X[:slots]] - gone_KDH, latent_ZDH])
        ms_YD = both_passes(group_cost(latent_YDH)).double()
        spared_ms_KD = ms_YD[slots + place_X[:slots]] - ms_YD[:slots]
        is_gone_KD = (gone_KDH != 0).any(-1)
        spared_ms_KD = torch.where(is_gone_KD, spared_ms_KD, 0.0)  # where nothing is gone, not even rounding
        group_Q = torch.where(old_K[slot_Q] == new_Q, slot_Q, slots + place_X[slots:])
        device_ms_KD, free_KDM = self.device_ms_D - spared_ms_KD, self.free_DM + gone_KDM
        bytes_KDC = self.bytes_CD.T - gone_KDC

        def of_some(some: list[int], span: int) -> _Trials:
            slot_X, group_X = slot_Q[some], group_Q[some]
            return _Trials(
                group_cost=group_cost,
                device_ms_QNL=device_ms_KD[slot_X].unflatten(1, (-1, span)),
                latent_QNLH=latent_YDH[group_X].unflatten(1, (-1, span)),
                group_ms_QNL=ms_YD[group_X].unflatten(1, (-1, span)),
                free_QNLM=free_KDM[slot_X].unflatten(1, (-1, span)),
                bytes_QNLC=bytes_KDC[slot_X].unflatten(1, (-1, span)),
                fits_Q=torch.ones(len(some), dtype=torch.bool),
                positions=[[] for _ in some],
            )

        return of_some

    def _without(self, tables: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [K, D, H], bytes sent [K, D, C] and memory [K, D, M] of some tables, each as it is sharded."""
        problem, ranks = self.problem, self.problem.num_ranks
        rank_X, part_X = problem.laid(self.sharding, tables)
        count_K = torch.from_numpy(problem.option_rows.parts_O[self._rows(tables)])
        row_X = rank_X + ranks * torch.arange(len(tables)).repeat_interleave(count_K)
        latent_KDH, bytes_KDC, used_KDM = (
            summed(values_PY[part_X], row_X, len(tables) * ranks).unflatten(0, (-1, ranks))
            for values_PY in (self.cost.latent_PH, problem.bytes_PC, problem.needs_PM)
        )
        return latent_KDH, bytes_KDC, used_KDM


@dataclass
class _Trials:
    """Queries whose units are equally wide, those with most units first, laid down side by side: every rank as each has
    it so far."""

    group_cost: Callable[[Tensor], Tensor]
    device_ms_QNL: Tensor
    latent_QNLH: Tensor
    """Summed latents of the fused group that the option's parts join, and"""
    group_ms_QNL: Tensor
    """what it costs, which is part of its rank's cost."""
    free_QNLM: Tensor
    bytes_QNLC: Tensor
    fits_Q: Tensor
    """False once memory forbids a unit."""
    positions: list[list[int]]

    def lay(self, latent_XLH: Tensor, need_XLM: Tensor, bytes_XLC: Tensor, is_last: bool) -> None:
        """Lay down one unit more of the first queries, X of them, each where it leaves the lowest peak; the last of all
        or not."""
        count = len(latent_XLH)
        device_ms_XNL, group_ms_XNL = self.device_ms_QNL[:count], self.group_ms_QNL[:count]
        latent_XNLH, free_XNLM = self.latent_QNLH[:count], self.free_QNLM[:count]
        after_XNL = both_passes(self.group_cost(latent_XNLH + latent_XLH[:, None])).double()
        peak_XNL = device_ms_XNL + after_XNL - group_ms_XNL
        position_X, found_X = best_position(peak_XNL.amax(-1), need_XLM, free_XNLM)
        self.fits_Q[:count].logical_and_(found_X)
        for places, position in zip(self.positions, position_X.tolist(), strict=False):
            places.append(position)
        chosen = torch.arange(count), position_X
        device_ms_XNL[chosen] = peak_XNL[chosen]
        self.bytes_QNLC[chosen] += bytes_XLC
        if not is_last:
            group_ms_XNL[chosen] = after_XNL[chosen]
            latent_XNLH[chosen] += latent_XLH
            free_XNLM[chosen] -= need_XLM


def wide_swaps(state: ShardingState, rank: int, unit: float) -> tuple[Tried, int] | None:
    """Rate the swaps of units over several ranks, but not all, that relieve a rank most if costs add up.

    Args:
        state: of the sharding.
        rank: the slowest.
        unit: milliseconds in which costs are compared.

    Returns:
        The swaps, and the ranks that they change in all; None without any.
    """
    problem, sharding, every = state.problem, state.sharding, state.problem.option_rows
    row_T = every.rows(range(problem.num_tables), sharding.options)
    span_T = every.span_O[row_T]
    wide_T = ((span_T > 1) & (span_T < problem.num_ranks)).nonzero()[0]
    if not len(wide_T):
        return None
    units_T = every.units_O[row_T[wide_T]]
    table_W, span_W = wide_T.repeat(units_T), span_T[wide_T].repeat(units_T)
    nth_W = counted_up(np.zeros_like(units_T), units_T)
    single_X = state.cost.single_ms_P.numpy()[every.parts(row_T[wide_T])]
    heaviest_W = np.maximum.reduceat(single_X, span_W.cumsum() - span_W)
    position_W = np.concatenate([sharding.positions[table] for table in wide_T])
    slowest_W = np.zeros(len(table_W))
    for span in np.unique(span_W):
        same_W = span_W == span
        slowest_W[same_W] = state.device_ms_D.view(-1, span).amax(-1).numpy()[position_W[same_W]]

    here_V = np.nonzero(rank // span_W == position_W)[0]
    other_VW = (position_W != position_W[here_V, None]) & (table_W != table_W[here_V, None])
    change_VW = heaviest_W - heaviest_W[here_V, None]
    peak_VW = np.maximum(slowest_W[here_V, None] + change_VW, slowest_W - change_VW)
    peak_Q = np.where(other_VW & (span_W == span_W[here_V, None]), peak_VW, np.inf).ravel()
    best_Q = np.argsort(peak_Q, kind="stable")[:MAX_PAIRS]
    best_Q = best_Q[np.isfinite(peak_Q[best_Q])]
    if not len(best_Q):
        return None

    def moved(one: int, other: int) -> Change:
        return sharding.move(int(table_W[one]), int(nth_W[one]), int(position_W[other]))

    pairs = [(here_V[pair // len(table_W)], pair % len(table_W)) for pair in best_Q]
    changes = [[moved(here, there), moved(there, here)] for here, there in pairs]
    device_QD, bytes_QCD, fits_Q = state.after(changes)
    overall_Q = overall_ms(compute_ms(device_QD, problem.shared_cores), problem.collectives.ms(bytes_QCD))
    overall_Q.masked_fill_(~fits_Q, torch.inf)
    tried = Tried(changes, in_steps(overall_Q, unit), state.square(device_QD, bytes_QCD))
    return tried, int(2 * span_W[[here for here, _ in pairs]].sum())
