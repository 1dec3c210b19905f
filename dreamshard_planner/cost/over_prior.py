# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A cost network that starts from the roofline model: it learns what that leaves.

On GPUs the roofline knows more than a few thousand measured sets show: what the widest table of a kernel does to the
others, what a cache holds, which optimizer states there are, and memory that no set was measured in. A network that
learns from nothing is as good on sets like those that it saw, and off where tables are of another kind.

Shapes: E ensemble members, S shards, X groups, P kinds of work, R latents of the roofline, K context channels,
H latent channels = P + R + E * K, 2 = forward and backward.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.compute import CostSource
from dreamshard_planner.cost.network import MIN_LOG_SUM, CostNetwork, CostNetworkConfig, StackedMLP
from dreamshard_planner.cost.roofline import Kernels, RooflineCost
from dreamshard_planner.workload.features import DESCRIPTORS, WORK, columns
from dreamshard_planner.workload.tables import OPTIMIZERS

if TYPE_CHECKING:
    from dreamshard_planner.cost.fit import LabelledSets

_DEVICE = ("memory_bytes_per_ms", "uvm_bytes_per_ms", "cache_bytes", "slowness")
_KERNELS = tuple(each.name for each in fields(Kernels))
_DIVIDE = {*_DEVICE, "forward_share", "backward_share", "cache_speedup", "gradient_speedup", "far_table_bytes"}
_MOST = 1e15
"""Of any figure: bytes of a cache are the largest."""
_LEAST_MS = 1e-3
"""That the network corrects: what a GPU's backward takes to return at once where nothing was looked up."""


class NetworkOverPrior(CostNetwork):
    """An ensemble of networks around one roofline, whose figures are part of its state: a later one changes nothing."""

    optimizers = tuple(name for name in OPTIMIZERS if name != "other")
    prior: Tensor

    def __init__(self, config: CostNetworkConfig, seed: int = 0) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.source = CostSource("network", "not trained")
        generator = torch.Generator().manual_seed(seed)
        members, num_work = config.members, len(WORK)
        hidden = config.table_hidden
        self.table = StackedMLP(members, (len(DESCRIPTORS), hidden, hidden, config.context), generator)
        sizes = (num_work + 2 + config.context, config.head_hidden, config.head_hidden, 2)
        self.head = StackedMLP(members, sizes, generator)
        with torch.no_grad():  # start from the roofline
            self.table.weights[-1].mul_(0.1)
            self.head.weights[-1].zero_()
        self._register_scalers()
        self.set_prior(RooflineCost.of_gpu("h100"))
        self.eval()

    def set_prior(self, prior: RooflineCost) -> None:
        """Start from this one."""
        values = [getattr(prior, name) for name in _DEVICE] + [getattr(prior.kernels, name) for name in _KERNELS]
        self.register_buffer("prior", torch.tensor(values, dtype=torch.float64))
        self._roofline, self._prior_channels = prior, prior.channels
        self.approximate_channels = len(WORK) + prior.channels + self.config.context

    def _load_from_state_dict(self, *arguments: object, **options: object) -> None:
        super()._load_from_state_dict(*arguments, **options)
        values = self.prior.tolist()
        for name, value in zip((*_DEVICE, *_KERNELS), values, strict=True):
            if not (0 < value if name in _DIVIDE else 0 <= value) or value > _MOST:
                raise ValueError(f"its prior has {name} {value:g}, which no device has")
        kernels = Kernels(**dict(zip(_KERNELS, values[len(_DEVICE) :], strict=True)))
        self.set_prior(RooflineCost(**dict(zip(_DEVICE, values, strict=False)), kernels=kernels))

    @torch.no_grad()
    def initialize(self, train: LabelledSets) -> None:
        """Set the scalers and the trained ranges from measured sets."""
        self._fit_scalers(train)

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`; channel 0 is the work named ``tables``, one per shard."""
        context_ESK = self.table(self._descriptors(features_SF)).clamp(-8, 8).exp()
        roofline_SR = self._roofline.encode(features_SF).to(features_SF.dtype)
        return torch.cat([features_SF[:, columns(WORK)], roofline_SR, context_ESK.transpose(0, 1).flatten(1)], dim=-1)

    def member_log_cost(self, latent_XH: Tensor, members: int | None = None) -> Tensor:
        """Logarithm of forward and backward milliseconds by each of the first ``members`` (default: all),
        [E, X, 2]; X is one dimension."""
        num_work, members = len(WORK), members or self.config.members
        start = num_work + self._prior_channels
        member_XH = latent_XH[:, start : start + members * self.config.context]
        context_EXK = member_XH.unflatten(-1, (members, -1)).transpose(0, 1).float()
        prior_X2 = self._roofline.group_cost_ms(latent_XH[:, num_work:start]).clamp_min(_LEAST_MS)
        log_prior_EX2 = prior_X2.float().log().expand(members, -1, -1)
        log_context_EXK = context_EXK.clamp_min(MIN_LOG_SUM).log().clamp(-8, 16)
        inputs = [self._log_work(latent_XH).expand(members, -1, -1), self._scaled(log_prior_EX2), log_context_EXK * 0.3]
        return log_prior_EX2 + self.head(torch.cat(inputs, dim=-1))
