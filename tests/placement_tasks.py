# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tiny placement tasks, and their cost."""

from dataclasses import replace

import torch

from common.whole_tables import over, problem_of, with_options
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.problem import Cost, Problem
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.tables import Table, workloads_of

ROOFLINE = RooflineCost(memory_bytes_per_ms=1e6, uvm_bytes_per_ms=1e5)


def tables(count: int, seed: int = 0) -> list[Table]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, 3, generator=generator).tolist()
    return [
        Table(f"t{i}", int(10 ** (2 + 3 * a)), 2 ** int(2 + 5 * b), (FeatureStatistics(10 ** (1.5 * c)),))
        for i, (a, b, c) in enumerate(draws)
    ]


def make_cost(count: int, devices: int, memory_bytes: int | None = None, groups: int = 1, seed: int = 0):
    workloads = workloads_of(tables(count, seed), 256)
    problem = problem_of(workloads, devices)
    problem = replace(problem, group_P=torch.arange(count) % groups, num_groups=min(groups, count))
    if memory_bytes is not None:
        problem = replace(problem, limits_DM=torch.full_like(problem.limits_DM, memory_bytes))
    return Cost(over(problem, CollectiveModel(devices, 1e6)), ROOFLINE)


def storage_problem(sizes: list[int], capacities: list[int]) -> Problem:
    base = make_cost(len(sizes), len(capacities)).problem
    problem = replace(base, needs_PM=torch.tensor(sizes)[:, None], limits_DM=torch.tensor(capacities)[:, None])
    return with_options(problem)
