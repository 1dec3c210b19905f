# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The published policies.

Shapes as in :mod:`dreamshard_planner.policy.network`; C channels of the recurrent core.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamshard_planner.policy.environment import OBSERVATION_INDEX
from dreamshard_planner.policy.network import AnyPolicy
from dreamshard_planner.policy.reinforce import ReinforceConfig
from paper.paper_network import PublishedTables


@dataclass(frozen=True, kw_only=True)
class PaperPolicyConfig:
    """Published sizes of the paper's policy network."""

    table_hidden: int = 128
    representation: int = 32
    cost_hidden: int = 32


class PaperPolicy(PublishedTables, AnyPolicy):
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


OBSERVED = tuple(OBSERVATION_INDEX[name] for name in ("forward", "backward", "free_memory"))
"""AutoShard balances computation alone: no communication."""


@dataclass(frozen=True, kw_only=True)
class RecurrentPolicyConfig:
    """Published sizes."""

    table_hidden: int = 128
    representation: int = 32
    core_layers: int = 2


class RecurrentPolicy(PublishedTables, AnyPolicy):
    """AutoShard's policy (Zha et al., KDD 2022, arXiv 2208.06399), a rival for comparison: an LSTM remembers the tables
    placed so far; a device is scored from that, from its own tables, and from both.

    A table is an MLP 21-128-32 of its features; a device the sum over its tables beside an MLP of its predicted costs
    and free memory; the score an MLP 192-128-128-64-1 of the LSTM's output, the device, and their product. Published
    sizes; as in our other policies costs are relative to a balanced device and the sum is scaled by devices over
    shards, so that one network serves tasks of any size.
    """

    def __init__(self, config: RecurrentPolicyConfig, seed: int = 0) -> None:
        width = 2 * config.representation
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(config.table_hidden, config.representation)
            self.core = nn.LSTM(config.representation, width, config.core_layers, batch_first=True)
            self.costs = nn.Linear(len(OBSERVED), config.representation)
            self.score = nn.Sequential(
                nn.Linear(3 * width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
                nn.Linear(64, 1),
            )  # fmt: skip
        self.config = config
        self.eval()

    def represent(self, features_TSF: Tensor) -> Tensor:
        """Representations of shards in the order in which they are placed, [T, S, R + C]: of the table, and of the
        sequence up to it."""
        table_TSR = super().represent(features_TSF)
        return torch.cat([table_TSR, self.core(table_TSR)[0]], dim=-1)

    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """Scores of devices, [..., D], minus infinity where illegal; arguments as in ``Policy.logits``."""
        representation = self.config.representation
        costs_XDR = torch.relu(self.costs(channels_XDO[..., OBSERVED]))
        device_XDC = torch.cat([load_XDR[..., :representation], costs_XDR], dim=-1)
        core_XDC = shard_XR[..., None, representation:].expand_as(device_XDC)
        logit_XD = self.score(torch.cat([core_XDC, device_XDC, core_XDC * device_XDC], dim=-1))[..., 0]
        return logit_XD.masked_fill(~legal_XD, -torch.inf)


PAPER_REINFORCE = ReinforceConfig(
    updates=100, tasks_per_update=1, episodes_per_task=10, learning_rate=5e-4, entropy_weight=0.001, looks=0
)
"""Ten iterations of ten updates of ten episodes of one task, as published."""
