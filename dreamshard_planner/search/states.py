# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans of one problem with the sums per rank that make a change of one cheap, and how their costs are compared.

Shapes: B placements side by side (free leading dimensions of the sums), X ranks of some of them, Q trials, P parts,
D ranks, G fused groups, C collectives, H latent channels, M limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeVar

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import Exchanges
from dreamshard_planner.cost.compute import both_passes, compute_ms, overall_ms
from dreamshard_planner.cost.problem import Change, Cost

DIGITS: Final = 5
"""Costs are compared after rounding to this many digits relative to the starting cost."""

Costs = TypeVar("Costs", Tensor, float)


def in_steps(cost_ms: Costs, unit: float) -> Costs:
    """Costs as they are compared: in whole steps, of which the unit has 10 to the power of :data:`DIGITS`."""
    steps = cost_ms / unit * 10**DIGITS
    return steps.round() if isinstance(steps, Tensor) else float(round(steps))


def rounded(cost_ms: Tensor, unit: float) -> Tensor:
    """Return costs rounded to these steps, in units."""
    return in_steps(cost_ms, unit) / 10**DIGITS


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
        self.add_up(rank_BX, part_X)

    def add_up(self, rank_BX: Tensor, part_X: Tensor | None, changed_X: Tensor | None = None) -> None:
        """Take all sums afresh, so that no rounding adds up; and the costs of groups, of all ranks or of those that
        changed."""
        cost = self.cost
        self.latent_DGH = cost.group_latents(rank_BX, part_X)
        if changed_X is None:
            self.group_ms_DG = both_passes(cost.compute.group_cost_ms(self.latent_DGH))
        else:
            self.group_ms_DG[changed_X] = both_passes(cost.compute.group_cost_ms(self.latent_DGH[changed_X]))
        self.bytes_CD = cost.bytes_sent(rank_BX, part_X)
        self.free_DM = self.problem.limits_DM - self.problem.taken(rank_BX, part_X)

    @property
    def device_ms_D(self) -> Tensor:
        """Compute of each rank, forward + backward."""
        return self.group_ms_DG.sum(-1)

    def square(self, device_ms_XD: Tensor, bytes_XCD: Tensor) -> Tensor:
        """Return the sum of squares of the ranks' milliseconds, [X]: of compute, and of what each sends in each
        collective. Of plans that cost the same, the one with the lower sum is nearer to a cheaper one."""
        return device_ms_XD.square().sum(-1) + self.sent_ms(bytes_XCD).square().sum((-2, -1))

    def sent_ms(self, bytes_XCD: Tensor) -> Tensor:
        """Return the milliseconds that what each rank sends would take alone, [X, C, D], latencies left out."""
        return bytes_XCD * self._sent_ms_per_byte_C1

    @cached_property
    def _sent_ms_per_byte_C1(self) -> Tensor:
        return torch.stack(self.problem.collectives.alone_ms_per_byte()).sum(0)[:, None]

    def overall_ms(self) -> Tensor:
        """Cost of each plan, [B]."""
        computed_B = compute_ms(self.device_ms_D, self.problem.shared_cores)
        return overall_ms(computed_B, self.problem.collectives.ms(self.bytes_CD))


class PlacementState(State):
    """Placements [B, P] of one problem side by side."""

    def __init__(self, cost: Cost, assignment_BP: Tensor) -> None:
        super().__init__(cost, assignment_BP)
        self.assignment_BP = assignment_BP.clone()
        approximates = cost.compute.approximates
        self.approximate_ms_DG = self.approximate_ms(self.latent_DGH) if approximates else self.group_ms_DG
        """Approximate cost of each group; :attr:`group_ms_DG` itself if costs are not approximated."""

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward + backward, approximately, [...]."""
        return both_passes(self.cost.compute.approximate_ms(latent_XH))

    @cached_property
    def exchanges(self) -> Exchanges:
        """Collectives that some part sends in: the others stay as they are wherever the parts lie."""
        every, sends = self.problem.collectives.collectives, self.problem.bytes_PC.any(0).nonzero()[:, 0].tolist()
        if odd := [every[column].name for column in sends if every[column].over != "world"]:
            raise ValueError(f"shards that span one rank must exchange with all ranks, but {odd[0]} does not.")
        return Exchanges(every, sends)

    @cached_property
    def sent_bytes_KP(self) -> Tensor:
        """Bytes that each part sends in each of them."""
        return self.problem.bytes_PC.T[self.exchanges.column_K].contiguous()

    @cached_property
    def sending_K(self) -> Tensor:
        """Columns of these collectives, each once, except those that cost nothing."""
        return (self.problem.bytes_PC.any(0) & (self._sent_ms_per_byte_C1[:, 0] > 0)).nonzero()[:, 0]

    @cached_property
    def other_collectives_ms(self) -> Tensor:
        """Milliseconds of the other collectives."""
        bytes_CD = self.bytes_CD[0].masked_fill(self.problem.bytes_PC.any(0)[:, None], 0.0)
        return self.problem.collectives.ms(bytes_CD)

    def replace(self, row_X: Tensor, assignment_XP: Tensor) -> None:
        """Let other placements take the place of some."""
        others = PlacementState(self.cost, assignment_XP)
        for name in ("assignment_BP", "latent_DGH", "group_ms_DG", "approximate_ms_DG", "bytes_CD", "free_DM"):
            getattr(self, name)[row_X] = getattr(others, name)

    def refresh(self, row_X: Tensor, rank_X: Tensor) -> None:
        """Take the sums of some ranks afresh: differences would add up rounding errors."""
        problem, cost = self.problem, self.cost
        here_XP = self.assignment_BP[row_X] == rank_X[:, None]
        here_XGP = here_XP[:, None] & self._member_GP
        latent_XGH = here_XGP.to(cost.latent_PH.dtype) @ cost.latent_PH
        bytes_XC = here_XP.to(problem.bytes_PC.dtype) @ problem.bytes_PC
        if cost.preload is not None:
            latent_XGH += cost.preload.latent_DGH[rank_X]
            bytes_XC += cost.preload.bytes_CD.T[rank_X]
        self.latent_DGH[row_X, rank_X], self.bytes_CD[row_X, :, rank_X] = latent_XGH, bytes_XC
        used_XM = torch.where(here_XP[..., None], problem.needs_PM, 0).sum(1)
        self.free_DM[row_X, rank_X] = problem.limits_DM[rank_X] - used_XM
        self.group_ms_DG[row_X, rank_X] = both_passes(cost.compute.group_cost_ms(latent_XGH))
        if cost.compute.approximates:
            self.approximate_ms_DG[row_X, rank_X] = self.approximate_ms(latent_XGH)

    @cached_property
    def _member_GP(self) -> Tensor:
        return self.problem.group_P == torch.arange(self.problem.num_groups)[:, None]
