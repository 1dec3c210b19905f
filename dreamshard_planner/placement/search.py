# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Local search on predicted cost: moves and swaps on the bottleneck device, with incremental cost.

A candidate changes two devices by one or two shards, so it costs a few additions of latents and one
evaluation of the head, however many shards there are. The budget is counted in candidates, scores are
compared after rounding and ties go to the lowest index, so the same inputs give the same plan.

Shapes: S shards, D devices, G fused groups, H latent channels, M kinds of memory, C candidates,
N shards on the bottleneck device, 2 = forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.model import PlacementCost

DIGITS = 5
"""Costs are compared after rounding to this many digits relative to the starting cost."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How long and how widely to search."""

    samples: int = 15
    """Sampled policy roll-outs beside the greedy one, at most; fewer on more than 8 devices, none on more than 64."""
    starts: int = 3
    """Best starting placements from which to descend."""
    candidates: int = 30_000
    """Moves and swaps to evaluate in all."""
    swaps_per_step: int = 192
    """Swaps evaluated exactly per step, the most promising by the sum of their single effects."""
    kick_shards: int = 3
    """Shards moved at random when a descent ends and budget is left."""
    patience: int = 20
    """Kicks in a row without improvement after which the search ends early."""

    def __post_init__(self) -> None:
        counts = (self.starts, self.candidates, self.swaps_per_step, self.kick_shards, self.patience)
        if min(counts) < 1 or self.samples < 0:
            raise ValueError(f"search settings must be positive, got {asdict(self)}")


DEFAULT_SEARCH = SearchConfig()


@dataclass(frozen=True)
class SearchResult:
    """The best placement found."""

    assignment_S: Tensor
    overall_ms: float
    candidates: int
    """Candidates evaluated."""
    cut_short: bool
    """Whether the time cap ended the search before its budget of candidates."""


class _Budget:
    """Candidates left, and the optional deadline on top."""

    def __init__(self, candidates: int, seconds: float | None) -> None:
        self.limit = candidates
        self.used = 0
        self.cut_short = False
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def left(self) -> bool:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.cut_short = True
        return self.used < self.limit and not self.cut_short

    def spend(self, candidates: int) -> None:
        self.used += candidates


class _State:
    """One placement with the sums that make a candidate cheap."""

    def __init__(self, cost: PlacementCost, assignment_S: Tensor) -> None:
        self.cost, self.problem = cost, cost.problem
        self.assignment_S = assignment_S.clone()
        self.latent_DGH = cost.group_latents(assignment_S[None])[0]
        self.group_ms_DG2 = cost.compute.group_cost_ms(self.latent_DGH)
        self.bytes_D = cost.output_bytes(assignment_S[None])[0]
        self.free_DM = self.problem.capacity_DM.clone()
        self.free_DM.index_add_(0, assignment_S, -self.problem.storage_SM)

    @property
    def device_ms_D(self) -> Tensor:
        return self.group_ms_DG2.sum((-1, -2))

    def overall_ms(self) -> float:
        collective, backward = self.cost.collectives.all_to_all_ms(self.bytes_D)
        return float(self.device_ms_D.max() + collective + backward)

    def change(self, shards: Sequence[int], devices: Sequence[int]) -> None:
        """Give shards to devices; the sums of every device that changed are taken afresh."""
        touched = {*devices, *self.assignment_S[list(shards)].tolist()}
        self.assignment_S[list(shards)] = torch.tensor(devices)
        for device in touched:
            here_S = self.assignment_S == device
            self.latent_DGH[device] = 0
            self.latent_DGH[device].index_add_(0, self.problem.group_S[here_S], self.cost.latent_SH[here_S])
            self.bytes_D[device] = self.problem.output_bytes_S[here_S].sum()
            self.free_DM[device] = self.problem.capacity_DM[device] - self.problem.storage_SM[here_S].sum(0)
        index = sorted(touched)
        self.group_ms_DG2[index] = self.cost.compute.group_cost_ms(self.latent_DGH[index])

    def group_ms(self, *latents: Tensor) -> tuple[Tensor, ...]:
        """Forward + backward [...] of several batches of groups [..., H], rated in one go."""
        rows = [latent_CH.flatten(0, -2) for latent_CH in latents]
        cost_X = self.cost.compute.group_cost_ms(torch.cat(rows)).sum(-1)
        parts = cost_X.split([len(row) for row in rows])
        return tuple(part.view(latent.shape[:-1]) for part, latent in zip(parts, latents, strict=True))


@dataclass(frozen=True)
class _Candidates:
    """Changes of two devices each: what leaves the bottleneck and what, if anything, comes back."""

    leaving_C: Tensor
    device_C: Tensor
    returning_C: Tensor
    """-1 for a move."""
    bottleneck_ms_C: Tensor
    """Cost of the bottleneck device after the change."""
    device_ms_C: Tensor
    """Cost of the other device after the change."""


@torch.no_grad()
def local_search(
    cost: PlacementCost,
    starts: Sequence[Tensor],
    config: SearchConfig,
    generator: torch.Generator,
    seconds: float | None = None,
) -> SearchResult:
    """Descend from each feasible start [S]; spend what is left of the budget on kicks of the best.

    The result is never worse than the best start.
    """
    budget = _Budget(config.candidates, seconds)
    best, best_key = starts[0], float("inf")
    unit = max(1e-9, min(float(cost.rate(start[None]).overall_ms_B) for start in starts))
    for start in starts:
        state = _State(cost, start)
        _descend(state, config, budget, unit)
        key = _rounded(state.overall_ms(), unit)
        if key < best_key:
            best, best_key = state.assignment_S.clone(), key
    fruitless = 0
    while budget.left() and fruitless < config.patience and cost.problem.num_devices > 1:
        state = _State(cost, best)
        _kick(state, config.kick_shards, generator)
        _descend(state, config, budget, unit)
        key, fruitless = _rounded(state.overall_ms(), unit), fruitless + 1
        if key < best_key:
            best, best_key, fruitless = state.assignment_S.clone(), key, 0
    overall_ms = float(cost.rate(best[None]).overall_ms_B)
    return SearchResult(best, overall_ms, budget.used, budget.cut_short)


def _rounded(cost_ms: float, unit: float) -> float:
    return round(cost_ms / unit, DIGITS)


def _kick(state: _State, shards: int, generator: torch.Generator) -> None:
    """Move a few random shards to random devices that can store them."""
    problem = state.problem
    for shard in torch.randint(problem.num_shards, (shards,), generator=generator).tolist():
        fits_D = ((state.free_DM >= problem.storage_SM[shard]) | (problem.storage_SM[shard] == 0)).all(-1)
        fits_D[state.assignment_S[shard]] = False
        if fits_D.any():
            options = fits_D.nonzero()[:, 0]
            pick = int(torch.randint(len(options), (1,), generator=generator))
            state.change([shard], [int(options[pick])])


def _descend(state: _State, config: SearchConfig, budget: _Budget, unit: float) -> None:
    """Steepest descent on the device with the largest cost, then on the one with the most output bytes."""
    while budget.left():
        slowest = int((state.device_ms_D / unit * 10**DIGITS).round().argmax())
        busiest = int(state.bytes_D.argmax())
        for bottleneck in dict.fromkeys((slowest, busiest)):
            if _improve(state, bottleneck, config, budget, unit):
                break
        else:
            return


def _improve(state: _State, bottleneck: int, config: SearchConfig, budget: _Budget, unit: float) -> bool:
    """Apply the best move or swap of ``bottleneck`` if it lowers the cost; says whether it did."""
    here_N = (state.assignment_S == bottleneck).nonzero()[:, 0]
    if len(here_N) == 0 or state.problem.num_devices == 1:
        return False
    moves, swaps = _moves_and_swaps(state, bottleneck, here_N, config.swaps_per_step)
    before = (_rounded(state.overall_ms(), unit), 0.0)
    best: tuple[tuple[float, float], int, _Candidates] | None = None
    for candidates in (moves, swaps):
        if len(candidates.leaving_C) == 0:
            continue
        budget.spend(len(candidates.leaving_C))
        overall_C, square_C = _scores(state, bottleneck, candidates, unit)
        # Lexicographic: overall cost first, then the balance of the two devices.
        index = int(torch.where(overall_C == overall_C.min(), square_C, torch.inf).argmin())
        key = (float(overall_C[index]), float(square_C[index]))
        if key < before and (best is None or key < best[0]):
            best = (key, index, candidates)
    if best is None:
        return False
    _, index, chosen = best
    leaving, device, returning = (
        int(values[index]) for values in (chosen.leaving_C, chosen.device_C, chosen.returning_C)
    )
    if returning < 0:
        state.change([leaving], [device])
    else:
        state.change([leaving, returning], [device, bottleneck])
    return True


def _moves_and_swaps(state: _State, bottleneck: int, here_N: Tensor, max_swaps: int) -> tuple[_Candidates, _Candidates]:
    """All feasible moves off ``bottleneck``, and the most promising feasible swaps, with exact costs."""
    problem, latent_SH, group_S = state.problem, state.cost.latent_SH, state.problem.group_S
    group_ms_DG = state.group_ms_DG2.sum(-1)
    device_ms_D = state.device_ms_D
    devices = torch.arange(problem.num_devices)

    group_N = group_S[here_N]
    there_J = (state.assignment_S != bottleneck).nonzero()[:, 0]
    home_J, group_J = state.assignment_S[there_J], group_S[there_J]
    # The groups without what leaves them, and with what comes to them: all rated at once.
    without_N, with_ND, without_J, with_J = state.group_ms(
        state.latent_DGH[bottleneck, group_N] - latent_SH[here_N],
        state.latent_DGH[:, group_N].transpose(0, 1) + latent_SH[here_N][:, None],
        state.latent_DGH[home_J, group_J] - latent_SH[there_J],
        state.latent_DGH[bottleneck, group_J] + latent_SH[there_J],
    )
    freed_N = group_ms_DG[bottleneck, group_N] - without_N
    added_ND = with_ND - group_ms_DG[:, group_N].T
    need_NM = problem.storage_SM[here_N]
    fits_ND = ((need_NM[:, None] <= state.free_DM) | (need_NM[:, None] == 0)).all(-1) & (devices != bottleneck)
    row_C, device_C = fits_ND.nonzero(as_tuple=True)
    moves = _Candidates(
        leaving_C=here_N[row_C],
        device_C=device_C,
        returning_C=torch.full_like(device_C, -1),
        bottleneck_ms_C=device_ms_D[bottleneck] - freed_N[row_C],
        device_ms_C=device_ms_D[device_C] + added_ND[row_C, device_C],
    )

    if len(there_J) == 0:
        return moves, _Candidates(*[torch.empty(0, dtype=torch.int64)] * 3, *[torch.empty(0)] * 2)
    freed_J = group_ms_DG[home_J, group_J] - without_J
    returned_J = with_J - group_ms_DG[bottleneck, group_J]
    # First order: the effects of leaving and coming add up. Exact within different groups, a guess within one.
    bottleneck_NJ = device_ms_D[bottleneck] - freed_N[:, None] + returned_J
    device_NJ = device_ms_D[home_J] - freed_J + added_ND[:, home_J]
    worst_NJ = torch.maximum(bottleneck_NJ, device_NJ)
    need_JM = problem.storage_SM[there_J]
    delta_NJM = need_NM[:, None] - need_JM[None]
    fits_NJ = ((delta_NJM <= state.free_DM[home_J]) | (delta_NJM <= 0)).all(-1)
    fits_NJ &= ((-delta_NJM <= state.free_DM[bottleneck]) | (delta_NJM >= 0)).all(-1)
    worst_NJ = worst_NJ.masked_fill(~fits_NJ, torch.inf).flatten()
    best_C = worst_NJ.topk(min(max_swaps, len(worst_NJ)), largest=False).indices.sort().values
    best_C = best_C[worst_NJ[best_C].isfinite()]
    row_C, column_C = best_C // len(there_J), best_C % len(there_J)
    bottleneck_C, device_ms_C = bottleneck_NJ.flatten()[best_C], device_NJ.flatten()[best_C]
    same_C = group_N[row_C] == group_J[column_C]
    if same_C.any():
        row, column = row_C[same_C], column_C[same_C]
        group, home = group_N[row], home_J[column]
        exchange_CH = latent_SH[there_J[column]] - latent_SH[here_N[row]]
        here_C, home_C = state.group_ms(
            state.latent_DGH[bottleneck, group] + exchange_CH, state.latent_DGH[home, group] - exchange_CH
        )
        bottleneck_C[same_C] = device_ms_D[bottleneck] - group_ms_DG[bottleneck, group] + here_C
        device_ms_C[same_C] = device_ms_D[home] - group_ms_DG[home, group] + home_C
    return moves, _Candidates(here_N[row_C], home_J[column_C], there_J[column_C], bottleneck_C, device_ms_C)


def _scores(state: _State, bottleneck: int, candidates: _Candidates, unit: float) -> tuple[Tensor, Tensor]:
    """Overall cost of each candidate, rounded, and its change of the sum of squares, both [C]."""
    device_ms_D, bytes_S = state.device_ms_D, state.problem.output_bytes_S
    moved_C = bytes_S[candidates.leaving_C]
    moved_C = moved_C - torch.where(candidates.returning_C >= 0, bytes_S[candidates.returning_C], 0.0)
    bottleneck_bytes_C = state.bytes_D[bottleneck] - moved_C
    device_bytes_C = state.bytes_D[candidates.device_C] + moved_C
    rest_ms_C = _largest_other(device_ms_D, bottleneck, candidates.device_C)
    largest_C = torch.maximum(
        _largest_other(state.bytes_D, bottleneck, candidates.device_C),
        torch.maximum(bottleneck_bytes_C, device_bytes_C),
    )
    smallest_C = -torch.maximum(
        _largest_other(-state.bytes_D, bottleneck, candidates.device_C),
        torch.maximum(-bottleneck_bytes_C, -device_bytes_C),
    )
    forward_C, backward_C = state.cost.collectives.bounded_all_to_all_ms(
        largest_C, smallest_C, state.bytes_D.sum().expand_as(largest_C)
    )
    compute_C = torch.maximum(rest_ms_C, torch.maximum(candidates.bottleneck_ms_C, candidates.device_ms_C))
    overall_C = ((compute_C + forward_C + backward_C) / unit * 10**DIGITS).round() / 10**DIGITS
    before_C = device_ms_D[bottleneck] ** 2 + device_ms_D[candidates.device_C] ** 2
    square_C = (candidates.bottleneck_ms_C**2 + candidates.device_ms_C**2 - before_C) / unit**2
    return overall_C, (square_C * 10**DIGITS).round() / 10**DIGITS


def _largest_other(values_D: Tensor, first: int, second_C: Tensor) -> Tensor:
    """Largest value over the devices that are neither ``first`` nor ``second``, [C]; the lowest finite
    value of the type where there is no other device."""
    others_D = values_D.clone()
    others_D[first] = torch.finfo(values_D.dtype).min
    top = others_D.topk(min(2, len(others_D)))
    if len(top.values) == 1:
        return top.values.expand(len(second_C))
    return torch.where(second_C == top.indices[0], top.values[1], top.values[0])
