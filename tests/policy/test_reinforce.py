# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Policies and their training, on tiny tasks with known answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from placement_tasks import ROOFLINE, make_cost, storage_problem

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.policy.environment import EstimatedMDP, TaskBatch
from dreamshard_planner.policy.network import AnyPolicy, Policy, PolicyConfig, roll_out, score_rollout
from dreamshard_planner.policy.reinforce import (
    ReinforceConfig,
    advantages,
    best_heuristic_ms,
    greedy_standing,
    train_policy,
)
from dreamshard_planner.search.heuristics import HEURISTICS, place_by_heuristic
from paper.networks import PaperPolicy, PaperPolicyConfig, RecurrentPolicy, RecurrentPolicyConfig

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


def test_advantages_by_hand() -> None:
    cost_E = torch.tensor([1.0, 3.0, 2.0, math.inf])
    advantage_E = advantages(cost_E, 2, infeasible_factor=1.5)
    # Second task: the infeasible episode counts 1.5 x 2 = 3; standardised pairs are +-1/sqrt(2).
    expected = [2**-0.5, -(2**-0.5), 2**-0.5, -(2**-0.5)]
    assert advantage_E.tolist() == pytest.approx(expected, rel=1e-4)
    assert advantages(torch.tensor([math.inf, math.inf]), 2, 1.5).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [make for make, _ in POLICIES])
def test_reinforce_lowers_the_cost(make) -> None:
    costs = [make_cost(6 + task % 5, 2 + task % 2, seed=task) for task in range(8)]
    policy = make()
    if isinstance(policy, Policy):
        torch.nn.init.zeros_(policy.greediness)  # from a uniform policy
    policy.initialize(torch.cat([cost.problem.features_PF for cost in costs]))
    config = ReinforceConfig(updates=80, tasks_per_update=4, episodes_per_task=16, learning_rate=5e-3)
    statistics = train_policy(policy, costs, config)
    first = sum(update.relative_cost for update in statistics[:10]) / 10
    last = sum(update.relative_cost for update in statistics[-10:]) / 10
    assert last < 0.97 * first
    assert all(update.infeasible_share == 0 and update.gradient_norm > 0 for update in statistics)
    assert statistics[-1].over_best_heuristic < statistics[0].over_best_heuristic


def test_the_policy_that_did_best_stays() -> None:
    """Steps so large that every update spoils the start, which is greedy on cost: greedy roll-outs end where they
    began, unless nobody looked."""
    costs = [make_cost(8 + task, 3, seed=task) for task in range(6)]
    harmful = ReinforceConfig(updates=12, tasks_per_update=2, episodes_per_task=4, learning_rate=10.0, looks=4)
    standings = {}
    for looks in (0, 4):
        policy = Policy(PolicyConfig())
        before = greedy_standing(policy, costs)
        train_policy(policy, costs, replace(harmful, looks=looks))
        standings[looks] = greedy_standing(policy, costs)
    assert standings[4] <= before < standings[0]


def test_standing_by_hand() -> None:
    cost = make_cost(4, 4)  # a device each: the heaviest table is the bottleneck
    policy = Policy(PolicyConfig())
    ideal_ms = float(cost.single_ms_P.sum()) / 4
    total_ms = float(cost.rate(torch.arange(4)[None]).overall_ms_B[0])
    infeasible, mean_log = greedy_standing(policy, [cost, make_cost(4, 4, memory_bytes=1)])
    assert infeasible == 1 and mean_log == pytest.approx(math.log(total_ms / ideal_ms))


def test_gap_to_the_best_rule_by_hand() -> None:
    cost = make_cost(6, 2)
    rated = [float(cost.rate(place_by_heuristic(cost.problem, rule)[None]).overall_ms_B[0]) for rule in HEURISTICS]
    assert best_heuristic_ms(cost) == pytest.approx(min(rated), rel=1e-6)
    assert best_heuristic_ms(Cost(storage_problem([3, 3, 3], [4, 4]), ROOFLINE)) == math.inf
    only = Cost(storage_problem([3, 3], [6, 1]), ROOFLINE)  # one placement alone fits
    told = train_policy(Policy(PolicyConfig()), [only], ReinforceConfig(updates=1, episodes_per_task=3))
    assert told[0].over_best_heuristic == pytest.approx(1.0)


def test_training_is_deterministic() -> None:
    costs = [make_cost(6, 2), make_cost(7, 3)]
    runs = []
    for _ in range(2):
        policy = Policy(PolicyConfig())
        train_policy(policy, costs, ReinforceConfig(updates=3, tasks_per_update=2, episodes_per_task=4))
        runs.append(torch.cat([parameter.flatten() for parameter in policy.parameters()]))
    assert torch.equal(runs[0], runs[1])
