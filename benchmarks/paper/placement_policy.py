# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Roll-outs of published policy networks, which choose the device that takes the next table.

One function scores, for sampling and for the gradient alike, under the same mask.

Shapes: X any leading dimensions (episodes, or steps x episodes), D devices, S tables, E episodes, O observation
channels, R representation channels, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from dreamshard_planner.policy.network import drawn
from paper.placement_mdp import EstimatedMDP, PlacementCost


class AnyPolicy(nn.Module, ABC):
    """A policy network: scores the devices for one table from what an episode has placed so far."""

    @abstractmethod
    def initialize(self, features_SF: Tensor) -> None:
        """Fit the feature scaler to the shards of the training tables, [S, F]."""

    @abstractmethod
    def represent(self, features_XF: Tensor) -> Tensor:
        """Representations of shards, [..., R]; what lies on a device is the sum of them."""

    @abstractmethod
    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """Scores of devices, [..., D], minus infinity where illegal.

        Args:
            channels_XDO: observation channels.
            legal_XD: devices that may take the shard.
            load_XDR: sum of the representations of the shards on each device, times D over S.
            shard_XR: representation of the shard to place.
        """


@torch.no_grad()
def roll_out(
    policy: AnyPolicy, cost: PlacementCost, episodes: int, generator: torch.Generator | None = None
) -> tuple[EstimatedMDP, Tensor, Tensor]:
    """Play episodes: sampled with ``generator``, greedy without. Return also what the policy saw: the channels
    [S, E, D, O] and the legal devices [S, E, D]."""
    environment = EstimatedMDP(cost, episodes)
    table_SR = policy.represent(environment.features_SF)
    load_EDR = torch.zeros(episodes, cost.problem.num_ranks, table_SR.shape[-1])
    channels, legal = [], []
    for table_R in table_SR:
        channels_EDO, legal_ED = environment.observe()
        table_ER = table_R.expand(episodes, -1)
        action_E = drawn(policy.logits(channels_EDO, legal_ED, _scaled(load_EDR, cost), table_ER), generator)
        load_EDR[torch.arange(episodes), action_E] += table_R
        environment.step(action_E)
        channels.append(channels_EDO)
        legal.append(legal_ED)
    return environment, torch.stack(channels), torch.stack(legal)


def _scaled(load_XDR: Tensor, cost: PlacementCost) -> Tensor:
    """Keep summed representations of one order, whatever the number of tables."""
    return load_XDR * (cost.problem.num_ranks / cost.problem.num_parts)


def played(policy: AnyPolicy, cost: PlacementCost, generator: torch.Generator | None = None) -> Tensor | None:
    """Return the placement [S] of one episode, as :func:`roll_out` plays it; None where it dead-ends."""
    environment, _, _ = roll_out(policy, cost, 1, generator)
    return environment.assignments()[0] if bool(environment.alive_E[0]) else None


def scored(
    policy: AnyPolicy, cost: PlacementCost, environment: EstimatedMDP, channels_SEDO: Tensor, legal_SED: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log probability of each action of a roll-out, and the entropy of each choice, both [S, E], under
    gradient. All steps at once: the load of a device before a step is an exclusive cumulative sum over the actions."""
    action_SE = torch.stack(environment.actions)
    table_SER = policy.represent(environment.features_SF)[:, None].expand(-1, action_SE.shape[1], -1)
    added_SEDR = nn.functional.one_hot(action_SE, legal_SED.shape[-1])[..., None] * table_SER[:, :, None]
    load_SEDR = _scaled(added_SEDR.cumsum(0) - added_SEDR, cost)
    log_SED = policy.logits(channels_SEDO, legal_SED, load_SEDR, table_SER).log_softmax(-1)
    finite_SED = log_SED.masked_fill(~legal_SED, 0.0)
    entropy_SE = -(finite_SED.exp() * finite_SED * legal_SED).sum(-1)
    return log_SED.gather(-1, action_SE[..., None])[..., 0], entropy_SE
