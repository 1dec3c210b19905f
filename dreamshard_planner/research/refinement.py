# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Refining a placed proposal: its fused kernels measured on this machine's devices, by all ranks that are there.

What is measured is what the ranks would run: shards of whole tables and columns, which may then move, and blocks of
rows, replicas and towers where they are. Where several ranks measure, they do so at the same time, each a share of the
sets: as in a training step, each has its neighbours beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dreamshard_planner.cost.dataset import REFERENCE_STRENGTH
from dreamshard_planner.cost.model import Chosen, Cost
from dreamshard_planner.errors import DreamShardError, TaskError
from dreamshard_planner.measure.hardware import available_bytes
from dreamshard_planner.measure.kernels import Arena, check_group
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.measure.sets import SetClock
from dreamshard_planner.measure.timing import pinned
from dreamshard_planner.planning.collective import CALL_SECONDS, Together
from dreamshard_planner.policy.place import Contender, Placement, RefineResult
from dreamshard_planner.research.refine import Laid, MeasuredCosts, RefineConfig, ShardSet, refine
from dreamshard_planner.search.local_search import SearchConfig
from dreamshard_planner.workload.tables import Workload

SHARE_OF_MEMORY = 0.5
"""Of what is free when measuring begins, shared by the ranks of a host: for weights and indices half of it, for what
kernels read and write at once the other."""
ARENA_BYTES = 2 << 30
"""Of weights at most: they are cold by far then."""
MAX_REASONS_SHOWN = 3
SETS_TO_COMPARE = 4
"""That each of several ranks measures in one call, if there are so many: what all of them take says how fast the rank
is just now."""


@dataclass(frozen=True)
class Request:
    """What every rank is to measure its share of."""

    workloads: tuple[Workload, ...]
    device: str
    threads: int
    seed: int
    sets: tuple[ShardSet, ...]
    repeats: int
    seconds: float


def measure_together(ranks: Ranks, kept: dict[str, Any], request: Request) -> tuple[Tensor, int]:
    """Milliseconds [X, K, 2] of the sets on each rank, NaN where a rank did not measure a set, and the bytes that the
    rank with most of them took; on every rank the same. Who measures what is drawn anew each time: else a slow rank's
    sets would be the slow ones."""
    calls = kept["calls"] = kept.get("calls", 0) + 1
    shares = shares_of_ranks(len(request.sets), ranks.size, torch.Generator().manual_seed(calls))

    def measure() -> tuple[list[list[float]], float, int]:
        if "clock" not in kept:
            kept["clock"] = _clock(request, ranks)
        clock: SetClock = kept["clock"]
        with pinned(request.threads):
            times_Y2 = clock([request.sets[index] for index in shares[ranks.rank]], request.repeats, request.seconds)
        return times_Y2.tolist(), math.nan if clock.usual_ms is None else float(clock.usual_ms), clock.peak_bytes

    measured = ranks.gather(measure)
    times_XK2 = torch.full((len(request.sets), ranks.size, 2), math.nan, dtype=torch.float64)
    for rank, (share, (times_Y2, usual_ms, _)) in enumerate(zip(shares, measured, strict=True)):
        if share:
            # Clocks call usual what their rank took at first; here, what the first rank took.
            same_speed = (measured[0][1] / usual_ms) ** REFERENCE_STRENGTH
            times_XK2[share, rank] = torch.tensor(times_Y2, dtype=torch.float64) * same_speed
    return times_XK2, max(held for *_, held in measured)


def shares_of_ranks(sets: int, ranks: int, generator: torch.Generator) -> list[list[int]]:
    """Indices of the sets that each rank measures, at random; several ranks measure the same one where there are few,
    so that every rank has some to compare."""
    wanted = -(-sets // ranks)
    each = min(sets, max(wanted, SETS_TO_COMPARE)) if ranks > 1 else sets
    order = torch.randperm(sets, generator=generator).tolist()
    return [[order[(rank * wanted + place) % sets] for place in range(each)] for rank in range(ranks)]


def _clock(request: Request, ranks: Ranks) -> SetClock:
    free = SHARE_OF_MEMORY * available_bytes(request.device) / (ranks.local_size if request.device == "cpu" else 1)
    weights = round(sum(w.rows * w.dim * w.weight_bytes for w in set(request.workloads)))
    arena_bytes = max(1 << 20, min(weights, ARENA_BYTES, int(free / 4)))
    arena = Arena(request.device, arena_bytes, index_bytes=int(free / 4), seed=request.seed)
    return SetClock(request.workloads, request.device, arena, request.seed, bytes_at_once=int(free / 2))


class Refinement:
    """Refines placements in the time that there is.

    Args:
        seconds: for the first one; later ones find no time left.
        seed: of searches, indices and order.
        search: settings of the searches.
        together: the ranks that measure.
    """

    def __init__(self, seconds: float, seed: int, search: SearchConfig, together: Together | None = None) -> None:
        self._seconds, self._seed, self._search = seconds, seed, search
        self._together, self._config = together or Together(), RefineConfig()
        self._peak_bytes = 0

    def __call__(
        self,
        cost: Cost,
        chosen: Chosen,
        placement: Placement,
        workload_P: Sequence[Workload],
        device: str,
        threads: int,
    ) -> Placement:
        """The placement that measuring chooses; kernels of this rank run with ``threads`` intra-op threads.

        Raises:
            DreamShardError: this machine has no such device, or a rank failed.
        """
        if self._seconds <= 0:
            return placement
        seconds, self._seconds = self._seconds, 0.0
        if device == "cuda" and not torch.cuda.is_available():
            raise DreamShardError("refine measures fused kernels on this machine, which has no CUDA device")
        if cost.compute.source.kind == "torchrec":
            return _noted(placement, ["nothing was measured: TorchRec's estimates don't tell kernels from exchanges"])
        parts = [*chosen.part_S.tolist(), *chosen.part_Y.tolist()]
        workloads = tuple(workload_P[part] for part in parts)
        reasons: dict[ShardSet, str | None] = {}

        def measurable(group: ShardSet) -> bool:
            if group not in reasons:
                reasons[group] = why_not([workloads[shard] for shard in group])
            return reasons[group] is None

        def measure(sets: Sequence[ShardSet], repeats: int, seconds: float) -> Tensor:
            return self._measure(Request(workloads, device, threads, self._seed, tuple(sets), repeats, seconds))

        part_Y = chosen.part_Y
        first_of: dict[int, int] = {}
        measured = MeasuredCosts(
            chosen.cost,
            measure,
            self._config,
            laid=Laid(chosen.rank_Y, cost.problem.group_P[part_Y], cost.latent_PH[part_Y]),
            alike=[first_of.setdefault(part, shard) for shard, part in enumerate(parts)],
            measurable=measurable,
        )
        starts = placement.distinct()
        result = refine(measured, starts, seconds, search=self._search, config=self._config, seed=self._seed)
        not_measured = sorted({reason for reason in reasons.values() if reason is not None})
        if len(not_measured) > MAX_REASONS_SHOWN:
            not_measured = [*not_measured[:MAX_REASONS_SHOWN], "..."]
        if not result.wanted_sets:
            return _noted(placement, [f"nothing was measured: {'; '.join(not_measured)}"])
        notes = [self._note(result, seconds)]
        if not_measured:
            notes.append(f"not measured, but predicted: {'; '.join(not_measured)}")
        if device == "cpu":
            notes.append(f"kernels were measured with {threads} thread(s)")
        placed = Contender("chosen", result.assignment_S, chosen.cost.rate(result.assignment_S[None]))
        return _noted(replace(placement, chosen=placed, refined=result), notes)

    def _measure(self, request: Request) -> Tensor:
        """In calls of no more than :data:`CALL_SECONDS`."""
        times_XK2 = torch.full((len(request.sets), self._together.ranks.size, 2), math.nan, dtype=torch.float64)
        deadline, first = time.monotonic() + request.seconds, True
        while True:
            missing = times_XK2[..., 0].isnan().all(-1).nonzero()[:, 0].tolist()
            left = deadline - time.monotonic()
            if not missing or (left <= 0 and not first):
                return times_XK2
            sets = tuple(request.sets[row] for row in missing)
            asked = replace(request, sets=sets, seconds=min(left, CALL_SECONDS))
            times_XK2[missing], held_bytes = self._together.do(measure_together, asked)
            self._peak_bytes, first = max(self._peak_bytes, held_bytes), False

    def _note(self, result: RefineResult, seconds: float) -> str:
        ranks = self._together.ranks.size
        where = "on this machine" if ranks == 1 else f"on {ranks} ranks at once"
        took = (
            f"in {result.seconds:.1f} s of refine_seconds={seconds:g}, with up to {self._peak_bytes / 2**30:.2f} GiB "
            f"of weights, indices and outputs{' on each' if ranks > 1 else ''}"
        )
        if result.measured is None:
            return (
                f"the time sufficed to measure {result.sets} of the {result.wanted_sets} fused groups of the plan, "
                f"{where}, {took}: it is chosen by prediction"
            )
        return f"chosen by measuring {result.plans} plans, {result.sets} fused groups, {where}, {took}"


def why_not(workloads: Sequence[Workload]) -> str | None:
    """Why a set of tables can't be measured; None where it can."""
    elsewhere = next((workload.name for workload in workloads if workload.memory != "device"), None)
    if elsewhere is not None:
        return f"table {elsewhere!r} and what shares its kernel, outside of device memory"
    try:
        check_group(workloads)
    except TaskError as error:
        return str(error)
    return None


def _noted(placement: Placement, notes: Iterable[str]) -> Placement:
    return replace(placement, notes=(*placement.notes, *notes))
