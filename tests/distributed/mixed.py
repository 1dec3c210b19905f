# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Models of several modules whose tables are sharded each in its own way, and their training, on several ranks or one.

Shape letters: B batch (a rank's share).
"""

import itertools
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from ranks import Rank
from small_models import collection, sequences, table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecsDistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import CustomTopologyData
from torchrec.distributed.types import ModuleSharder, ShardedTensor
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.job import EveryTypeSharder
from dreamshard_planner import DistributedModelParallel, DreamShardPlanner
from tests.ways import TopLayer

SAMPLES = 16
MAX_LENGTH = 4
"""Lookups per sample and feature: from none to these."""
STEPS = 4
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class TableSpec:
    """A table, and how it may be sharded."""

    rows: int
    dim: int
    sharding_types: tuple[str, ...] | None = None
    min_partition: int | None = None
    features: int = 1
    pooling: PoolingType = PoolingType.SUM
    data_type: DataType = DataType.FP32
    planned_lookups: float = 2.0
    """Per sample, as the planner is told."""


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        modules: by module, its tables by name. A module whose name starts with ``sequence`` is an EmbeddingCollection,
            any other an EmbeddingBagCollection, with weighted lookups where it starts with ``weighted``. Where it
            starts with ``carried``, batches have weights that the module does not ask for.
        optimizer: set with ``apply_optimizer_in_backward``; None for none.
        stock: with TorchRec's own sharders; else :class:`EveryTypeSharder`.
        exact_training: see ``DreamShardPlanner``.
        planner: ``dreamshard``, or ``torchrec`` for what ours refuses.
        dense: the script's optimizer for all that no kernel updates; None for none.
        attached: this package's ``DistributedModelParallel``, which attaches optimizers to replicas; else TorchRec's.
        planned_batch: samples of a rank, as the planner is told.
        memory_bytes: of the first ranks; the others repeat them.
    """

    modules: Mapping[str, Mapping[str, TableSpec]]
    optimizer: type[torch.optim.Optimizer] | None = None
    stock: bool = True
    exact_training: bool = True
    planner: str = "dreamshard"
    dense: type[torch.optim.Optimizer] | None = torch.optim.SGD
    attached: bool = True
    planned_batch: int = 16
    memory_bytes: tuple[int, ...] = (8 << 30,)

    def tables(self) -> Iterator[tuple[str, str, TableSpec]]:
        for module, tables in self.modules.items():
            for name, spec in tables.items():
                yield module, name, spec


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    """Mean over the ranks, per step."""
    weights: dict[str, Tensor]
    """By table, whole."""
    sharding: dict[str, tuple[str, list[int]]]
    notes: tuple[str, ...]
    warned: tuple[str, ...]
    error: str | None


class MixedModel(TopLayer):
    """Pooled and sequence embeddings into one linear layer; returns the loss of a batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(sum(spec.dim * spec.features for *_, spec in case.tables()))
        self.features: dict[str, list[str]] = {}
        for module, tables in case.modules.items():
            configs = [
                table(name, spec.rows, spec.dim, spec.features, data_type=spec.data_type, pooling=spec.pooling)
                for name, spec in tables.items()
            ]
            sequence, weighted = module.startswith("sequence"), module.startswith("weighted")
            made = sequences(*configs) if sequence else collection(*configs, weighted=weighted)
            setattr(self, module, made)
            self.features[module] = [name for config in configs for name in config.feature_names]
            if case.optimizer is not None:
                apply_optimizer_in_backward(case.optimizer, made.parameters(), {"lr": LEARNING_RATE})

    def forward(self, batches: dict[str, KeyedJaggedTensor], labels_B: Tensor) -> Tensor:
        columns = []
        for module, names in self.features.items():
            output = getattr(self, module)(batches[module])
            for name in names:
                if module.startswith("sequence"):
                    columns.append(output[name].to_padded_dense(MAX_LENGTH).tanh().sum(1))
                else:
                    columns.append(output[name].float())
        return self.loss_and_logits(columns, labels_B)[0]


def batches(case: Case, step: int, first: int, count: int) -> tuple[dict[str, KeyedJaggedTensor], Tensor]:
    """Samples ``first`` to ``first + count`` of a step's global batch, by module, and their labels."""
    generator = torch.Generator().manual_seed(step % 2)  # batches come back, so that what was learned is seen again
    result = {}
    for module, tables in case.modules.items():
        names, indices, weights, lengths = [], [], [], []
        for name, spec in tables.items():
            for number in range(spec.features):
                names.append(f"{name}_f{number}")
                length_B = torch.randint(MAX_LENGTH + 1, (SAMPLES,), generator=generator)
                start = int(length_B[:first].sum())
                index_L = torch.randint(spec.rows, (int(length_B.sum()),), generator=generator)
                weight_L = torch.rand(len(index_L), generator=generator)
                lengths.append(length_B[first : first + count])
                end = start + int(lengths[-1].sum())
                indices.append(index_L[start:end])
                weights.append(weight_L[start:end])
        result[module] = KeyedJaggedTensor(
            names,
            torch.cat(indices),
            torch.cat(weights) if module.startswith(("weighted", "carried")) else None,
            lengths=torch.cat(lengths),
        )
    labels = torch.randint(2, (SAMPLES,), generator=generator).float()
    return result, labels[first : first + count]


def sharders(case: Case) -> list[ModuleSharder[nn.Module]]:
    return [EmbeddingBagCollectionSharder() if case.stock else EveryTypeSharder(), EmbeddingCollectionSharder()]


def planner_of(case: Case, world_size: int, local_world_size: int, **arguments: Any) -> EmbeddingShardingPlanner:
    constraints = {
        name: ParameterConstraints(
            sharding_types=list(spec.sharding_types) if spec.sharding_types else None,
            min_partition=spec.min_partition,
            pooling_factors=[spec.planned_lookups],
            compute_kernels=["fused", "dense"],
            is_weighted=module.startswith("carried"),
        )
        for module, name, spec in case.tables()
    }
    memory = [case.memory_bytes[rank % len(case.memory_bytes)] for rank in range(world_size)]
    custom = CustomTopologyData({"ddr_cap": memory}, world_size) if len(set(memory)) > 1 else None
    common: dict[str, Any] = {
        "topology": Topology(
            world_size, "cpu", local_world_size=local_world_size, ddr_cap=memory[0], custom_topology_data=custom
        ),
        "batch_size": case.planned_batch,
        "constraints": constraints,
        "stats": [],
        "debug": False,
        **arguments,
    }
    if case.planner == "torchrec":
        return EmbeddingShardingPlanner(**common)
    return DreamShardPlanner(**common, exact_training=case.exact_training, effort="quick")


def train_all(rank: Rank, cases: Mapping[str, Case], hosts: int = 1) -> dict[str, Trained]:
    """Train every case on all ranks, which are spread evenly over some hosts: TorchRec takes the ranks of a host from
    the environment."""
    os.environ["LOCAL_WORLD_SIZE"] = str(rank.world_size // hosts)
    return {name: train(case, rank, rank.world_size // hosts) for name, case in cases.items()}


def train(case: Case, rank: Rank, local_world_size: int) -> Trained:
    """Train on all ranks; ``error`` where TorchRec crashes, as it then does on every rank."""
    planner = planner_of(case, rank.world_size, local_world_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = planner.collective_plan(MixedModel(case), sharders(case), dist.group.WORLD)
    warned = tuple(str(warning.message) for warning in caught if warning.category is UserWarning)
    losses: list[float] = []
    weights, error = {}, None
    try:
        kind = DistributedModelParallel if case.attached else TorchRecsDistributedModelParallel
        model = kind(MixedModel(case), device=rank.device, sharders=sharders(case), plan=plan)
        fill(model)
        _steps(case, model, rank, losses)
        weights = whole_weights(model, rank.world_size)
    except (AssertionError, RuntimeError, ValueError) as crash:
        error = f"{type(crash).__name__}: {crash}"
    sharding = {
        name: (parameter.sharding_type, list(parameter.ranks))
        for tables in plan.plan.values()
        for name, parameter in tables.items()
    }
    told = isinstance(planner, DreamShardPlanner) and rank.rank == 0
    return Trained(losses, weights, sharding, planner.report().notes if told else (), warned, error)


def _steps(case: Case, model: DistributedModelParallel, rank: Rank, losses: list[float]) -> None:
    count, optimizer = SAMPLES // rank.world_size, None
    if case.dense is not None:
        parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = case.dense(parameters.values(), lr=LEARNING_RATE)
    for step in range(STEPS):
        model.zero_grad()
        loss = model(*batches(case, step, count * rank.rank, count))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        total = loss.detach() / rank.world_size
        dist.all_reduce(total)
        losses.append(total.item())


def alone(case: Case) -> Case:
    modules = {
        module: {name: replace(spec, sharding_types=("table_wise",)) for name, spec in tables.items()}
        for module, tables in case.modules.items()
    }
    return replace(case, modules=modules, planner="torchrec")


def local_shards(
    model: DistributedModelParallel,
) -> Iterator[tuple[str, Sequence[int], list[tuple[list[int], Tensor]]]]:
    """Yield name, shape, and this rank's shards with their offsets of every table."""
    for key, value in model.state_dict().items():
        if not key.endswith(".weight") or key.startswith("top"):
            continue
        yield key.split(".")[-2], tuple(value.size()), parts_of(value)


def parts_of(value: Tensor | ShardedTensor) -> list[tuple[list[int], Tensor]]:
    if isinstance(value, ShardedTensor):
        return [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in value.local_shards()]
    if isinstance(value, DTensor):
        local = value.to_local()  # where it has no shard, it has an offset all the same
        return [
            (list(at), part.detach()) for at, part in zip(local.local_offsets(), local.local_shards(), strict=False)
        ]
    return [([0] * value.dim(), value.detach())]


def untrained(name: str, shape: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(tuple(shape)).uniform_(-0.5, 0.5, generator=generator)


def fill(model: DistributedModelParallel) -> None:
    """Set weights that do not depend on the sharding."""
    for name, shape, shards in local_shards(model):
        whole = untrained(name, shape)
        for (row, column), part in shards:
            part.copy_(whole[row : row + part.shape[0], column : column + part.shape[1]])


def whole_weights(model: DistributedModelParallel, world_size: int) -> dict[str, Tensor]:
    """Weights of every table, put together of all ranks' shards, on every rank."""
    local = list(local_shards(model))
    gathered: list[Any] = [local]
    if world_size > 1:
        gathered = [None] * world_size
        dist.all_gather_object(gathered, local)
    weights: dict[str, Tensor] = {}
    for name, shape, shards in itertools.chain(*gathered):
        whole = weights.setdefault(name, torch.full(shape, float("nan")))
        for (row, column), part in shards:
            whole[row : row + part.shape[0], column : column + part.shape[1]] = part.float()
    return weights
