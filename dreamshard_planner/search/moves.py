# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Moves and swaps of units of span 1: descents that relieve the bottleneck rank by the best one each step.

A candidate changes two ranks by one or two shards. Its cost takes a few additions of latents and one evaluation of the
head, however many shards there are. All candidates are rated approximately: swaps as the sum of two single effects. The
most promising ones are rated exactly. Several placements descend side by side, since the calls of one alone take longer
than its arithmetic.

Scores are compared after rounding and ties go to the lowest index, so the same inputs give the same plan.

Shapes: P parts, S shards (the parts of a placement problem), D ranks, G fused groups, H latent channels, M limits,
B placements side by side, K collectives that parts send in, N shards on the bottleneck rank (padded), A arrivals
(D times nothing: a move; and every shard: a swap), C candidates rated exactly, X any of [N, A] and [C].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import Exchanges
from dreamshard_planner.cost.problem import Cost, Problem, both_passes, compute_ms, has_room, overall_ms
from dreamshard_planner.search.effort import Budget
from dreamshard_planner.search.reshards import State, in_steps

MAX_APPROXIMATED = 20_000
"""Candidates of one step, over all placements side by side. With more, calls no longer dominate, and one descent that
ends is worth more than several that do not."""
LAST_PATIENCE = 24
"""Fruitless perturbed copies, one after the other, at which a search ends."""
MAX_COPIES = 8
"""Perturbed copies of a placement that descend side by side."""
RATED_EXACTLY = 16
"""Moves and swaps of one step that are rated exactly: the most promising by the approximate cost."""
PERTURBED_SHARDS = 3
"""Shards that a perturbed copy has elsewhere."""
MAX_PAIRS = 2_000_000
"""Upper bound on the candidates of one step, for memory: only the heaviest of thousands of shards may leave."""


class PlacementState(State):
    """Placements [B, P] of one problem side by side."""

    def __init__(self, cost: Cost, assignment_BP: Tensor) -> None:
        super().__init__(cost, assignment_BP)
        self.assignment_BP = assignment_BP.clone()
        self.approximate_ms_DG = self.group_ms_DG
        """Approximate cost of each group; :attr:`group_ms_DG` itself if costs are not approximated."""
        if cost.compute.approximates:
            self.approximate_ms_DG = self.approximate_ms(self.latent_DGH)

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """Return forward + backward of groups, approximately, [...]."""
        return both_passes(self.cost.compute.approximate_ms(latent_XH))

    @cached_property
    def exchanges(self) -> Exchanges:
        """Collectives that some part sends in: the others stay as they are wherever the parts lie."""
        every, sends = self.problem.collectives.collectives, self.problem.bytes_PC.any(0).nonzero()[:, 0].tolist()
        if odd := [every[column].name for column in sends if every[column].over != "world"]:
            raise ValueError(f"shards that span one rank must exchange with all ranks, but {odd[0]} does not.")
        return Exchanges(every, sends)

    @cached_property
    def sent_bytes_KP(self) -> Tensor:
        """Bytes that each part sends in each of them."""
        return self.problem.bytes_PC.T[self.exchanges.column_K].contiguous()

    @cached_property
    def sending_C(self) -> Tensor:
        """True for these collectives, except those that cost nothing."""
        return self.problem.bytes_PC.any(0) & (self.sent_ms_per_byte_C1[:, 0] > 0)

    @cached_property
    def other_collectives_ms(self) -> Tensor:
        """Milliseconds of the other collectives."""
        return self.problem.collectives.ms(self.bytes_CD[0].masked_fill(self.problem.bytes_PC.any(0)[:, None], 0.0))

    def replace(self, row_X: Tensor, assignment_XP: Tensor) -> None:
        """Let other placements take the place of some."""
        self.assignment_BP[row_X], ranks = assignment_XP, self.problem.num_ranks
        self.refresh(row_X.repeat_interleave(ranks), torch.arange(ranks).repeat(len(row_X)))

    def refresh(self, row_X: Tensor, rank_X: Tensor) -> None:
        """Take the sums of some ranks afresh."""
        row_R = row_X.unique()
        self.latent_DGH[row_R], self.bytes_CD[row_R], self.free_DM[row_R] = self.sums(self.assignment_BP[row_R])
        latent_XGH = self.latent_DGH[row_X, rank_X]
        self.group_ms_DG[row_X, rank_X] = self.exact_ms(latent_XGH)
        if self.cost.compute.approximates:
            self.approximate_ms_DG[row_X, rank_X] = self.approximate_ms(latent_XGH)


@torch.inference_mode()
def local_search(
    cost: Cost,
    start_BS: Tensor,
    budget: Budget,
    generator: torch.Generator | None = None,
    patience: int = LAST_PATIENCE,
) -> Tensor:
    """Descend from feasible placements and return the best one found, [S]; never worse than the best start.

    Args:
        cost: the problem, whose parts are placed one by one, and its cost.
        start_BS: rank of each part, of one placement or several.
        budget: moves, and swaps rated exactly.
        generator: draws perturbed copies of the best placement, from which descents go on; None for no copies.
        patience: fruitless copies, one after the other, at which the search ends.
    """
    start_ms_B = cost.rate(start_BS).overall_ms_B
    best = _Best(start_BS[int(start_ms_B.argmin())], max(1e-9, float(start_ms_B.min())))
    if cost.problem.num_ranks == 1 or not start_BS.shape[1]:
        return best.assignment_S
    _descend(PlacementState(cost, start_BS), best, budget)
    if generator is not None and budget.left():

        def perturbed(copies: int) -> Tensor:
            return _perturbed(cost.problem, best.assignment_S, copies, generator)

        copies = PlacementState(cost, perturbed(_side_by_side(cost.problem)))
        _descend(copies, best, budget, perturbed, patience)
    return best.assignment_S


def _side_by_side(problem: Problem) -> int:
    """Return how many copies may advance together."""
    shards, ranks = problem.num_parts, problem.num_ranks
    candidates = (shards // ranks + 1) * (shards + ranks)
    return max(1, min(MAX_COPIES, MAX_APPROXIMATED // candidates))


def _perturbed(problem: Problem, assignment_S: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """Return copies [B, S] of a placement with a few random shards on other random ranks that have room."""
    perturbed_BP = assignment_S.repeat(copies, 1)
    free_BDM = problem.limits_DM - problem.taken(perturbed_BP)
    for copied_S, free_DM in zip(perturbed_BP, free_BDM, strict=True):
        for shard in torch.randint(problem.num_parts, (PERTURBED_SHARDS,), generator=generator).tolist():
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
        """Keep the best of some placements if it is better; return whether it is."""
        cost_B = in_steps(states.overall_ms()[row_B], self.unit)
        index = int(cost_B.argmin())
        if not float(cost_B[index]) < self.cost:
            return False
        self.assignment_S, self.cost = states.assignment_BP[row_B[index]].clone(), float(cost_B[index])
        return True


def _descend(
    states: PlacementState,
    best: _Best,
    budget: Budget,
    perturbed: Callable[[int], Tensor] | None = None,
    patience: int = 0,
) -> None:
    """Descend steeply on each placement's slowest rank, on the one that sends longest in all, and on those that do in
    each collective, in turns. A placement that can get no further is replaced by one of ``perturbed``, if given, until
    patience ends."""
    every_B = row_B = torch.arange(len(states.assignment_BP))
    turn_B, failed_B = torch.zeros_like(row_B), torch.zeros_like(row_B)
    fruitless = 0
    while len(row_B) and budget.left() and (perturbed is None or fruitless < patience):
        bottlenecks = _bottlenecks(states, row_B, best.unit)
        bottleneck_B = torch.stack(bottlenecks, -1).gather(1, turn_B[:, None])[:, 0]
        improved_B, candidates = improve(states, row_B, bottleneck_B, best.unit)
        budget.used += candidates
        failed_B = torch.where(improved_B, 0, failed_B + 1)
        turn_B = torch.where(improved_B, turn_B, (turn_B + 1) % len(bottlenecks))
        stuck_B = failed_B == len(bottlenecks)
        if not stuck_B.any():
            continue
        ended_X = row_B[stuck_B]
        fruitless = 0 if best.challenge(states, ended_X) else fruitless + len(ended_X)
        if perturbed is None:
            row_B, turn_B, failed_B = row_B[~stuck_B], turn_B[~stuck_B], failed_B[~stuck_B]
        else:
            states.replace(ended_X, perturbed(len(ended_X)))
            failed_B[stuck_B] = 0
    best.challenge(states, every_B)


def _bottlenecks(states: PlacementState, row_B: Tensor, unit: float) -> list[Tensor]:
    """Return ranks of some placements, [B] each: the slowest, and the ones that send longest, in all and in each
    collective."""
    sent_BCD = (states.bytes_CD[row_B] * states.sent_ms_per_byte_C1)[:, states.sending_C]
    in_all = [sent_BCD.sum(1)] if sent_BCD.shape[1] > 1 else []
    loads_BD = [in_steps(states.device_ms_D[row_B], unit), *in_all, *sent_BCD.unbind(1)]
    return [load_BD.argmax(-1) for load_BD in loads_BD]


def improve(states: PlacementState, row_B: Tensor, bottleneck_B: Tensor, unit: float) -> tuple[Tensor, int]:
    """Apply to each placement ``row_B`` the best move or swap of its bottleneck rank, if that lowers the cost.

    Returns:
        Whether each improved, bool [B], and the number of candidates: moves, and swaps rated exactly.
    """
    step = Step(states, row_B, bottleneck_B, unit)
    if not step.holds_BP.any():
        return torch.zeros(len(row_B), dtype=torch.bool), 0
    leaving_BC, device_BC, arrival_BC, fits_BC, count = step.most_promising()
    after_ms = step.rate(leaving_BC, device_BC, arrival_BC)
    overall_BC, square_BC = step.scores(leaving_BC, device_BC, arrival_BC, after_ms)
    overall_BC = overall_BC.masked_fill(~fits_BC, torch.inf)
    least_B = overall_BC.amin(-1)
    choice_B1 = torch.where(overall_BC == least_B[:, None], square_BC, torch.inf).argmin(-1, keepdim=True)
    before_B = in_steps(states.overall_ms()[row_B], unit)
    # Overall cost first; if another rank decides that, the balance of the two ranks.
    balances_B = square_BC.gather(1, choice_B1)[:, 0] < 0
    improved_B = (least_B < before_B) | ((least_B == before_B) & balances_B)
    if improved_B.any():
        row_X, from_X = row_B[improved_B], bottleneck_B[improved_B]
        leaving_X, device_X, arrival_X = (
            values_BC.gather(1, choice_B1)[improved_B, 0] for values_BC in (leaving_BC, device_BC, arrival_BC)
        )
        states.assignment_BP[row_X, leaving_X] = device_X
        swapped_X = arrival_X >= 0
        states.assignment_BP[row_X[swapped_X], arrival_X[swapped_X]] = from_X[swapped_X]
        states.refresh(row_X.repeat(2), torch.cat([from_X, device_X]))
    return improved_B, count


class Step:
    """Candidates of some placements, each with a bottleneck rank that is to get cheaper.

    A candidate is a shard that leaves the bottleneck, the device that it goes to, and the shard that comes back from
    there (-1 for a move): int64 tensors [B, X], or of shapes that broadcast to that.

    Args:
        states: sums of all placements.
        row_B: the placements among them.
        here_B: bottleneck rank of each.
        unit: milliseconds in which costs are compared.
    """

    def __init__(self, states: PlacementState, row_B: Tensor, here_B: Tensor, unit: float) -> None:
        self._states, self._row_B, self._here_B, self._unit = states, row_B, here_B, unit
        self._assignment_BP, self._device_ms_BD = states.assignment_BP[row_B], states.device_ms_D[row_B]
        self.holds_BP = self._assignment_BP == here_B[:, None]
        """Shards on the bottleneck, bool."""
        self._others_ms = _Extremes(self._device_ms_BD, here_B, largest=True)
        self._bytes_KBD = states.bytes_CD[row_B][:, states.exchanges.column_K].transpose(0, 1)
        self._most, self._least = (_Extremes(self._bytes_KBD, here_B, largest) for largest in (True, False))

    def most_promising(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        """Return the candidates that cost least approximately, whether memory allows each, bool [B, C] (others only
        fill up the rows), and how many candidates to count: all moves, and the swaps among these."""
        states, problem, holds_BP = self._states, self._states.problem, self.holds_BP
        placements, ranks, arrivals = len(holds_BP), problem.num_ranks, problem.num_ranks + problem.num_parts
        heaviest_BP = torch.where(holds_BP, states.cost.single_ms_P, -1.0).argsort(dim=-1, descending=True, stable=True)
        most = min(int(holds_BP.sum(-1).max()), max(1, MAX_PAIRS // (placements * arrivals)))
        leaving_BN = heaviest_BP[:, :most]
        device_BA = torch.cat([torch.arange(ranks).expand(placements, -1), self._assignment_BP], dim=1)
        arrival_A = torch.cat([torch.full((ranks,), -1), torch.arange(problem.num_parts)])

        fits_BNA = self._fits(leaving_BN, device_BA, arrival_A)
        fits_BNA &= holds_BP.gather(1, leaving_BN)[..., None] & (device_BA != self._here_B[:, None])[:, None]
        after_ms = self._approximate(leaving_BN)
        overall_BNA, square_BNA = self.scores(
            leaving_BN[..., None], device_BA[:, None], arrival_A[None, None], after_ms
        )
        tie_break_BNA = 0.1 * square_BNA / (1 + square_BNA.abs())
        key_BX = (overall_BNA + tie_break_BNA).masked_fill(~fits_BNA, torch.inf).flatten(1)
        best_BC = key_BX.topk(min(RATED_EXACTLY, key_BX.shape[1]), largest=False).indices.sort().values
        fits_BC, arrival_BC = key_BX.gather(1, best_BC).isfinite(), arrival_A[best_BC % arrivals]
        counted = fits_BNA[..., :ranks].sum() + (fits_BC & (arrival_BC >= 0)).sum()
        leaving_BC, device_BC = leaving_BN.gather(1, best_BC // arrivals), device_BA.gather(1, best_BC % arrivals)
        return leaving_BC, device_BC, arrival_BC, fits_BC, int(counted)

    def _fits(self, leaving_BN: Tensor, device_BA: Tensor, arrival_A: Tensor) -> Tensor:
        """Return whether both ranks can store what they would hold, bool [B, N, A]. A rank that does not grow always
        can, even if a reservation left less than nothing."""
        needs_PM, free_DM, row_B = self._states.problem.needs_PM, self._states.free_DM, self._row_B
        need_AM = torch.where((arrival_A >= 0)[:, None], needs_PM[arrival_A], 0)
        fits_BNA = torch.ones(*leaving_BN.shape, len(arrival_A), dtype=torch.bool)
        for kind in needs_PM.any(0).nonzero()[:, 0].tolist():
            grows_BNA = needs_PM[leaving_BN, kind][..., None] - need_AM[:, kind]
            free_BA, here_free_B = free_DM[row_B[:, None], device_BA, kind], free_DM[row_B, self._here_B, kind]
            fits_BNA &= (grows_BNA <= free_BA[:, None]) | (grows_BNA <= 0)
            fits_BNA &= (-grows_BNA <= here_free_B[:, None, None]) | (grows_BNA >= 0)
        return fits_BNA

    def _approximate(self, leaving_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cost of the bottleneck and of the other rank after every move and swap, both [B, N, A]: swaps as
        if the effects of leaving and arriving added up."""
        states, assignment_BP, group_P = self._states, self._assignment_BP, self._states.problem.group_P
        latent_PH, latent_BDGH = states.cost.latent_PH, states.latent_DGH
        row_B1, here_B1, group_BN = self._row_B[:, None], self._here_B[:, None], group_P[leaving_BN]
        places = (
            (row_B1, here_B1, group_BN),
            (row_B1[..., None], torch.arange(states.problem.num_ranks), group_BN[..., None]),
            (row_B1, assignment_BP, group_P),
            (row_B1, here_B1, group_P),
        )
        leaving_BNH = latent_PH[leaving_BN]
        changes = (-leaving_BNH, leaving_BNH[:, :, None], -latent_PH, latent_PH)
        after = [latent_BDGH[place] + change for place, change in zip(places, changes, strict=True)]
        sizes = [latent.shape[:-1] for latent in after]
        after_ms_X = states.approximate_ms(torch.cat([latent.flatten(0, -2) for latent in after]))
        left_BN, joined_BND, gone_BP, arrived_BP = (
            part.view(size) - states.approximate_ms_DG[place]
            for part, size, place in zip(after_ms_X.split([size.numel() for size in sizes]), sizes, places, strict=True)
        )
        left_ms_BN1 = (self._device_ms_BD.gather(1, here_B1) + left_BN)[..., None]
        here_ms = left_ms_BN1.expand_as(joined_BND), left_ms_BN1 + arrived_BP[:, None]
        to_BND = self._device_ms_BD[:, None] + joined_BND
        home_BNP = assignment_BP[:, None].expand(-1, leaving_BN.shape[1], -1)
        return torch.cat(here_ms, -1), torch.cat([to_BND, to_BND.gather(2, home_BNP) + gone_BP[:, None]], -1)

    def rate(self, leaving_BC: Tensor, device_BC: Tensor, arrival_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exact cost of the bottleneck and of the other rank after each candidate, both [B, C]."""
        here_BC = self._here_B[:, None].expand_as(device_BC)
        rank_4BC = torch.stack([here_BC, device_BC, device_BC, here_BC])
        part_4BC = torch.stack([leaving_BC, leaving_BC, arrival_BC, arrival_BC])
        trial_4BC = torch.arange(device_BC.numel()).view_as(device_BC).expand_as(rank_4BC)
        sign_4BC = torch.tensor([-1, 1, -1, 1])[:, None, None].expand_as(rank_4BC)
        is_some = part_4BC >= 0
        changes = (values_4BC[is_some] for values_4BC in (trial_4BC, rank_4BC, part_4BC, sign_4BC))
        change_QD = self._states.changed_ms(self._row_B.repeat_interleave(device_BC.shape[1]), *changes)
        after_BCD = self._device_ms_BD[:, None] + change_QD.view(*device_BC.shape, -1)
        here_ms_BC, device_ms_BC = (after_BCD.gather(-1, one_BC[..., None])[..., 0] for one_BC in (here_BC, device_BC))
        return here_ms_BC, device_ms_BC

    def scores(
        self, leaving_BX: Tensor, device_BX: Tensor, arrival_BX: Tensor, after_ms: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the overall cost of each candidate, rounded, and its change of the two ranks' sum of squares, both
        [B, X], from what the bottleneck and the other rank cost afterwards."""
        here_ms_BX, device_ms_BX = after_ms
        compute_BX = self._computed(device_BX, here_ms_BX, device_ms_BX)
        bytes_KP = self._states.sent_bytes_KP
        gained_KBX = bytes_KP[:, leaving_BX] - torch.where(arrival_BX >= 0, bytes_KP[:, arrival_BX], 0.0)
        here_before_KBX, there_before_KBX = self._of_both(self._bytes_KBD, device_BX)
        here_KBX, there_KBX = here_before_KBX - gained_KBX, there_before_KBX + gained_KBX
        collectives_BX = self._states.exchanges.bounded_ms(
            torch.maximum(self._most.beside(device_BX), torch.maximum(here_KBX, there_KBX)),
            torch.minimum(self._least.beside(device_BX), torch.minimum(here_KBX, there_KBX)),
            _spread(self._bytes_KBD.sum(-1), device_BX),
        )
        overall_BX = overall_ms(compute_BX, collectives_BX) + self._states.other_collectives_ms
        square_BX = here_ms_BX**2 + device_ms_BX**2 - sum(self._of_both(self._device_ms_BD**2, device_BX))
        changed_KBX = 2 * gained_KBX * (there_before_KBX - here_before_KBX + gained_KBX)  # of both squares together
        square_BX = square_BX + torch.tensordot(self._states.exchanges.sent_ms_per_byte_K**2, changed_KBX, 1)
        return in_steps(overall_BX, self._unit), in_steps(square_BX, self._unit**2)

    def _computed(self, device_BX: Tensor, here_ms_BX: Tensor, device_ms_BX: Tensor) -> Tensor:
        """Return the milliseconds of compute by what the bottleneck and the other rank cost, [B, X]."""
        shared_cores = self._states.problem.shared_cores
        if shared_cores is None:
            return torch.maximum(self._others_ms.beside(device_BX), torch.maximum(here_ms_BX, device_ms_BX))
        rank_D, here_BX1 = torch.arange(self._states.problem.num_ranks), _spread(self._here_B, device_BX)[..., None]
        after_BXD = _spread(self._device_ms_BD.T, device_BX).movedim(0, -1)
        after_BXD = torch.where(rank_D == here_BX1, here_ms_BX[..., None], after_BXD)
        after_BXD = torch.where(rank_D == device_BX[..., None], device_ms_BX[..., None], after_BXD)
        return compute_ms(after_BXD, shared_cores)

    def _of_both(self, values_BD: Tensor, device_BX: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values of the bottleneck and of another rank, [..., B, X]; values may have leading dimensions."""
        lead, device_BF = values_BD.shape[:-2], device_BX.flatten(1)
        here_B1 = self._here_B[:, None]
        there_BX = values_BD.gather(-1, device_BF.expand(*lead, *device_BF.shape)).view(*lead, *device_BX.shape)
        return _spread(values_BD.gather(-1, here_B1.expand(*lead, *here_B1.shape))[..., 0], device_BX), there_BX


class _Extremes:
    """The two largest, or smallest, values [..., B, D] of all ranks but the bottleneck."""

    def __init__(self, values_BD: Tensor, here_B: Tensor, largest: bool) -> None:
        limits = torch.finfo(values_BD.dtype)
        here_B1 = here_B[:, None].expand(*values_BD.shape[:-1], 1)
        top = values_BD.scatter(-1, here_B1, limits.min if largest else limits.max).topk(2, largest=largest)
        (self._first_B, self._second_B), self._device_B = top.values.unbind(-1), top.indices[..., 0]

    def beside(self, device_BX: Tensor) -> Tensor:
        """Return the extreme without one more rank, [..., B, X]; the limit of the type if there is no other."""
        first_BX, second_BX, own_BX = (
            _spread(values_B, device_BX) for values_B in (self._first_B, self._second_B, self._device_B)
        )
        return torch.where(device_BX == own_BX, second_BX, first_BX)


def _spread(values_B: Tensor, like_BX: Tensor) -> Tensor:
    """Return values [..., B] with as many dimensions behind B as there are here."""
    return values_B.view(*values_B.shape, *[1] * (like_BX.dim() - 1))
