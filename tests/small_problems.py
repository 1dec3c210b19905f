# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Small problems of tables, options and units, tiny placement tasks, and their costs."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from common.whole_tables import over, problem_of, with_options
from dreamshard_planner.cost.collectives import Collective, CollectiveModel, Collectives
from dreamshard_planner.cost.problem import Cost, CostSource, GivenCost, Option, Problem
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.tables import Table, workloads_of

RANKS, HOST = 4, 2
MEMORY = 1000


def sharding_cost(num_tables: int, seed: int = 0, memory: int = MEMORY, latency_ms: float = 0.0) -> Cost:
    """Random tables on two hosts of two ranks, each whole, in two slices, over a host, over the world, or replicated;
    costs are given, and add up."""
    rng = random.Random(seed)
    world = CollectiveModel(RANKS, 1e3, latency_ms)
    gather = CollectiveModel(RANKS, 2e3, latency_ms)
    host, across = CollectiveModel(HOST, 1e4, latency_ms), CollectiveModel(RANKS // HOST, 1e2, latency_ms)
    collectives = [
        Collective("table_wise", "world", world, world),
        Collective("column_wise", "world", world, world),
        Collective("row_wise", "world", world, gather),
        Collective("table_row_wise inside", "host", host, host),
        Collective("table_row_wise across", "across", across, across),
        Collective("data_parallel", "world", None, world),
    ]
    parts: list[tuple[int, float, int, dict[int, float]]] = []

    def part(group: int, ms: float, size: int, sent: dict[int, float]) -> int:
        parts.append((group, ms, size, sent))
        return len(parts) - 1

    tables = []
    for _ in range(num_tables):
        ms, size, sent = rng.uniform(0.2, 4), rng.randint(20, 200), rng.uniform(1, 50)
        whole = part(0, ms, size, {0: sent})
        slices = [part(1, 0.6 * ms, size // 2, {1: sent / 2}) for _ in range(2)]
        host_blocks = [part(2, 0.6 * ms, size // 2, {3: sent, 4: sent / 2}) for _ in range(HOST)]
        blocks = [part(3, 0.35 * ms, size // 4, {2: sent / 4}) for _ in range(RANKS)]
        replica = part(4, 0.4 * ms, size, {5: size / 2})
        tables.append(
            (
                Option(np.array([[whole]]), "table_wise"),
                Option(np.array(slices)[:, None], "column_wise"),
                Option(np.array([host_blocks]), "table_row_wise"),
                Option(np.array([blocks]), "row_wise"),
                Option(np.full((1, RANKS), replica), "data_parallel", "dense"),
            )
        )
    bytes_PC = torch.zeros(len(parts), len(collectives), dtype=torch.float64)
    for row, (*_, sent_of) in enumerate(parts):
        for column, sent in sent_of.items():
            bytes_PC[row, column] = sent
    problem = Problem(
        num_ranks=RANKS,
        tables=tuple(tables),
        names=tuple(f"t{i}" for i in range(num_tables)),
        features_PF=torch.zeros(len(parts), 1),
        group_P=torch.tensor([group for group, *_ in parts]),
        num_groups=5,
        needs_PM=torch.tensor([[size] for _, _, size, _ in parts]),
        limits_DM=torch.full((RANKS, 1), memory),
        bytes_PC=bytes_PC,
        collectives=Collectives(collectives, HOST, world),
    )
    latent_PH = torch.tensor([[1.0, ms / 3, 2 * ms / 3] for _, ms, _, _ in parts], dtype=torch.float64)
    return Cost(problem, GivenCost(CostSource("given", "by hand")), latent_PH)


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


def choices(problem: Problem, table: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Every way to shard a table: an option, by its number, and positions of its units."""
    for index, option in enumerate(problem.tables[table]):
        positions = [range(problem.num_ranks // option.span)] * option.units
        yield from ((index, places) for places in itertools.product(*positions))
