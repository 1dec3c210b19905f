# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What sets of shards cost: the interface of every source of compute costs, and the one formula.

A rank's compute is the sum over its fused groups; within a group a :class:`ComputeCost` (network, roofline, estimates
that come with the shards) says what the *set* costs.

Shapes: S shards, F features, H latent channels, X groups or placements, D ranks, G fused groups; dimensions X are free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


def overall_ms(slowest_X: Tensor, collective_ms: tuple[Tensor, Tensor]) -> Tensor:
    """Cost of placements, [...]: the one formula for labels, search, benchmarks and reports,

        max over ranks of (forward + backward)  +  forward collectives  +  backward collectives

    because between two all-to-all barriers of steady training a rank runs the backward of one step and the forward of
    the next.

    Args:
        slowest_X: compute milliseconds of the slowest rank.
        collective_ms: milliseconds [...] of the collectives, forward and backward.
    """
    forward_X, backward_X = collective_ms
    return slowest_X + forward_X + backward_X


def both_passes(ms_X2: Tensor) -> Tensor:
    """Forward + backward, [...]; torch's sum over so short a dimension takes several times as long."""
    return ms_X2[..., 0] + ms_X2[..., 1]


NOT_MEASURED = "nothing measured"
"""How the detail of a source ends that is a guess."""


@dataclass(frozen=True)
class CostSource:
    """Where a cost came from; shown wherever a cost is shown."""

    kind: str
    """``network`` or ``roofline``; rivals have kinds of their own."""
    detail: str
    """Checkpoint and hardware, or the bandwidths used."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


class ComputeCost(ABC):
    """Cost of fused groups. Shards are encoded once; a group is the *sum* of its shards' latents.

    A cost around another one, such as :class:`WithExtras`, adds to :meth:`group_cost_ms` and :meth:`approximate_ms`
    alike, and passes on ``source``, ``approximates``, :meth:`extra_ms`, :meth:`notes` and, unless it adds channels,
    ``approximate_channels``.
    """

    source: CostSource
    approximate_channels: int | None = None
    """How many leading latent channels :meth:`approximate_ms` reads; None: all. Only these need to be summed for it."""
    approximates: bool = False
    """Whether :meth:`approximate_ms` differs from :meth:`group_cost_ms`, so that the best by it have to be rated."""

    @abstractmethod
    def encode(self, features_SF: Tensor) -> Tensor:
        """Additive latents [S, H] of shards; channel 0 is 1 for each, so that it counts a group's shards."""

    @abstractmethod
    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2] of groups from their summed latents [..., H].
        A group without shards costs exactly nothing."""

    def needed_by(self, features_SF: Tensor) -> ComputeCost:
        """The same costs for these shards, without what none of them needs."""
        return self

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """A cheaper estimate of :meth:`group_cost_ms`, for what a policy observes at every step."""
        return self.group_cost_ms(latent_XH)

    def extra_ms(self, latent_XH: Tensor) -> Tensor:
        """Of :meth:`group_cost_ms`, what is spent outside of fused kernels, where timing these does not see it."""
        return latent_XH.new_zeros(*latent_XH.shape[:-1], 2)

    def reward_ms(self, latent_XDGH: Tensor, collective_ms: tuple[Tensor, Tensor]) -> Tensor:
        """What the estimated MDP counts as the overall cost of placements, [...]: the formula, unless a network has an
        overall head of its own."""
        return overall_ms(self.group_cost_ms(latent_XDGH).sum(-2).sum(-1).amax(-1), collective_ms)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """What a reader of the costs of these shards and groups should know, e.g. that they lie outside of what was
        measured."""
        return ()


class GivenCost(ComputeCost):
    """Costs that parts come with, such as TorchRec's estimates: they add up, fused or not. Latents are a count, forward
    and backward milliseconds."""

    def __init__(self, source: CostSource) -> None:
        self.source = source

    def encode(self, features_SF: Tensor) -> Tensor:
        """Not from features: give latents."""
        raise TypeError("these costs come with the parts: give latent_PH")

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2]; nothing for an empty group."""
        return torch.where(latent_XH[..., :1] > 0.5, latent_XH[..., 1:3], 0.0)


class WithExtras(ComputeCost):
    """A compute cost, and milliseconds that some parts add outside of their fused kernel, such as the table-sized
    gradient of data-parallel. Latents have two channels more."""

    def __init__(self, compute: ComputeCost) -> None:
        self.source, self.approximates = compute.source, compute.approximates
        self._compute = compute

    def encode(self, features_SF: Tensor) -> Tensor:
        """Latents of parts that add nothing."""
        return self.latents(features_SF, torch.zeros(len(features_SF), 2, dtype=torch.float64))

    def latents(self, features_SF: Tensor, extra_ms_S2: Tensor) -> Tensor:
        """The compute cost's latents, and forward and backward milliseconds beside them."""
        return torch.cat([self._compute.encode(features_SF).double(), extra_ms_S2], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2]."""
        return self._compute.group_cost_ms(latent_XH[..., :-2]) + self._own_ms(latent_XH)

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """The compute cost's, and the extras."""
        return self._compute.approximate_ms(latent_XH[..., :-2]) + self._own_ms(latent_XH)

    def extra_ms(self, latent_XH: Tensor) -> Tensor:
        """The compute cost's, and the extras."""
        return self._compute.extra_ms(latent_XH[..., :-2]) + self._own_ms(latent_XH)

    def _own_ms(self, latent_XH: Tensor) -> Tensor:
        """The extras, without the rounding of what was subtracted."""
        return latent_XH[..., -2:].clamp_min(0)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's."""
        return self._compute.notes(features_SF, latent_XH[..., :-2])
