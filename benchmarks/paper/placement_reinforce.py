# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""REINFORCE on the estimated MDP: a batch baseline per task, an entropy term, no hardware.

Shapes: T tasks, E episodes, K episodes per task, S steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Cost
from paper.placement_mdp import TaskBatch
from paper.placement_policy import AnyPolicy, roll_out, score_rollout


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Settings of a policy's training."""

    updates: int = 500
    """Gradient steps."""
    tasks_per_update: int = 6
    """Tasks drawn for one step; they are played side by side."""
    episodes_per_task: int = 12
    """Sampled episodes per task; their mean is the baseline."""
    learning_rate: float = 3e-3
    """Initial rate of Adam; falls linearly to zero."""
    entropy_weight: float = 0.003
    """Weight of the entropy bonus; falls linearly to zero."""
    infeasible_factor: float = 1.5
    """An infeasible episode counts as this many times the task's worst feasible one."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.updates, self.tasks_per_update) < 1 or self.episodes_per_task < 2 or self.learning_rate <= 0:
            raise ValueError(f"updates, tasks and rate must be positive, episodes at least 2, got {asdict(self)}")


def advantages(cost_E: Tensor, episodes_per_task: int, infeasible_factor: float) -> Tensor:
    """Standardised advantages [E] of episodes: how much cheaper than the other episodes of the same task.

    Infeasible episodes (infinite cost) count as ``infeasible_factor`` times the worst feasible one; a task
    without any feasible episode teaches nothing.
    """
    cost_TK = cost_E.view(-1, episodes_per_task)
    finite_TK = cost_TK.isfinite()
    worst_T1 = cost_TK.masked_fill(~finite_TK, 0.0).amax(-1, keepdim=True)
    cost_TK = torch.where(finite_TK, cost_TK, worst_T1 * infeasible_factor)
    centred_TK = cost_TK.mean(-1, keepdim=True) - cost_TK
    return (centred_TK / (cost_TK.std(-1, keepdim=True) + 1e-6 * worst_T1 + 1e-12)).flatten()


def train_policy(policy: AnyPolicy, costs: Sequence[Cost], config: ReinforceConfig) -> None:
    """Train ``policy`` in place on tasks drawn from ``costs``."""
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    # Tasks of similar size share an update, so that padding stays cheap.
    by_size = sorted(costs, key=lambda cost: cost.problem.num_parts)
    tasks_per_update = min(config.tasks_per_update, len(costs))
    for update in range(config.updates):
        remaining = 1 - update / config.updates
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * remaining
        start = int(torch.randint(len(costs) - tasks_per_update + 1, (1,), generator=generator))
        batch = TaskBatch.collate(by_size[start : start + tasks_per_update])
        reinforce_update(policy, optimizer, batch, config, config.entropy_weight * remaining, generator)


def reinforce_update(
    policy: AnyPolicy,
    optimizer: torch.optim.Optimizer,
    tasks: TaskBatch,
    config: ReinforceConfig,
    entropy_weight: float,
    generator: torch.Generator,
) -> None:
    """One REINFORCE step on all steps of all episodes of ``tasks``."""
    rollout = roll_out(policy, tasks, config.episodes_per_task, generator, record=True)
    environment = rollout.environment
    advantage_E = advantages(environment.overall_ms(), config.episodes_per_task, config.infeasible_factor)
    log_probability_SE, entropy_SE = score_rollout(policy, rollout)
    step_mask_SE = tasks.step_mask_TS.T[:, environment.task_E]
    # Each episode weighs the same, whatever the number of its shards.
    weight_SE = step_mask_SE / step_mask_SE.sum(0).clamp_min(1)
    loss_E = -((log_probability_SE * advantage_E + entropy_weight * entropy_SE) * weight_SE).sum(0)
    optimizer.zero_grad()
    loss_E.mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
