# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets of one problem, timed as fused kernels on the device at hand, and costs of placements by them.

Shapes: S shards, D devices, X sets, R repeats, 2 = forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from dreamshard_planner.cost.dataset import REFERENCE_STRENGTH
from dreamshard_planner.cost.problem import Cost, PlacementCosts
from dreamshard_planner.measure.kernels import Arena, FusedKernel, Samples, time_groups
from dreamshard_planner.measure.sets import REFERENCE_SETS
from dreamshard_planner.workload.tables import INDEX_BYTES, OUTPUT_BYTES, Workload

ShardSet = tuple[int, ...]
"""Shards of one fused group on one device, ascending."""


class MeasuredCosts:
    """Placements of one problem, rated by measured sets and modelled collectives.

    Args:
        cost: of the shards; its collectives are taken.
        measure: times sets, each so many times: forward and backward milliseconds [X, 2].
    """

    def __init__(self, cost: Cost, measure: Callable[[Sequence[ShardSet], int], Tensor]) -> None:
        self.cost, self._measure = cost, measure
        self._set_ms: dict[ShardSet, Tensor] = {}

    def sets_of(self, assignment_S: Tensor) -> list[list[ShardSet]]:
        """Return the fused groups of each device, without the empty ones."""
        problem = self.cost.problem
        sets: dict[int, list[int]] = {}
        for shard, key in enumerate((assignment_S * problem.num_groups + problem.group_P).tolist()):
            sets.setdefault(key, []).append(shard)
        devices: list[list[ShardSet]] = [[] for _ in range(problem.num_ranks)]
        for key, shards in sorted(sets.items()):
            devices[key // problem.num_groups].append(tuple(shards))
        return devices

    def time(self, assignments: Sequence[Tensor], repeats: int) -> None:
        """Measure the sets of some placements side by side, each once."""
        sets = {group for plan in assignments for device in self.sets_of(plan) for group in device}
        todo = sorted(sets - self._set_ms.keys())
        if not todo:
            return
        self._set_ms.update(zip(todo, self._measure(todo, repeats), strict=True))

    def rate(self, assignment_S: Tensor) -> PlacementCosts:
        """Return the costs of a placement by the measurements of its sets."""
        nothing = torch.zeros(2, dtype=torch.float64)
        device_ms_D2 = torch.stack(
            [sum((self._set_ms[group] for group in device), nothing) for device in self.sets_of(assignment_S)]
        )
        collectives_ms_B = self.cost.problem.collectives.ms(self.cost.bytes_sent(assignment_S[None]))
        return PlacementCosts(device_ms_D2[None, :, 0], device_ms_D2[None, :, 1], collectives_ms_B)


class SetClock:
    """Times sets of some workloads as fused kernels, each run beside a reference set that tells slow spells.

    Args:
        workloads: of one problem; a set is a tuple of their indices.
        arena: shared weights and indices, on the device where kernels run.
        seed: of indices and order.
        bytes_at_once: of indices, outputs and their gradients; a single set may need more.
    """

    def __init__(
        self,
        workloads: Sequence[Workload],
        arena: Arena,
        seed: int = 0,
        bytes_at_once: int = 4 << 30,
    ) -> None:
        self._workloads, self._arena, self._seed = workloads, arena, seed
        self._bytes_at_once = bytes_at_once
        self._reference = FusedKernel(REFERENCE_SETS[arena.device.type], arena, seed)
        self._order = torch.Generator().manual_seed(seed)
        self.usual_ms: Tensor | None = None
        """Milliseconds of the reference set when this clock was first used."""

    def samples(self, sets: Sequence[tuple[int, ...]], repeats: int) -> Samples:
        """Return all runs of each set; sets are interleaved, as many at a time as memory should hold."""
        parts = []
        for some in self._at_once(sets):
            kernels = [FusedKernel([self._workloads[i] for i in group], self._arena, self._seed) for group in some]
            parts.append(time_groups(kernels, self._reference, repeats, generator=self._order))
        return Samples(*map(torch.cat, zip(*parts, strict=True)))

    def _at_once(self, sets: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Yield the sets, in order, in parts that memory holds."""
        start = 0
        while start < len(sets):
            stop, part_bytes = start, 0
            while stop < len(sets):
                group_bytes = self._bytes_of(sets[stop])
                if stop > start and part_bytes + group_bytes > self._bytes_at_once:
                    break
                stop, part_bytes = stop + 1, part_bytes + group_bytes
            yield list(sets[start:stop])
            start = stop

    def _bytes_of(self, group: tuple[int, ...]) -> int:
        workloads = [self._workloads[i] for i in group]
        return round(sum(INDEX_BYTES * w.lookups + 2 * OUTPUT_BYTES * w.output_elements for w in workloads))

    def corrected_ms(self, samples: Samples) -> Tensor:
        """Samples [X, R, 2] with slow spells damped, as :class:`~dreamshard_planner.cost.dataset.CostDataset` does."""
        if self.usual_ms is None:
            raise ValueError("nothing was timed yet")
        step_XR1 = samples.reference_ms.sum(-1, keepdim=True)
        return samples.samples_ms * (self.usual_ms / step_XR1) ** REFERENCE_STRENGTH

    def __call__(self, sets: Sequence[tuple[int, ...]], repeats: int) -> Tensor:
        """Return the medians [X, 2] over the repeats. The first call says what speed of the machine is usual."""
        timed = self.samples(sets, repeats)
        if self.usual_ms is None:
            self.usual_ms = timed.reference_ms.sum(-1).median()
        return self.corrected_ms(timed).quantile(0.5, dim=1)


def spread(samples_XR2: Tensor) -> Tensor:
    """Return mean absolute deviations [X, 2] from the medians, as shares of them."""
    median_X12 = samples_XR2.quantile(0.5, dim=1, keepdim=True)
    return ((samples_XR2 - median_X12).abs() / median_X12).mean(1)
