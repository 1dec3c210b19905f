# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""That learning happened, on tables that training never saw: the cost network, and the policy without search."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.linear_cost import LinearCost
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.dataset import CostDataset, LabelledSets
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.policy.reinforce import ReinforceConfig, standing
from dreamshard_planner.training import QUICK, TrainingConfig, drawn_tasks
from dreamshard_planner.training.rounds import improve, validate_policy
from dreamshard_planner.workload.pools import pool_tables

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
