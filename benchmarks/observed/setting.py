# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Models that are observed, and how."""

from __future__ import annotations

import random
from dataclasses import dataclass

from dlrm.job import Job
from dlrm.model import heated, scale_tables
from dlrm.node import Node
from dlrm.options import OPTIMIZERS, Config
from dreamshard_planner.workload.pools import named_pool

LEARNED_FROM, HELD_OUT = 2, 5
"""Plans that each model trains under, one after another."""


@dataclass(frozen=True)
class Setting:
    """Of all models; see the options of the command."""

    tables: str
    count: int
    max_rows: int
    dim: int
    lookups: float
    hot: float
    batch_size: int
    steps: int
    learned_from: str
    sharding_types: tuple[str, ...]
    min_partition: int
    plans: tuple[str, ...]
    steps_measured: int
    copies: int
    block: int

    def job(self, seed: int, node: Node) -> Job:
        """One of the models."""
        pool = named_pool(self.tables)
        drawn = random.Random(seed).sample(pool, min(self.count, len(pool)))
        tables, _ = scale_tables([heated(table, self.lookups) for table in drawn], self.max_rows, self.dim, self.hot)
        return Job.of(tables, self.config(seed), node)

    def config(self, seed: int) -> Config:
        """How its plans are made and measured."""
        optimizer = tuple(OPTIMIZERS)[seed % len(OPTIMIZERS)]
        return Config(
            planners="dreamshard,torchrec",
            copies=self.copies,
            steps=self.steps_measured,
            block=self.block,
            batch_size=self.batch_size,
            sharding_types=",".join(kind for kind in self.sharding_types if trains_exactly(kind, optimizer)),
            min_partition=self.min_partition,
            optimizer=optimizer,
            processor_time=True,
            seed=seed,
        ).on("cpu")


def trains_exactly(kind: str, optimizer: str) -> bool:
    """Whether tables of this sharding type are trained as whole ones: column slices would have row-wise states of their
    own."""
    return not ("column" in kind and optimizer == "rowwise_adagrad")
