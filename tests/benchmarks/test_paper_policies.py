# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The published estimated MDP, in which single tables get a device each, and the policies of the paper's experiment."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from placement_tasks import make_cost

from paper.networks import PaperPolicy, PaperPolicyConfig, RecurrentPolicy, RecurrentPolicyConfig
from paper.placement_mdp import EstimatedMDP, TaskBatch
from paper.placement_policy import AnyPolicy, Policy, PolicyConfig, roll_out, score_rollout
from paper.placement_reinforce import ReinforceConfig, train_policy

POLICIES = [(lambda seed=0: Policy(PolicyConfig(), seed), "score")]
POLICIES += [(lambda seed=0: PaperPolicy(PaperPolicyConfig(), seed), "score")]
POLICIES += [(lambda seed=0: RecurrentPolicy(RecurrentPolicyConfig(), seed), "score.6")]
"""Every policy network, and its last layer."""


@pytest.mark.parametrize(("make", "last_layer"), POLICIES)
def test_sampling_and_scoring_agree(make: Callable[..., AnyPolicy], last_layer: str) -> None:
    """Scoring all steps at once gives the very distributions that actions were drawn from."""
    policy = make(seed=1)
    torch.nn.init.normal_(policy.get_submodule(last_layer).weight, generator=torch.Generator().manual_seed(0))
    tasks = TaskBatch.collate([make_cost(6, 3), make_cost(4, 2)])
    rollout = roll_out(policy, tasks, 2, torch.Generator().manual_seed(0), record=True)
    log_probability_SE, _ = score_rollout(policy, rollout)
    environment = EstimatedMDP(tasks, 2)
    representation = policy.represent(tasks.features_TSF)
    load = torch.zeros(4, 3, representation.shape[-1])
    scale = (tasks.device_mask_TD.sum(-1) / tasks.step_mask_TS.sum(-1))[environment.task_E][:, None, None]
    for step in range(tasks.num_steps):
        observation = environment.observe()
        shard = representation[:, step][environment.task_E]
        logits = policy.logits(observation.channels_EDO, observation.legal_ED, load * scale, shard)
        action = rollout.environment.action_ES[:, step]
        expected = logits.log_softmax(-1).gather(-1, action[:, None])[:, 0]
        torch.testing.assert_close(log_probability_SE[step], expected, rtol=1e-4, atol=1e-5)
        load[torch.arange(4), action] += shard * tasks.step_mask_TS[:, step][environment.task_E][:, None]
        environment.step(action)


@pytest.mark.parametrize("make", [make for make, _ in POLICIES])
def test_reinforce_lowers_the_cost(make: Callable[..., AnyPolicy]) -> None:
    costs = [make_cost(6 + task % 5, 2 + task % 2, seed=task) for task in range(8)]
    policy = make()
    if isinstance(policy, Policy):
        torch.nn.init.zeros_(policy.greediness)  # from a uniform policy
    policy.initialize(torch.cat([cost.problem.features_PF for cost in costs]))
    config = ReinforceConfig(updates=80, tasks_per_update=4, episodes_per_task=16, learning_rate=5e-3)
    statistics = train_policy(policy, costs, config)
    first, last = (sum(update.relative_cost for update in part) for part in (statistics[:10], statistics[-10:]))
    assert last < 0.97 * first
    assert all(update.infeasible_share == 0 and update.gradient_norm > 0 for update in statistics)
    assert statistics[-1].over_best_heuristic < statistics[0].over_best_heuristic
