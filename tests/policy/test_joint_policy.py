# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The joint estimated MDP, its policy, and their training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sharding_tasks import RANKS, sharding_cost

from common.joint_reinforce import (
    JointReinforceConfig,
    Rollout,
    joint_standing,
    save_joint_policy,
    train_joint_policy,
)
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.policy.joint_environment import RULES, TYPES, JointMDP, JointTask
from dreamshard_planner.policy.joint_network import (
    SUBSETS,
    JointPolicy,
    JointPolicyConfig,
    joint_roll_out,
    joint_starts,
    shipped_joint_policy,
    subset_types,
)
from dreamshard_planner.search.effort import SearchConfig
from dreamshard_planner.search.search import search
from dreamshard_planner.search.starts import JointOptions, level_starts

TRAINING = JointReinforceConfig(updates=4, tasks_per_update=2, episodes_per_task=6, looks=2)


def task_of(cost: Cost) -> JointTask:
    return JointTask(cost, JointOptions(cost))


def starts_of(cost: Cost, policy: JointPolicy) -> list[Sharding]:
    asked = JointOptions(cost)
    return joint_starts(cost, policy, asked, level_starts(cost, asked))


def rolled_out(cost: Cost, episodes: int = 8, seed: int = 0, types_EN: torch.Tensor | None = None) -> JointMDP:
    generator, policy = torch.Generator().manual_seed(seed), JointPolicy(JointPolicyConfig())
    torch.nn.init.zeros_(policy.log_greediness)  # choices that differ
    return joint_roll_out(policy, task_of(cost), episodes, generator, types_EN)


@pytest.mark.parametrize("seed", range(4))
def test_running_sums_are_the_rating(seed: int) -> None:
    cost = sharding_cost(6, seed, latency_ms=0.05)
    environment = rolled_out(cost)
    plans = environment.shardings()
    rated = torch.tensor([cost.overall_ms(plan) for plan in plans])
    predicted = environment.relative_cost() * environment.task.level_ms
    torch.testing.assert_close(predicted, rated.double(), rtol=1e-6, atol=0)
    assert len(set(plans)) > 1


@pytest.mark.parametrize("memory", [420, 600])
def test_plans_keep_within_memory(memory: int) -> None:
    cost = sharding_cost(8, memory=memory)
    plans = [plan for plan in rolled_out(cost, 16).shardings() if plan is not None]
    assert plans
    assert all(bool(cost.problem.fits(plan)) for plan in plans)


def test_dead_ends_are_infeasible_not_crashes() -> None:
    cost = sharding_cost(8, memory=60)
    environment = rolled_out(cost, 4)
    assert not environment.alive_E.any()
    assert environment.relative_cost().isinf().all()
    assert environment.shardings() == [None] * 4
    assert starts_of(cost, JointPolicy(JointPolicyConfig())) == []


def test_episodes_use_the_types_that_they_may() -> None:
    cost = sharding_cost(6)
    plans = rolled_out(cost, len(SUBSETS), types_EN=subset_types()).shardings()
    for plan, subset in zip(plans, SUBSETS, strict=True):
        used = {options[at].sharding_type for options, at in zip(cost.problem.tables, plan.options, strict=True)}
        assert used <= set(subset)


def test_given_options_are_laid_down_anew() -> None:
    cost = sharding_cost(6)
    options = (0, 1, 2, 3, 4, 0)
    option_ET = torch.tensor([options, (-1,) * 6])
    environment = joint_roll_out(JointPolicy(JointPolicyConfig()), task_of(cost), 2, option_ET=option_ET)
    assert environment.shardings()[0].options == options
    assert environment.shardings()[1].options != options


def test_units_of_an_option_lie_on_ranks_of_their_own() -> None:
    cost = sharding_cost(6)
    columns = torch.tensor([[kind == "column_wise" for kind in TYPES]])
    (plan,) = rolled_out(cost, 1, types_EN=columns).shardings()
    assert all(len(set(places)) == 2 for places in plan.positions)


def test_pinned_units_stay() -> None:
    cost = sharding_cost(4)
    options = cost.problem.tables[0]
    pinned = (replace(options[1], pinned=(3, 1)), replace(options[2], pinned=(1,)))
    tables = (pinned, *cost.problem.tables[1:])
    fixed = Cost(replace(cost.problem, tables=tables), cost.compute, cost.latent_PH)
    plans = rolled_out(fixed).shardings()
    assert {plan.positions[0] for plan in plans} <= {(3, 1), (1,)}


def test_tables_come_dearest_first() -> None:
    task = task_of(sharding_cost(6))
    levels = [task.actions(step).level for step in range(6)]
    assert levels == sorted(levels, reverse=True)
    assert sum(levels) == pytest.approx(1.0)
    assert task.left_T[0] == 1.0


def test_a_table_with_more_slices_than_ranks_is_left_to_others() -> None:
    cost = sharding_cost(2)
    columns = cost.problem.tables[0][1]
    many = replace(columns, units=columns.units * RANKS)
    sliced = Cost(replace(cost.problem, tables=((many,), cost.problem.tables[1])), cost.compute, cost.latent_PH)
    assert starts_of(sliced, JointPolicy(JointPolicyConfig())) == []


def test_an_untrained_policy_evens_out() -> None:
    """Equal tables that can only be whole: as many on each rank."""
    cost = sharding_cost(1)
    whole = cost.problem.tables[0][:1]
    problem = replace(cost.problem, tables=(whole,) * (2 * RANKS), names=("t",) * 2 * RANKS)
    same = Cost(problem, cost.compute, cost.latent_PH)
    plan = starts_of(same, JointPolicy(JointPolicyConfig()))[0]
    assert sorted(places[0] for places in plan.positions) == sorted([*range(RANKS)] * 2)


def test_what_was_not_legal_was_not_taken_and_teaches_nothing() -> None:
    policy, cost = JointPolicy(JointPolicyConfig()), sharding_cost(8, memory=420)
    rollout = Rollout.of(policy, task_of(cost), 16, torch.Generator().manual_seed(0))
    log_probability_SE, entropy_SE = rollout.scored_by(policy)
    assert log_probability_SE.isfinite().all()
    for step, seen in enumerate(rollout.seen):
        assert seen.legal_XA.gather(1, rollout.action_SE[step][:, None]).all()
        forced_E = seen.legal_XA.sum(-1) == 1
        assert log_probability_SE[step][forced_E].abs().sum() == 0 and entropy_SE[step][forced_E].abs().sum() == 0


def test_rules_with_the_same_positions_are_one_action() -> None:
    environment = JointMDP(task_of(sharding_cost(3)), 1)
    legal_OK = environment.observe().legal_EA.view(-1, len(RULES))
    assert legal_OK.sum(-1).tolist() == [1] * len(legal_OK)  # ranks are empty: all rules say the first


def test_training_keeps_what_did_best_and_repeats() -> None:
    tasks = [task_of(sharding_cost(5, seed)) for seed in range(4)]
    policies = []
    for _ in range(2):
        policy = JointPolicy(JointPolicyConfig(hidden=8))
        before = joint_standing(policy, tasks)
        after = train_joint_policy(policy, tasks, tasks, TRAINING)
        assert after <= before
        assert joint_standing(policy, tasks) == pytest.approx(after)
        policies.append(policy)
    assert all(torch.equal(*pair) for pair in zip(*(policy.parameters() for policy in policies), strict=True))


def test_roll_outs_that_would_take_too_long_are_given_up() -> None:
    cost = sharding_cost(8, 3)
    asked = JointOptions(cost)
    level = level_starts(cost, asked)
    with pytest.raises(TimeoutError):
        joint_starts(cost, shipped_joint_policy(), asked, level, seconds=0.0)
    unhurried = joint_starts(cost, shipped_joint_policy(), asked, level, seconds=1000.0)
    assert unhurried == starts_of(cost, shipped_joint_policy()) != []


def test_the_search_is_never_worse_than_a_roll_out() -> None:
    cost = sharding_cost(8, 3)
    starts = starts_of(cost, shipped_joint_policy())
    found = search(cost, starts, SearchConfig(reshards=100, moves=100, last_moves=100))
    costs = [cost.overall_ms(start) for start in starts]
    assert costs == sorted(costs)
    assert found.overall_ms <= costs[0] + 1e-12


def test_a_saved_policy_is_read_as_it_was(tmp_path, monkeypatch) -> None:
    policy = JointPolicy(JointPolicyConfig(hidden=8), seed=3)
    save_joint_policy(policy, tmp_path / "joint.safetensors", {"why": "a test"})
    monkeypatch.setattr("dreamshard_planner.policy.joint_network.SHIPPED", tmp_path / "joint.safetensors")
    read = shipped_joint_policy.__wrapped__()
    assert read.config == policy.config
    assert all(torch.equal(*pair) for pair in zip(read.parameters(), policy.parameters(), strict=True))
