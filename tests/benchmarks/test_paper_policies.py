# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The published estimated MDP, in which single tables get a device each, and the policies of the paper's experiment."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from placement_tasks import ROOFLINE, make_cost, storage_problem

from dreamshard_planner.cost.problem import Cost
from dreamshard_planner.search.placing import HEURISTICS, place_by_heuristic
from paper.networks import PaperPolicy, PaperPolicyConfig, RecurrentPolicy, RecurrentPolicyConfig
from paper.placement_mdp import OBSERVATION_INDEX, EstimatedMDP, TaskBatch
from paper.placement_policy import AnyPolicy, Policy, PolicyConfig, greedy_plan, roll_out, score_rollout
from paper.placement_reinforce import ReinforceConfig, best_heuristic_ms, greedy_standing, train_policy

POLICIES = [(lambda seed=0: Policy(PolicyConfig(), seed), "score")]
POLICIES += [(lambda seed=0: PaperPolicy(PaperPolicyConfig(), seed), "score")]
POLICIES += [(lambda seed=0: RecurrentPolicy(RecurrentPolicyConfig(), seed), "score.6")]
"""Every policy network, and its last layer."""


def test_environment_matches_the_rating() -> None:
    costs = [make_cost(7, 3, groups=2), make_cost(4, 2), make_cost(5, 4, seed=3)]
    tasks = TaskBatch.collate(costs)
    environment = roll_out(Policy(PolicyConfig()), tasks, 3, torch.Generator().manual_seed(0)).environment
    assert (costs[0].single_ms_P[tasks.order_TS[0]].diff() <= 0).all()  # hardest first
    for task, cost in enumerate(costs):
        rated = cost.rate(environment.assignments(task))
        episodes, devices = slice(3 * task, 3 * task + 3), cost.problem.num_ranks
        predicted_ED = environment.device_ms_ED2[episodes, :devices].sum(-1)
        torch.testing.assert_close(predicted_ED, rated.device_ms_BD.float(), rtol=1e-4, atol=1e-5)
        assert environment.action_ES[episodes].max() < devices
        torch.testing.assert_close(environment.overall_ms()[episodes], rated.overall_ms_B.float())
    excess = EstimatedMDP(TaskBatch.collate([make_cost(5, 3)]), 1).observe().channels_EDO
    assert excess[..., OBSERVATION_INDEX["excess"]].tolist() == [[0.0, 0.0, 0.0]]


def test_memory_is_masked_when_acting_and_in_the_gradient() -> None:
    policy, cost = Policy(PolicyConfig()), Cost(storage_problem([4, 4, 4, 4], [8, 8]), ROOFLINE)
    rollout = roll_out(policy, TaskBatch.collate([cost]), 16, torch.Generator().manual_seed(0), record=True)
    assert cost.problem.fits(rollout.environment.assignments(0)).all()
    log_probability_SE, entropy_SE = score_rollout(policy, rollout)
    forced_SE = rollout.legal_SED.sum(-1) == 1
    assert forced_SE.any()
    assert log_probability_SE[forced_SE].abs().max() == 0 and entropy_SE[forced_SE].abs().max() == 0
    full = Cost(storage_problem([3, 3, 3], [4, 4]), ROOFLINE)
    assert roll_out(policy, TaskBatch.collate([full]), 4, torch.Generator()).environment.overall_ms().isinf().all()
    assert greedy_plan(policy, full) is None


def test_padding_does_not_change_a_task() -> None:
    small, large = make_cost(5, 2), make_cost(12, 6, seed=4)
    policy = Policy(PolicyConfig(), seed=2)
    torch.nn.init.normal_(policy.score.weight, generator=torch.Generator().manual_seed(0))
    alone = roll_out(policy, TaskBatch.collate([small]), 1).environment.assignments(0)
    beside = roll_out(policy, TaskBatch.collate([small, large]), 1).environment.assignments(0)
    assert torch.equal(alone, beside)


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


def test_standings_by_hand() -> None:
    cost = make_cost(4, 4)  # a device each: the heaviest table is the bottleneck
    ideal_ms = float(cost.single_ms_P.sum()) / 4
    total_ms = float(cost.rate(torch.arange(4)[None]).overall_ms_B[0])
    infeasible, mean_log = greedy_standing(Policy(PolicyConfig()), [cost, make_cost(4, 4, memory_bytes=1)])
    assert infeasible == 1 and mean_log == pytest.approx(math.log(total_ms / ideal_ms))
    cost = make_cost(6, 2)
    rated = [float(cost.rate(place_by_heuristic(cost.problem, rule)[None]).overall_ms_B[0]) for rule in HEURISTICS]
    assert best_heuristic_ms(cost) == pytest.approx(min(rated), rel=1e-6)
    assert best_heuristic_ms(Cost(storage_problem([3, 3, 3], [4, 4]), ROOFLINE)) == math.inf
