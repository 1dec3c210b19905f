# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""That learning happened, on tables that training never saw: the cost network, and the policy without search."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.linear_cost import LinearCost
from dreamshard_planner.checkpoints.checkpoint import resolve
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import (
    FitConfig,
    LabelledSets,
    fit_cost_network,
    mape_2,
    predict_ms,
)
from dreamshard_planner.cost.network import CostNetworkConfig
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.policy.reinforce import ReinforceConfig, train_policy
from dreamshard_planner.training import (
    TrainingConfig,
    pool_tables,
    priced_tasks,
    proposed_sets,
    validate_policy,
)

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
CONFIG = TrainingConfig(seed=0)


@pytest.fixture(scope="module")
def measured() -> tuple[LabelledSets, LabelledSets]:
    """Sets measured on a CPU; the tables of the second part are in no set of the first."""
    train, test = CostDataset.load(DATA / "cpu-train.npz"), CostDataset.load(DATA / "cpu-test.npz")
    names = [{workload.name for group in dataset.sets for workload in group} for dataset in (train, test)]
    assert not names[0] & names[1]
    return LabelledSets.of_dataset(train), LabelledSets.of_dataset(test)


def test_network_beats_the_additive_baseline_on_measured_sets(measured) -> None:
    train, test = measured
    linear_2 = mape_2(predict_ms(LinearCost.fit(train), test), test.labels_ms_X2)
    network = fit_cost_network(train, CostNetworkConfig(members=2), FitConfig(epochs=12, seed=0))
    network_2 = mape_2(predict_ms(network, test), test.labels_ms_X2)
    assert (network_2 < 0.8 * linear_2).all(), (network_2, linear_2)


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
    from torchrec.distributed.planner.types import Topology

    checkpoint = resolve("auto", device)
    compute = checkpoint.compute_cost(Topology(world_size=1, compute_device=device))
    _, test_tables = pool_tables(CONFIG.pools)
    judged = validate_policy(checkpoint.policy, compute, test_tables, replace(CONFIG, seed=1000))
    assert all(ratio < 1 for ratio in judged["policy_over_rule"].values()), judged
    assert judged["infeasible"]["policy"] <= max(judged["infeasible"].values())


def test_reinforce_improves_on_unseen_tasks() -> None:
    """Trained here from a policy that ignores cost, judged on tables that it did not train on."""
    roofline = RooflineCost(1e9, 1e8)
    train_tables, test_tables = pool_tables(CONFIG.pools)
    config = replace(CONFIG, num_tasks=30, validation_tasks=20, tasks=replace(CONFIG.tasks, max_tables=20))
    policy = Policy(PolicyConfig(), seed=0)
    torch.nn.init.zeros_(policy.greediness)
    costs = [task.cost for task in priced_tasks(roofline, train_tables, 30, config.tasks, seed=0)]
    policy.initialize(torch.cat([cost.problem.features_PF for cost in costs]))
    before = validate_policy(policy, roofline, test_tables, config)["policy_over_rule"]["size_greedy"]
    train_policy(policy, costs, ReinforceConfig(updates=80, learning_rate=5e-3, seed=0))
    after = validate_policy(policy, roofline, test_tables, config)["policy_over_rule"]["size_greedy"]
    assert after < 1 < 0.8 * before, (after, before)  # from worse than a rule to better than it


def test_proposed_sets_are_what_the_policy_puts_together() -> None:
    roofline = RooflineCost(1e9, 1e8)
    tables, _ = pool_tables(CONFIG.pools)
    tasks = priced_tasks(roofline, tables, 5, CONFIG.tasks, seed=0)
    sets = proposed_sets(Policy(PolicyConfig()), tasks, 20, seed=0)
    known = [set(task.workloads) for task in tasks]
    optimizers = [{workload.optimizer for workload in chosen} for chosen in sets]
    assert all(len(one) == 1 for one in optimizers) and set.union(*optimizers) == {"sgd", "rowwise_adagrad", "adagrad"}
    of_tasks = [{replace(workload, optimizer="sgd") for workload in chosen} for chosen in sets]
    assert all(any(chosen <= workloads for workloads in known) for chosen in of_tasks)
    assert all(len({workload.batch_size for workload in chosen}) == 1 for chosen in sets)
