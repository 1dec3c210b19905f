# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training of the policy, on tiny tasks."""

import math
from dataclasses import replace

import pytest
import torch
from sharding_tasks import sharding_cost

from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.policy.reinforce import DEAREST, ReinforceConfig, Rollout, advantages, standing, train_policy
from dreamshard_planner.policy.task import ShardingTask
from dreamshard_planner.search.starts import OptionTotals

TRAINING = ReinforceConfig(updates=4, tasks_per_update=2, episodes_per_task=6, looks=2, learning_rate=6e-3)


def tasks_of(*seeds: int, memory: int = 1000, latency_ms: float = 0.0) -> list[ShardingTask]:
    costs = [sharding_cost(5, seed, memory, latency_ms) for seed in seeds]
    return [ShardingTask(cost, OptionTotals(cost)) for cost in costs]


def test_advantages_by_hand() -> None:
    assert advantages(torch.tensor([1.0, 3.0]), 1.5).tolist() == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    # The infeasible episode counts 1.5 x 2 = 3.
    assert advantages(torch.tensor([2.0, math.inf]), 1.5).tolist() == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    assert advantages(torch.tensor([math.inf, math.inf]), 1.5).tolist() == [0.0, 0.0]


def test_what_was_not_legal_was_not_taken_and_teaches_nothing() -> None:
    """Scoring all steps at once gives the very distributions that actions were drawn from."""
    policy = Policy(PolicyConfig())
    (task,) = tasks_of(0, memory=420)
    rollout = Rollout.of(policy, task, 16, torch.Generator().manual_seed(0))
    log_probability_SE, entropy_SE = rollout.scored_by(policy)
    assert log_probability_SE.isfinite().all()
    for step, seen in enumerate(rollout.seen):
        action_E1 = rollout.action_SE[step][:, None]
        assert seen.legal_XA.gather(1, action_E1).all()
        expected_E = policy.logits(seen).log_softmax(-1).gather(1, action_E1)[:, 0]
        torch.testing.assert_close(log_probability_SE[step], expected_E)
        forced_E = seen.legal_XA.sum(-1) == 1
        assert log_probability_SE[step][forced_E].abs().sum() == 0 and entropy_SE[step][forced_E].abs().sum() == 0


def test_training_keeps_what_did_best_and_repeats() -> None:
    """Every look rates the policy; the last one stays only if nobody looks."""
    tasks, wild = tasks_of(0, 1, 2, 3), replace(TRAINING, learning_rate=10.0)
    policies = []
    for config in (TRAINING, TRAINING, wild, replace(wild, looks=0)):
        policy = Policy(PolicyConfig(hidden=8))
        before = standing(policy, tasks)
        told = train_policy(policy, tasks, config)
        assert standing(policy, tasks) <= before or not config.looks
        assert len(told) == 4 and all(update.infeasible_share == 0 for update in told)
        policies.append(policy)
    assert all(torch.equal(*pair) for pair in zip(policies[0].parameters(), policies[1].parameters(), strict=True))
    assert not torch.equal(policies[3].log_weights, Policy(PolicyConfig(hidden=8)).log_weights)


def test_training_lowers_the_cost() -> None:
    """From a policy that ignores cost. Collectives start slowly, so later sweeps keep to the first sweep's types."""
    policy, tasks = Policy(PolicyConfig()), tasks_of(*range(6), latency_ms=2.0)
    torch.nn.init.constant_(policy.log_greediness, -20.0)
    before = standing(policy, tasks)
    told = train_policy(policy, tasks, replace(TRAINING, updates=40, episodes_per_task=12, learning_rate=2e-2))
    assert standing(policy, tasks) < before
    first, last = (sum(update.relative_cost for update in part) for part in (told[:8], told[-8:]))
    assert last < first


def test_tasks_without_a_feasible_episode_teach_nothing() -> None:
    policy = Policy(PolicyConfig(hidden=8))
    tasks = tasks_of(0, memory=60)
    before = [parameter.clone() for parameter in policy.parameters()]
    config = replace(TRAINING, updates=1, tasks_per_update=1, entropy_weight=0.0, looks=0)
    (told,) = train_policy(policy, tasks, config)
    assert told.infeasible_share == 1 and told.relative_cost == DEAREST
    assert standing(policy, tasks) == pytest.approx(math.log(DEAREST))
    assert all(torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True))
    with pytest.raises(ValueError, match="episodes at least 2"):
        replace(TRAINING, episodes_per_task=1)
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        PolicyConfig(hidden=0)
