# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compute costs of sets of shards: the interface of every source, and the one formula.

A rank's compute is the sum over its fused groups; within a group a :class:`ComputeCost` (network, roofline, estimates
that come with the shards) says what the *set* costs.

Shapes: S shards, F features, H latent channels, X groups or placements, D ranks, G fused groups, N hosts, L ranks of a
host; dimensions X are free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dreamshard_planner.workload.tables import columns, optimizer_of


def overall_ms(compute_X: Tensor, collectives_X: Tensor) -> Tensor:
    """Cost of placements, [...]: the one formula for labels, search, benchmarks and reports,

        max over ranks of (forward + backward)  +  collectives of both passes

    because between two all-to-all barriers of steady training a rank runs the backward of one step and the forward of
    the next. Where ranks share cores, :func:`compute_ms` takes the place of the maximum.

    Args:
        compute_X: milliseconds of compute, by :func:`compute_ms`.
        collectives_X: milliseconds of all collectives.
    """
    return compute_X + collectives_X


@dataclass(frozen=True)
class SharedCores:
    """Cores of a host that its CPU ranks share."""

    at_once: float
    """Ranks of a host that can compute at once, fewer than all."""
    on_host: int
    """Ranks of a host."""

    @cached_property
    def waits_L(self) -> Tensor:
        """Milliseconds that one of work adds to the whole, from the quickest rank of a host to the slowest, [L]."""
        computing_L = torch.arange(self.on_host, 0, -1, dtype=torch.float64)
        return (computing_L / self.at_once).clamp_min(1).diff(append=torch.zeros(1, dtype=torch.float64)).neg()


def compute_ms(device_ms_XD: Tensor, shared_cores: SharedCores | None = None) -> Tensor:
    """Milliseconds [...] until every rank has computed: those of the slowest one, unless ranks share cores. Then all
    of a host that still compute go on equally fast, as processes of one system do.

    Args:
        device_ms_XD: milliseconds of each rank, if it has a core of its own.
        shared_cores: of each host; None if all ranks can compute at once.
    """
    if shared_cores is None:
        return device_ms_XD.amax(-1)
    missing = -device_ms_XD.shape[-1] % shared_cores.on_host  # of the last host
    host_ms_XNL = pad(device_ms_XD, (0, missing)).unflatten(-1, (-1, shared_cores.on_host))
    return (host_ms_XNL.sort(-1).values @ shared_cores.waits_L.to(device_ms_XD.dtype)).amax(-1)


def both_passes(ms_X2: Tensor) -> Tensor:
    """Forward + backward, [...]; torch's sum over so short a dimension takes several times as long."""
    return ms_X2[..., 0] + ms_X2[..., 1]


NOT_MEASURED = "nothing measured"
"""End of a guessed source's detail."""


@dataclass(frozen=True)
class CostSource:
    """Origin of a cost, shown beside it."""

    kind: str
    """``network`` or ``roofline``; rivals have kinds of their own."""
    detail: str
    """Checkpoint and hardware, or the bandwidths used."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


class ComputeCost(ABC):
    """Cost of fused groups. Shards are encoded once; a group is the *sum* of its shards' latents."""

    source: CostSource
    approximates: bool = False
    """True if :meth:`approximate_ms` differs from :meth:`group_cost_ms`, so that the best by it must be rated."""

    @abstractmethod
    def encode(self, features_SF: Tensor) -> Tensor:
        """Additive latents [S, H] of shards; channel 0 is 1 for each, so that it counts a group's shards."""

    @abstractmethod
    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2] of groups from their summed latents [..., H].
        A group without shards costs exactly nothing."""

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """Estimate :meth:`group_cost_ms` more cheaply, to choose the moves and swaps that are rated."""
        return self.group_cost_ms(latent_XH)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """Return notes for readers of these costs, such as tables outside the measured range."""
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


OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad"}
"""Optimizers with corrections of their own, in the order of :func:`optimizer_of`, and their names; all others go with
row-wise Adagrad."""
UNCHANGED = (1.0, 0.0, 0.0, 0.0, 0.0)
"""Numbers of a direction without a correction."""
EXTENT = ("distinct_rows", "distinct_elements", "lookup_elements", "lookups")
"""Features that the numbers behind the scale are multiplied with."""
LEAST_SCALE = 0.1
"""Smallest scale of a kernel cost, which knows what else there is than rows."""

Corrections = Mapping[str, Sequence[Sequence[float]]]
"""By optimizer: forward and backward, each a scale and milliseconds per unit of each :data:`EXTENT`."""


class AdjustedCost(ComputeCost):
    """A compute cost with corrections by optimizer, and milliseconds of parts outside of their fused kernel, such as
    for the table-sized gradient of data-parallel.

    Latents begin with the named sums below; the latents of the compute cost follow.

    Args:
        compute: costs of fused kernels.
        corrections: by optimizer; see :data:`Corrections`.
        learned: training steps that the corrections were learned from, in words; empty for measured sets.
    """

    COUNT, SCALE, ADDED_MS, EXTRA_MS = slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 7)
    """Channels: fused shards, sums of their scales, milliseconds of corrections, and milliseconds beside kernels; each
    but the count forward and backward."""
    _OWN = 7

    def __init__(self, compute: ComputeCost, corrections: Corrections | None = None, learned: str = "") -> None:
        self._compute, self.source, self.approximates = compute, compute.source, compute.approximates
        self._learned = learned
        if learned:
            prior = self.source.detail.removesuffix(f", {NOT_MEASURED}")
            self.source = CostSource(self.source.kind, f"{prior}, learned from {learned}")
        self._rates_O2N = torch.tensor([(corrections or {}).get(name, (UNCHANGED, UNCHANGED)) for name in OPTIMIZERS])

    def needed_by(self, features_SF: Tensor) -> ComputeCost:
        """The compute cost itself, if nothing is corrected of these shards' optimizers."""
        rates_O2N = self._rates_O2N[optimizer_of(features_SF).unique()]
        unchanged = bool((rates_O2N == torch.tensor(UNCHANGED)).all())
        return self._compute if unchanged and not self._learned else self

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`; the shards take nothing outside of their kernels."""
        latent_SH, rates_S2N = self._compute.encode(features_SF), self._rates_O2N[optimizer_of(features_SF)]
        added_S2 = torch.einsum("sdk,sk->sd", rates_S2N[..., 1:], features_SF[:, columns(EXTENT)])
        count_S1 = torch.ones_like(added_S2[:, :1])
        return torch.cat([count_S1, rates_S2N[..., 0], added_S2, torch.zeros_like(added_S2), latent_SH], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.group_cost_ms`."""
        return self._adjusted(self._compute.group_cost_ms(latent_XH[..., self._OWN :]), latent_XH)

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.approximate_ms`."""
        return self._adjusted(self._compute.approximate_ms(latent_XH[..., self._OWN :]), latent_XH)

    def _adjusted(self, cost_X2: Tensor, latent_XH: Tensor) -> Tensor:
        """Apply corrections; a group of several optimizers has the mean of their scales. Clamps absorb the rounding
        of sums that a search subtracted."""
        # In numpy, whose calls cost a third of torch's.
        own_XN, cost_NX2 = latent_XH[..., : self._OWN].detach().numpy(), cost_X2.detach().numpy()
        count_X1 = own_XN[..., self.COUNT]
        kernel_X2 = own_XN[..., self.SCALE] / np.maximum(count_X1, 1) * cost_NX2
        kernel_X2 = np.where(count_X1 > 0.5, kernel_X2 + np.maximum(own_XN[..., self.ADDED_MS], 0), 0.0)
        return torch.from_numpy(kernel_X2 + np.maximum(own_XN[..., self.EXTRA_MS], 0))

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's notes, but none of a prior that was learned from training steps."""
        if self._learned and self.source.kind == "roofline":
            return ()
        return self._compute.notes(features_SF, latent_XH[..., self._OWN :])
