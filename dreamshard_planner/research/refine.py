# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Search that measures: time the best plans' fused kernels, learn the model's error from them, search again.

What was measured is evidence (:mod:`dreamshard_planner.research.evidence`), and so is what was predicted. Searches run
on errors drawn from the posterior (Thompson sampling), so that shards whose error is unknown are tried. The plan is
chosen by what all evidence together makes of it: a set measured a few times is known little better than a good network
predicts it, and the best of many such measurements is mostly the luckiest.

Shapes: S shards that may be moved, Y that lie on devices already, D devices, G fused groups, H latent channels,
X sets, 2 = forward and backward.
"""

from __future__ import annotations

import math
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dreamshard_planner.cost.compute import ComputeCost, CostSource
from dreamshard_planner.cost.model import Cost, PlacementCosts, Preload
from dreamshard_planner.cost.problem import summed
from dreamshard_planner.policy.place import RefineResult
from dreamshard_planner.research.evidence import ErrorModel, Evidence, Measurements, shares
from dreamshard_planner.search.local_search import SearchConfig, local_search

ShardSet = tuple[int, ...]
"""Shards of one fused group on one device, ascending; those that lie there already are counted on from S."""

MeasureSets = Callable[[Sequence[ShardSet], int, float], Tensor]
"""``(sets, repeats, seconds)`` -> forward and backward milliseconds [X, 2], or [X, K, 2] by K ranks, double precision;
NaN for sets that could not be measured in that time, or not there."""

SEARCH_SECONDS = 2.0
"""Of one search at most."""

MAX_MEASUREMENTS = 1_500
"""The latest, that are learned from: time to learn grows with their third power."""


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """How to spend the seconds."""

    plans_at_first: int = 4
    """Cheapest plans by prediction that are measured before anything is learned."""
    plans_at_once: int = 4
    """Found by searches of their own, then measured side by side with the best so far."""
    rounds: int = 1_000
    """Of that, at most, whatever time is left."""
    repeats: int = 3
    """Timed runs of a set."""
    finalists: int = 4
    """Plans that are measured again, to choose from."""
    final_repeats: int = 9
    """Of theirs, at most."""
    final_share: float = 0.3
    """Share of the time that is kept for the finalists."""
    errors: ErrorModel = field(default_factory=ErrorModel)
    candidates: int = 1_000
    """Of each search, and"""
    patience: int = 4
    """as in :class:`~dreamshard_planner.search.local_search.SearchConfig`: errors are drawn anew for the next one."""


@dataclass(frozen=True)
class Laid:
    """Shards that lie on devices already, in fused groups of their own."""

    device_Y: Tensor
    group_Y: Tensor
    latent_YH: Tensor


class WithShardErrors(ComputeCost):
    """A compute cost with a log factor for each shard of one problem; of use for that problem only."""

    def __init__(self, compute: ComputeCost, single_ms_S: Tensor, log_factor_S: Tensor, offset: float) -> None:
        self.source = CostSource(compute.source.kind, f"{compute.source.detail}, corrected by measurement")
        self._compute, self._offset = compute, offset
        self.extra_S2 = torch.stack([single_ms_S * log_factor_S, single_ms_S], dim=-1).double()

    def encode(self, features_SF: Tensor) -> Tensor:
        """Two channels more than the compute cost's: weighted log factors, and weights."""
        return torch.cat([self._compute.encode(features_SF).double(), self.extra_S2], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """The compute cost times the factor of the set."""
        log_factor_X = latent_XH[..., -2] / latent_XH[..., -1].clamp_min(1e-9) + self._offset
        return self._compute.group_cost_ms(latent_XH[..., :-2]) * log_factor_X.exp()[..., None]

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's."""
        return self._compute.notes(features_SF, latent_XH[..., :-2])


class MeasuredCosts:
    """What measurement has said of one problem's sets so far, and what that says of its shards.

    Args:
        cost: of the shards that may be moved.
        measure: times sets.
        config: for its errors.
        laid: what lies on devices already.
        alike: for each of the S + Y shards, the first that asks for the same; default: none does.
        measurable: whether a set can be; others cost what is predicted. Default: all.
    """

    def __init__(
        self,
        cost: Cost,
        measure: MeasureSets,
        config: RefineConfig,
        *,
        laid: Laid | None = None,
        alike: Sequence[int] | None = None,
        measurable: Callable[[ShardSet], bool] = lambda _: True,
    ) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        self.cost, self._measure, self._config = cost, measure, config
        self._laid = laid or Laid(nothing, nothing, cost.latent_PH[:0])
        self._latent_ZH = torch.cat([cost.latent_PH, self._laid.latent_YH])
        self._alike = list(range(len(self._latent_ZH))) if alike is None else list(alike)
        self._measurable = measurable
        self._single_ms_Z = cost.compute.group_cost_ms(self._latent_ZH).sum(-1).double().clamp_min(1e-9)
        self.set_ms: dict[ShardSet, Tensor] = {}
        """As measured last."""
        self._predicted_ms: dict[ShardSet, Tensor] = {}
        self._expected_ms: dict[ShardSet, Tensor] = {}
        self._seen: list[tuple[ShardSet, int, int, float]] = []
        self._spells = 0
        self.evidence: Evidence | None = None

    def sets_of(self, assignment_S: Tensor) -> list[list[ShardSet]]:
        """Fused groups of each device, without the empty ones."""
        problem = self.cost.problem
        device_Z = torch.cat([assignment_S, self._laid.device_Y])
        key_Z = device_Z * problem.num_groups + torch.cat([problem.group_P, self._laid.group_Y])
        sets: dict[int, list[int]] = {}
        for shard, key in zip(self._alike, key_Z.tolist(), strict=True):
            sets.setdefault(key, []).append(shard)
        devices: list[list[ShardSet]] = [[] for _ in range(problem.num_ranks)]
        for key, shards in sorted(sets.items()):
            devices[key // problem.num_groups].append(tuple(sorted(shards)))
        return devices

    def wanted(self, assignments: Sequence[Tensor]) -> set[ShardSet]:
        """Sets of some plans that can be measured."""
        sets = {group for plan in assignments for device in self.sets_of(plan) for group in device}
        return {group for group in sets if self._measurable(group)}

    def time(
        self,
        assignments: Sequence[Tensor],
        repeats: int,
        again: bool = False,
        seconds: float = math.inf,
        beside: Sequence[Tensor] = (),
    ) -> int:
        """Measure the sets of some plans side by side, as far as ``seconds`` suffice; returns how many were asked for.

        Args:
            assignments: the plans.
            repeats: timed runs of each set.
            again: measure sets that were measured before as well; else only new ones, and with them, to compare,
            beside: those in which these plans differ.
            seconds: for all.
        """
        wanted = self.wanted(assignments)
        new = wanted if again else wanted - self.set_ms.keys()
        if not new:
            return 0
        todo = sorted(new | (self.wanted(beside) - wanted))
        self._note(todo, repeats, self._measure(todo, repeats, seconds))
        return len(todo)

    def knows(self, assignment_S: Tensor) -> bool:
        """Whether all sets of a plan that can be measured have been."""
        return self.wanted([assignment_S]) <= self.set_ms.keys()

    def _note(self, sets: Sequence[ShardSet], repeats: int, kernel_ms: Tensor) -> None:
        self._predict(sets)
        kernel_ms_XK2 = kernel_ms.view(len(sets), -1, 2)
        for group, kernel_ms_K2 in zip(sets, kernel_ms_XK2, strict=True):
            there = (~kernel_ms_K2.isnan().any(-1)).nonzero()[:, 0].tolist()
            if not there:
                continue
            set_ms_K2 = kernel_ms_K2 + self.cost.compute.extra_ms(self._latent(group))
            self.set_ms[group] = set_ms_K2[there].mean(0)
            for rank in there:
                ratio = set_ms_K2[rank].sum().clamp_min(1e-9) / self._predicted_ms[group].sum().clamp_min(1e-9)
                self._seen.append((group, self._spells + rank, repeats, math.log(ratio)))
        self._spells += kernel_ms_XK2.shape[1]

    def _latent(self, group: ShardSet) -> Tensor:
        return self._latent_ZH[list(group)].sum(0)

    def _predict(self, sets: Sequence[ShardSet]) -> None:
        new = [group for group in sets if group not in self._predicted_ms]
        if new:
            predicted_X2 = self.cost.compute.group_cost_ms(torch.stack([self._latent(group) for group in new]))
            self._predicted_ms.update(zip(new, predicted_X2.double(), strict=True))

    def learn(self) -> None:
        """Weigh all that was measured so far."""
        if not self._seen:
            return
        seen = self._seen[-MAX_MEASUREMENTS:]
        index = {group: row for row, group in enumerate(self.set_ms)}
        share_XS = shares(self._single_ms_Z, list(index))
        set_N, spell_N, runs_N = torch.tensor([(index[group], spell, runs) for group, spell, runs, _ in seen]).T
        log_ratio_N = torch.tensor([ratio for *_, ratio in seen], dtype=torch.float64)
        measurements = Measurements(share_XS[set_N], set_N, spell_N, runs_N, log_ratio_N)
        self.evidence = Evidence(measurements, self._config.errors)
        ratio_X = self.evidence.of_sets(share_XS, torch.arange(len(index))).exp()
        for group, ratio in zip(index, ratio_X.tolist(), strict=True):
            split_2 = self.set_ms[group] / self.set_ms[group].sum().clamp_min(1e-9)
            self._expected_ms[group] = split_2 * self._predicted_ms[group].sum() * ratio

    def rate(self, assignment_S: Tensor) -> PlacementCosts:
        """Costs of one plan all of whose sets are measured, by the last measurement of each."""
        return self._rate(assignment_S, self.set_ms)

    def expected(self, assignment_S: Tensor) -> PlacementCosts:
        """The same by all evidence up to :meth:`learn`."""
        return self._rate(assignment_S, self._expected_ms)

    def _rate(self, assignment_S: Tensor, known_ms: dict[ShardSet, Tensor]) -> PlacementCosts:
        devices = self.sets_of(assignment_S)
        self._predict([group for device in devices for group in device if group not in known_ms])
        each_ms, nothing = ChainMap(known_ms, self._predicted_ms), torch.zeros(2, dtype=torch.float64)
        device_ms_D2 = torch.stack([sum((each_ms[group] for group in device), nothing) for device in devices])
        collective_ms = self.cost.problem.collectives.ms(self.cost.bytes_sent(assignment_S[None]))
        return PlacementCosts(device_ms_D2[None, :, 0], device_ms_D2[None, :, 1], *collective_ms)

    def expected_ms(self, assignment_S: Tensor) -> float:
        """Of one plan, by all evidence."""
        return float(self.expected(assignment_S).overall_ms_B[0])

    def corrected(self, generator: torch.Generator) -> Cost:
        """The problem under errors drawn from their posterior."""
        if self.evidence is None:
            raise ValueError("nothing was measured yet")
        factor_Z, offset = self.evidence.draw(generator)
        corrected = WithShardErrors(self.cost.compute, self._single_ms_Z, factor_Z[self._alike], offset)
        latent_ZH = torch.cat([self._latent_ZH, corrected.extra_S2], dim=-1)
        movable = self.cost.problem.num_parts
        preload = self.cost.preload and self._preload(self.cost.preload, latent_ZH[movable:])
        return Cost(self.cost.problem, corrected, latent_ZH[:movable], preload)

    def _preload(self, preload: Preload, latent_YH: Tensor) -> Preload:
        ranks, groups = self.cost.problem.num_ranks, self.cost.problem.num_groups
        sums_XH = summed(latent_YH, self._laid.device_Y * groups + self._laid.group_Y, ranks * groups)
        return replace(preload, latent_DGH=sums_XH.unflatten(0, (ranks, groups)))


@torch.no_grad()
def refine(
    measured: MeasuredCosts,
    starts: Sequence[Tensor],
    seconds: float,
    *,
    search: SearchConfig,
    config: RefineConfig | None = None,
    seed: int = 0,
) -> RefineResult:
    """Improve on feasible plans [S], cheapest prediction first, by measuring for ``seconds``.

    The result depends on the clock, and on what is measured: it is not the same twice. Where the time is too short for
    all that ``config`` wants, fewer plans are measured; where it is too short for one, the first start is the result.
    """
    config = config or RefineConfig()
    begin = time.monotonic()
    quick = replace(search, candidates=config.candidates, starts=1, patience=config.patience)
    run = _Refinement(measured, quick, config, seed)
    until = begin + (1 - config.final_share) * seconds
    wanted = len(measured.wanted(starts[:1]))
    chosen_S = starts[0]
    rated: tuple[PlacementCosts | None, PlacementCosts | None] = None, None
    if run.measure(starts[:1], until):
        if measured.cost.problem.num_parts and measured.cost.problem.num_ranks > 1 and wanted:
            more = run.affordable(wanted, config.repeats, until)
            run.measure(starts[1 : min(config.plans_at_first, 1 + more)], until)
            run.search(until)
            run.decide(starts[0], begin + seconds)
        measured.learn()
        chosen_S = min(run.plans.values(), key=measured.expected_ms)
        rated = measured.expected(chosen_S), measured.expected(starts[0])
    counts = len(run.plans), len(measured.set_ms), wanted
    return RefineResult(chosen_S, *rated, *counts, time.monotonic() - begin)


class _Refinement:
    """Plans measured so far, and the time that it takes to measure more."""

    def __init__(self, measured: MeasuredCosts, search: SearchConfig, config: RefineConfig, seed: int) -> None:
        self._measured, self._search, self._config = measured, search, config
        self._generator = torch.Generator().manual_seed(seed)
        self._run_seconds = 0.0
        self.plans: dict[tuple[int, ...], Tensor] = {}

    def affordable(self, sets: int, repeats: int, until: float) -> int:
        """How many times so many sets could be measured until then."""
        run_seconds = self._run_seconds * max(1, sets) * (repeats + 1)  # the first run warms up
        return int(max(0.0, until - time.monotonic()) / run_seconds) if run_seconds else 1

    def measure(self, plans: Sequence[Tensor], until: float, beside: Sequence[Tensor] = ()) -> bool:
        """Measure what is new in some plans, beside others; whether all of the first was."""
        begin = time.monotonic()
        timed = self._measured.time(plans, self._config.repeats, seconds=until - begin, beside=beside)
        if timed:
            self._run_seconds = (time.monotonic() - begin) / (timed * (self._config.repeats + 1))
        self.plans.update({tuple(plan.tolist()): plan for plan in plans if self._measured.knows(plan)})
        return bool(plans) and self._measured.knows(plans[0])

    def search(self, until: float) -> None:
        """Search on drawn errors, measure what is found, learn, and so on; where nothing new is found, measure the best
        plans again."""
        measured, config = self._measured, self._config
        for _ in range(config.rounds):
            measured.learn()
            best = self._best(config.finalists)
            found: list[Tensor] = []
            while len(found) < config.plans_at_once and (left := until - time.monotonic()) > 0:
                drawn, seconds = measured.corrected(self._generator), min(left, SEARCH_SECONDS)
                found.append(local_search(drawn, best[:1], self._search, self._generator, seconds).assignment_S)
            new = len(measured.wanted(found) - measured.set_ms.keys())
            if not found or not self.affordable(new or len(measured.wanted(best)), config.repeats, until):
                break
            if new:
                self.measure(found, until, beside=best[:1])
            else:
                measured.time(best, config.repeats, again=True, seconds=until - time.monotonic())

    def decide(self, first_S: Tensor, until: float) -> None:
        """Measure the best plans once more beside the first, in as many runs as there is time for."""
        measured, config = self._measured, self._config
        measured.learn()
        finalists = [first_S, *self._best(config.finalists)]
        while len(finalists) > 2 and not self.affordable(len(measured.wanted(finalists)), config.repeats, until):
            finalists.pop()
        runs = self.affordable(len(measured.wanted(finalists)), 0, until) - 1
        if len(self.plans) > 1 and runs > 0:
            left = until - time.monotonic()
            measured.time(finalists, min(config.final_repeats, runs), again=True, seconds=left)

    def _best(self, count: int) -> list[Tensor]:
        return sorted(self.plans.values(), key=self._measured.expected_ms)[:count]
