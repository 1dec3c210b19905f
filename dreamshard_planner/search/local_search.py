# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Local search on predicted cost: moves and swaps on the bottleneck rank, with incremental cost.

What a change costs is in :mod:`dreamshard_planner.search.changes`. Descents from several placements advance side by
side, because one alone would spend its time on calls and not on arithmetic.

The budget is counted in moves and in swaps rated exactly, scores are compared after rounding and ties go to the lowest
index, so the same inputs give the same plan.

Shapes: S shards, which are the parts P of their problem, D ranks, M limits, B placements side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Problem, has_room
from dreamshard_planner.search.changes import improve
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.states import PlacementState, rounded

MAX_APPROXIMATED = 20_000
"""Candidates of one step, over all placements side by side, whose cost is approximated. With more of them, the overhead
of calls no longer matters, and one descent that ends is worth more than several that do not."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """How long and how widely to search."""

    samples: int = 15
    """Sampled policy roll-outs beside the greedy one, at most; fewer on more than 8 ranks, none on more than 64."""
    starts: int = 3
    """Starting placements to descend from: the cheapest."""
    candidates: int = 20_000
    """Moves to evaluate in all, and swaps that are rated exactly."""
    candidates_per_step: int = 16
    """Candidates of one step of one placement that are rated exactly: the most promising by the approximate cost."""
    perturbed: int = 8
    """Perturbed copies of the best placement that descend side by side while budget is left; none with 0."""
    perturbed_shards: int = 3
    """Shards that a perturbation moves at random."""
    patience: int = 24
    """Perturbations without improvement, one after the other, at which the search ends early."""

    def __post_init__(self) -> None:
        least = {"samples": 0, "perturbed": 0}
        if any(value < least.get(name, 1) for name, value in asdict(self).items()):
            raise ValueError(f"search settings must be positive, got {asdict(self)}")

    def times(self, effort: float) -> SearchConfig:
        """Return the same settings with this multiple of roll-outs, starts, candidates and patience."""
        return replace(
            self,
            samples=portion(self.samples, effort),
            starts=portion(self.starts, effort),
            candidates=portion(self.candidates, effort),
            patience=portion(self.patience, effort),
        )


DEFAULT_SEARCH = SearchConfig()


@dataclass(frozen=True)
class SearchResult:
    """The best placement found."""

    assignment_S: Tensor
    overall_ms: float
    candidates: int
    """Candidates rated."""
    cut_short: bool
    """Whether the time cap ended the search before its budget of candidates."""


class Budget:
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

    def seconds_left(self) -> float | None:
        """Until the deadline; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def spend(self, candidates: int) -> None:
        self.used += candidates


@torch.inference_mode()
def local_search(
    cost: Cost,
    starts: Sequence[Tensor],
    config: SearchConfig,
    generator: torch.Generator,
    seconds: float | None = None,
) -> SearchResult:
    """Descend from each feasible start [S]; spend what is left of the budget on perturbed copies of the best.

    The result is never worse than the best start.
    """
    problem, budget = cost.problem, Budget(config.candidates, seconds)
    if problem.num_ranks == 1:
        return SearchResult(starts[0], float(cost.rate(starts[0][None]).overall_ms_B), 0, False)
    start_BP = torch.stack(list(starts))
    best = _Best(starts[0], max(1e-9, float(cost.rate(start_BP).overall_ms_B.min())))
    side_by_side = _side_by_side(problem, config.perturbed)
    for some_BP in start_BP.split(side_by_side):
        _descend(PlacementState(cost, some_BP), best, config, budget)

    def perturbed(copies: int) -> Tensor:
        return _perturbed(problem, best.assignment_S, copies, config.perturbed_shards, generator)

    if config.perturbed and budget.left():
        _descend(PlacementState(cost, perturbed(side_by_side)), best, config, budget, perturbed)
    overall_ms = float(cost.rate(best.assignment_S[None]).overall_ms_B)
    return SearchResult(best.assignment_S, overall_ms, budget.used, budget.cut_short)


def _side_by_side(problem: Problem, wanted: int) -> int:
    """How many of the wanted placements may advance together."""
    shards, ranks = problem.num_parts, problem.num_ranks
    candidates = (shards // ranks + 1) * (shards + ranks)
    return max(1, min(wanted, MAX_APPROXIMATED // candidates))


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
    while len(row_B) and budget.left() and (perturbed is None or fruitless < config.patience):
        slowest_B = rounded(states.device_ms_D[row_B], best.unit).argmax(-1)
        busiest_B = (states.byte_weight_C1 * states.bytes_CD[row_B]).sum(1).argmax(-1)
        bottleneck_B = torch.where(by_bytes_B, busiest_B, slowest_B)
        improved_B, candidates = improve(states, row_B, bottleneck_B, config.candidates_per_step, best.unit)
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
