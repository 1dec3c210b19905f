# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans of one problem with the sums per rank that make a change of one cheap, and how their costs are compared.

Shapes: B placements side by side (free leading dimensions of the sums), Q trials, P parts, X parts laid down or
changed, Z fused groups of ranks that trials change, D ranks, G fused groups, C collectives, H latent channels,
M limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import torch
from torch import Tensor

from dreamshard_planner.cost.compute import both_passes, compute_ms, overall_ms
from dreamshard_planner.cost.problem import Change, Cost

DIGITS: Final = 5
"""Costs are compared after rounding to this many digits relative to the starting cost."""

Costs = TypeVar("Costs", Tensor, float)


def in_steps(cost_ms: Costs, unit: float) -> Costs:
    """Costs as they are compared: in whole steps, of which the unit has 10 to the power of :data:`DIGITS`."""
    steps = cost_ms / unit * 10**DIGITS
    return steps.round() if isinstance(steps, Tensor) else float(round(steps))


@dataclass(frozen=True)
class Tried:
    """Costs of a sharding after some trials."""

    changes: Sequence[Sequence[Change]]
    """Changes of each trial."""
    overall_Q: Tensor
    """Cost in whole steps; infinite where memory does not allow it."""
    square_Q: Tensor
    """See :meth:`State.square`."""

    @cached_property
    def key_Q(self) -> Tensor:
        """Sort key: the cost, and among equals the sum of squares."""
        return self.overall_Q + self.square_Q / (self.square_Q.max() * 2).clamp_min(1e-30)


class State:
    """Sums of one plan, or of several side by side, on every rank. Moves, swaps and re-shards start from them.

    Args:
        cost: the problem and its cost.
        rank_BX: ranks of what is laid down, int64.
        part_X: which parts these are; by default all in order.
    """

    def __init__(self, cost: Cost, rank_BX: Tensor, part_X: Tensor | None = None) -> None:
        self.cost, self.problem = cost, cost.problem
        self.latent_DGH, self.bytes_CD, self.free_DM = self.sums(rank_BX, part_X)
        self.group_ms_DG = self.exact_ms(self.latent_DGH)

    def sums(self, rank_BX: Tensor, part_X: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return latents, bytes sent and free memory, taken afresh: differences would add up rounding errors."""
        free_DM = self.problem.limits_DM - self.problem.taken(rank_BX, part_X)
        return self.cost.group_latents(rank_BX, part_X), self.cost.bytes_sent(rank_BX, part_X), free_DM

    def exact_ms(self, latent_XH: Tensor) -> Tensor:
        """Return forward + backward of groups, [...]."""
        return both_passes(self.cost.compute.group_cost_ms(latent_XH))

    def changed_ms(self, state_Q: Tensor, trial_X: Tensor, rank_X: Tensor, part_X: Tensor, sign_X: Tensor) -> Tensor:
        """Return how much longer each rank computes after trials, [Q, D].

        Args:
            state_Q: plan that each trial changes, of those side by side.
            trial_X: trial of each part that comes or goes.
            rank_X: its rank.
            part_X: the part.
            sign_X: 1 if it comes, -1 if it goes.
        """
        ranks, groups = self.problem.num_ranks, self.problem.num_groups
        slots = trial_X * ranks * groups + rank_X * groups + self.problem.group_P[part_X]
        slot_Z, at_X = slots.unique(return_inverse=True)
        row_Z = slot_Z // groups
        now_Z = (state_Q[row_Z // ranks], row_Z % ranks, slot_Z % groups)
        latent_ZH = self.latent_DGH.view(-1, ranks, *self.latent_DGH.shape[-2:])[now_Z]
        latent_ZH.index_add_(0, at_X, sign_X[:, None] * self.cost.latent_PH[part_X])
        change_Z = (self.exact_ms(latent_ZH) - self.group_ms_DG.view(-1, ranks, groups)[now_Z]).double()
        return change_Z.new_zeros(len(state_Q) * ranks).index_add_(0, row_Z, change_Z).view(-1, ranks)

    @property
    def device_ms_D(self) -> Tensor:
        """Compute of each rank, forward + backward."""
        return self.group_ms_DG.sum(-1)

    def square(self, device_ms_XD: Tensor, bytes_XCD: Tensor) -> Tensor:
        """Return the sum of squares of the ranks' milliseconds, [X]: of compute, and of what each sends in each
        collective. Of plans that cost the same, the one with the lower sum is nearer to a cheaper one."""
        return device_ms_XD.square().sum(-1) + (bytes_XCD * self._sent_ms_per_byte_C1).square().sum((-2, -1))

    @cached_property
    def _sent_ms_per_byte_C1(self) -> Tensor:
        return torch.stack(self.problem.collectives.alone_ms_per_byte()).sum(0)[:, None]

    def overall_ms(self) -> Tensor:
        """Cost of each plan, [B]."""
        computed_B = compute_ms(self.device_ms_D, self.problem.shared_cores)
        return overall_ms(computed_B, self.problem.collectives.ms(self.bytes_CD))
