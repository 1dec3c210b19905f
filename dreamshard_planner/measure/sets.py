# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measured costs of the sets of one problem: a clock that placements can be judged by, on the device at hand.

Shapes: X sets, R repeats, 2 = forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dreamshard_planner.cost.dataset import REFERENCE_STRENGTH
from dreamshard_planner.measure.collect import REFERENCE_SETS
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.timing import Samples, time_groups
from dreamshard_planner.workload.tables import Workload

MAX_BYTES_AT_ONCE = 4 << 30
"""Of indices, outputs and their gradients."""


class SetClock:
    """Times sets of some workloads as fused kernels, each run beside a reference set that tells slow spells.

    Args:
        workloads: of one problem; a set is a tuple of their indices.
        device: where kernels run.
        arena: shared weights and indices. Default: one of default size.
        seed: of indices and order.
    """

    def __init__(
        self, workloads: Sequence[Workload], device: torch.device | str, arena: Arena | None = None, seed: int = 0
    ) -> None:
        self._workloads, self._device, self._seed = workloads, device, seed
        self._arena = arena or Arena(device, seed=seed)
        self._reference = FusedKernel(REFERENCE_SETS[torch.device(device).type], device, seed, self._arena)
        self._order = torch.Generator().manual_seed(seed)
        self._usual_ms: Tensor | None = None

    def samples(self, sets: Sequence[tuple[int, ...]], repeats: int) -> list[Samples]:
        """All runs of each set; sets are interleaved, as many at a time as memory should hold."""
        samples: list[Samples] = []
        for some in self._at_once(sets):
            kernels = [
                FusedKernel([self._workloads[i] for i in group], self._device, self._seed, self._arena)
                for group in some
            ]
            samples += time_groups(kernels, repeats, generator=self._order, reference=self._reference)
        return samples

    def _at_once(self, sets: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """The sets, in order, in parts whose indices and outputs take up to :data:`MAX_BYTES_AT_ONCE`."""
        part: list[tuple[int, ...]] = []
        part_bytes = 0.0
        for group in sets:
            workloads = [self._workloads[i] for i in group]
            group_bytes = sum(8 * w.lookups + 2 * 4 * w.output_elements for w in workloads)
            if part and part_bytes + group_bytes > MAX_BYTES_AT_ONCE:
                yield part
                part, part_bytes = [], 0.0
            part.append(group)
            part_bytes += group_bytes
        if part:
            yield part

    def corrected_ms(self, samples: Samples) -> Tensor:
        """Samples [R, 2] with slow spells damped, as :class:`~dreamshard_planner.cost.dataset.CostDataset` does."""
        if self._usual_ms is None:
            raise ValueError("nothing was timed yet")
        step_R1 = samples.reference_ms.sum(-1, keepdim=True)
        return samples.samples_ms * (self._usual_ms / step_R1) ** REFERENCE_STRENGTH

    def __call__(self, sets: Sequence[tuple[int, ...]], repeats: int) -> Tensor:
        """Medians [X, 2] over the repeats. The first call says what speed of the machine is usual."""
        timed = self.samples(sets, repeats)
        if self._usual_ms is None:
            self._usual_ms = torch.cat([samples.reference_ms.sum(-1) for samples in timed]).median()
        return torch.stack([self.corrected_ms(samples).quantile(0.5, dim=0) for samples in timed])
