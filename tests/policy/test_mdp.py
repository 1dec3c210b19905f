# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP and the tasks that policies train in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from placement_tasks import ROOFLINE, make_cost, storage_problem, tables

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.errors import TaskError
from dreamshard_planner.policy.environment import OBSERVATION_INDEX, EstimatedMDP, TaskBatch
from dreamshard_planner.policy.network import Policy, PolicyConfig, roll_out, score_rollout
from dreamshard_planner.policy.tasks import TaskConfig, draw_tasks, problem_of
from dreamshard_planner.workload.tables import Workload


def test_environment_matches_the_rating() -> None:
    costs = [make_cost(7, 3, groups=2), make_cost(4, 2), make_cost(5, 4, seed=3)]
    rollout = roll_out(Policy(PolicyConfig()), TaskBatch.collate(costs), 3, torch.Generator().manual_seed(0))
    environment = rollout.environment
    for task, cost in enumerate(costs):
        assignment_ES = environment.assignments(task)
        rated = cost.rate(assignment_ES)
        episodes = slice(3 * task, 3 * task + 3)
        devices = cost.problem.num_ranks
        predicted_ED = environment.device_ms_ED2[episodes, :devices].sum(-1)
        torch.testing.assert_close(predicted_ED, rated.device_ms_BD.float(), rtol=1e-4, atol=1e-5)
        assert environment.action_ES[episodes].max() < devices
        torch.testing.assert_close(environment.overall_ms()[episodes], rated.overall_ms_B.float())


def test_shards_come_hardest_first() -> None:
    cost = make_cost(8, 2)
    order = TaskBatch.collate([cost]).order_TS[0]
    placed = cost.single_ms_P[order]
    assert (placed.diff() <= 0).all()


def test_excess_is_zero_on_the_best_device() -> None:
    environment = EstimatedMDP(TaskBatch.collate([make_cost(5, 3)]), 1)
    excess = environment.observe().channels_EDO[..., OBSERVATION_INDEX["excess"]]
    assert excess.tolist() == [[0.0, 0.0, 0.0]]


def test_memory_that_nobody_needs_binds_nobody() -> None:
    problem = make_cost(4, 2, memory_bytes=10**9).problem
    with_unused = replace(
        problem,
        needs_PM=torch.cat([torch.zeros_like(problem.needs_PM), problem.needs_PM], dim=-1),
        limits_DM=torch.cat([torch.zeros_like(problem.limits_DM), problem.limits_DM], dim=-1),
    )
    free = []
    for variant in (problem, with_unused):
        mdp = EstimatedMDP(TaskBatch.collate([Cost(variant, ROOFLINE)]), 1)
        free.append(mdp.observe().channels_EDO[..., OBSERVATION_INDEX["free_memory"]])
    assert torch.equal(*free) and free[0].min() > 0.9


def test_memory_is_masked_when_acting_and_in_the_gradient() -> None:
    cost = Cost(storage_problem([4, 4, 4, 4], [8, 8]), ROOFLINE)
    policy = Policy(PolicyConfig())
    rollout = roll_out(policy, TaskBatch.collate([cost]), 16, torch.Generator().manual_seed(0), record=True)
    assert cost.problem.fits(rollout.environment.assignments(0)).all()
    log_probability_SE, entropy_SE = score_rollout(policy, rollout)
    forced_SE = rollout.legal_SED.sum(-1) == 1
    assert forced_SE.any()
    assert log_probability_SE[forced_SE].abs().max() == 0 and entropy_SE[forced_SE].abs().max() == 0


def test_dead_ends_are_infeasible_not_crashes() -> None:
    cost = Cost(storage_problem([3, 3, 3], [4, 4]), ROOFLINE)
    environment = roll_out(Policy(PolicyConfig()), TaskBatch.collate([cost]), 4, torch.Generator()).environment
    assert not environment.alive_E.any()
    assert environment.overall_ms().isinf().all()


def test_padding_does_not_change_a_task() -> None:
    small, large = make_cost(5, 2), make_cost(12, 6, seed=4)
    policy = Policy(PolicyConfig(), seed=2)
    torch.nn.init.normal_(policy.score.weight, generator=torch.Generator().manual_seed(0))
    alone = roll_out(policy, TaskBatch.collate([small]), 1).environment.assignments(0)
    beside = roll_out(policy, TaskBatch.collate([small, large]), 1).environment.assignments(0)
    assert torch.equal(alone, beside)


def test_drawn_tasks_leave_room_for_placement() -> None:
    """No table takes more than its share where others can replace it, and what was drawn stays reproducible."""

    def single_ms(workloads: Sequence[Workload]) -> torch.Tensor:
        return Cost(problem_of(workloads, 1), ROOFLINE).single_ms_P

    config = TaskConfig(min_tables=4, max_tables=40, devices=(2, 4, 8), heaviest=0.6)
    drawn = draw_tasks(tables(400), 30, config, 0, single_ms)
    for task in drawn:
        single_ms_S = single_ms(task.workloads)
        assert len(task.workloads) >= 2 * task.problem.num_ranks
        assert float(single_ms_S.max()) <= 0.6 * float(single_ms_S.sum()) / task.problem.num_ranks
        assert len({workload.name for workload in task.workloads}) == len(task.workloads)
    assert [task.workloads for task in draw_tasks(tables(400), 30, config, 0, single_ms)] == [
        t.workloads for t in drawn
    ]
    few = draw_tasks(tables(5), 3, replace(config, min_tables=5), 0, single_ms)  # nothing to replace a table with
    assert all(len(task.workloads) == 5 for task in few)
    with pytest.raises(TaskError, match="heaviest must be positive.*-1"):
        replace(config, heaviest=-1)
