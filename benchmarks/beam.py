# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column splits by beam search around capped greedy placement, as NeuroShard does it (arXiv 2305.01868, section 4).

The outer search starts from whole tables. Each level splits one table further, of those that are largest and those that
cost most alone; of all that come out of it, the cheapest few go on. The inner search places units from dear to cheap,
each where its rank then costs least, under a cap on what a rank sends, for a grid of caps; the cheapest placement is
the price of the splits.

Shapes: Q lanes (splits x caps), S units of the longest lane, D ranks, G fused groups, H latent channels, M kinds of
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.sharding import Chosen, Sharding, ShardingCost
from dreamshard_planner.placement.starts import lay_wide


@dataclass(frozen=True, kw_only=True)
class BeamConfig:
    """NeuroShard's own settings."""

    candidates: int = 10
    """Tables to split next: so many of the largest, and so many of the dearest."""
    width: int = 3
    """Of the beam."""
    levels: int = 10
    """Splits at most."""
    caps: int = 11
    """From the mean to :attr:`widest_cap` times the mean."""
    widest_cap: float = 1.5


@torch.no_grad()
def beam_search(cost: ShardingCost, config: BeamConfig | None = None) -> Sharding | None:
    """The cheapest sharding that the beam meets; None where none fits. The first option of a table without a split is
    where it starts, and options of more units, the fewest first, are its splits."""
    config = config or BeamConfig()
    ladders = [_ladder(options) for options in cost.problem.tables]
    steps = (0,) * len(ladders)
    rated: dict[tuple[int, ...], tuple[float, Sharding | None]] = {}
    rated[steps] = _placed(cost, [_options(ladders, steps)], config)[0]
    beam = [steps]
    for _ in range(config.levels):
        further = dict.fromkeys(
            tuple(step + (other == table) for other, step in enumerate(steps))
            for steps in beam
            for table in _candidates(cost, ladders, steps, config)
        )
        new = [steps for steps in further if steps not in rated]
        if not new:
            break
        rated.update(zip(new, _placed(cost, [_options(ladders, steps) for steps in new], config), strict=True))
        beam = sorted(new, key=lambda steps: rated[steps][0])[: config.width]
    return min(rated.values(), key=lambda entry: entry[0])[1]


def _ladder(options: Sequence) -> list[int]:
    """Options of one table by their number of units, the first of each number."""
    first: dict[int, int] = {}
    for index, option in enumerate(options):
        if all(unit.span == 1 for unit in option.units):
            first.setdefault(len(option.units), index)
    return [first[count] for count in sorted(first)] or [0]


def _options(ladders: Sequence[Sequence[int]], steps: Sequence[int]) -> tuple[int, ...]:
    return tuple(ladder[step] for ladder, step in zip(ladders, steps, strict=True))


def _candidates(
    cost: ShardingCost, ladders: Sequence[Sequence[int]], steps: Sequence[int], config: BeamConfig
) -> list[int]:
    """Tables that can be split further: those whose units are largest, and those whose units cost most."""
    left = [table for table, (ladder, step) in enumerate(zip(ladders, steps, strict=True)) if step + 1 < len(ladder)]
    largest: dict[int, float] = {}
    dearest: dict[int, float] = {}
    for table in left:
        parts = [p for unit in cost.problem.tables[table][ladders[table][steps[table]]].units for p in unit.parts]
        largest[table] = float(cost.problem.storage_PM[parts].sum(-1).max())
        dearest[table] = float(cost.single_ms_P[parts].max())
    chosen: dict[int, None] = {}
    for value in (largest, dearest):
        chosen.update(dict.fromkeys(sorted(left, key=lambda t: (-value[t], t))[: config.candidates]))
    return list(chosen)


def _placed(
    cost: ShardingCost, choices: Sequence[tuple[int, ...]], config: BeamConfig
) -> list[tuple[float, Sharding | None]]:
    """Every choice of options with its best placement over all caps, and what that costs; infinity where none fits."""
    infeasible: tuple[float, Sharding | None] = (float("inf"), None)
    best = [infeasible] * len(choices)
    chosen: list[tuple[int, Chosen]] = []
    for index, options in enumerate(choices):
        sharding = lay_wide(cost, options)
        if sharding is not None:
            chosen.append((index, cost.chosen(sharding)))
    if not chosen:
        return best
    caps_K = torch.linspace(1.0, config.widest_cap, config.caps, dtype=torch.float64)
    rank_QS, alive_Q = _capped_greedy(cost, [one for _, one in chosen], caps_K)
    for lane, (index, one) in enumerate(chosen):
        lanes = slice(lane * config.caps, (lane + 1) * config.caps)
        for rank_S in rank_QS[lanes][alive_Q[lanes], : len(one.units)].unique(dim=0):
            sharding = one.placed(rank_S)
            best[index] = min(best[index], (cost.overall_ms(sharding), sharding), key=lambda entry: entry[0])
    return best


def _capped_greedy(cost: ShardingCost, chosen: Sequence[Chosen], caps_K: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks of the units of each choice under each cap, [Q, S] in the order of the choice's units (and minus one beyond
    them), and which lanes came to an end [Q]; lanes of a choice lie next to each other."""
    problem, caps = cost.problem, len(caps_K)
    lanes, most = len(chosen) * caps, max(len(one.units) for one in chosen)
    rank_QS = torch.full((lanes, most), -1, dtype=torch.int64)
    alive_Q = torch.ones(lanes, dtype=torch.bool)
    order_QS = torch.full((lanes, most), -1, dtype=torch.int64)
    latent_QSH = torch.zeros(lanes, most, cost.latent_PH.shape[1], dtype=torch.float64)
    group_QS = torch.zeros(lanes, most, dtype=torch.int64)
    sent_QS = torch.zeros(lanes, most, dtype=torch.float64)
    need_QSM = torch.zeros(lanes, most, problem.storage_PM.shape[1], dtype=torch.int64)
    latent_QDGH = torch.zeros(lanes, problem.num_ranks, problem.num_groups, cost.latent_PH.shape[1]).double()
    free_QDM = torch.zeros(lanes, *problem.capacity_DM.shape, dtype=torch.int64)
    cap_Q = torch.zeros(lanes, dtype=torch.float64)
    for index, one in enumerate(chosen):
        rows, task = slice(index * caps, (index + 1) * caps), one.cost.problem
        order_S = one.cost.single_ms_S.argsort(descending=True, stable=True)
        count = len(order_S)
        order_QS[rows, :count] = order_S
        latent_QSH[rows, :count] = one.cost.latent_SH[order_S].double()
        group_QS[rows, :count] = task.group_S[order_S]
        sent_QS[rows, :count] = task.output_bytes_S[order_S]
        need_QSM[rows, :count] = task.storage_SM[order_S]
        free_QDM[rows] = task.capacity_DM
        cap_Q[rows] = caps_K * float(task.output_bytes_S.sum()) / problem.num_ranks
        if one.cost.preload is not None:
            latent_QDGH[rows] = one.cost.preload.latent_DGH.double()
    group_ms_QDG = cost.compute.group_cost_ms(latent_QDGH).sum(-1).double()
    sent_QD = torch.zeros(lanes, problem.num_ranks, dtype=torch.float64)
    for step in range(most):
        lane_X = (alive_Q & (order_QS[:, step] >= 0)).nonzero()[:, 0]
        each, group_X = torch.arange(len(lane_X)), group_QS[lane_X, step]
        with_XDH = latent_QDGH[lane_X, :, group_X] + latent_QSH[lane_X, step, None]
        ms_XD = cost.compute.group_cost_ms(with_XDH).sum(-1).double()
        device_ms_XD = group_ms_QDG[lane_X].sum(-1) - group_ms_QDG[lane_X, :, group_X] + ms_XD
        need_X1M = need_QSM[lane_X, step, None]
        fits_XD = ((need_X1M <= free_QDM[lane_X]) | (need_X1M == 0)).all(-1)
        fits_XD &= sent_QD[lane_X] + sent_QS[lane_X, step, None] <= cap_Q[lane_X, None] * (1 + 1e-9)
        rank_X = device_ms_XD.masked_fill(~fits_XD, torch.inf).argmin(-1)
        alive_Q[lane_X] &= fits_XD.any(-1)
        latent_QDGH[lane_X, rank_X, group_X] = with_XDH[each, rank_X]
        group_ms_QDG[lane_X, rank_X, group_X] = ms_XD[each, rank_X]
        sent_QD[lane_X, rank_X] += sent_QS[lane_X, step]
        free_QDM[lane_X, rank_X] -= need_QSM[lane_X, step]
        rank_QS[lane_X, order_QS[lane_X, step]] = rank_X
    return rank_QS, alive_Q
