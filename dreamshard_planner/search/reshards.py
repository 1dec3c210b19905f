# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans with the sums per rank that make changes cheap; re-shards, by which a table changes its option; and swaps of
wide units.

A table's parts are subtracted, and the units of another option laid down one by one where they leave the lowest peak.
Many tables x options are tried side by side. A re-shard lays one table down where there is room; where all hosts are
full, two tables have to change places: a unit that spans several ranks, the slowest among them, and another of that
span.

Shapes: B placements side by side (free leading dimensions of the sums), P parts, T tables, Q queries (a table and an
option that it may change to) or trials, D ranks, N positions, L span, G fused groups, C collectives, H latent channels,
M limits, K tables that may change, X parts laid down, or some queries, Z fused groups that trials change, U units,
V those on the slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.problem import (
    Change,
    Cost,
    Option,
    Sharding,
    both_passes,
    compute_ms,
    counted_up,
    has_room,
    overall_ms,
    summed,
)

DIGITS = 5
"""Costs are compared after rounding to this many digits relative to the starting cost."""
TABLES_TRIED = 24
"""Tables of the slowest rank that one step tries to re-shard: the heaviest."""
RATED_EXACTLY = 8
"""Re-shards of one step that are rated exactly: the most promising by the approximate cost."""
MAX_PAIRS = 128
"""Swaps of one step: those that would be best if costs added up."""


def in_steps(cost_ms: Tensor, unit: float) -> Tensor:
    """Return costs as they are compared: in whole steps, of which the unit has 10 to the power of :data:`DIGITS`."""
    return (cost_ms / unit * 10**DIGITS).round()


@dataclass(frozen=True)
class Tried:
    """Costs of a sharding after some trials."""

    changes: Sequence[Sequence[Change]]
    """Changes of each trial."""
    overall_Q: Tensor
    """Cost in whole steps; infinite where memory does not allow it."""
    square_Q: Tensor
    """See :meth:`State.square`."""

    @cached_property
    def key_Q(self) -> Tensor:
        """Sort key: the cost, and among equals the sum of squares."""
        return self.overall_Q + self.square_Q / (self.square_Q.max() * 2).clamp_min(1e-30)


class State:
    """Sums of one plan, or of several side by side, on every rank. Moves, swaps and re-shards start from them.

    Args:
        cost: the problem and its cost.
        rank_BX: ranks of what is laid down, int64.
        part_X: which parts these are; by default all in order.
    """

    def __init__(self, cost: Cost, rank_BX: Tensor, part_X: Tensor | None = None) -> None:
        self.cost, self.problem = cost, cost.problem
        self.latent_DGH, self.bytes_CD, self.free_DM = self.sums(rank_BX, part_X)
        self.group_ms_DG = self.exact_ms(self.latent_DGH)

    def sums(self, rank_BX: Tensor, part_X: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents, bytes sent and free memory, taken afresh: differences would add up rounding errors."""
        free_DM = self.problem.limits_DM - self.problem.taken(rank_BX, part_X)
        return self.cost.group_latents(rank_BX, part_X), self.cost.bytes_sent(rank_BX, part_X), free_DM

    def exact_ms(self, latent_XH: Tensor) -> Tensor:
        """Return forward + backward of groups, [...]."""
        return both_passes(self.cost.compute.group_cost_ms(latent_XH))

    def changed_ms(self, state_Q: Tensor, trial_X: Tensor, rank_X: Tensor, part_X: Tensor, sign_X: Tensor) -> Tensor:
        """Return how much longer each rank computes after trials, [Q, D].

        Args:
            state_Q: plan that each trial changes, of those side by side.
            trial_X: trial of each part that comes or goes.
            rank_X: its rank.
            part_X: the part.
            sign_X: 1 if it comes, -1 if it goes.
        """
        ranks, groups = self.problem.num_ranks, self.problem.num_groups
        slots = trial_X * ranks * groups + rank_X * groups + self.problem.group_P[part_X]
        slot_Z, at_X = slots.unique(return_inverse=True)
        row_Z = slot_Z // groups
        now_Z = (state_Q[row_Z // ranks], row_Z % ranks, slot_Z % groups)
        latent_ZH = self.latent_DGH.view(-1, ranks, *self.latent_DGH.shape[-2:])[now_Z]
        latent_ZH.index_add_(0, at_X, sign_X[:, None] * self.cost.latent_PH[part_X])
        change_Z = (self.exact_ms(latent_ZH) - self.group_ms_DG.view(-1, ranks, groups)[now_Z]).double()
        return change_Z.new_zeros(len(state_Q) * ranks).index_add_(0, row_Z, change_Z).view(-1, ranks)

    @property
    def device_ms_D(self) -> Tensor:
        """Compute of each rank, forward + backward."""
        return self.group_ms_DG.sum(-1)

    def square(self, device_ms_XD: Tensor, bytes_XCD: Tensor) -> Tensor:
        """Return the sum of squares of the ranks' milliseconds, [X]: of compute, and of what each sends in each
        collective. Of plans that cost the same, the one with the lower sum is nearer to a cheaper one."""
        return device_ms_XD.square().sum(-1) + (bytes_XCD * self.sent_ms_per_byte_C1).square().sum((-2, -1))

    @cached_property
    def sent_ms_per_byte_C1(self) -> Tensor:
        """Milliseconds that one byte to each peer takes in each collective, latencies left out."""
        return self.problem.collectives.alone_ms_per_byte().sum(0)[:, None]

    def overall_ms(self) -> Tensor:
        """Cost of each plan, [B]."""
        return self.overall_of(self.device_ms_D, self.bytes_CD)

    def overall_of(self, device_ms_XD: Tensor, bytes_XCD: Tensor) -> Tensor:
        """Cost, [X], if the ranks compute for so long and send so many bytes."""
        computed_X = compute_ms(device_ms_XD, self.problem.shared_cores)
        return overall_ms(computed_X, self.problem.collectives.ms(bytes_XCD))


class ShardingState(State):
    """One sharding, re-sharded table by table.

    Args:
        cost: the problem and its cost.
        sharding: to start from.
        unit: milliseconds in which costs are compared, after rounding.
    """

    def __init__(self, cost: Cost, sharding: Sharding, unit: float) -> None:
        super().__init__(cost, *cost.problem.laid(sharding))
        self._unit, self.sharding = unit, sharding
        options_T = self.problem.tables
        self._changeable_T = np.array([len(options) > 1 or self._movable(options[0]) for options in options_T])
        self._weigh()

    def _weigh(self) -> None:
        """Refresh the burden of each table on each rank and on the exchanges."""
        problem, shape = self.problem, (self.problem.num_tables, self.problem.num_ranks)
        laid = problem.laid_by([self.sharding.now(table) for table in range(problem.num_tables)])
        rank_X, part_X, table_X = (values_X.numpy() for values_X in laid)
        self._burden_TD, self._exchange_T = np.full(shape, -np.inf), np.zeros(problem.num_tables)
        self._burden_TD[table_X, rank_X] = 0.0
        np.add.at(self._burden_TD, (table_X, rank_X), self.cost.single_ms_P.numpy()[part_X])
        np.add.at(self._exchange_T, table_X, problem.exchange_ms_P.numpy()[part_X])

    def change(self, table: int, option: int, positions: tuple[int, ...]) -> None:
        """Shard one table another way."""
        before, change = self.sharding.now(table), (table, option, positions)
        self.sharding = self.sharding.changed(*change)
        self.latent_DGH, self.bytes_CD, self.free_DM = self.sums(*self.problem.laid(self.sharding))
        changed_X = self.problem.laid_by([before, change])[0].unique()
        self.group_ms_DG[changed_X] = self.exact_ms(self.latent_DGH[changed_X])
        self._weigh()

    def after(self, trials: Sequence[Sequence[Change]]) -> tuple[Tensor, Tensor, Tensor]:
        """Rate trials, each of which changes some tables.

        Returns:
            Compute of each rank, float64 [Q, D]; bytes that it sends to each peer, float64 [Q, C, D]; and whether
            memory allows it, bool [Q]. What grows by nothing always fits.
        """
        problem, count, ranks = self.problem, len(trials), self.problem.num_ranks
        changes = [change for trial in trials for change in trial]
        trial_of = torch.tensor([number for number, trial in enumerate(trials) for _ in trial])
        now = [self.sharding.now(table) for table, *_ in changes]
        rank_X, part_X, number_X = problem.laid_by([*now, *changes])
        trial_X, sign_X = trial_of.repeat(2)[number_X], torch.where(number_X < len(now), -1, 1)
        state_Q = torch.zeros(count, dtype=torch.int64)
        device_QD = self.device_ms_D + self.changed_ms(state_Q, trial_X, rank_X, part_X, sign_X)
        row_X, sign_X1 = trial_X * ranks + rank_X, sign_X[:, None]
        bytes_QDC = self.bytes_CD.T.repeat(count, 1, 1)
        bytes_QDC.flatten(0, 1).index_add_(0, row_X, sign_X1 * problem.bytes_PC[part_X])
        more_QDM = summed(sign_X1 * problem.needs_PM[part_X], row_X, count * ranks).view(count, ranks, -1)
        fits_Q = ((more_QDM <= self.free_DM) | (more_QDM <= 0)).flatten(1).all(-1)
        return device_QD, bytes_QDC.transpose(1, 2), fits_Q

    def _judged(
        self, changes: Sequence[Sequence[Change]], device_QD: Tensor, bytes_QCD: Tensor, fits_Q: Tensor
    ) -> Tried:
        """Return the costs after trials, see :meth:`after`."""
        overall_Q = in_steps(self.overall_of(device_QD, bytes_QCD), self._unit).masked_fill(~fits_Q, torch.inf)
        return Tried(changes, overall_Q, self.square(device_QD, bytes_QCD))

    def force(self, table: int, option: int) -> None:
        """Shard one table another way, whatever that costs; leaves it where memory does not allow it."""
        tried = self.tried([(table, option)], approximately=True)
        if math.isfinite(float(tried.key_Q[0])):
            self.change(*tried.changes[0][0])

    def prefer_cheaper_kernels(self) -> None:
        """Give tables the kernel whose shards cost least alone, those that gain most first, as far as memory allows.

        On ranks that are not the bottleneck a search is indifferent between a table in device memory and one that is
        read over the link to the host, and a user is not.
        """
        single_P, before = self.cost.single_ms_P.numpy(), self.sharding
        gains = []
        for table, (options, chosen) in enumerate(zip(self.problem.tables, before.options, strict=True)):
            now = options[chosen]
            gains += [
                (single_P[one.parts].sum() - single_P[now.parts].sum(), table, option)
                for option, one in enumerate(options)
                if one is not now and (one.sharding_type, one.part_UL.shape) == (now.sharding_type, now.part_UL.shape)
            ]
        for gain, table, option in sorted(gains):
            if gain >= 0 or before.now(table) != self.sharding.now(table):
                continue
            change = table, option, before.positions[table]
            device_QD, bytes_QCD, fits_Q = self.after([[change]])
            overall_Q = self.overall_of(device_QD, bytes_QCD)
            if fits_Q[0] and overall_Q[0] <= self.overall_ms() * (1 + 1e-12):  # but for rounding
                self.change(*change)

    def heaviest(self) -> list[int]:
        """Tables that burden the slowest rank, or the exchanges, most, whether or not they may be split otherwise."""
        exchange_T = np.where(self._exchange_T > 0, self._exchange_T, -np.inf)
        burdens = self._burden_TD[:, self._bottleneck], exchange_T
        return list(dict.fromkeys(table for burden_T in burdens for table in self._first(burden_T)))

    def improve(self, limit: int, left: Callable[[], bool]) -> int:
        """Re-shard tables on the bottleneck rank, and where that helps no more swap what spans several ranks, until
        nothing helps; says how many changes were tried."""
        tried, improved = 0, True
        while improved and tried < limit and left():
            for step in (self._reshard, self._swap):
                improved, changes = step()
                tried += changes
                if improved:
                    break
        return tried

    def _reshard(self) -> tuple[bool, int]:
        """Apply the best re-shard of one of the heaviest tables on the slowest rank, or of all ranks if these share
        cores, if it lowers the cost, or the sum of squares at the same cost. Says whether it did, and how many it
        tried."""
        alone = self.problem.shared_cores is None
        burden_T = self._burden_TD[:, self._bottleneck] if alone else self._burden_TD.clip(0).sum(1)
        queries = [
            (table, option)
            for table in self._first(np.where(self._changeable_T, burden_T, -np.inf))
            for option, one in enumerate(self.problem.tables[table])
            if option != self.sharding.options[table] or self._movable(one)
        ]
        if not queries:
            return False, 0
        tried = self.tried(queries, approximately=True)
        if self.cost.compute.approximates:
            order = torch.argsort(tried.key_Q, stable=True)[:RATED_EXACTLY].sort().values.tolist()
            tried = self.tried([queries[index] for index in order])
        return self._taken(tried), len(queries)

    def _swap(self) -> tuple[bool, int]:
        """Apply the best swap of wide units on the bottleneck rank, if it helps. Counts the re-shards that would
        take as long: a re-shard is tried on all ranks, a swap on those of two places."""
        swaps = self.swaps(self._bottleneck, lambda span_T: (span_T > 1) & (span_T < self.problem.num_ranks), MAX_PAIRS)
        if not swaps:
            return False, 0
        changed_ranks = sum(2 * self.problem.tables[table][option].span for (table, option, _), _ in swaps)
        return self._take_best(swaps), math.ceil(changed_ranks / self.problem.num_ranks)

    def swaps(self, rank: int, of_span: Callable[[np.ndarray], np.ndarray], most: int) -> list[list[Change]]:
        """Return swaps of units of a rank for equally wide ones of other tables on other ranks, those first that would
        leave the lowest peak if costs added up.

        Args:
            rank: whose units are swapped.
            of_span: tells which spans may be swapped, bool [T] from int64 [T].
            most: number of swaps.
        """
        sharding, every = self.sharding, self.problem.option_rows
        row_T = every.rows(range(self.problem.num_tables), sharding.options)
        some_T = of_span(every.span_O[row_T]).nonzero()[0]
        if not len(some_T):
            return []
        span_T, units_T = every.span_O[row_T[some_T]], every.units_O[row_T[some_T]]
        table_U, span_U = some_T.repeat(units_T), span_T.repeat(units_T)
        nth_U = counted_up(np.zeros_like(units_T), units_T)
        single_X = self.cost.single_ms_P.numpy()[every.parts(row_T[some_T])]
        heaviest_U = np.maximum.reduceat(single_X, span_U.cumsum() - span_U)
        position_U = np.concatenate([sharding.positions[table] for table in some_T])
        slowest_U = np.zeros(len(table_U))
        for span in np.unique(span_U):
            same_U = span_U == span
            slowest_U[same_U] = self.device_ms_D.view(-1, span).amax(-1).numpy()[position_U[same_U]]

        here_V = np.nonzero(rank // span_U == position_U)[0]
        other_VU = (position_U != position_U[here_V, None]) & (table_U != table_U[here_V, None])
        change_VU = heaviest_U - heaviest_U[here_V, None]
        peak_VU = np.maximum(slowest_U[here_V, None] + change_VU, slowest_U - change_VU)
        peak_Q = np.where(other_VU & (span_U == span_U[here_V, None]), peak_VU, np.inf).ravel()
        best_Q = np.argsort(peak_Q, kind="stable")[:most]

        def moved(one: int, other: int) -> Change:
            return sharding.move(int(table_U[one]), int(nth_U[one]), int(position_U[other]))

        pairs = [(here_V[pair // len(table_U)], pair % len(table_U)) for pair in best_Q[np.isfinite(peak_Q[best_Q])]]
        return [[moved(here, there), moved(there, here)] for here, there in pairs]

    def _take_best(self, trials: Sequence[Sequence[Change]]) -> bool:
        """Rate trials as :meth:`after` does, and apply the best as :meth:`_taken` does."""
        return self._taken(self._judged(trials, *self.after(trials)))

    def _taken(self, tried: Tried) -> bool:
        """Apply the best of some trials, if its cost, rounded, is lower than now; or as low with a lower sum of
        squares. Says whether it did."""
        index = int(tried.key_Q.argmin())
        after, now = float(tried.overall_Q[index]), float(in_steps(self.overall_ms(), self._unit))
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

    def _first(self, burden_T: np.ndarray) -> list[int]:
        """Return the tables with the largest finite burdens."""
        order_T = np.argsort(-burden_T, kind="stable")[:TABLES_TRIED]
        return order_T[np.isfinite(burden_T[order_T])].tolist()

    def tried(self, queries: Sequence[tuple[int, int]], approximately: bool = False) -> Tried:
        """Rate options of tables, each laid down unit by unit where it leaves the lowest peak; changes nothing."""
        compute, problem = self.cost.compute, self.problem
        options = [problem.tables[table][option] for table, option in queries]
        # Those of one span side by side, and those with units left always the first of them.
        order = sorted(range(len(queries)), key=lambda query: (options[query].span, -options[query].units))
        some = [queries[query] for query in order]
        trials = self._lifted(some, compute.approximate_ms if approximately else compute.group_cost_ms)
        first = 0
        for _, alike in groupby(order, key=lambda query: options[query].span):
            parts = [options[query].part_UL for query in alike]
            steps = len(parts[0])
            for step in range(steps):
                part_XL = torch.from_numpy(np.stack([part_UL[step] for part_UL in parts if step < len(part_UL)]))
                what = self.cost.latent_PH[part_XL], problem.needs_PM[part_XL], problem.bytes_PC[part_XL]
                trials.lay(first, *what, is_last=step == steps - 1)
            first += len(parts)
        changes = [[(*query, tuple(places))] for query, places in zip(some, trials.positions, strict=True)]
        back = np.argsort(order)
        trials_Q = trials.device_ms_QD, trials.bytes_QDC.transpose(1, 2), trials.fits_Q
        return self._judged([changes[index] for index in back], *(values_Q[back] for values_Q in trials_Q))

    def _lifted(self, queries: Sequence[tuple[int, int]], group_cost: Callable[[Tensor], Tensor]) -> _Trials:
        """Return the sums without the queries' tables, before any unit is placed. Y are fused groups, each with or
        without one of the tables."""
        problem, every, ranks = self.problem, self.problem.option_rows, self.problem.num_ranks
        table_K, slot_of_Q = np.unique([table for table, _ in queries], return_inverse=True)
        tables, slot_Q = len(table_K), torch.from_numpy(slot_of_Q)
        now = [self.sharding.now(table) for table in table_K.tolist()]
        rank_X, part_X, slot_X = problem.laid_by(now)
        gone_KDH, gone_KDC, gone_KDM = (
            summed(values_PY[part_X], rank_X + ranks * slot_X, tables * ranks).unflatten(0, (-1, ranks))
            for values_PY in (self.cost.latent_PH, problem.bytes_PC, problem.needs_PM)
        )
        old_K, new_Q = (
            torch.from_numpy(every.group_O[every.rows([one[0] for one in some], [one[1] for one in some])])
            for some in (now, queries)
        )
        # Each group as it is, and each that a table leaves without that table: few, whatever many options join them.
        group_Z, place_X = torch.cat([old_K, new_Q]).unique(return_inverse=True)
        latent_ZDH = self.latent_DGH.transpose(0, 1)[group_Z]
        latent_YDH = torch.cat([latent_ZDH[place_X[:tables]] - gone_KDH, latent_ZDH])
        ms_YD = both_passes(group_cost(latent_YDH)).double()
        spared_ms_KD = ms_YD[tables + place_X[:tables]] - ms_YD[:tables]
        is_gone_KD = (gone_KDH != 0).any(-1)
        spared_ms_KD = torch.where(is_gone_KD, spared_ms_KD, 0.0)  # where nothing is gone, not even rounding
        group_Q = torch.where(old_K[slot_Q] == new_Q, slot_Q, tables + place_X[tables:])
        return _Trials(
            group_cost=group_cost,
            device_ms_QD=(self.device_ms_D - spared_ms_KD)[slot_Q],
            latent_QDH=latent_YDH[group_Q],
            group_ms_QD=ms_YD[group_Q],
            free_QDM=(self.free_DM + gone_KDM)[slot_Q],
            bytes_QDC=(self.bytes_CD.T - gone_KDC)[slot_Q],
            fits_Q=torch.ones(len(queries), dtype=torch.bool),
            positions=[[] for _ in queries],
        )


@dataclass
class _Trials:
    """Queries laid down side by side: every rank as each has it so far."""

    group_cost: Callable[[Tensor], Tensor]
    device_ms_QD: Tensor
    latent_QDH: Tensor
    """Summed latents of the fused group that the option's parts join, and"""
    group_ms_QD: Tensor
    """what it costs, which is part of its rank's cost."""
    free_QDM: Tensor
    bytes_QDC: Tensor
    fits_Q: Tensor
    """False once memory forbids a unit."""
    positions: list[list[int]]

    def lay(self, first: int, latent_XLH: Tensor, need_XLM: Tensor, bytes_XLC: Tensor, is_last: bool) -> None:
        """Lay down one unit more of X queries from the first on, where it leaves the lowest peak; the last or not."""
        count, span = latent_XLH.shape[:2]
        sums = self.device_ms_QD, self.group_ms_QD, self.latent_QDH, self.free_QDM, self.bytes_QDC
        device_ms_XNL, group_ms_XNL, latent_XNLH, free_XNLM, bytes_XNLC = (
            sum_QDY[first : first + count].unflatten(1, (-1, span)) for sum_QDY in sums
        )
        after_XNL = both_passes(self.group_cost(latent_XNLH + latent_XLH[:, None])).double()
        peak_XNL = device_ms_XNL + after_XNL - group_ms_XNL
        fits_XN = has_room(need_XLM[:, None], free_XNLM).all(-1)
        position_X = peak_XNL.amax(-1).masked_fill(~fits_XN, torch.inf).argmin(-1)
        self.fits_Q[first : first + count].logical_and_(fits_XN.any(-1))
        for places, position in zip(self.positions[first:], position_X.tolist(), strict=False):
            places.append(position)
        chosen = torch.arange(count), position_X
        device_ms_XNL[chosen] = peak_XNL[chosen]
        bytes_XNLC[chosen] += bytes_XLC
        if not is_last:
            group_ms_XNL[chosen] = after_XNL[chosen]
            latent_XNLH[chosen] += latent_XLH
            free_XNLM[chosen] -= need_XLM
