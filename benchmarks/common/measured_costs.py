# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs of placements whose fused kernels were measured.

Shapes: S shards, D devices, X sets, 2 = forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dreamshard_planner.cost.model import Cost, PlacementCosts

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

    def time(self, assignments: Sequence[Tensor], repeats: int, again: bool = False) -> None:
        """Measure the sets of some placements side by side; with ``again`` also sets that were measured before."""
        sets = {group for plan in assignments for device in self.sets_of(plan) for group in device}
        todo = sorted(sets if again else sets - self._set_ms.keys())
        if not todo:
            return
        self._set_ms.update(zip(todo, self._measure(todo, repeats), strict=True))

    def rate(self, assignment_S: Tensor) -> PlacementCosts:
        """Return the costs of a placement by the last measurement of each of its sets."""
        nothing = torch.zeros(2, dtype=torch.float64)
        device_ms_D2 = torch.stack(
            [sum((self._set_ms[group] for group in device), nothing) for device in self.sets_of(assignment_S)]
        )
        collective_ms = self.cost.problem.collectives.ms(self.cost.bytes_sent(assignment_S[None]))
        return PlacementCosts(device_ms_D2[None, :, 0], device_ms_D2[None, :, 1], *collective_ms)
