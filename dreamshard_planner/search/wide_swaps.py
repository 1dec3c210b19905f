# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Swaps of wide units: what spans several ranks, the slowest among them, changes places with another of that span.

A re-shard lays one table down where there is room; where all hosts are full, two tables have to change places.

Shapes: E pairs, 2 their places, L span, D ranks, G fused groups, C collectives, H latent channels, M kinds of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dreamshard_planner.cost.compute import overall_ms
from dreamshard_planner.cost.problem import Unit, has_room
from dreamshard_planner.search.states import in_steps, ordered

if TYPE_CHECKING:
    from dreamshard_planner.search.reshards import ShardingState

MAX_PAIRS = 128
"""Pairs of one step: those that would be best if costs added up."""


@dataclass(frozen=True)
class WideUnit:
    """A unit that spans some ranks but not all, where it lies."""

    table: int
    index: int
    """Which unit of the table's option it is."""
    position: int
    unit: Unit

    @property
    def ranks(self) -> range:
        """Those that it lies on."""
        return self.unit.ranks(self.position)


@dataclass(frozen=True)
class RatedSwaps:
    """Pairs, and what the cost is after each has changed places."""

    pairs: list[tuple[WideUnit, WideUnit]]
    overall_E: Tensor
    """Rounded, in steps; infinite where memory does not allow the swap."""
    square_E: Tensor
    """Sum of squares of the ranks' milliseconds."""

    @property
    def key_E(self) -> Tensor:
        """Their order."""
        return ordered(self.overall_E, self.square_E)


def wide_units(state: ShardingState) -> list[WideUnit]:
    """All that may be swapped: nothing that is pinned."""
    problem, sharding = state.problem, state.sharding
    return [
        WideUnit(table, index, position, unit)
        for table, (option, positions) in enumerate(zip(sharding.options, sharding.positions, strict=True))
        if problem.tables[table][option].pinned is None
        for index, (unit, position) in enumerate(zip(problem.tables[table][option].units, positions, strict=True))
        if 1 < unit.span < problem.num_ranks
    ]


def rated_swaps(state: ShardingState, rank: int, unit: float) -> RatedSwaps | None:
    """The most promising swaps that relieve a rank; None where there are none.

    Args:
        state: of the sharding.
        rank: the slowest.
        unit: milliseconds in which costs are compared.
    """
    pairs = _most_promising(state, wide_units(state), rank)
    return _rated(state, pairs, unit) if pairs else None


def _most_promising(state: ShardingState, units: Sequence[WideUnit], rank: int) -> list[tuple[WideUnit, WideUnit]]:
    single_P, device_D = state.cost.single_ms_P.tolist(), state.device_ms_D.tolist()
    heaviest = {unit: max(single_P[part] for part in unit.unit.parts) for unit in units}
    slowest = {unit: max(device_D[rank] for rank in unit.ranks) for unit in units}

    def peak(here: WideUnit, there: WideUnit) -> float:
        change = heaviest[there] - heaviest[here]
        return max(slowest[here] + change, slowest[there] - change)

    pairs = [
        (here, there)
        for here in units
        if rank in here.ranks
        for there in units
        if there.unit.span == here.unit.span and there.position != here.position and there.table != here.table
    ]
    return sorted(pairs, key=lambda pair: peak(*pair))[:MAX_PAIRS]


def _rated(state: ShardingState, pairs: list[tuple[WideUnit, WideUnit]], unit: float) -> RatedSwaps:
    problem, cost = state.problem, state.cost
    overall_E = torch.zeros(len(pairs), dtype=torch.float64)
    square_E = torch.zeros_like(overall_E)
    by_span: dict[int, list[int]] = {}
    for index, (here, _) in enumerate(pairs):
        by_span.setdefault(here.unit.span, []).append(index)
    for some in by_span.values():
        rank_E2L = torch.tensor([[list(one.ranks) for one in pairs[index]] for index in some])
        part_E2L = torch.tensor([[one.unit.parts for one in pairs[index]] for index in some])
        group_E2 = problem.group_P[part_E2L[..., 0]]
        arriving_E2L, arriving_group_E2 = part_E2L.flip(1), group_E2.flip(1)

        each = torch.arange(len(some))[:, None, None], torch.arange(2)[:, None], torch.arange(rank_E2L.shape[-1])
        latent_E2LGH = state.latent_DGH[rank_E2L]  # a copy
        latent_E2LGH[(*each, group_E2[..., None])] -= cost.latent_PH[part_E2L]
        latent_E2LGH[(*each, arriving_group_E2[..., None])] += cost.latent_PH[arriving_E2L]
        device_ED = state.device_ms_D.repeat(len(some), 1)
        device_ED[each[0], rank_E2L] = cost.compute.group_cost_ms(latent_E2LGH).sum((-1, -2)).double()
        bytes_EDC = state.bytes_CD.T.repeat(len(some), 1, 1)
        bytes_EDC[each[0], rank_E2L] += problem.bytes_PC[arriving_E2L] - problem.bytes_PC[part_E2L]
        room_E2LM = state.free_DM[rank_E2L] + problem.storage_PM[part_E2L]
        fits_E = has_room(problem.storage_PM[arriving_E2L], room_E2LM).all(-1).all(-1)

        overall_ms_E = overall_ms(device_ED.amax(-1), problem.collectives.ms(bytes_EDC.transpose(1, 2)))
        overall_E[some] = in_steps(overall_ms_E, unit).masked_fill(~fits_E, torch.inf)
        square_E[some] = device_ED.square().sum(-1)
    return RatedSwaps(pairs, overall_E, square_E)
