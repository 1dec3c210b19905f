# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Models of a few tables, and planners for them: what many tests start from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.cost.problem import Problem
from dreamshard_planner.offline.jobs import SCHEMA
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.reader import OptionReader

SHARDERS = [EmbeddingBagCollectionSharder()]
TABLE_WISE = {"sharding_types": ["table_wise"]}
MB = 2**20


def table(name: str, rows: int = 1000, dim: int = 16, features: int = 1, **arguments) -> EmbeddingBagConfig:
    names = [f"{name}_f{k}" for k in range(features)]
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=names, **arguments)


def collection(
    *tables: EmbeddingBagConfig,
    weighted: bool = False,
    optimizer: type[torch.optim.Optimizer] | None = None,
    device: str = "meta",
) -> EmbeddingBagCollection:
    """Return a collection, without weights by default; its tables have the in-backward optimizer, if one is given."""
    made = EmbeddingBagCollection(tables=list(tables), is_weighted=weighted, device=torch.device(device))
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    return made


def sequences(*tables: EmbeddingBagConfig, **arguments) -> EmbeddingCollection:
    """Return a collection of the same tables, unpooled."""
    configs = [
        EmbeddingConfig(one.num_embeddings, one.embedding_dim, one.name, one.data_type, one.feature_names, **arguments)
        for one in tables
    ]
    return EmbeddingCollection(tables=configs, device=torch.device("meta"))


def managed(plain: nn.Module, rows: int, buckets: int = 1, **arguments) -> nn.Module:
    """Return a collection of tables of so many rows, to which managed collisions map ids."""
    pooled = isinstance(plain, EmbeddingBagCollection)
    configs = plain.embedding_bag_configs() if pooled else plain.embedding_configs()
    given = {"eviction_policy": DistanceLFU_EvictionPolicy(), "eviction_interval": 2, "buckets": buckets, **arguments}
    collisions = {config.name: MCHManagedCollisionModule(rows, plain.device, **given) for config in configs}
    kind = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    return kind(plain, ManagedCollisionCollection(collisions, configs), allow_in_place_embed_weight_update=True)


def small_model(optimizer: type[torch.optim.Optimizer] | None = None) -> nn.Module:
    tables = (table(f"t{i}", 100 * (i + 1), 8 * (1 + i % 3), 1 + i % 2) for i in range(6))
    return nn.ModuleDict({"sparse": collection(*tables, optimizer=optimizer)})


def topology(world_size: int = 2, memory: int = 2**34, device: str = "cpu") -> Topology:
    return Topology(world_size=world_size, compute_device=device, ddr_cap=memory, hbm_cap=memory)


def planner(**arguments) -> DreamShardPlanner:
    given = {"topology": topology(), "effort": "quick", "batch_size": 64, "stats": [], "debug": False}
    return DreamShardPlanner(**(given | arguments))


def planned(
    model: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]] = SHARDERS, **arguments
) -> DreamShardPlanner:
    made = planner(**arguments)
    made.plan(model, list(sharders))
    return made


def rater(topology: Topology, constraints: dict[str, ParameterConstraints] | None = None, **arguments) -> PlanRater:
    """Return a rater of options that no planner has enumerated."""
    return PlanRater(PlannedRanks.of(topology), OptionReader(constraints), **arguments)


def output_bytes_P(problem: Problem) -> Tensor:
    """Bytes that each part adds to the exchanges of outputs and gradients."""
    outputs_C = [not collective.of_lookups for collective in problem.collectives.collectives]
    return problem.bytes_PC[:, outputs_C].sum(-1)


def ranks_of(plan) -> dict[str, list[int]]:
    return {name: sharding.ranks for module in plan.plan.values() for name, sharding in module.items()}


def table_list(folder: Path, *tables: Any) -> str:
    path = folder / "tables.json"
    path.write_text(json.dumps({"schema": SCHEMA, "tables": tables}))
    return str(path)
