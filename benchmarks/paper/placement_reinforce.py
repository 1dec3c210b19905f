# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""REINFORCE on the estimated MDP: a batch baseline per task, an entropy term, no hardware.

Shapes: E episodes, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dreamshard_planner.policy.reinforce import advantages
from paper.placement_mdp import PlacementCost
from paper.placement_policy import AnyPolicy, roll_out, scored

EPISODES = 10
"""Sampled episodes of an update, all of one task; their mean is the baseline."""
INFEASIBLE_FACTOR = 1.5
"""An infeasible episode counts as this many times the task's worst feasible one."""


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Settings of a policy's training; published ones by default: ten iterations of ten updates."""

    updates: int = 100
    learning_rate: float = 5e-4
    """Initial rate of Adam; falls linearly to zero."""
    entropy_weight: float = 0.001
    seed: int = 0


def train_policy(policy: AnyPolicy, costs: Sequence[PlacementCost], config: ReinforceConfig) -> None:
    """Train ``policy`` in place on tasks drawn from ``costs``; the entropy's weight falls linearly to zero."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    for update in range(config.updates):
        cost = costs[int(torch.randint(len(costs), (1,), generator=generator))]
        remaining = 1 - update / config.updates
        reinforce_update(policy, optimizer, cost, config, generator, remaining, remaining)


def reinforce_update(
    policy: AnyPolicy,
    optimizer: torch.optim.Optimizer,
    cost: PlacementCost,
    config: ReinforceConfig,
    generator: torch.Generator,
    remaining: float,
    entropy_share: float = 1.0,
) -> None:
    """One step on sampled episodes of one task, at the ``remaining`` share of the rate."""
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate * remaining
    environment, *seen = roll_out(policy, cost, EPISODES, generator)
    advantage_E = advantages(environment.overall_ms(), INFEASIBLE_FACTOR)
    log_probability_SE, entropy_SE = scored(policy, cost, environment, *seen)
    entropy_weight = config.entropy_weight * entropy_share
    loss_E = -(log_probability_SE * advantage_E + entropy_weight * entropy_SE).mean(0)
    optimizer.zero_grad()
    loss_E.mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
