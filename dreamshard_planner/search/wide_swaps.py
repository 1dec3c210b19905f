# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Swaps of wide units: what spans several ranks, the slowest among them, changes places with another of that span.

A re-shard lays one table down where there is room; where all hosts are full, two tables have to change places.

Shapes: Q pairs, Y parts of both units of all pairs, X the same leaving and arriving, W wide units,
V those on the slowest rank, D ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.compute import overall_ms
from dreamshard_planner.cost.problem import Unit
from dreamshard_planner.search.states import Change, Tried, in_steps

if TYPE_CHECKING:
    from dreamshard_planner.search.reshards import ShardingState

MAX_PAIRS = 128
"""Pairs of one step: those that would be best if costs added up."""


class WideUnit(NamedTuple):
    """A unit that spans some ranks but not all, where it lies."""

    table: int
    nth: int
    """Which unit of the table's option it is."""
    position: int
    unit: Unit

    @property
    def ranks(self) -> range:
        """Those that it lies on."""
        return self.unit.ranks(self.position)


def wide_swaps(state: ShardingState, rank: int, unit: float) -> tuple[Tried, int] | None:
    """The most promising swaps that relieve a rank, and the ranks that they change in all; None where there are none.

    Args:
        state: of the sharding.
        rank: the slowest.
        unit: milliseconds in which costs are compared.
    """
    pairs = _most_promising(state, rank)
    if not pairs:
        return None
    overall_Q, square_Q = _rated(state, pairs)
    changes = [[_moved(state, here, there), _moved(state, there, here)] for here, there in pairs]
    return Tried(changes, in_steps(overall_Q, unit), square_Q), sum(2 * here.unit.span for here, _ in pairs)


def _moved(state: ShardingState, one: WideUnit, other: WideUnit) -> Change:
    """One unit where another is."""
    return state.sharding.move(one.table, one.nth, other.position)


def _most_promising(state: ShardingState, rank: int) -> list[tuple[WideUnit, WideUnit]]:
    """Pairs that would leave the lowest peak if costs added up."""
    problem, sharding, every = state.problem, state.sharding, state.problem.option_rows
    row_T = every.rows(range(problem.num_tables), sharding.options)
    span_T = every.span_O[row_T]
    wide_T = ((span_T > 1) & (span_T < problem.num_ranks) & every.is_free_O[row_T]).nonzero()[0]
    if not len(wide_T):
        return []
    units_T = every.parts_O[row_T[wide_T]] // span_T[wide_T]
    table_W, span_W = wide_T.repeat(units_T), span_T[wide_T].repeat(units_T)
    single_X = state.cost.single_ms_P.numpy()[every.all_parts(row_T[wide_T])]
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

    def unit(index: int) -> WideUnit:
        table, nth = int(table_W[index]), int(index - np.searchsorted(table_W, table_W[index]))
        option = problem.tables[table][sharding.options[table]]
        return WideUnit(table, nth, int(position_W[index]), option.units[nth])

    pairs = [divmod(int(pair), len(table_W)) for pair in best_Q[np.isfinite(peak_Q[best_Q])]]
    return [(unit(here_V[here]), unit(there)) for here, there in pairs]


def _rated(state: ShardingState, pairs: list[tuple[WideUnit, WideUnit]]) -> tuple[Tensor, Tensor]:
    """Overall milliseconds and the sum of squares of the ranks' after each pair has changed places, both [Q]."""
    span_Q = torch.tensor([here.unit.span for here, _ in pairs])
    query_Y = torch.arange(len(pairs)).repeat_interleave(2 * span_Q)
    rank_Y = torch.tensor([rank for pair in pairs for one in pair for rank in one.ranks])
    leaving = [part for here, there in pairs for one in (here, there) for part in one.unit.parts]
    arriving = [part for here, there in pairs for one in (there, here) for part in one.unit.parts]
    sign_X = torch.tensor([-1, 1]).repeat_interleave(len(query_Y))
    device_QD, collective_ms, fits_Q = state.after(
        len(pairs), query_Y.repeat(2), sign_X, rank_Y.repeat(2), torch.tensor(leaving + arriving)
    )
    overall_Q = overall_ms(device_QD.amax(-1), collective_ms).masked_fill(~fits_Q, torch.inf)
    return overall_Q, device_QD.square().sum(-1)
