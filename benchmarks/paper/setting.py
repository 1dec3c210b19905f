# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The setting of the DreamShard paper: one pool, one dim, one batch size, one optimizer; tasks of a number of tables on
a number of devices.

Shapes: S shards (tables), F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.fit import LabelledSets
from dreamshard_planner.policy.tasks import Task, problem_of
from dreamshard_planner.training import pool_tables
from dreamshard_planner.workload.features import feature_matrix
from dreamshard_planner.workload.tables import Table, Workload, workloads_of
from placements.contests import BYTES_PER_MS
from placements.placers import Contest

POOL = "meta_like_2021"
MEMORY_BYTES = 5e9
"""Of a device, as published; tables count as fp16 there, whatever they are trained in."""
FP16_BYTES = 2


@dataclass(frozen=True, order=True)
class Setting:
    """Tables and devices of a task; written ``40x4``."""

    tables: int
    devices: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        """From ``TABLESxDEVICES``."""
        tables, _, devices = text.partition("x")
        if not (tables.isdecimal() and devices.isdecimal() and int(tables) and int(devices) > 1):
            raise ValueError(f"a setting is TABLESxDEVICES, e.g. 40x4, got {text!r}")
        return cls(int(tables), int(devices))

    def __str__(self) -> str:
        return f"{self.tables}x{self.devices}"


@dataclass(frozen=True)
class Half:
    """Half of the pool: the tables that train, or those that test."""

    tables: tuple[Table, ...]
    batch_size: int
    number: int = field(repr=False)

    @cached_property
    def workloads(self) -> list[Workload]:
        """One per table."""
        return workloads_of(self.tables, self.batch_size)

    @cached_property
    def features_SF(self) -> Tensor:
        """Of all tables, [S, F]."""
        return feature_matrix(self.workloads)

    def tasks(self, setting: Setting, count: int) -> list[Contest]:
        """The first ``count`` of this half's tasks: random tables, the same for everybody."""
        generator = torch.Generator().manual_seed(10_000 * setting.tables + 100 * setting.devices + self.number)
        tasks = []
        for index in range(count):
            chosen = torch.randperm(len(self.tables), generator=generator)[: setting.tables].tolist()
            tables = tuple(self.tables[table] for table in chosen)
            workloads = tuple(self.workloads[table] for table in chosen)
            problem = problem_of(workloads, setting.devices)
            capacity_bytes = int(MEMORY_BYTES * tables[0].weight_bytes / FP16_BYTES)
            problem = replace(problem, limits_DM=torch.full_like(problem.limits_DM, capacity_bytes))
            model = CollectiveModel(setting.devices, BYTES_PER_MS)
            name = f"{setting}.{index}"
            tasks.append(Contest(name, str(setting), tables, Task(workloads, problem), self.batch_size, False, model))
        return tasks

    def labelled(self, sets: Sequence[Sequence[str]], labels_ms_X2: Tensor) -> LabelledSets:
        """Measured sets of tables by name; empty ones may be among them."""
        index_S = torch.tensor([self._index[name] for group in sets for name in group], dtype=torch.int64)
        lengths = torch.tensor([0, *(len(group) for group in sets)])
        return LabelledSets(self.features_SF[index_S], lengths.cumsum(0), labels_ms_X2.float())

    @cached_property
    def _index(self) -> dict[str, int]:
        return {table.name: index for index, table in enumerate(self.tables)}

    def workloads_named(self, names: Sequence[str]) -> list[Workload]:
        """Of tables by name."""
        return [self.workloads[self._index[name]] for name in names]


def halves(batch_size: int, dim: int = 16, weight_bytes: int = 4) -> tuple[Half, Half]:
    """Training and test half of the pool, the same as in the training of what ships; SGD, all of one dim."""
    parts = pool_tables((POOL,))
    train, test = (
        tuple(replace(table, dim=dim, weight_bytes=weight_bytes, optimizer="sgd") for table in part) for part in parts
    )
    return Half(train, batch_size, 0), Half(test, batch_size, 1)
