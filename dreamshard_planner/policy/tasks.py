# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placement problems drawn from table pools: what policies train and are judged on.

Shapes: S shards, D devices, M limits (one here).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel, Collectives
from dreamshard_planner.cost.problem import Problem
from dreamshard_planner.errors import TaskError
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Table, Workload, workloads_of

BATCH_SIZES = {"cpu": (256, 512, 1024, 2048), "cuda": (2048, 4096, 8192, 16384, 32768, 65536)}
"""Samples that each kernel of a task sees, by device."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which tasks to draw."""

    min_tables: int = 4
    max_tables: int = 80
    """Table counts are log-uniform between these, bounds included."""
    devices: tuple[int, ...] = (2, 3, 4, 6, 8, 16)
    batch_sizes: tuple[int, ...] | None = None
    """Samples that each kernel sees; default: ``BATCH_SIZES`` of the device."""
    unlimited_share: float = 0.6
    """Share of the tasks in which memory does not bind."""
    slack: tuple[float, float] = (1.1, 1.6)
    """Memory of a device over the balanced size, elsewhere."""
    heaviest: float | None = None
    """Most that one table may cost, as a share of an ideally balanced device; None: whatever the pool holds. Where one
    table alone is the bottleneck, all sensible placements are equal, and nothing is learned or shown."""

    def __post_init__(self) -> None:
        if self.heaviest is not None and not self.heaviest > 0:
            raise TaskError(f"heaviest must be positive or None, got {self.heaviest}")
        least = min(*self.devices, *(self.batch_sizes or (1,)), 1)
        if not 1 <= self.min_tables <= self.max_tables or least < 1:
            raise TaskError(f"tables, devices and batch sizes must be positive and ordered, got {asdict(self)}")


@dataclass(frozen=True)
class Task:
    """A problem with the workloads that it was made from."""

    workloads: tuple[Workload, ...]
    problem: Problem


def problem_of(workloads: Sequence[Workload], num_devices: int) -> Problem:
    """A problem from whole-table workloads, all in one fused group, on devices whose memory is no limit; its exchange
    costs nothing until :meth:`Problem.over <dreamshard_planner.cost.problem.Problem.over>` says which link it takes."""
    if num_devices < 1 or not workloads:
        raise TaskError(f"a task needs tables and devices, got {len(workloads)} tables, {num_devices} devices")
    sizes = [w.rows * (w.dim * w.weight_bytes + (4 if w.optimizer != "sgd" else 0)) for w in workloads]
    output_bytes = [w.output_elements * OUTPUT_BYTES / num_devices for w in workloads]
    return Problem(
        num_ranks=num_devices,
        features_PF=feature_matrix(workloads),
        group_P=torch.zeros(len(workloads), dtype=torch.int64),
        num_groups=1,
        bytes_PC=torch.tensor(output_bytes, dtype=torch.float64)[:, None],
        collectives=Collectives.all_to_all(CollectiveModel(num_devices, math.inf, 0.0)),
        needs_PM=torch.tensor(sizes, dtype=torch.int64)[:, None],
        limits_DM=torch.full((num_devices, 1), torch.iinfo(torch.int64).max // 4),
        names=tuple(w.name for w in workloads),
    )


def draw_tasks(
    tables: Sequence[Table],
    num_tasks: int,
    config: TaskConfig,
    seed: int,
    single_ms: Callable[[Sequence[Workload]], Tensor],
    device: str = "cpu",
) -> list[Task]:
    """Random tasks over ``tables``: subsets of random size, device counts, batch sizes, memory.

    ``single_ms`` says what workloads cost alone on a device, [S]; asked only where ``config.heaviest`` is given. Then
    too heavy tables give way to others, as long as there are any, and there are at least two tables for a device.
    ``device`` is the kind that the tasks are for.
    """
    batch_sizes = config.batch_sizes or BATCH_SIZES[device]
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator))

    def choose(values: Sequence[int]) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    pools: dict[int, tuple[list[Workload], Tensor | None]] = {}
    low, high = torch.tensor([config.min_tables, min(config.max_tables, len(tables)) + 1]).log().tolist()
    tasks = []
    for _ in range(num_tasks):
        count = max(1, min(int(torch.tensor(uniform(low, high)).exp()), len(tables)))
        batch_size = choose(batch_sizes)
        if batch_size not in pools:
            pool = workloads_of(tables, batch_size)
            pools[batch_size] = pool, None if config.heaviest is None else single_ms(pool)
        pool, single_ms_W = pools[batch_size]
        order = torch.randperm(len(tables), generator=generator).tolist()
        if single_ms_W is None or config.heaviest is None:
            num_devices, chosen = choose(config.devices), order[:count]
        else:
            few = [devices for devices in config.devices if 2 * devices <= count]
            num_devices = choose(few or [min(config.devices)])
            chosen = _without_heavy(order, count, single_ms_W, config.heaviest / num_devices)
        workloads = tuple(pool[index] for index in chosen)
        problem = problem_of(workloads, num_devices)
        if uniform(0, 1) >= config.unlimited_share:
            sizes_S = problem.needs_PM[:, 0]
            balanced = max(float(sizes_S.sum()) / problem.num_ranks, float(sizes_S.max()))
            memory_bytes = int(balanced * uniform(*config.slack))
            problem = replace(problem, limits_DM=torch.full_like(problem.limits_DM, memory_bytes))
        tasks.append(Task(workloads, problem))
    return tasks


def _without_heavy(order: Sequence[int], count: int, single_ms_W: Tensor, most: float) -> list[int]:
    """The first ``count`` of ``order``; while one makes more than the share ``most`` of their sum, the next of the rest
    takes its place."""
    chosen, rest = list(order[:count]), iter(order[count:])
    single_ms_C = single_ms_W[chosen]
    while float(single_ms_C.max()) > most * float(single_ms_C.sum()):
        following = next(rest, None)
        if following is None:
            break
        heaviest = int(single_ms_C.argmax())
        chosen[heaviest], single_ms_C[heaviest] = following, single_ms_W[following]
    return chosen
