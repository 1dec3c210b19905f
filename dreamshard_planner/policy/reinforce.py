# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""REINFORCE on the estimated MDP: a batch baseline per task, an entropy bonus, no hardware.

Shapes: E episodes of one task, S steps, T tables, A actions, N types of sharding.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dreamshard_planner.policy.mdp import EstimatedMDP
from dreamshard_planner.policy.network import SWEEPS, Policy, Seen, opening_types, roll_out
from dreamshard_planner.policy.task import TYPES, ShardingTask

TRAINING_SWEEPS = SWEEPS[::3]
"""Sweeps of an episode of the training: two of a roll-out's, which rank first sweeps nearly as all do."""
DEAREST = 10.0
"""Relative cost of an infeasible episode in :class:`UpdateStatistics` and :func:`standing`."""


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Settings of a policy's training."""

    updates: int = 150
    """Gradient steps."""
    tasks_per_update: int = 3
    """Tasks drawn for one step."""
    episodes_per_task: int = 16
    """Sampled episodes per task; their mean is the baseline."""
    all_types_share: float = 0.5
    """Share of the drawn tasks that may use all types of sharding in the first sweep; others some, at random."""
    learning_rate: float = 2e-3
    """Initial rate of Adam; falls linearly to zero."""
    entropy_weight: float = 0.003
    """Weight of the entropy bonus; falls linearly to zero."""
    infeasible_factor: float = 1.5
    """An infeasible episode counts as this many times the task's worst feasible one."""
    looks: int = 5
    """Times that greedy roll-outs on some of the training tasks are rated, besides the start: the best policy stays.
    0 keeps the last one."""
    look_tasks: int = 12
    """Training tasks that a look rolls out."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.updates, self.tasks_per_update) < 1 or self.episodes_per_task < 2 or self.learning_rate <= 0:
            raise ValueError(f"updates, tasks and rate must be positive, episodes at least 2, got {asdict(self)}")


FROM_SCRATCH = ReinforceConfig(updates=800, learning_rate=6e-3, entropy_weight=0.01)
"""Settings for an untrained policy: four minutes of two cores."""


@dataclass(frozen=True)
class UpdateStatistics:
    """Figures of one update, means over its tasks."""

    relative_cost: float
    """Mean cost over the level height (:mod:`dreamshard_planner.policy.task`), at most :data:`DEAREST` per episode."""
    entropy: float
    """Mean over the choices, nats."""
    infeasible_share: float


def advantages(cost_E: Tensor, infeasible_factor: float) -> Tensor:
    """Return standardised advantages [E] of a task's episodes: how much cheaper than their mean each is.

    Infeasible episodes (infinite cost) count as ``infeasible_factor`` times the worst feasible one; a task
    without any feasible episode teaches nothing.
    """
    finite_E = cost_E.isfinite()
    worst = cost_E.masked_fill(~finite_E, 0.0).max()
    cost_E = torch.where(finite_E, cost_E, worst * infeasible_factor)
    return (cost_E.mean() - cost_E) / (cost_E.std() + 1e-6 * worst + 1e-12)


def _sampled(
    policy: Policy, task: ShardingTask, episodes: int, generator: torch.Generator, types_ETN: np.ndarray | None
) -> tuple[EstimatedMDP, Seen, Tensor]:
    """Play episodes; return them, all that the policy saw, padded with illegal actions, and its actions, [S, E]."""
    steps: list[tuple[Seen, Tensor]] = []
    environment = roll_out(
        policy, task, episodes, generator, types_ETN, TRAINING_SWEEPS, on_step=lambda *step: steps.append(step)
    )

    def padded(name: str) -> Tensor:
        values = [getattr(seen, name).transpose(0, 1) for seen, _ in steps]
        return nn.utils.rnn.pad_sequence(values, batch_first=True).transpose(1, 2)

    every = Seen(padded("excess_XAY"), padded("features_XAF"), padded("legal_XA"))
    return environment, every, torch.stack([action_E for _, action_E in steps])


def train_policy(
    policy: Policy,
    tasks: Sequence[ShardingTask],
    config: ReinforceConfig,
    on_update: Callable[[int, UpdateStatistics], None] | None = None,
) -> list[UpdateStatistics]:
    """Train ``policy`` in place; return statistics per update.

    Sampled episodes may get cheaper while greedy ones, from which planning starts, get dearer: hence the looks.
    """
    generator, draws = torch.Generator().manual_seed(config.seed), random.Random(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    every = -(-config.updates // config.looks) if config.looks else config.updates + 1
    looked_at = tasks[:: -(-len(tasks) // config.look_tasks)]
    best = (standing(policy, looked_at), copy.deepcopy(policy.state_dict())) if config.looks else None
    statistics = []
    for update in range(config.updates):
        remaining = 1 - update / config.updates
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * remaining
        optimizer.zero_grad()
        chosen = draws.sample(list(tasks), min(config.tasks_per_update, len(tasks)))
        weight = config.entropy_weight * remaining
        told = [_backward(policy, task, _types(draws, task, config), config, weight, generator) for task in chosen]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        statistics.append(UpdateStatistics(*(sum(values) / len(told) for values in zip(*told, strict=True))))
        if best and ((update + 1) % every == 0 or update + 1 == config.updates):
            stands = standing(policy, looked_at)
            best = (stands, copy.deepcopy(policy.state_dict())) if stands < best[0] else best
        if on_update is not None:
            on_update(update, statistics[-1])
    if best:
        policy.load_state_dict(best[1])
    return statistics


def _types(draws: random.Random, task: ShardingTask, config: ReinforceConfig) -> np.ndarray | None:
    """Return types that the first sweep of all episodes of a task may use, bool [E, T, N]; None for all of them."""
    if draws.random() < config.all_types_share:
        return None
    while not any(types := [draws.random() < 0.5 for _ in TYPES]):
        pass
    return np.tile(types, (config.episodes_per_task, task.num_tables, 1))


def _backward(
    policy: Policy,
    task: ShardingTask,
    types_ETN: np.ndarray | None,
    config: ReinforceConfig,
    entropy_weight: float,
    generator: torch.Generator,
) -> tuple[float, float, float]:
    """Add one task's gradient; return relative cost, entropy and infeasible share, as in :class:`UpdateStatistics`."""
    environment, seen, action_SE = _sampled(policy, task, config.episodes_per_task, generator, types_ETN)
    cost_E = torch.from_numpy(environment.relative_cost()).float()
    advantage_E = advantages(cost_E, config.infeasible_factor)
    log_SEA = policy.logits(seen).log_softmax(-1)
    log_probability_SE = log_SEA.gather(-1, action_SE[..., None])[..., 0]
    finite_SEA = log_SEA.masked_fill(~seen.legal_XA, 0.0)
    entropy_SE = -(finite_SEA.exp() * finite_SEA * seen.legal_XA).sum(-1)
    # Each episode weighs the same, whatever the number of its tables.
    loss = -(log_probability_SE * advantage_E + entropy_weight * entropy_SE).mean()
    (loss / config.tasks_per_update).backward()
    relative_cost, infeasible_share = cost_E.clamp_max(DEAREST).mean(), cost_E.isinf().float().mean()
    return float(relative_cost), float(entropy_SE.detach().mean()), float(infeasible_share)


@torch.no_grad()
def standing(policy: Policy, tasks: Sequence[ShardingTask]) -> float:
    """Return the mean logarithm of the relative cost of greedy roll-outs; less is better.

    One half are roll-outs of all types, the other the best of :data:`~dreamshard_planner.policy.network.OPENINGS`.
    Infeasible ones count as :data:`DEAREST`.
    """
    logs = []
    for task in tasks:
        types_ETN = opening_types(task.num_tables)
        log_E = np.log(roll_out(policy, task, len(types_ETN), types_ETN=types_ETN).relative_cost().clip(max=DEAREST))
        logs.append(float(log_E[0] + log_E.min()) / 2)
    return sum(logs) / len(logs)
