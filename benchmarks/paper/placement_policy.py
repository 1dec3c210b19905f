# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Roll-outs of published policy networks, which choose the device that takes the next table.

One function scores, for sampling and for the gradient alike, under the same mask.

Shapes: X any leading dimensions (episodes, or steps x episodes), D devices, S shards, E episodes, T tasks,
A actions, O observation channels, R representation channels, F features.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.problem import Cost
from paper.placement_mdp import EstimatedMDP, TaskBatch

LOGIT_STEP = 1e-3
"""Greedy decoding compares logits after rounding to this step, so that ties always go to the lowest rank."""


class AnyPolicy(nn.Module, ABC):
    """A policy network: scores the devices for one shard from what an episode has placed so far."""

    config: Any

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


def drawn(logit_EA: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """An action of each episode, int64 [E]: by its probability, with ``generator``; the likeliest without."""
    if generator is None:
        return (logit_EA / LOGIT_STEP).round().argmax(-1)
    uniform_EA = torch.rand(logit_EA.shape, generator=generator).clamp_min(1e-9)
    return (logit_EA - (-uniform_EA.log()).log()).argmax(-1)  # Gumbel's trick


def scored(logit_SEA: Tensor, legal_SEA: Tensor, action_SE: Tensor) -> tuple[Tensor, Tensor]:
    """Log probability of each action taken, and entropy of each choice, both [S, E], under gradient."""
    log_SEA = logit_SEA.log_softmax(-1)
    finite_SEA = log_SEA.masked_fill(~legal_SEA, 0.0)
    entropy_SE = -(finite_SEA.exp() * finite_SEA * legal_SEA).sum(-1)
    return log_SEA.gather(-1, action_SE[..., None])[..., 0], entropy_SE


@dataclass(frozen=True)
class Rollout:
    """Finished episodes with what the policy saw, ready to be scored again under gradient."""

    environment: EstimatedMDP
    channels_SEDO: Tensor | None
    legal_SED: Tensor | None


def _load_scale(tasks: TaskBatch) -> Tensor:
    """Devices over shards of each task, [T]: keeps summed representations of one order."""
    return tasks.device_mask_TD.sum(-1) / tasks.step_mask_TS.sum(-1).clamp_min(1)


@torch.no_grad()
def roll_out(
    policy: AnyPolicy,
    tasks: TaskBatch,
    episodes_per_task: int,
    generator: torch.Generator | None = None,
    record: bool = False,
    greedy_first: bool = False,
) -> Rollout:
    """Play episodes: sampled with ``generator``, greedy without.

    ``record`` keeps what the policy saw; with ``greedy_first`` the first episode of each task is greedy in any case.
    """
    environment = EstimatedMDP(tasks, episodes_per_task)
    task_E, episode_E = environment.task_E, torch.arange(environment.num_episodes)
    representation_TSR = policy.represent(tasks.features_TSF)
    load_EDR = torch.zeros(*environment.bytes_ED.shape, representation_TSR.shape[-1])
    scale_E11 = _load_scale(tasks)[task_E][:, None, None]
    step_mask_TS = tasks.step_mask_TS
    channels, legal = [], []
    for step in range(tasks.num_steps):
        observation = environment.observe()
        shard_ER = representation_TSR[:, step][task_E]
        logit_ED = policy.logits(observation.channels_EDO, observation.legal_ED, load_EDR * scale_E11, shard_ER)
        action_E = drawn(logit_ED, generator)
        if greedy_first:
            action_E = torch.where(episode_E % episodes_per_task == 0, drawn(logit_ED), action_E)
        load_EDR[episode_E, action_E] += shard_ER * step_mask_TS[:, step][task_E][:, None]
        environment.step(action_E)
        if record:
            channels.append(observation.channels_EDO)
            legal.append(observation.legal_ED)
    return Rollout(environment, torch.stack(channels) if record else None, torch.stack(legal) if record else None)


def greedy_plan(policy: AnyPolicy, cost: Cost) -> Tensor | None:
    """One greedy roll-out, [S]; None where it dead-ends."""
    return roll_out(policy, TaskBatch.collate([cost]), 1).environment.plans(0)[0]


def score_rollout(policy: AnyPolicy, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """See :func:`scored`. All steps at once: the load of a device before a step is an exclusive cumulative sum over the
    actions."""
    if rollout.channels_SEDO is None or rollout.legal_SED is None:
        raise ValueError("what the policy saw was not kept: roll out with record=True")
    environment = rollout.environment
    tasks, task_E = environment.tasks, environment.task_E
    shard_SER = (policy.represent(tasks.features_TSF) * tasks.step_mask_TS[..., None]).transpose(0, 1)[:, task_E]
    action_SE = environment.action_ES.T
    chosen_SED = nn.functional.one_hot(action_SE, environment.bytes_ED.shape[1]).to(shard_SER.dtype)
    added_SEDR = chosen_SED[..., None] * shard_SER[:, :, None]
    load_SEDR = (added_SEDR.cumsum(0) - added_SEDR) * _load_scale(tasks)[task_E][:, None, None]
    logit_SED = policy.logits(rollout.channels_SEDO, rollout.legal_SED, load_SEDR, shard_SER)
    return scored(logit_SED, rollout.legal_SED, action_SE)
