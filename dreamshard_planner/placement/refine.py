# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Search that measures: time the best plans' fused kernels, learn the model's error from them, search again.

The error is learned as one log factor per shard, weighted in a set by the shard's share of the set's cost, from a
Gaussian prior (Bayesian linear regression). Searches run on factors drawn from the posterior (Thompson sampling), so
that shards whose factor is unknown are tried; the plan is chosen by what was measured.

Shapes: S shards, D devices, G fused groups, H latent channels, X measured sets, 2 = forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dreamshard_planner.cost.model import ComputeCost, CostSource, PlacementCost, PlacementCosts
from dreamshard_planner.placement.search import SearchConfig, local_search

ShardSet = tuple[int, ...]
"""Shards of one fused group on one device, ascending."""

MeasureSets = Callable[[Sequence[ShardSet], int], Tensor]
"""``(sets, repeats)`` -> forward and backward milliseconds [X, 2], double precision."""


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """How to spend the seconds."""

    plans_at_first: int = 4
    """Cheapest plans by prediction that are measured before anything is learned."""
    searches: int = 1_000
    """At most, whatever time is left."""
    repeats: int = 3
    """Timed runs of a set."""
    finalists: int = 4
    """Cheapest plans by measurement that are measured again, to choose from."""
    final_repeats: int = 9
    final_share: float = 0.2
    """Share of the time that is kept for the finalists."""
    prior: float = 0.25
    """Standard deviation of a shard's log factor before anything is measured."""
    noise: float = 0.03
    """Relative error of a measured set."""
    candidates: int = 4_000
    """Of each search."""


@dataclass(frozen=True)
class RefineResult:
    """The plan that measurement chose."""

    assignment_S: Tensor
    measured: PlacementCosts
    """Compute as measured, collectives as modelled."""
    first: PlacementCosts
    """The same of the first start, measured beside it."""
    plans: int
    """Plans measured."""
    sets: int
    """Different fused groups measured."""


class CorrectedCost:
    """A compute cost with a log factor for each shard of one problem; a :class:`ComputeCost` for that problem only."""

    glance_channels: int | None = None

    def __init__(self, compute: ComputeCost, single_ms_S: Tensor, log_factor_S: Tensor, offset: float) -> None:
        self.source = CostSource(compute.source.kind, f"{compute.source.detail}, corrected by measurement")
        self._compute, self._offset = compute, offset
        self._extra_S2 = torch.stack([single_ms_S * log_factor_S, single_ms_S], dim=-1)

    def encode(self, features_SF: Tensor) -> Tensor:
        """Two channels more than the compute cost's: weighted log factors, and weights."""
        latent_SH = self._compute.encode(features_SF)
        return torch.cat([latent_SH.double(), self._extra_S2.double()], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """The compute cost times the factor of the set."""
        log_factor_X = latent_XH[..., -2] / latent_XH[..., -1].clamp_min(1e-9) + self._offset
        return self._compute.group_cost_ms(latent_XH[..., :-2]) * log_factor_X.exp()[..., None]

    def glance_ms(self, latent_XH: Tensor) -> Tensor:
        """As :meth:`group_cost_ms`."""
        return self.group_cost_ms(latent_XH)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's."""
        return self._compute.notes(features_SF, latent_XH[..., :-2])


class MeasuredCosts:
    """What measurement has said of one problem's sets so far, and what that says of its shards."""

    def __init__(self, cost: PlacementCost, measure: MeasureSets, config: RefineConfig) -> None:
        self.cost, self._measure, self._config = cost, measure, config
        self.set_ms: dict[ShardSet, Tensor] = {}
        self._single_ms_S = cost.single_ms_S.double().clamp_min(1e-9)

    def sets_of(self, assignment_S: Tensor) -> list[list[ShardSet]]:
        """Fused groups of each device, without the empty ones."""
        problem = self.cost.problem
        key_S = (assignment_S * problem.num_groups + problem.group_S).tolist()
        sets: dict[int, list[int]] = {}
        for shard, key in enumerate(key_S):
            sets.setdefault(key, []).append(shard)
        devices: list[list[ShardSet]] = [[] for _ in range(problem.num_devices)]
        for key, shards in sorted(sets.items()):
            devices[key // problem.num_groups].append(tuple(shards))
        return devices

    def time(self, assignments: Sequence[Tensor], repeats: int, again: bool = False) -> None:
        """Measure the sets of some plans together; sets measured before only ``again``."""
        sets = {group for plan in assignments for device in self.sets_of(plan) for group in device}
        todo = sorted(sets if again else sets - self.set_ms.keys())
        if todo:
            self.set_ms.update(zip(todo, self._measure(todo, repeats), strict=True))

    def rate(self, assignment_S: Tensor) -> PlacementCosts:
        """Costs of one plan all of whose sets are measured."""
        nothing = torch.zeros(2, dtype=torch.float64)
        device_ms_D2 = torch.stack(
            [sum((self.set_ms[group] for group in device), nothing) for device in self.sets_of(assignment_S)]
        )
        forward_B, backward_B = self.cost.collectives_ms(self.cost.output_bytes(assignment_S[None]))
        return PlacementCosts(device_ms_D2[None, :, 0], device_ms_D2[None, :, 1], forward_B, backward_B)

    def overall_ms(self, assignment_S: Tensor) -> float:
        """Of one plan all of whose sets are measured."""
        return float(self.rate(assignment_S).overall_ms_B[0])

    def corrected(self, generator: torch.Generator) -> PlacementCost:
        """The problem under factors drawn from their posterior."""
        problem, config = self.cost.problem, self._config
        share_XS = torch.zeros(len(self.set_ms), problem.num_shards + 1, dtype=torch.float64)
        share_XS[:, -1] = 1.0  # the machine as a whole, faster or slower than the model thinks
        for row, group in enumerate(self.set_ms):
            weight = self._single_ms_S[list(group)]
            share_XS[row, list(group)] = weight / weight.sum()
        latent_XH = torch.stack([self.cost.latent_SH[list(group)].sum(0) for group in self.set_ms])
        predicted_X = self.cost.compute.group_cost_ms(latent_XH).sum(-1).double().clamp_min(1e-9)
        measured_X = torch.stack(list(self.set_ms.values())).sum(-1).clamp_min(1e-9)
        precision_S = torch.full((problem.num_shards + 1,), config.prior**-2, dtype=torch.float64)
        precision_SS = share_XS.T @ share_XS / config.noise**2 + precision_S.diag()
        factor_SS = torch.linalg.cholesky(precision_SS)
        right_S1 = (share_XS.T @ (measured_X / predicted_X).log() / config.noise**2)[:, None]
        mean_S = torch.cholesky_solve(right_S1, factor_SS)[:, 0]
        normal_S1 = torch.randn(problem.num_shards + 1, 1, generator=generator, dtype=torch.float64)
        drawn_S = mean_S + torch.linalg.solve_triangular(factor_SS.T, normal_S1, upper=True)[:, 0]
        corrected = CorrectedCost(self.cost.compute, self._single_ms_S, drawn_S[:-1], float(drawn_S[-1]))
        return PlacementCost(problem, corrected, self.cost.collectives)


@torch.no_grad()
def refine(
    cost: PlacementCost,
    starts: Sequence[Tensor],
    measure: MeasureSets,
    seconds: float,
    *,
    search: SearchConfig,
    config: RefineConfig | None = None,
    seed: int = 0,
) -> RefineResult:
    """Improve on feasible plans [S], cheapest prediction first, by measuring for ``seconds``.

    The result depends on the clock, and on what is measured: it is not the same twice. Where the time is too short for
    all that ``config`` wants, fewer plans are measured; the first start always is.
    """
    config = config or RefineConfig()
    generator = torch.Generator().manual_seed(seed)
    begin = time.monotonic()
    deadline = begin + seconds
    search_until = deadline - config.final_share * seconds
    measured = MeasuredCosts(cost, measure, config)
    search = replace(search, candidates=config.candidates, starts=1)
    measured.time(starts[:1], config.repeats)
    run_seconds = (time.monotonic() - begin) / (config.repeats + 1)  # of one plan; the first run warms up

    def affordable(until: float, repeats: int) -> int:
        return int(max(0.0, until - time.monotonic()) / (run_seconds * (repeats + 1)))

    first = starts[: 1 + min(config.plans_at_first - 1, affordable(search_until, config.repeats))]
    plans = {tuple(start.tolist()): start for start in first}
    measured.time(list(plans.values()), config.repeats)
    for _ in range(config.searches):
        if time.monotonic() > search_until:
            break
        best_S = min(plans.values(), key=measured.overall_ms)
        found_S = local_search(measured.corrected(generator), [best_S], search, generator).assignment_S
        measured.time([found_S], config.repeats)
        plans.setdefault(tuple(found_S.tolist()), found_S)
    most = min(config.finalists, affordable(deadline, config.final_repeats) - 1)
    finalists = sorted(plans.values(), key=measured.overall_ms)[: max(1, most)]
    if len(plans) > 1:
        repeats = min(config.final_repeats, max(config.repeats, affordable(deadline, 0) // 2 - 1))
        measured.time([starts[0], *finalists], repeats, again=True)
    chosen_S = min([starts[0], *finalists], key=measured.overall_ms)
    return RefineResult(chosen_S, measured.rate(chosen_S), measured.rate(starts[0]), len(plans), len(measured.set_ms))
