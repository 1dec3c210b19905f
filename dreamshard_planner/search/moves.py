# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Moves and swaps on the bottleneck rank: the cost of each, from sums that are there, and descents by the best ones.

A candidate changes two ranks by one or two shards, so it costs a few additions of latents and one evaluation of the
head, however many shards there are. All candidates are rated approximately (moves one by one, swaps as the sum of two
single effects), and the most promising ones exactly. Perturbed copies of a placement descend side by side, because one
alone would spend its time on calls and not on arithmetic.

Scores are compared after rounding and ties go to the lowest index, so the same inputs give the same plan.

Shapes: P parts, S shards, which are the parts of a placement problem, D ranks, G fused groups, H latent channels,
M limits, B placements side by side, N shards on the bottleneck rank (padded), A arrivals (D times nothing: a move; and
every shard: a swap), C candidates rated exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.compute import both_passes, overall_ms
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Problem, has_room
from dreamshard_planner.search.effort import Budget, Deadline, SearchConfig
from dreamshard_planner.search.states import DIGITS, PlacementState, rounded

MAX_APPROXIMATED = 20_000
"""Candidates of one step, over all placements side by side, whose cost is approximated. With more of them, the overhead
of calls no longer matters, and one descent that ends is worth more than several that do not."""
MAX_COPIES = 8
"""Perturbed copies of a placement that descend side by side."""
MAX_PAIRS = 2_000_000
"""Candidates of one step at the very most: of thousands of shards on one device, only the heaviest leave. Bounds
memory."""


@dataclass(frozen=True)
class Moved:
    """Where moves and swaps led."""

    assignment_S: Tensor
    candidates: int
    """Moves, and swaps rated exactly."""
    cut_short: bool
    """Whether the deadline ended it."""


@torch.inference_mode()
def local_search(
    cost: Cost, start_S: Tensor, config: SearchConfig, deadline: Deadline, generator: torch.Generator | None = None
) -> Moved:
    """Descend from a feasible placement; never worse than it.

    Args:
        cost: the problem, whose parts are placed one by one, and its cost.
        start_S: rank of each part.
        config: how long to search.
        deadline: when to stop, however much is left of that.
        generator: draws perturbed copies of the best placement, from which descents go on; None for one descent.
    """
    budget = Budget(config.moves if generator is None else config.last_moves, deadline)
    if cost.problem.num_ranks == 1 or not len(start_S):
        return Moved(start_S, 0, False)
    start_ms = float(cost.rate(start_S[None]).overall_ms_B)
    best = _Best(start_S, max(1e-9, start_ms))
    _descend(PlacementState(cost, start_S[None]), best, config, budget)
    if generator is not None and budget.left():

        def perturbed(copies: int) -> Tensor:
            return _perturbed(cost.problem, best.assignment_S, copies, config.perturbed_units, generator)

        copies = PlacementState(cost, perturbed(_side_by_side(cost.problem)))
        _descend(copies, best, config, budget, perturbed)
    return Moved(best.assignment_S, budget.used, budget.cut_short)


def _side_by_side(problem: Problem) -> int:
    """Return how many copies may advance together."""
    shards, ranks = problem.num_parts, problem.num_ranks
    candidates = (shards // ranks + 1) * (shards + ranks)
    return max(1, min(MAX_COPIES, MAX_APPROXIMATED // candidates))


def _perturbed(problem: Problem, assignment_S: Tensor, copies: int, shards: int, generator: torch.Generator) -> Tensor:
    """Copies [B, S] of a placement with a few random shards moved to random ranks that can store them."""
    perturbed_BP = assignment_S.repeat(copies, 1)
    free_BDM = problem.limits_DM - problem.taken(perturbed_BP)
    for copied_S, free_DM in zip(perturbed_BP, free_BDM, strict=True):
        for shard in torch.randint(problem.num_parts, (shards,), generator=generator).tolist():
            need_M, home = problem.needs_PM[shard], int(copied_S[shard])
            fits_D = has_room(need_M, free_DM)
            fits_D[home] = False
            if fits_D.any():
                options = fits_D.nonzero()[:, 0]
                rank = int(options[int(torch.randint(len(options), (1,), generator=generator))])
                copied_S[shard] = rank
                free_DM[home] += need_M
                free_DM[rank] -= need_M
    return perturbed_BP


class _Best:
    """The best placement so far."""

    def __init__(self, assignment_S: Tensor, unit: float) -> None:
        self.assignment_S, self.unit, self.cost = assignment_S, unit, float("inf")

    def challenge(self, states: PlacementState, row_B: Tensor) -> bool:
        """Whether the best of some placements is better, and so takes its place."""
        cost_B = rounded(states.overall_ms()[row_B], self.unit)
        index = int(cost_B.argmin())
        if not float(cost_B[index]) < self.cost:
            return False
        self.assignment_S, self.cost = states.assignment_BP[row_B[index]].clone(), float(cost_B[index])
        return True


def _descend(
    states: PlacementState,
    best: _Best,
    config: SearchConfig,
    budget: Budget,
    perturbed: Callable[[int], Tensor] | None = None,
) -> None:
    """Steepest descent of every placement on the rank with the largest cost, then on the one that exchanges most. Where
    one can get no further, one of ``perturbed`` takes its place, if given, until patience ends."""
    every_B = row_B = torch.arange(len(states.assignment_BP))
    by_bytes_B = torch.zeros(len(row_B), dtype=torch.bool)
    fruitless = 0
    while len(row_B) and budget.left() and (perturbed is None or fruitless < config.last_patience):
        slowest_B = rounded(states.device_ms_D[row_B], best.unit).argmax(-1)
        busiest_B = (states.byte_weight_C1 * states.bytes_CD[row_B]).sum(1).argmax(-1)
        bottleneck_B = torch.where(by_bytes_B, busiest_B, slowest_B)
        improved_B, candidates = improve(states, row_B, bottleneck_B, config.moves_rated, best.unit)
        budget.spend(candidates)
        stuck_B = ~improved_B & (by_bytes_B | (slowest_B == busiest_B))
        by_bytes_B = ~improved_B & ~stuck_B
        if not stuck_B.any():
            continue
        ended_X = row_B[stuck_B]
        fruitless = 0 if best.challenge(states, ended_X) else fruitless + len(ended_X)
        if perturbed is None:
            row_B, by_bytes_B = row_B[~stuck_B], by_bytes_B[~stuck_B]
        else:
            states.replace(ended_X, perturbed(len(ended_X)))
    best.challenge(states, every_B)


@dataclass(frozen=True)
class Bottlenecks:
    """Some of the placements, and the device of each that is to get cheaper."""

    row_B: Tensor
    """Where they stand among all placements."""
    device_B: Tensor
    assignment_BP: Tensor
    here_BP: Tensor
    """Which shards it holds."""
    device_ms_BD: Tensor
    bytes_BCD: Tensor
    others_ms: _Extremes
    """Of the other devices."""
    exchanges: list[tuple[int, list[_Exchange]]]
    """Of each collective that some part sends in."""

    @classmethod
    def of(cls, states: PlacementState, row_B: Tensor, device_B: Tensor) -> Bottlenecks:
        """Those of the placements ``row_B``."""
        assignment_BP, here_B1 = states.assignment_BP[row_B], device_B[:, None]
        device_ms_BD, bytes_BCD = states.device_ms_D[row_B], states.bytes_CD[row_B]
        exchanges = [
            (column, [_Exchange.of(bytes_BCD[:, column], here_B1, member_D) for member_D in members])
            for column, members in states.exchanges
        ]
        others_ms = _Extremes.of(device_ms_BD, here_B1, largest=True)
        here_BP = assignment_BP == here_B1
        return cls(row_B, device_B, assignment_BP, here_BP, device_ms_BD, bytes_BCD, others_ms, exchanges)


@dataclass(frozen=True)
class Candidates:
    """Changes of two ranks each: what leaves the bottleneck, where to, and what comes back from there, all [B, ...], or
    of shapes that broadcast to that."""

    leaving_BX: Tensor
    device_BX: Tensor
    arrival_BX: Tensor
    """-1 for a move."""
    fits_BX: Tensor
    """Whether memory allows it; what does not fit only fills up the rows."""
    counted: int = 0
    """All moves, and the swaps among these."""


def improve(
    states: PlacementState, row_B: Tensor, bottleneck_B: Tensor, rated_exactly: int, unit: float
) -> tuple[Tensor, int]:
    """Apply to each of the placements ``row_B`` the best move or swap of its bottleneck device, if it lowers the cost;
    says which it did, bool [B], and how many candidates were worth counting: moves, and swaps rated exactly."""
    bottlenecks = Bottlenecks.of(states, row_B, bottleneck_B)
    if not bottlenecks.here_BP.any():
        return torch.zeros(len(row_B), dtype=torch.bool), 0
    candidates = _most_promising(states, bottlenecks, rated_exactly, unit)
    overall_BC, square_BC = _scores(states, bottlenecks, candidates, _rate(states, bottlenecks, candidates), unit)
    overall_BC = overall_BC.masked_fill(~candidates.fits_BX, torch.inf)
    least_B = overall_BC.amin(-1)
    choice_B1 = torch.where(overall_BC == least_B[:, None], square_BC, torch.inf).argmin(-1, keepdim=True)
    before_B = rounded(states.overall_ms()[row_B], unit)
    # Overall cost first; where that is another device's, the balance of the two devices.
    balances_B = square_BC.gather(1, choice_B1)[:, 0] < 0
    improved_B = (least_B < before_B) | ((least_B == before_B) & balances_B)
    if improved_B.any():
        row_X, from_X = row_B[improved_B], bottleneck_B[improved_B]
        leaving_X, device_X, arrival_X = (
            values_BC.gather(1, choice_B1)[improved_B, 0]
            for values_BC in (candidates.leaving_BX, candidates.device_BX, candidates.arrival_BX)
        )
        states.assignment_BP[row_X, leaving_X] = device_X
        swapped_X = arrival_X >= 0
        states.assignment_BP[row_X[swapped_X], arrival_X[swapped_X]] = from_X[swapped_X]
        states.refresh(row_X.repeat(2), torch.cat([from_X, device_X]))
    return improved_B, candidates.counted


def _most_promising(states: PlacementState, bottlenecks: Bottlenecks, rated_exactly: int, unit: float) -> Candidates:
    """Of all moves and swaps those that cost least approximately."""
    problem, assignment_BP, here_BP = states.problem, bottlenecks.assignment_BP, bottlenecks.here_BP
    num_placements, num_arrivals = len(assignment_BP), problem.num_ranks + problem.num_parts
    heaviest_BP = torch.where(here_BP, states.cost.single_ms_P, -1.0).argsort(dim=-1, descending=True, stable=True)
    most = min(int(here_BP.sum(-1).max()), max(1, MAX_PAIRS // (num_placements * num_arrivals)))
    leaving_BN = heaviest_BP[:, :most]
    device_BA = torch.cat([torch.arange(problem.num_ranks).expand(num_placements, -1), assignment_BP], dim=1)
    arrival_A = torch.cat([torch.full((problem.num_ranks,), -1), torch.arange(problem.num_parts)])

    fits_BNA = _fits(states, bottlenecks, leaving_BN, device_BA, arrival_A)
    fits_BNA &= here_BP.gather(1, leaving_BN)[..., None] & (device_BA != bottlenecks.device_B[:, None])[:, None]
    every = Candidates(leaving_BN[..., None], device_BA[:, None], arrival_A, fits_BNA)
    after_ms = _approximate(states, bottlenecks, leaving_BN)
    overall_BNA, square_BNA = _scores(states, bottlenecks, every, after_ms, unit)
    tie_break_BNA = 10.0 ** -(DIGITS + 1) * square_BNA / (1 + square_BNA.abs())
    key_BX = (overall_BNA + tie_break_BNA).masked_fill(~fits_BNA, torch.inf).flatten(1)
    best_BC = key_BX.topk(min(rated_exactly, key_BX.shape[1]), largest=False).indices.sort().values
    fits_BC, arrival_BC = key_BX.gather(1, best_BC).isfinite(), arrival_A[best_BC % num_arrivals]
    moves, swaps = fits_BNA[..., : problem.num_ranks].sum(), (fits_BC & (arrival_BC >= 0)).sum()
    leaving_BC, device_BC = leaving_BN.gather(1, best_BC // num_arrivals), device_BA.gather(1, best_BC % num_arrivals)
    return Candidates(leaving_BC, device_BC, arrival_BC, fits_BC, int(moves + swaps))


def _fits(
    states: PlacementState, bottlenecks: Bottlenecks, leaving_BN: Tensor, device_BA: Tensor, arrival_A: Tensor
) -> Tensor:
    """Whether both devices can store what they would hold, bool [B, N, A]. What grows by nothing always fits, even
    where a reservation left less than nothing."""
    needs_PM, row_B = states.problem.needs_PM, bottlenecks.row_B
    storage_AM = torch.where((arrival_A >= 0)[:, None], needs_PM[arrival_A], 0)
    fits_BNA = torch.ones(*leaving_BN.shape, len(arrival_A), dtype=torch.bool)
    for kind in needs_PM.any(0).nonzero()[:, 0].tolist():
        grows_BNA = needs_PM[leaving_BN, kind][..., None] - storage_AM[:, kind]
        free_BA = states.free_DM[row_B[:, None], device_BA, kind]
        here_free_B = states.free_DM[row_B, bottlenecks.device_B, kind]
        fits_BNA &= (grows_BNA <= free_BA[:, None]) | (grows_BNA <= 0)
        fits_BNA &= (-grows_BNA <= here_free_B[:, None, None]) | (grows_BNA >= 0)
    return fits_BNA


def _approximate(states: PlacementState, bottlenecks: Bottlenecks, leaving_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Cost of the bottleneck device and of the other one after every move and swap, both [B, N, A], approximately:
    swaps as if the effects of leaving and arriving added up."""
    assignment_BP, device_ms_BD = bottlenecks.assignment_BP, bottlenecks.device_ms_BD
    seen = states.cost.compute.approximate_channels
    latent_PH, latent_BDGH = states.cost.latent_PH[:, :seen], states.latent_DGH[..., :seen]
    group_P, device_D = states.problem.group_P, torch.arange(states.problem.num_ranks)
    row_B1, here_B1, group_BN = bottlenecks.row_B[:, None], bottlenecks.device_B[:, None], group_P[leaving_BN]
    places = (
        (row_B1, here_B1, group_BN),
        (row_B1[..., None], device_D, group_BN[..., None]),
        (row_B1, assignment_BP, group_P),
        (row_B1, here_B1, group_P),
    )
    leaving_BNH = latent_PH[leaving_BN]
    changes = (-leaving_BNH, leaving_BNH[:, :, None], -latent_PH, latent_PH)
    after = [latent_BDGH[place] + change for place, change in zip(places, changes, strict=True)]
    after_ms_X = states.approximate_ms(torch.cat([latent.flatten(0, -2) for latent in after]))
    sizes = [latent.shape[:-1] for latent in after]
    parts = after_ms_X.split([size.numel() for size in sizes])
    left_BN, joined_BND, gone_BP, arrived_BP = (
        part.view(size) - states.approximate_ms_DG[place]
        for part, size, place in zip(parts, sizes, places, strict=True)
    )
    here_ms_B11 = device_ms_BD.gather(1, here_B1)[..., None]
    home_BNP = assignment_BP[:, None].expand(-1, leaving_BN.shape[1], -1)
    move_BND = (here_ms_B11 + left_BN[..., None]).expand_as(joined_BND)
    swap_BNP = here_ms_B11 + left_BN[..., None] + arrived_BP[:, None]
    to_BND = device_ms_BD[:, None] + joined_BND
    return torch.cat([move_BND, swap_BNP], -1), torch.cat([to_BND, to_BND.gather(2, home_BNP) + gone_BP[:, None]], -1)


def _rate(states: PlacementState, bottlenecks: Bottlenecks, candidates: Candidates) -> tuple[Tensor, Tensor]:
    """Exact cost of the bottleneck device and of the other one after each candidate, both [B, C]."""
    leaving_BC, device_BC, arrival_BC = candidates.leaving_BX, candidates.device_BX, candidates.arrival_BX
    row_BC, here_BC = (values_B[:, None].expand_as(device_BC) for values_B in (bottlenecks.row_B, bottlenecks.device_B))
    latent_PH, group_P = states.cost.latent_PH, states.problem.group_P
    group_BC, arrival_group_BC = group_P[leaving_BC], group_P[arrival_BC]
    together_BC = (arrival_BC >= 0) & (arrival_group_BC == group_BC)
    apart_BC = (arrival_BC >= 0) & ~together_BC
    exchanged_BCH = latent_PH[leaving_BC] - torch.where(together_BC[..., None], latent_PH[arrival_BC], 0.0)
    # What leaves and what arrives change one group of each device, or two.
    index = torch.cat([torch.arange(device_BC.numel()), apart_BC.flatten().nonzero()[:, 0]])
    group_X = torch.cat([group_BC.flatten(), arrival_group_BC[apart_BC]])
    exchanged_XH = torch.cat([exchanged_BCH.flatten(0, 1), -latent_PH[arrival_BC[apart_BC]]])
    places, after = [], []
    for side_BC, change_XH in ((here_BC, -exchanged_XH), (device_BC, exchanged_XH)):
        places.append((row_BC.flatten()[index], side_BC.flatten()[index], group_X))
        after.append(states.latent_DGH[places[-1]] + change_XH)
    after_ms_X = both_passes(states.cost.compute.group_cost_ms(torch.cat(after)))
    rated = []
    for side_BC, place, part_X in zip((here_BC, device_BC), places, after_ms_X.chunk(2), strict=True):
        change_ms_X = torch.zeros(side_BC.numel(), dtype=part_X.dtype)
        change_ms_X.index_add_(0, index, part_X - states.group_ms_DG[place])
        rated.append(bottlenecks.device_ms_BD.gather(1, side_BC) + change_ms_X.view(side_BC.shape))
    return rated[0], rated[1]


def _scores(
    states: PlacementState,
    bottlenecks: Bottlenecks,
    candidates: Candidates,
    after_ms: tuple[Tensor, Tensor],
    unit: float,
) -> tuple[Tensor, Tensor]:
    """Overall cost of each candidate, rounded, and its change of the two ranks' sum of squares, both [B, ...];
    ``after_ms`` [B, ...] is what the bottleneck and the other rank cost afterwards."""
    device_BX, (here_ms_BX, device_ms_BX) = candidates.device_BX, after_ms
    rest_ms_BX = bottlenecks.others_ms.beside(device_BX)
    compute_BX = torch.maximum(rest_ms_BX, torch.maximum(here_ms_BX, device_ms_BX))
    collective_ms = _collectives_after(states, bottlenecks, candidates)
    here_before_BX, before_BX = _of_both(bottlenecks.device_ms_BD**2, bottlenecks.device_B, device_BX)
    square_BX = here_ms_BX**2 + device_ms_BX**2 - (here_before_BX + before_BX)
    return rounded(overall_ms(compute_BX, collective_ms), unit), rounded(square_BX, unit**2)


def _collectives_after(
    states: PlacementState, bottlenecks: Bottlenecks, candidates: Candidates
) -> tuple[Tensor, Tensor]:
    """Forward and backward milliseconds of all collectives after each candidate, both [B, ...]. Only those change in
    which some part sends."""
    leaving_BX, device_BX, arrival_BX = candidates.leaving_BX, candidates.device_BX, candidates.arrival_BX
    bytes_PC, (forward_BX, backward_BX) = states.problem.bytes_PC, states.other_collectives_ms
    for column, exchanges in bottlenecks.exchanges:
        gained_BX = bytes_PC[leaving_BX, column] - torch.where(arrival_BX >= 0, bytes_PC[arrival_BX, column], 0.0)
        here_BX, there_BX = _of_both(bottlenecks.bytes_BCD[:, column], bottlenecks.device_B, device_BX)
        changed = bottlenecks.device_B, device_BX, (here_BX - gained_BX, there_BX + gained_BX), gained_BX
        after = [exchange.after(*changed) for exchange in exchanges]
        one = states.problem.collectives.collectives[column]
        forward_ms_BX = 0.0 if one.forward is None else _slowest(one.forward, after)
        if one.backward == one.forward:
            backward_ms_BX = forward_ms_BX
        else:
            backward_ms_BX = 0.0 if one.backward is None else _slowest(one.backward, after)
        forward_BX, backward_BX = forward_BX + forward_ms_BX, backward_BX + backward_ms_BX
    return forward_BX, backward_BX


ExchangedBytes = tuple[Tensor, Tensor, Tensor]
"""Largest and smallest bytes that one of its ranks sends to each peer, and the sum over its ranks, each of a shape that
broadcasts to [B, ...]."""


@dataclass(frozen=True)
class _Extremes:
    """The two largest, or smallest, values of all devices but the bottleneck."""

    first_B: Tensor
    device_B: Tensor
    """Whose the first is."""
    second_B: Tensor

    @classmethod
    def of(cls, values_BD: Tensor, here_B1: Tensor, largest: bool) -> _Extremes:
        limits = torch.finfo(values_BD.dtype)
        top = values_BD.scatter(1, here_B1, limits.min if largest else limits.max).topk(2, largest=largest)
        return cls(top.values[:, 0], top.indices[:, 0], top.values[:, 1])

    def beside(self, device_BX: Tensor) -> Tensor:
        """That of all but one more device, [B, ...]; the limit of the type where there is no other."""
        own = _own(device_BX)
        return torch.where(device_BX == self.device_B[own], self.second_B[own], self.first_B[own])


@dataclass(frozen=True)
class _Exchange:
    """What all ranks of one exchange but the bottleneck send: the same whatever a candidate changes."""

    member_D: Tensor | None
    """Whether each device is one of them; None: all are."""
    largest: _Extremes
    smallest: _Extremes
    total_B: Tensor
    """The bottleneck's included."""

    @classmethod
    def of(cls, bytes_BD: Tensor, here_B1: Tensor, member_D: Tensor | None) -> _Exchange:
        most_BD, least_BD, limits = bytes_BD, bytes_BD, torch.finfo(bytes_BD.dtype)
        if member_D is not None:
            bytes_BD = bytes_BD * member_D
            most_BD, least_BD = (most_BD.masked_fill(~member_D, limit) for limit in (limits.min, limits.max))
        largest, smallest = _Extremes.of(most_BD, here_B1, largest=True), _Extremes.of(least_BD, here_B1, largest=False)
        return cls(member_D, largest, smallest, bytes_BD.sum(-1))

    def after(
        self, here_B: Tensor, device_BX: Tensor, bytes_BX: tuple[Tensor, Tensor], gained_BX: Tensor
    ) -> ExchangedBytes:
        """What its ranks send once the bottleneck has given so many bytes to another device; ``bytes_BX`` are what both
        have then."""
        most, least, total_BX = bytes_BX, bytes_BX, self.total_B[_own(device_BX)]
        if self.member_D is not None:
            limits, (here_bytes_BX, there_bytes_BX) = torch.finfo(gained_BX.dtype), bytes_BX
            here_BX, there_BX = self.member_D[here_B][_own(device_BX)], self.member_D[device_BX]
            most, least = (
                (torch.where(here_BX, here_bytes_BX, limit), torch.where(there_BX, there_bytes_BX, limit))
                for limit in (limits.min, limits.max)
            )
            total_BX = total_BX + gained_BX * (there_BX.double() - here_BX.double())
        largest_BX = torch.maximum(self.largest.beside(device_BX), torch.maximum(*most))
        return largest_BX, torch.minimum(self.smallest.beside(device_BX), torch.minimum(*least)), total_BX


def _slowest(model: CollectiveModel, exchanges: list[ExchangedBytes]) -> Tensor:
    """Milliseconds of the slowest of several exchanges side by side, [B, ...]."""
    each_BX = [model.bounded_all_to_all_ms(*exchange) for exchange in exchanges]
    return each_BX[0] if len(each_BX) == 1 else torch.stack(each_BX).amax(0)


def _of_both(values_BD: Tensor, here_B: Tensor, device_BX: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the bottleneck and of another device, of shapes that broadcast to [B, ...]."""
    there_BX = values_BD.gather(1, device_BX.flatten(1)).view_as(device_BX)
    return values_BD.gather(1, here_B[:, None])[:, 0][_own(device_BX)], there_BX


def _own(values_BX: Tensor) -> tuple[slice | None, ...]:
    """What gives [B] as many dimensions as there are here."""
    return slice(None), *[None] * (values_BX.dim() - 1)
