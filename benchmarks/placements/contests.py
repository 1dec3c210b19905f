# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Contests for placers: held-out tables, ranks, and loose or tight memory.

Shapes: S tables, D devices, M limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from common.whole_tables import Task, problem_of, with_options
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.problem import Problem
from dreamshard_planner.search.starts import packed_start
from dreamshard_planner.training import TrainingConfig
from dreamshard_planner.workload.pools import named_pool, pool_tables
from dreamshard_planner.workload.tables import Table, workloads_of

POOLS = ("meta_like_2021", "merlin_medium", "mlperf_dlrm_dcnv2")
FILLED = 0.95
"""Share of all memory that is taken in a tight task."""
BYTES_PER_MS = 12.5e9 / 1e3  # 100 Gbit/s Ethernet; only the overall cost depends on it
MORE = 1.01
"""Factor by which the memory of a task grows until its tables pack."""


@dataclass(frozen=True)
class Contest:
    """A task for all placers: tables, devices and memory, and the samples that a kernel sees."""

    name: str
    pool: str
    tables: tuple[Table, ...]
    task: Task
    batch_size: int
    tight: bool
    collectives: CollectiveModel


def draw_contests(count: int, seed: int, batch_size: int) -> list[Contest]:
    """Tasks of 20 to 100 held-out tables on 2, 4 or 8 devices; in half of them they fill 95 % of the memory.

    Pools that never train anything are held out as a whole; of the 26 MLPerf tables a task takes 20 to 26.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    trained = TrainingConfig().pools
    held_out = {name: pool_tables([name])[1] if name in trained else named_pool(name) for name in POOLS}
    contests = []
    for index in range(count):
        pool = POOLS[index % len(POOLS)]
        tables = held_out[pool]
        order = torch.randperm(len(tables), generator=generator)[: pick(20, min(100, len(tables)))].tolist()
        optimizer = ("sgd", "rowwise_adagrad")[pick(0, 1)]
        chosen = tuple(replace(tables[i], optimizer=optimizer) for i in order)
        devices = (2, 4, 8)[pick(0, 2)]
        tight = index % 2 == 1
        workloads = tuple(workloads_of(chosen, batch_size))
        problem = problem_of(workloads, devices)
        capacity_bytes = int(least_capacity_bytes(problem) * (1.0 if tight else 4.0))
        problem = replace(problem, limits_DM=torch.full_like(problem.limits_DM, capacity_bytes))
        name = f"{seed}.{index}"
        model = CollectiveModel(devices, BYTES_PER_MS)
        contests.append(Contest(name, pool, chosen, Task(workloads, problem), batch_size, tight, model))
    return contests


def least_capacity_bytes(problem: Problem) -> float:
    """Return a device's bytes so that the tables fill 95 % of all memory, or more if whole tables pack worse."""
    sizes_S = problem.needs_PM[:, 0].double()
    capacity = float(sizes_S.sum()) / problem.num_ranks / FILLED
    problem = with_options(problem)
    while packed_start(replace(problem, limits_DM=torch.full_like(problem.limits_DM, int(capacity)))) is None:
        capacity *= MORE
    return capacity
