# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Random models of every kind of table and module, with everything that a planner can be given."""

import random
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, ShardingOption, Topology
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm.job import EveryTypeSharder
from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.search_space.sharding_types import CW, DP, RW, SHARDING_TYPES, TW
from tests.small_models import collection, sequences, table

GIB = 2**30
POOLED_TYPES, SEQUENCE_TYPES = tuple(SHARDING_TYPES), (TW, CW, RW, DP)
CUDA_KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")


@dataclass(frozen=True)
class MixedCase:
    model: nn.Module
    sharders: list[ModuleSharder[nn.Module]]
    topology: Topology
    batch_size: int
    statistics: TableStatistics | None
    constraints: dict[str, ParameterConstraints]
    heuristical: bool
    settings: dict[str, Any]
    """``exact_training``, ``cost_source`` and ``sharding_types`` of the planner."""
    left_out: frozenset[str]

    def reservation(self):
        kind = HeuristicalStorageReservation if self.heuristical else FixedPercentageStorageReservation
        return kind(percentage=0.1)

    def _arguments(self) -> dict[str, Any]:
        given = {"topology": self.topology, "batch_size": self.batch_size, "storage_reservation": self.reservation()}
        return {**given, "stats": [], "debug": False}

    def planner(self, **changed: Any) -> DreamShardPlanner:
        own = {"statistics": self.statistics, "constraints": self.constraints, **self.settings}
        return DreamShardPlanner(**self._arguments(), **(own | changed))

    def torchrec_plan(self, constraints: dict[str, ParameterConstraints] | None) -> list[ShardingOption] | None:
        """Return the plan of TorchRec's planner under the constraints; None if it finds none in ten seconds."""
        theirs = EmbeddingShardingPlanner(**self._arguments(), constraints=constraints, timeout_seconds=10)
        try:
            theirs.plan(self.model, self.sharders)
        except PlannerError:
            return None
        return theirs._best_plan


def mixed_case(seed: int) -> MixedCase:
    """1 to 24 tables in up to five modules on 1 to 16 ranks, of which hosts may hold fewer than all."""
    rng = random.Random(seed)
    device = rng.choice(["cpu", "cuda", "cuda"])
    world_size = rng.choice((1, 2, 2, 3, 4, 4, 6, 8, 8, 16))
    hosts = rng.choice([ranks for ranks in (world_size, world_size // 2, 2, 1) if ranks and world_size % ranks == 0])
    model, tables = _random_model(rng, rng.choice((1, 3, 8, 24)))
    sharders = [
        (EveryTypeSharder if device == "cpu" and rng.random() < 0.6 else EmbeddingBagCollectionSharder)(),
        EmbeddingCollectionSharder(),
    ]
    constraints = {
        name: made for name, config in tables.items() if (made := _random_constraint(rng, config, device)) is not None
    }
    settings = {
        "exact_training": rng.random() < 0.6,
        "cost_source": rng.choice(["auto", "auto", "roofline", "torchrec"]),
        "sharding_types": rng.choice([None, None, None, (TW, CW, RW), POOLED_TYPES]),
    }
    rng.random()  # keeps the cases that plan records were made of
    left_out = frozenset(_other_device_group(rng, model, constraints, device))
    weight_bytes = sum(c.num_embeddings * c.embedding_dim * 4 for c in tables.values())
    # Generous memory, or little more than the weights' even share, or than half of it where the host's memory helps.
    memory = 64 * GIB if rng.random() < 0.4 else int(weight_bytes / world_size * rng.uniform(0.5, 4)) + 2**21
    return MixedCase(
        model=model,
        sharders=sharders,
        topology=Topology(
            world_size=world_size,
            compute_device=device,
            local_world_size=hosts,
            hbm_cap=memory,
            ddr_cap=memory * (1 if device == "cpu" else rng.choice([1, 4])),
        ),
        batch_size=rng.choice([16, 128, 512]),
        statistics=_random_statistics(rng, tables),
        constraints=constraints,
        heuristical=rng.random() < 0.2,
        settings=settings,
        left_out=left_out,
    )


def _random_model(rng: random.Random, num_tables: int) -> tuple[nn.Module, dict[str, EmbeddingBagConfig]]:
    model, tables = nn.Module(), {}
    kinds = [rng.choice(["bags", "bags", "weighted", "sequence"]) for _ in range(rng.choice([1, 1, 2, 3, 5]))]
    for index, kind in enumerate(kinds):
        own, width = [], rng.choice([4, 32, 64, 256])
        for number in range(-(-num_tables // len(kinds))):
            rows = rng.choice([1, rng.randint(2, 40), int(10 ** rng.uniform(2, 6))])
            dim = width if kind == "sequence" else rng.choice([4, 8, 12, 32, 64, 128, 256, 512])
            features, data_type = rng.choice([1, 1, 1, 2, 3]), rng.choice([DataType.FP32, DataType.FP32, DataType.FP16])
            pooling = PoolingType.SUM if kind == "sequence" else rng.choice([PoolingType.SUM, PoolingType.MEAN])
            own.append(table(f"t{index}_{number}", rows, dim, features, data_type=data_type, pooling=pooling))
        if kind == "sequence":
            module = sequences(*own)
            own = module.embedding_configs()
        else:
            module = collection(*own, weighted=kind == "weighted")
        setattr(model, f"{kind}{index}", module)
        optimizer = rng.choice([None, torch.optim.SGD, torch.optim.Adam, RowWiseAdagrad])
        if optimizer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
        tables.update({config.name: config for config in own})
    return model, tables


def _random_constraint(rng: random.Random, config: EmbeddingBagConfig, device: str) -> ParameterConstraints | None:
    if rng.random() < 0.4:
        return None
    pooled = isinstance(config, EmbeddingBagConfig)
    types = None
    if rng.random() < 0.5:
        types = rng.sample(POOLED_TYPES if pooled else SEQUENCE_TYPES, rng.choice([1, 2, 4]))
        types += [] if rng.random() < 0.2 else [TW]
    kernels = None
    if device == "cuda" and rng.random() < 0.4:
        kernels = [*rng.sample(CUDA_KERNELS, rng.choice([1, 2])), "dense"]
    factors = [float(rng.choice([0, 1, 5, 30])) for _ in config.feature_names]
    return ParameterConstraints(
        sharding_types=types,
        compute_kernels=kernels,
        min_partition=rng.choice([None, None, 4, 16, 32, 128, 1024]),
        pooling_factors=factors if rng.random() < 0.5 else [1.0],
        num_poolings=[2.0] * len(factors) if rng.random() < 0.1 else None,
        cache_params=CacheParams(load_factor=rng.choice([0.1, 0.5])) if rng.random() < 0.3 else None,
        enforce_hbm=rng.choice([None, None, True, False]),
        device_group=rng.choice([None, None, device]),
    )


def _other_device_group(
    rng: random.Random, model: nn.Module, constraints: dict[str, ParameterConstraints], device: str
) -> list[str]:
    """Leave one table of some modules to another device group; return these tables."""
    left_out = []
    for module in model.children():
        names = [name.split(".")[-2] for name, _ in module.named_parameters()]
        if len(names) > 1 and rng.random() < 0.2:
            constraints[names[0]] = ParameterConstraints(device_group="cpu" if device == "cuda" else "cuda")
            left_out.append(names[0])
    return left_out


def _random_statistics(rng: random.Random, tables: dict[str, EmbeddingBagConfig]) -> TableStatistics | None:
    features = {}
    for config in tables.values():
        for feature in config.feature_names if rng.random() < 0.4 else []:
            bins = (0.5, 0.3, 0.2) + (0.0,) * 14 if rng.random() < 0.5 else None
            features[feature] = FeatureStatistics(rng.choice([0.0, 10 ** rng.uniform(-1, 2)]), bins, 512)
    return TableStatistics(features) if features else None
