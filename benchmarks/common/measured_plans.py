# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans of one model, judged by kernels that run here: each fused kernel of each rank is measured as one, exchanges are
modelled, and so is what the table-sized gradients of data-parallel tables add.

Shapes: P parts, D ranks, 2 = forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.set_clock import SetClock
from dreamshard_planner.cost.model import PlacementCosts
from dreamshard_planner.cost.roofline import dense_ms
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.given_plans import Rated
from dreamshard_planner.workload.tables import Workload


@dataclass(frozen=True)
class _Kernel:
    """Parts of one plan that one rank runs as one fused kernel."""

    rank: int
    parts: tuple[int, ...]
    workloads: tuple[Workload, ...]


def measured_costs(
    plans: Sequence[Rated], context: PlanningContext, repeats: int, arena: Arena | None = None, seed: int = 0
) -> list[PlacementCosts]:
    """Costs of plans of one model, B = 1 each, whose kernels are timed in turns; one that two plans share, once.

    Args:
        plans: as :class:`~dreamshard_planner.planning.given_plans.GivenPlans` rates them.
        context: that rated them.
        repeats: of each kernel.
        arena: see :class:`~common.set_clock.SetClock`.
        seed: of indices and order.
    """
    kernels = [_kernels(plan) for plan in plans]
    workloads = list(dict.fromkeys(workload for some in kernels for kernel in some for workload in kernel.workloads))
    index = {workload: at for at, workload in enumerate(workloads)}
    sets = [[tuple(sorted(index[workload] for workload in kernel.workloads)) for kernel in some] for some in kernels]
    todo = sorted({each for some in sets for each in some})
    clock = SetClock(workloads, context.topology.compute_device, arena, seed=seed)
    set_ms = dict(zip(todo, clock(todo, repeats), strict=True))
    costs = []
    for plan, some, their_sets in zip(plans, kernels, sets, strict=True):
        extra_ms_P = dense_ms(plan.read.dense_elements_P, plan.read.dense_passes_P, context.topology)
        cost_D2 = torch.zeros(plan.read.problem.num_ranks, 2, dtype=torch.float64)
        for kernel, each in zip(some, their_sets, strict=True):
            cost_D2[kernel.rank] += set_ms[each]
            cost_D2[kernel.rank, 1] += extra_ms_P[list(kernel.parts)].sum()
        bytes_CD = plan.cost.bytes_sent(*plan.cost.problem.laid(plan.sharding))
        exchanges = plan.read.problem.collectives.ms(bytes_CD[None])
        costs.append(PlacementCosts(cost_D2[None, :, 0], cost_D2[None, :, 1], *exchanges))
    return costs


def _kernels(plan: Rated) -> list[_Kernel]:
    """Of all ranks."""
    parts: dict[tuple[int, int], list[int]] = {}
    for rank, part in zip(*(rows_X.tolist() for rows_X in plan.cost.problem.laid(plan.sharding)), strict=True):
        parts.setdefault((rank, int(plan.read.problem.group_P[part])), []).append(part)
    return [
        _Kernel(rank, tuple(some), tuple(plan.read.workload_P[part] for part in some))
        for (rank, _), some in sorted(parts.items())
    ]
