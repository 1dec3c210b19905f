# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Moves and swaps on the bottleneck device: what each would cost, from sums that are there, and the best one applied.

A candidate changes two devices by one or two shards, so it costs a few additions of latents and one evaluation of the
head, however many shards there are. All candidates are glanced at (moves one by one, swaps as the sum of two single
effects), and the most promising ones rated exactly.

Shapes: S shards, D devices, G fused groups, H latent channels, M kinds of memory, B placements side by side,
N shards on the bottleneck device (padded), A arrivals (D times nothing: a move; and every shard: a swap),
C candidates rated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.search.states import DIGITS, PlacementStates, rounded

MAX_PAIRS = 2_000_000
"""Candidates of one step at the very most: of thousands of shards on one device, only the heaviest leave. Bounds
memory."""


@dataclass(frozen=True)
class Bottlenecks:
    """Some of the placements, and the device of each that is to get cheaper."""

    row_B: Tensor
    """Where they stand among all placements."""
    device_B: Tensor
    assignment_BS: Tensor
    here_BS: Tensor
    """Which shards it holds."""
    device_ms_BD: Tensor
    bytes_BCD: Tensor

    @classmethod
    def of(cls, states: PlacementStates, row_B: Tensor, device_B: Tensor) -> Bottlenecks:
        """Those of the placements ``row_B``."""
        assignment_BS = states.assignment_BS[row_B]
        here_BS = assignment_BS == device_B[:, None]
        return cls(row_B, device_B, assignment_BS, here_BS, states.device_ms_BD[row_B], states.bytes_BCD[row_B])


@dataclass(frozen=True)
class Candidates:
    """Changes of two devices each: what leaves the bottleneck, where to, and what comes back from there."""

    leaving_BC: Tensor
    device_BC: Tensor
    arrival_BC: Tensor
    """-1 for a move."""
    fits_BC: Tensor
    """Whether memory allows it; what does not fit only fills up the rows."""
    counted: int = 0
    """All moves, and the swaps among these."""


def improve(
    states: PlacementStates, row_B: Tensor, bottleneck_B: Tensor, rated_exactly: int, unit: float
) -> tuple[Tensor, int]:
    """Apply to each of the placements ``row_B`` the best move or swap of its bottleneck device, if it lowers the cost;
    says which it did, bool [B], and how many candidates were worth counting: moves, and swaps rated exactly."""
    bottlenecks = Bottlenecks.of(states, row_B, bottleneck_B)
    if not bottlenecks.here_BS.any():
        return torch.zeros(len(row_B), dtype=torch.bool), 0
    candidates = _most_promising(states, bottlenecks, rated_exactly, unit)
    overall_BC, square_BC = _scores(
        states,
        bottlenecks,
        candidates.device_BC,
        candidates.leaving_BC,
        candidates.arrival_BC,
        *_rate(states, bottlenecks, candidates),
        unit,
    )
    overall_BC = overall_BC.masked_fill(~candidates.fits_BC, torch.inf)
    least_B = overall_BC.amin(-1)
    choice_B1 = torch.where(overall_BC == least_B[:, None], square_BC, torch.inf).argmin(-1, keepdim=True)
    before_B = rounded(states.overall_ms_B()[row_B], unit)
    # Overall cost first; where that is another device's, the balance of the two devices.
    balances_B = square_BC.gather(1, choice_B1)[:, 0] < 0
    improved_B = (least_B < before_B) | ((least_B == before_B) & balances_B)
    if improved_B.any():
        row_X, from_X = row_B[improved_B], bottleneck_B[improved_B]
        leaving_X, device_X, arrival_X = (
            values_BC.gather(1, choice_B1)[improved_B, 0]
            for values_BC in (candidates.leaving_BC, candidates.device_BC, candidates.arrival_BC)
        )
        states.assignment_BS[row_X, leaving_X] = device_X
        swapped_X = arrival_X >= 0
        states.assignment_BS[row_X[swapped_X], arrival_X[swapped_X]] = from_X[swapped_X]
        states.refresh(row_X.repeat(2), torch.cat([from_X, device_X]))
    return improved_B, candidates.counted


def _most_promising(states: PlacementStates, bottlenecks: Bottlenecks, rated_exactly: int, unit: float) -> Candidates:
    """Of all moves and swaps those that cost least at a glance."""
    problem, assignment_BS, here_BS = states.problem, bottlenecks.assignment_BS, bottlenecks.here_BS
    num_placements, num_arrivals = len(assignment_BS), problem.num_devices + problem.num_shards
    heaviest_BS = torch.where(here_BS, states.cost.single_ms_S, -1.0).argsort(dim=-1, descending=True, stable=True)
    most = min(int(here_BS.sum(-1).max()), max(1, MAX_PAIRS // (num_placements * num_arrivals)))
    leaving_BN = heaviest_BS[:, :most]
    device_BA = torch.cat([torch.arange(problem.num_devices).expand(num_placements, -1), assignment_BS], dim=1)
    arrival_A = torch.cat([torch.full((problem.num_devices,), -1), torch.arange(problem.num_shards)])

    fits_BNA = _fits(states, bottlenecks, leaving_BN, device_BA, arrival_A)
    fits_BNA &= here_BS.gather(1, leaving_BN)[..., None] & (device_BA != bottlenecks.device_B[:, None])[:, None]
    overall_BNA, square_BNA = _scores(
        states,
        bottlenecks,
        device_BA[:, None].expand_as(fits_BNA),
        leaving_BN[..., None],
        arrival_A,
        *_glance(states, bottlenecks, leaving_BN),
        unit,
    )
    tie_break_BNA = 10.0 ** -(DIGITS + 1) * square_BNA / (1 + square_BNA.abs())
    key_BX = (overall_BNA + tie_break_BNA).masked_fill(~fits_BNA, torch.inf).flatten(1)
    best_BC = key_BX.topk(min(rated_exactly, key_BX.shape[1]), largest=False).indices.sort().values
    fits_BC, arrival_BC = key_BX.gather(1, best_BC).isfinite(), arrival_A[best_BC % num_arrivals]
    moves, swaps = fits_BNA[..., : problem.num_devices].sum(), (fits_BC & (arrival_BC >= 0)).sum()
    return Candidates(
        leaving_BC=leaving_BN.gather(1, best_BC // num_arrivals),
        device_BC=device_BA.gather(1, best_BC % num_arrivals),
        arrival_BC=arrival_BC,
        fits_BC=fits_BC,
        counted=int(moves + swaps),
    )


def _fits(
    states: PlacementStates, bottlenecks: Bottlenecks, leaving_BN: Tensor, device_BA: Tensor, arrival_A: Tensor
) -> Tensor:
    """Whether both devices can store what they would hold, bool [B, N, A]. What grows by nothing always fits, even
    where a reservation left less than nothing."""
    storage_SM, row_B = states.problem.storage_SM, bottlenecks.row_B
    storage_AM = torch.where((arrival_A >= 0)[:, None], storage_SM[arrival_A], 0)
    fits_BNA = torch.ones(*leaving_BN.shape, len(arrival_A), dtype=torch.bool)
    for kind in range(storage_SM.shape[1]):
        grows_BNA = storage_SM[leaving_BN, kind][..., None] - storage_AM[:, kind]
        free_BA = states.free_BDM[row_B[:, None], device_BA, kind]
        here_free_B = states.free_BDM[row_B, bottlenecks.device_B, kind]
        fits_BNA &= (grows_BNA <= free_BA[:, None]) | (grows_BNA <= 0)
        fits_BNA &= (-grows_BNA <= here_free_B[:, None, None]) | (grows_BNA >= 0)
    return fits_BNA


def _glance(states: PlacementStates, bottlenecks: Bottlenecks, leaving_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Cost of the bottleneck device and of the other one after every move and swap, both [B, N, A]: moves at a glance,
    swaps as if the effects of leaving and arriving added up."""
    assignment_BS, device_ms_BD = bottlenecks.assignment_BS, bottlenecks.device_ms_BD
    seen = states.cost.compute.glance_channels
    latent_SH, latent_BDGH = states.cost.latent_SH[:, :seen], states.latent_BDGH[..., :seen]
    group_S, device_D = states.problem.group_S, torch.arange(states.problem.num_devices)
    row_B1, here_B1, group_BN = bottlenecks.row_B[:, None], bottlenecks.device_B[:, None], group_S[leaving_BN]
    places = (
        (row_B1, here_B1, group_BN),
        (row_B1[..., None], device_D, group_BN[..., None]),
        (row_B1, assignment_BS, group_S),
        (row_B1, here_B1, group_S),
    )
    leaving_BNH = latent_SH[leaving_BN]
    changes = (-leaving_BNH, leaving_BNH[:, :, None], -latent_SH, latent_SH)
    after = [latent_BDGH[place] + change for place, change in zip(places, changes, strict=True)]
    after_ms_X = states.glance(torch.cat([latent.flatten(0, -2) for latent in after]))
    sizes = [latent.shape[:-1] for latent in after]
    parts = after_ms_X.split([size.numel() for size in sizes])
    left_BN, joined_BND, gone_BS, arrived_BS = (
        part.view(size) - states.glance_ms_BDG[place] for part, size, place in zip(parts, sizes, places, strict=True)
    )
    here_ms_B11 = device_ms_BD.gather(1, here_B1)[..., None]
    home_BNS = assignment_BS[:, None].expand(-1, leaving_BN.shape[1], -1)
    move_BND = (here_ms_B11 + left_BN[..., None]).expand_as(joined_BND)
    swap_BNS = here_ms_B11 + left_BN[..., None] + arrived_BS[:, None]
    to_BND = device_ms_BD[:, None] + joined_BND
    return torch.cat([move_BND, swap_BNS], -1), torch.cat([to_BND, to_BND.gather(2, home_BNS) + gone_BS[:, None]], -1)


def _rate(states: PlacementStates, bottlenecks: Bottlenecks, candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Exact cost of the bottleneck device and of the other one after each candidate, both [B, C]."""
    leaving_BC, device_BC, arrival_BC = candidates.leaving_BC, candidates.device_BC, candidates.arrival_BC
    row_BC, here_BC = (values_B[:, None].expand_as(device_BC) for values_B in (bottlenecks.row_B, bottlenecks.device_B))
    latent_SH, group_S = states.cost.latent_SH, states.problem.group_S
    group_BC, arrival_group_BC = group_S[leaving_BC], group_S[arrival_BC]
    together_BC = (arrival_BC >= 0) & (arrival_group_BC == group_BC)
    apart_BC = (arrival_BC >= 0) & ~together_BC
    exchanged_BCH = latent_SH[leaving_BC] - torch.where(together_BC[..., None], latent_SH[arrival_BC], 0.0)
    # What leaves and what arrives change one group of each device, or two.
    index = torch.cat([torch.arange(device_BC.numel()), apart_BC.flatten().nonzero()[:, 0]])
    group_X = torch.cat([group_BC.flatten(), arrival_group_BC[apart_BC]])
    exchanged_XH = torch.cat([exchanged_BCH.flatten(0, 1), -latent_SH[arrival_BC[apart_BC]]])
    places, after = [], []
    for side_BC, change_XH in ((here_BC, -exchanged_XH), (device_BC, exchanged_XH)):
        places.append((row_BC.flatten()[index], side_BC.flatten()[index], group_X))
        after.append(states.latent_BDGH[places[-1]] + change_XH)
    after_ms_X = states.cost.compute.group_cost_ms(torch.cat(after)).sum(-1)
    rated = []
    for side_BC, place, part_X in zip((here_BC, device_BC), places, after_ms_X.chunk(2), strict=True):
        change_ms_X = torch.zeros(side_BC.numel(), dtype=part_X.dtype)
        change_ms_X.index_add_(0, index, part_X - states.group_ms_BDG[place])
        rated.append(bottlenecks.device_ms_BD.gather(1, side_BC) + change_ms_X.view(side_BC.shape))
    return rated[0], rated[1]


def _scores(
    states: PlacementStates,
    bottlenecks: Bottlenecks,
    device_BX: Tensor,
    leaving_BX: Tensor,
    arrival_BX: Tensor,
    here_ms_BX: Tensor,
    device_ms_BX: Tensor,
    unit: float,
) -> tuple[Tensor, Tensor]:
    """Overall cost of each candidate, rounded, and its change of the two devices' sum of squares, both [B, ...].

    Args:
        device_BX: the device that is not the bottleneck.
        leaving_BX: the shard that goes there.
        arrival_BX: the shard that comes back; -1 for a move.
        here_ms_BX: cost of the bottleneck device afterwards.
        device_ms_BX: cost of the other one afterwards.
    """
    own = (slice(None), *[None] * (device_BX.dim() - 1))
    before_BD, here_B1 = bottlenecks.device_ms_BD, bottlenecks.device_B[:, None]
    rest_ms_BX = _largest_other(before_BD, here_B1, device_BX)
    compute_BX = torch.maximum(rest_ms_BX, torch.maximum(here_ms_BX, device_ms_BX))
    forward_BX, backward_BX = _collectives_after(states, bottlenecks, device_BX, leaving_BX, arrival_BX)
    squared_BD = before_BD**2
    before_BX = squared_BD.gather(1, here_B1)[:, 0][own] + squared_BD.gather(1, device_BX.flatten(1)).view_as(device_BX)
    square_BX = here_ms_BX**2 + device_ms_BX**2 - before_BX
    return rounded(compute_BX + forward_BX + backward_BX, unit), rounded(square_BX, unit**2)


def _collectives_after(
    states: PlacementStates, bottlenecks: Bottlenecks, device_BX: Tensor, leaving_BX: Tensor, arrival_BX: Tensor
) -> tuple[Tensor, Tensor]:
    """Forward and backward milliseconds of all collectives after each candidate, both [B, ...]. Only those change that
    carry what leaves and what arrives."""
    problem, model = states.problem, states.cost.collectives
    own = (slice(None), *[None] * (device_BX.dim() - 1))
    here_B1, bytes_BCD = bottlenecks.device_B[:, None], bottlenecks.bytes_BCD
    left_BX = problem.output_bytes_S[leaving_BX]
    back_BX = torch.where(arrival_BX >= 0, problem.output_bytes_S[arrival_BX], 0.0)
    if problem.num_collectives == 1:
        after = _bounded(model, bytes_BCD[:, 0], here_B1, device_BX, left_BX - back_BX)
        if states.cost.preload is None:
            return after
        preload = states.cost.preload
        return after[0] + preload.forward_collective_ms, after[1] + preload.backward_collective_ms
    together_BX = problem.collective_S[leaving_BX] == problem.collective_S[arrival_BX]
    totals = [ms_B[own] for ms_B in states.cost.collectives_ms(bytes_BCD)]
    for shard_BX, gained_BX in (
        (leaving_BX, left_BX - torch.where(together_BX, back_BX, 0.0)),
        (arrival_BX, -torch.where(together_BX, 0.0, back_BX)),
    ):
        gained_BX = gained_BX.expand_as(device_BX)
        collective_BX = problem.collective_S[shard_BX].expand_as(device_BX)
        for collective in range(problem.num_collectives):
            here_BX = collective_BX == collective
            bytes_BD = bytes_BCD[:, collective]
            after = _bounded(model, bytes_BD, here_B1, device_BX, gained_BX)
            before = model.all_to_all_ms(bytes_BD)
            totals = [
                total_BX + torch.where(here_BX, after_BX - before_B[own], 0.0)
                for total_BX, after_BX, before_B in zip(totals, after, before, strict=True)
            ]
    return totals[0], totals[1]


def _bounded(
    model: CollectiveModel, bytes_BD: Tensor, here_B1: Tensor, device_BX: Tensor, gained_BX: Tensor
) -> tuple[Tensor, Tensor]:
    """One all-to-all after the bottleneck has given so many bytes to the other device, both [B, ...]."""
    own = (slice(None), *[None] * (device_BX.dim() - 1))
    here_bytes_BX = bytes_BD.gather(1, here_B1)[:, 0][own] - gained_BX
    device_bytes_BX = bytes_BD.gather(1, device_BX.flatten(1)).view(device_BX.shape) + gained_BX
    largest_BX = torch.maximum(
        _largest_other(bytes_BD, here_B1, device_BX), torch.maximum(here_bytes_BX, device_bytes_BX)
    )
    smallest_BX = -torch.maximum(
        _largest_other(-bytes_BD, here_B1, device_BX), torch.maximum(-here_bytes_BX, -device_bytes_BX)
    )
    return model.bounded_all_to_all_ms(largest_BX, smallest_BX, bytes_BD.sum(-1)[own].expand_as(largest_BX))


def _largest_other(values_BD: Tensor, first_B1: Tensor, second_BX: Tensor) -> Tensor:
    """Largest value over the devices that are neither ``first`` nor ``second``, [B, ...]; the lowest finite value of
    the type where there is no other device."""
    top = values_BD.scatter(1, first_B1, torch.finfo(values_BD.dtype).min).topk(2)
    own = (..., *[None] * (second_BX.dim() - 1))
    return torch.where(second_BX == top.indices[:, 0][own], top.values[:, 1][own], top.values[:, 0][own])
