# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The policy network of the DreamShard paper as published, for ablation.

Shapes as in :mod:`dreamshard_planner.policy.network`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamshard_planner.policy.environment import OBSERVATION_INDEX
from dreamshard_planner.policy.network import AnyPolicy
from dreamshard_planner.workload.features import PAPER_FEATURES, Scaler, columns


class PublishedTables(AnyPolicy):
    """What DreamShard's and AutoShard's policies share: tables represented by an MLP of the 21 published features."""

    feature_mean: Tensor
    feature_scale: Tensor

    def __init__(self, hidden: int, representation: int) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(len(PAPER_FEATURES), hidden), nn.ReLU(), nn.Linear(hidden, representation))
        self.register_buffer("feature_mean", torch.zeros(len(PAPER_FEATURES)))
        self.register_buffer("feature_scale", torch.ones(len(PAPER_FEATURES)))

    def initialize(self, features_SF: Tensor) -> None:
        """Fit the feature scaler to the shards of the training tables, [S, F]."""
        scaler = Scaler.fit(features_SF[:, columns(PAPER_FEATURES)])
        self.feature_mean.copy_(scaler.mean_F)
        self.feature_scale.copy_(scaler.scale_F)

    def represent(self, features_XF: Tensor) -> Tensor:
        """Representations of shards, [..., R]."""
        return self.table((features_XF[..., columns(PAPER_FEATURES)] - self.feature_mean) / self.feature_scale)


@dataclass(frozen=True, kw_only=True)
class PaperPolicyConfig:
    """Published sizes of the paper's policy network."""

    table_hidden: int = 128
    representation: int = 32
    cost_hidden: int = 32


class PaperPolicy(PublishedTables):
    """The DreamShard paper's policy network (section 3.3), for ablation.

    A device is the sum of its tables' representations (MLP 21-128-32) beside an MLP 3-64-32 of its predicted
    forward, communication and backward cost; a linear layer scores it. Costs are relative to a balanced
    device, and the sum is scaled by devices over shards, so that one network serves tasks of any size.
    """

    def __init__(self, config: PaperPolicyConfig, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(config.table_hidden, config.representation)
            self.costs = nn.Sequential(
                nn.Linear(3, config.cost_hidden), nn.ReLU(), nn.Linear(config.cost_hidden, config.representation)
            )
            self.score = nn.Linear(2 * config.representation, 1)
        self.config = config
        self.eval()

    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """Scores of devices, [..., D], minus infinity where illegal; arguments as in ``Policy.logits``."""
        observed = [OBSERVATION_INDEX[name] for name in ("forward", "communication", "backward")]
        costs_XDR = self.costs(channels_XDO[..., observed])
        logit_XD = self.score(torch.cat([load_XDR, costs_XDR], dim=-1))[..., 0]
        return logit_XD.masked_fill(~legal_XD, -torch.inf)
