# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP, and the policy that learns in it; that learning happened, on tables that training never saw."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_problems import RANKS, sharding_cost

from common.linear_cost import LinearCost
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import prior_policy, resolve
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.cost.problem import Cost, Sharding
from dreamshard_planner.policy.mdp import EstimatedMDP, Sweep
from dreamshard_planner.policy.network import STARTS, SWEEPS, Policy, PolicyConfig, policy_starts, roll_out
from dreamshard_planner.policy.reinforce import DEAREST, ReinforceConfig, advantages, standing, train_policy
from dreamshard_planner.policy.task import ShardingTask
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.training import QUICK, TrainingConfig, drawn_tasks
from dreamshard_planner.training.rounds import improve, validate_policy
from dreamshard_planner.workload.pools import pool_tables


def task_of(cost: Cost) -> ShardingTask:
    return ShardingTask(cost, OptionTotals(cost))


def starts_of(cost: Cost, policy: Policy, seconds: float = math.inf) -> list[Sharding]:
    return policy_starts(cost, policy, OptionTotals(cost), seconds)


def rolled_out(cost: Cost, episodes: int = 8, seed: int = 0, sweeps: Sequence[Sweep] = SWEEPS[:1]) -> EstimatedMDP:
    generator, policy = torch.Generator().manual_seed(seed), Policy(PolicyConfig())
    torch.nn.init.zeros_(policy.log_greediness)  # choices that differ
    return roll_out(policy, task_of(cost), episodes, generator, None, sweeps)


@pytest.mark.parametrize("sweeps", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_running_sums_are_the_rating(seed: int, sweeps: int) -> None:
    cost = sharding_cost(6, seed, latency_ms=0.05)
    environment = rolled_out(cost, sweeps=SWEEPS[:sweeps])
    plans = environment.shardings()
    rated = [cost.overall_ms(plan) for plan in plans]
    np.testing.assert_allclose(environment.relative_cost() * environment.task.level_ms, rated, rtol=1e-6)
    assert len(set(plans)) > 1 or sweeps > 1


@pytest.mark.parametrize("seed", range(4))
def test_later_sweeps_make_plans_cheaper(seed: int) -> None:
    cost = sharding_cost(12, seed, latency_ms=0.05)
    first, all_sweeps = (rolled_out(cost, 8, sweeps=sweeps).relative_cost() for sweeps in (SWEEPS[:1], SWEEPS))
    assert np.log(all_sweeps).mean() < np.log(first).mean() - 0.02


def test_the_cheapest_episodes_go_on_one_of_each_cost() -> None:
    environment = roll_out(Policy(PolicyConfig()), task_of(sharding_cost(6)), 8, survivors=(8,))
    assert len(environment.shardings()) == 1  # greedy episodes of one policy are one plan
    sampled = torch.Generator().manual_seed(0), None, SWEEPS[:2]
    costs: list[np.ndarray] = []
    environment = roll_out(
        Policy(PolicyConfig()),
        task_of(sharding_cost(12)),
        8,
        *sampled,
        survivors=(3,),
        on_sweep=lambda played: costs.append(played.relative_cost()),
    )
    assert costs[0][environment.episode_E].tolist() == sorted({*costs[0].tolist()})[:3]


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
    assert np.isinf(environment.relative_cost()).all()
    assert environment.shardings() == [None] * 4
    assert starts_of(cost, Policy(PolicyConfig())) == []


@pytest.mark.parametrize("policy", [Policy(PolicyConfig()), prior_policy()])
def test_equal_whole_tables_are_evened_out(policy: Policy) -> None:
    cost = sharding_cost(1)
    whole = cost.problem.tables[0][:1]
    problem = replace(cost.problem, tables=(whole,) * (2 * RANKS), names=("t",) * 2 * RANKS)
    plan = starts_of(Cost(problem, cost.compute, cost.latent_PH), policy)[0]
    assert sorted(places[0] for places in plan.positions) == sorted([*range(RANKS)] * 2)


def test_starts_come_cheapest_first_and_are_given_up_when_late() -> None:
    cost = sharding_cost(8, 3)
    with pytest.raises(TimeoutError):
        starts_of(cost, prior_policy(), seconds=0.0)
    starts = starts_of(cost, prior_policy())
    assert starts_of(cost, prior_policy(), seconds=1000.0) == starts
    assert 0 < len(starts) <= STARTS
    costs = [cost.overall_ms(start) for start in starts]
    assert costs == sorted(costs)


TRAINING = ReinforceConfig(updates=4, tasks_per_update=2, episodes_per_task=6, looks=2, learning_rate=6e-3)


def tasks_of(*seeds: int, memory: int = 1000, latency_ms: float = 0.0) -> list[ShardingTask]:
    return [task_of(sharding_cost(5, seed, memory, latency_ms)) for seed in seeds]


def test_advantages_by_hand() -> None:
    assert advantages(torch.tensor([1.0, 3.0]), 1.5).tolist() == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    # The infeasible episode counts 1.5 x 2 = 3.
    assert advantages(torch.tensor([2.0, math.inf]), 1.5).tolist() == pytest.approx([2**-0.5, -(2**-0.5)], rel=1e-4)
    assert advantages(torch.tensor([math.inf, math.inf]), 1.5).tolist() == [0.0, 0.0]


def test_training_keeps_what_did_best_and_repeats() -> None:
    """Every look rates the policy; the last one stays only if nobody looks."""
    tasks, wild = tasks_of(0, 1), replace(TRAINING, learning_rate=10.0)
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


DATA = Path(__file__).parents[2] / "benchmarks" / "data"
CONFIG = TrainingConfig(seed=0)


@pytest.fixture(scope="module")
def measured() -> tuple[LabelledSets, LabelledSets]:
    """Sets measured on a CPU; the tables of the second part are in no set of the first."""
    train, test = CostDataset.load(DATA / "cpu-train.npz"), CostDataset.load(DATA / "cpu-test.npz")
    names = [{workload.name for group in dataset.sets for workload in group} for dataset in (train, test)]
    assert not names[0] & names[1]
    return LabelledSets.of_dataset(train), LabelledSets.of_dataset(test)


def test_shipped_network_beats_the_additive_baseline(measured) -> None:
    train, test = measured
    linear_2 = mape_2(predict_ms(LinearCost.fit(train), test), test.labels_ms_X2)
    shipped = resolve("auto", "cpu")  # knows the machine at the speed that it had over all training data
    test = LabelledSets.of_dataset(CostDataset.load(DATA / "cpu-test.npz"), shipped.metadata["reference_ms"])
    shipped_2 = mape_2(predict_ms(shipped.cost, test), test.labels_ms_X2)
    assert (shipped_2 < 0.6 * linear_2).all() and (shipped_2 < 0.10).all(), (shipped_2, linear_2)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_shipped_policy_alone_beats_every_rule_on_unseen_tasks(device: str) -> None:
    """One greedy roll-out, no search; geometric mean of predicted costs over tasks of held-out tables."""
    _, test_tables = pool_tables(CONFIG.pools)
    config = replace(CONFIG, device=device, validation_tasks=5, task_tables=(8, 40), task_ranks=(2, 4, 8), seed=1000)
    judged = validate_policy(resolve("auto", device), test_tables, config)
    assert all(ratio < 1 for ratio in judged["policy_over_rule"].values()), judged
    assert judged["infeasible"]["policy"] <= 3  # tasks that are short of memory


def test_reinforce_improves_on_unseen_tasks() -> None:
    """Trained here from a policy that ignores cost, judged on tables that it did not train on."""
    train_tables, test_tables = pool_tables(CONFIG.pools)
    reinforce = ReinforceConfig(updates=8, episodes_per_task=8, learning_rate=2e-2, looks=2, look_tasks=4)
    config = replace(QUICK, device="cuda", num_tasks=10, reinforce=reinforce)
    ignorant = Checkpoint(Policy(PolicyConfig()), None, {"hardware": {}})
    torch.nn.init.constant_(ignorant.policy.log_greediness, -20.0)
    unseen = [drawn.task for drawn in drawn_tasks(ignorant, test_tables, 6, config, seed=7)]
    before = standing(ignorant.policy, unseen)
    _, trained = improve(config, ignorant, train_tables, False)
    assert standing(trained.policy, unseen) < before - 0.05
    assert standing(ignorant.policy, unseen) == before  # a copy was trained
