# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Policies trained on tasks that a cost prices, and judged on tasks of held-out tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.model import Cost
from dreamshard_planner.measure.sets import GroupMix, set_work, work_limits
from dreamshard_planner.policy.environment import TaskBatch
from dreamshard_planner.policy.network import AnyPolicy, Policy, PolicyConfig, greedy_plan, roll_out
from dreamshard_planner.policy.reinforce import UpdateStatistics, train_policy
from dreamshard_planner.policy.tasks import TaskConfig, draw_tasks, problem_of
from dreamshard_planner.search.heuristics import HEURISTICS, place_by_heuristic
from dreamshard_planner.support.progress import progress_bar
from dreamshard_planner.training.config import TrainingConfig
from dreamshard_planner.workload.tables import Table, Workload

BANDWIDTHS = (2e9 / 1e3, 600e9 / 1e3)
"""All-to-all bytes per millisecond of training tasks, log-uniform: from Ethernet (2 GB/s) to NVLink (600 GB/s). A
policy does not observe the bandwidth, so it learns what is good on average; the search afterwards knows it."""


def improve(
    config: TrainingConfig, compute: ComputeCost, tables: Sequence[Table], progress: bool
) -> tuple[AnyPolicy, list[UpdateStatistics], list[PricedTask]]:
    """Train a policy by REINFORCE on the estimated MDP of ``compute``."""
    policy = Policy(PolicyConfig(), seed=config.seed)
    tasks = priced_tasks(compute, tables, config.num_tasks, config.tasks, config.seed, config.device)
    costs = [task.cost for task in tasks]
    policy.initialize(torch.cat([cost.problem.features_PF for cost in costs]))
    with progress_bar("improving the policy", config.reinforce.updates, progress) as advance:
        statistics = train_policy(
            policy,
            costs,
            config.reinforce,
            lambda _, update: advance(f"{update.over_best_heuristic:.3f} x the best rule"),
        )
    return policy, statistics, tasks


@dataclass(frozen=True)
class PricedTask:
    """A task of the policy's training with its cost."""

    workloads: tuple[Workload, ...]
    cost: Cost


@torch.no_grad()
def priced_tasks(
    compute: ComputeCost, tables: Sequence[Table], num_tasks: int, config: TaskConfig, seed: int, device: str = "cpu"
) -> list[PricedTask]:
    """Random tasks over ``tables``, for that kind of device, with their costs."""

    def single_ms(workloads: Sequence[Workload]) -> Tensor:
        return Cost(problem_of(workloads, 1), compute).single_ms_P

    low, high = (math.log(bandwidth) for bandwidth in BANDWIDTHS)
    share_T = torch.rand(num_tasks, generator=torch.Generator().manual_seed(seed)).tolist()
    priced = []
    for task, share in zip(draw_tasks(tables, num_tasks, config, seed, single_ms, device), share_T, strict=True):
        link = CollectiveModel(task.problem.num_ranks, math.exp(low + (high - low) * share))
        priced.append(PricedTask(task.workloads, Cost(task.problem.over(link), compute)))
    return priced


def proposed_sets(
    policy: AnyPolicy, tasks: Sequence[PricedTask], num_sets: int, seed: int, device: str = "cpu"
) -> list[list[Workload]]:
    """What the policy puts on one device in sampled placements of its training tasks, with random optimizers: sets
    worth measuring, because planning will meet their like."""
    generator = torch.Generator().manual_seed(seed)
    samples, mix = -(-num_sets // len(tasks)), GroupMix()
    sets = []
    for task in tasks:
        environment = roll_out(policy, TaskBatch.collate([task.cost]), samples, generator).environment
        assignment_ES = environment.assignments(0)[environment.alive_E]
        device_E = torch.randint(task.cost.problem.num_ranks, (len(assignment_ES),), generator=generator)
        for chosen_S in (assignment_ES == device_E[:, None]).tolist():
            held = compress(task.workloads, chosen_S)
            optimizer = mix.optimizer(torch.rand(1, generator=generator).item())
            sets.append([replace(workload, optimizer=optimizer) for workload in held])
    order = torch.randperm(len(sets), generator=generator).tolist()
    limits = work_limits(None, device, seed)
    return [sets[index] for index in order if sets[index] and set_work(sets[index]) <= next(limits)]


def validate_policy(
    policy: AnyPolicy, compute: ComputeCost, tables: Sequence[Table], config: TrainingConfig
) -> dict[str, Any]:
    """Predicted cost of one greedy roll-out over each rule's, on tasks of held-out tables.

    Geometric means over the tasks that both place; infeasible tasks are counted.
    """
    tasks = priced_tasks(compute, tables, config.validation_tasks, config.tasks, config.seed + 7, config.device)
    costs = [task.cost for task in tasks]
    with torch.no_grad():
        ours = torch.tensor([rated_ms(cost, greedy_plan(policy, cost)) for cost in costs])
        infeasible, ratios = {"policy": int(ours.isinf().sum())}, {}
        for rule in HEURISTICS:
            theirs = torch.tensor([rated_ms(cost, place_by_heuristic(cost.problem, rule)) for cost in costs])
            both = ours.isfinite() & theirs.isfinite()
            ratios[rule] = round(float((ours[both] / theirs[both]).log().mean().exp()), 4)
            infeasible[rule] = int(theirs.isinf().sum())
    return {"policy_over_rule": ratios, "infeasible": infeasible, "tasks": config.validation_tasks}


def rated_ms(cost: Cost, assignment_S: Tensor | None) -> float:
    """Predicted overall cost of one placement; infinite where there is none."""
    return float("inf") if assignment_S is None else float(cost.rate(assignment_S[None]).overall_ms_B[0])
