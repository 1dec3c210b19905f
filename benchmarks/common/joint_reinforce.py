# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How the joint policy that ships is trained: REINFORCE on the joint estimated MDP, a batch baseline per task, an
entropy term, no hardware.

Shapes: E episodes of one task, S steps, N types of sharding.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from dreamshard_planner.policy.joint_environment import TYPES, JointMDP, JointTask
from dreamshard_planner.policy.joint_network import JointPolicy, Seen, joint_roll_out, subset_types
from dreamshard_planner.policy.network import scored
from dreamshard_planner.policy.reinforce import advantages, copied
from dreamshard_planner.support.files import write_whole

FORMAT = "dreamshard_planner.joint_policy/1"


@dataclass(frozen=True, kw_only=True)
class JointReinforceConfig:
    """How a joint policy is trained."""

    updates: int = 800
    """Gradient steps."""
    tasks_per_update: int = 3
    episodes_per_task: int = 16
    """Sampled episodes per task; their mean is the baseline."""
    all_types_share: float = 0.5
    """Of the tasks of an update, how many may use all types of sharding; the others may use some, at random."""
    learning_rate: float = 6e-3
    """Initial rate of Adam; falls linearly to zero."""
    entropy_weight: float = 0.01
    """Weight of the entropy bonus; falls linearly to zero."""
    infeasible_factor: float = 1.5
    """An infeasible episode counts as this many times the task's worst feasible one."""
    looks: int = 6
    """Times that greedy roll-outs on the validation tasks are looked at, besides the start: the policy that did best
    stays."""
    seed: int = 0


@dataclass(frozen=True)
class JointUpdate:
    """What one update looked like."""

    spread: float
    """Standard deviation of the episodes' cost over their mean, mean over the tasks."""
    entropy: float
    """Mean over the choices, nats."""
    infeasible_share: float


@dataclass(frozen=True)
class Rollout:
    """Finished episodes, what the policy saw at each step, and what it did."""

    environment: JointMDP
    seen: list[Seen]
    action_SE: Tensor

    @classmethod
    def of(
        cls,
        policy: JointPolicy,
        task: JointTask,
        episodes: int,
        generator: torch.Generator,
        types_EN: Tensor | None = None,
    ) -> Rollout:
        """Play sampled episodes."""
        seen: list[Seen] = []
        taken: list[Tensor] = []

        def keep(step: Seen, action_E: Tensor) -> None:
            seen.append(step)
            taken.append(action_E)

        environment = joint_roll_out(policy, task, episodes, generator, types_EN, on_step=keep)
        return cls(environment, seen, torch.stack(taken))

    def scored_by(self, policy: JointPolicy) -> tuple[Tensor, Tensor]:
        """See :func:`~dreamshard_planner.policy.network.scored`; steps are padded with illegal actions."""
        most = max(seen.legal_XA.shape[1] for seen in self.seen)

        def padded(name: str) -> Tensor:
            values = [getattr(seen, name) for seen in self.seen]
            trailing = (0, 0) * (values[0].dim() - 2)
            return torch.stack([nn.functional.pad(part, (*trailing, 0, most - part.shape[1])) for part in values])

        every = Seen(padded("excess_XAY"), padded("features_XAF"), padded("legal_XA"))
        return scored(policy.logits(every), every.legal_XA, self.action_SE)


def train_joint_policy(
    policy: JointPolicy,
    tasks: Sequence[JointTask],
    validation: Sequence[JointTask],
    config: JointReinforceConfig,
    on_update: Callable[[int, JointUpdate], None] | None = None,
    on_look: Callable[[int, float], None] | None = None,
) -> float:
    """Train ``policy`` in place; returns the :func:`joint_standing` of what stays."""
    generator, draws = torch.Generator().manual_seed(config.seed), random.Random(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    every = -(-config.updates // config.looks)
    best = joint_standing(policy, validation), copied(policy)
    if on_look is not None:
        on_look(0, best[0])
    for update in range(config.updates):
        remaining = 1 - update / config.updates
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * remaining
        optimizer.zero_grad()
        chosen = draws.sample(list(tasks), min(config.tasks_per_update, len(tasks)))
        seen = [
            _backward(policy, task, _random_types(draws, config), config, config.entropy_weight * remaining, generator)
            for task in chosen
        ]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if on_update is not None:
            spread, entropy, infeasible = (sum(values) / len(seen) for values in zip(*seen, strict=True))
            on_update(update, JointUpdate(spread, entropy, infeasible))
        if (update + 1) % every == 0 or update + 1 == config.updates:
            standing = joint_standing(policy, validation)
            best = (standing, copied(policy)) if standing < best[0] else best
            if on_look is not None:
                on_look(update + 1, standing)
    policy.load_state_dict(best[1])
    return best[0]


def _random_types(draws: random.Random, config: JointReinforceConfig) -> Tensor | None:
    """Types that all episodes of a task may use, bool [E, N]; None for all of them."""
    if draws.random() < config.all_types_share:
        return None
    while True:
        types = [draws.random() < 0.5 for _ in TYPES]
        if any(types):
            return torch.tensor([types]).expand(config.episodes_per_task, -1)


def _backward(
    policy: JointPolicy,
    task: JointTask,
    types_EN: Tensor | None,
    config: JointReinforceConfig,
    entropy_weight: float,
    generator: torch.Generator,
) -> tuple[float, float, float]:
    """Add one task's gradient; returns spread, entropy and infeasible share, as in :class:`JointUpdate`."""
    rollout = Rollout.of(policy, task, config.episodes_per_task, generator, types_EN)
    cost_E = rollout.environment.relative_cost().float()
    finite_E = cost_E[cost_E.isfinite()]
    if not len(finite_E):
        return 0.0, 0.0, 1.0
    advantage_E = advantages(cost_E, config.episodes_per_task, config.infeasible_factor)
    log_probability_SE, entropy_SE = rollout.scored_by(policy)
    # Each episode weighs the same, whatever the number of its tables.
    loss = -(log_probability_SE * advantage_E + entropy_weight * entropy_SE).mean()
    (loss / config.tasks_per_update).backward()
    spread = float(finite_E.std() / finite_E.mean()) if len(finite_E) > 1 else 0.0
    return spread, float(entropy_SE.detach().mean()), 1 - len(finite_E) / len(cost_E)


@torch.no_grad()
def joint_standing(policy: JointPolicy, tasks: Sequence[JointTask]) -> float:
    """Mean logarithm of the relative cost of greedy roll-outs, half of those that may use all types, half of the best
    of all subsets: less is better. Infeasible ones count as ten times the level height."""
    types_EN, logs = subset_types(), []
    for task in tasks:
        cost_E = joint_roll_out(policy, task, len(types_EN), types_EN=types_EN).relative_cost().clamp_max(10.0)
        logs.append((math.log(float(cost_E[0])) + math.log(float(cost_E.min()))) / 2)
    return sum(logs) / len(logs)


def save_joint_policy(policy: JointPolicy, path: str | Path, description: Mapping[str, Any]) -> None:
    """Write weights and how they came about as safetensors; an existing file is replaced as a whole.

    Raises:
        FileError: where that fails.
    """
    header = {"format": FORMAT, "description": json.dumps({**description, "config": asdict(policy.config)})}
    tensors = {name: tensor.detach().contiguous() for name, tensor in policy.state_dict().items()}
    write_whole(path, serialize(tensors, metadata=header), keep=True)
