# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables as TorchRec's module, and models and ranks that plans over every sharding type are made for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner.search_space.sharding_types import CW, DP, RW, TW, TWCW, TWRW
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.pools import meta_like, named_pool
from dreamshard_planner.workload.tables import Table

SETTINGS = {"all": (TW, CW, TWCW, RW, TWRW, DP), "no_dp": (TW, CW, TWCW, RW, TWRW)}
"""Sharding types of each setting: those that TorchRec's planner uses unasked, with and without data-parallel."""
GPU_BYTES, HOST_BYTES, RANKS_PER_HOST = 80 * 2**30, 128 * 2**30, 8


def meta_collection(tables: Iterable[Table]) -> EmbeddingBagCollection:
    """All of them in one collection, each with features of its own."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=feature_names(table),
        )
        for table in tables
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=configs)


def feature_names(table: Table) -> list[str]:
    """One name per feature that the table serves."""
    return [f"{table.name}_f{index}" for index in range(len(table.features))]


def random_tables(count: int, seed: int = 0) -> list[Table]:
    """Rows from a thousand to thirty million, pooling factors to a hundred."""
    rng = random.Random(seed)
    shapes = [(int(10 ** rng.uniform(3, 7.5)), rng.choice([32, 64, 128, 256])) for _ in range(count)]
    return [
        Table(f"t{index}", rows, dim, (FeatureStatistics(10 ** rng.uniform(0, 2)),))
        for index, (rows, dim) in enumerate(shapes)
    ]


@dataclass(frozen=True)
class FullTask:
    """A model and the ranks that it is to be planned for."""

    name: str
    make: Callable[[], list[Table]]
    ranks: int
    batch_size: int

    def model(self) -> nn.Module:
        """On the meta device: planning reads shapes only."""
        model = nn.Module()
        model.sparse = meta_collection(self.make())
        return model

    def constraints(self, setting: str) -> dict[str, ParameterConstraints]:
        """True pooling factors and the setting's sharding types, for every planner alike."""
        return {
            table.name: ParameterConstraints(
                sharding_types=list(SETTINGS[setting]) if setting != "all" else None,
                pooling_factors=[feature.pooling_factor for feature in table.features],
            )
            for table in self.make()
        }

    def given(self) -> dict[str, Any]:
        """Return arguments of any planner, for all sharding types that TorchRec's uses unasked."""
        given = {"topology": self.topology(), "batch_size": self.batch_size, "constraints": self.constraints("all")}
        return {**given, "stats": [], "debug": False}

    def topology(self) -> Topology:
        """Hosts of eight GPUs."""
        return Topology(
            self.ranks, "cuda", hbm_cap=GPU_BYTES, ddr_cap=HOST_BYTES, local_world_size=min(RANKS_PER_HOST, self.ranks)
        )


def named_task(name: str) -> FullTask:
    """Return a task such as ``mlperf x 8``, ``meta 60 x 64``, ``random 50 x 8`` or ``merlin tiny x 16``."""
    model, _, ranks = name.partition(" x ")
    family, _, size = model.partition(" ")
    make = {
        "mlperf": lambda: named_pool("mlperf_dlrm_dcnv2"),
        "meta": lambda: meta_like(num_tables=int(size)),
        "random": lambda: random_tables(int(size)),
        "merlin": lambda: named_pool(f"merlin_{size}"),
    }[family]
    return FullTask(name, make, int(ranks), 2048 if family == "random" else 8192)
