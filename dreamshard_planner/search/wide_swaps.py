# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Swaps of wide units: what spans several ranks, the slowest among them, changes places with another of that span.

A re-shard lays one table down where there is room; where all hosts are full, two tables have to change places.

Shapes: Q pairs, 2 their places, W wide units, V those on the slowest rank, L span, D ranks, G fused groups,
C collectives, H latent channels, M kinds of memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.compute import overall_ms
from dreamshard_planner.cost.problem import Unit, has_room
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
    overall_Q, square_Q = torch.zeros(2, len(pairs), dtype=torch.float64)
    for span in {here.unit.span for here, _ in pairs}:
        some = [index for index, (here, _) in enumerate(pairs) if here.unit.span == span]
        overall_Q[some], square_Q[some] = _rated(state, [pairs[index] for index in some], unit)
    changes = [[_moved(state, here, there), _moved(state, there, here)] for here, there in pairs]
    return Tried(changes, overall_Q, square_Q), sum(2 * here.unit.span for here, _ in pairs)


def _moved(state: ShardingState, one: WideUnit, other: WideUnit) -> Change:
    """One unit where another is."""
    moved = state.sharding.moved(one.table, one.nth, other.position)
    return one.table, moved.options[one.table], moved.positions[one.table]


def _most_promising(state: ShardingState, rank: int) -> list[tuple[WideUnit, WideUnit]]:
    """Pairs that would leave the lowest peak if costs added up."""
    problem, sharding = state.problem, state.sharding
    wide = [  # nothing that is pinned
        (table, option, problem.tables[table][option].units[0].span)
        for table, option in enumerate(sharding.options)
        if 1 < problem.tables[table][option].units[0].span < problem.num_ranks
        and problem.tables[table][option].pinned is None
    ]
    if not wide:
        return []
    single_P = state.cost.single_ms_P.numpy()
    heaviest = [single_P[problem.parts_of(table, option)].reshape(-1, span).max(1) for table, option, span in wide]
    heaviest_W = np.concatenate(heaviest)
    position_W = np.array([at for table, *_ in wide for at in sharding.positions[table]])
    counts = [len(units) for units in heaviest]
    table_W, _, span_W = np.array(wide).repeat(counts, 0).T
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


def _rated(state: ShardingState, pairs: list[tuple[WideUnit, WideUnit]], unit: float) -> tuple[Tensor, Tensor]:
    """What :class:`Tried` holds of some equally wide pairs, after each has changed places, both [Q]."""
    problem, cost = state.problem, state.cost
    rank_Q2L = torch.tensor([[list(one.ranks) for one in pair] for pair in pairs])
    part_Q2L = torch.tensor([[one.unit.parts for one in pair] for pair in pairs])
    group_Q2 = problem.group_P[part_Q2L[..., 0]]
    arriving_Q2L, arriving_group_Q2 = part_Q2L.flip(1), group_Q2.flip(1)

    each = torch.arange(len(pairs))[:, None, None], torch.arange(2)[:, None], torch.arange(rank_Q2L.shape[-1])
    latent_Q2LGH = state.latent_DGH[rank_Q2L]  # a copy
    latent_Q2LGH[(*each, group_Q2[..., None])] -= cost.latent_PH[part_Q2L]
    latent_Q2LGH[(*each, arriving_group_Q2[..., None])] += cost.latent_PH[arriving_Q2L]
    device_QD = state.device_ms_D.repeat(len(pairs), 1)
    device_QD[each[0], rank_Q2L] = cost.compute.group_cost_ms(latent_Q2LGH).sum((-1, -2)).double()
    bytes_QDC = state.bytes_CD.T.repeat(len(pairs), 1, 1)
    bytes_QDC[each[0], rank_Q2L] += problem.bytes_PC[arriving_Q2L] - problem.bytes_PC[part_Q2L]
    room_Q2LM = state.free_DM[rank_Q2L] + problem.storage_PM[part_Q2L]
    fits_Q = has_room(problem.storage_PM[arriving_Q2L], room_Q2LM).all(-1).all(-1)
    overall_ms_Q = overall_ms(device_QD.amax(-1), problem.collectives.ms(bytes_QDC.transpose(1, 2)))
    return in_steps(overall_ms_Q, unit).masked_fill(~fits_Q, torch.inf), device_QD.square().sum(-1)
