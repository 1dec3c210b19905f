# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The insides of TorchRec, torch and FBGEMM that the package reads: private attributes, differences between releases,
and texts of errors. Each function names the class it reads. Read in TorchRec 1.6 to 1.9 and torch 2.11 to 2.14.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.embedding import get_ec_index_dedup
from torchrec.distributed.planner import storage_reservations
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.estimator.config import EmbeddingPerfEstimatorConfig
from torchrec.distributed.planner.estimator.estimator import EmbeddingPerfEstimator, EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import DeviceHardware, ParameterConstraints, StorageReservation, Topology
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import Awaitable, ModuleSharder, ShardMetadata
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# Parameters and sharders


def optimizer_classes(parameter: Tensor) -> Sequence[type] | None:
    """Return the classes that ``apply_optimizer_in_backward`` gave a parameter; None without."""
    return getattr(parameter, "_optimizer_classes", None)


def optimizer_arguments(parameter: Tensor) -> dict[str, Any]:
    """Return the arguments that ``apply_optimizer_in_backward`` gave with the first class; empty without."""
    return (getattr(parameter, "_optimizer_kwargs", None) or [{}])[0]


def optimizer_name(parameter: Tensor, fused_params: Mapping[str, Any] | None) -> str:
    """Return FBGEMM's name, in lower case, of a table's in-backward optimizer: set on the parameter
    (``apply_optimizer_in_backward``) or in the sharder's fused parameters; by default FBGEMM's SGD. Return the name of
    its class if TorchRec knows no such kernel."""
    optimizer = (fused_params or {}).get("optimizer")
    if classes := optimizer_classes(parameter):
        # As TorchRec: an argument of this name has precedence over the class.
        optimizer = optimizer_arguments(parameter).get("optimizer")
        if optimizer is None:
            try:
                optimizer = optimizer_type_to_emb_opt_type(classes[0])
            except ValueError:
                return classes[0].__name__.lower()
    return "exact_sgd" if optimizer is None else getattr(optimizer, "name", str(optimizer)).lower()


def in_backward_optimizers(parameter: Tensor) -> list[Any] | None:
    """Return the optimizers by which ``in_backward_optimizer_filter`` tells a sharded parameter; None without."""
    return getattr(parameter, "_in_backward_optimizers", None)


def set_in_backward_optimizers(parameter: Tensor, optimizers: list[Any]) -> None:
    """Let ``in_backward_optimizer_filter`` find optimizers of a sharded parameter."""
    vars(parameter)["_in_backward_optimizers"] = optimizers


def sharder_of_tables(sharder: ModuleSharder[nn.Module] | None) -> ModuleSharder[nn.Module] | None:
    """Return the sharder of a module's tables: where feature processors, ITEP or managed collisions are around a
    collection, the collection's, whose settings the outer sharder may not show."""
    inner_names = ("_ebc_sharder", "_e_sharder", "_embedding_collection_sharder")
    inner = next((vars(sharder)[name] for name in inner_names if name in vars(sharder)), None) if sharder else None
    return sharder if inner is None else sharder_of_tables(inner)


def dedups_ids(sharder: ModuleSharder[nn.Module] | None) -> bool:
    """Return whether a sharder, or TorchRec's global switch, sends a rank's repeated ids of a collection once."""
    asks = getattr(sharder, "_use_index_dedup", None)
    return asks is not None and (asks or get_ec_index_dedup())


def grid_takes_varied_batches() -> bool:
    """Return whether grid_shard runs on batches whose size varies by feature, as from TorchRec 1.9 on."""
    return hasattr(GridPooledEmbeddingDist, "_preprocess_batch_size_per_rank_per_feature")


# Estimators


class _QuicklyScanned(EmbeddingPerfEstimatorConfig):
    """TorchRec's default hardware. TorchRec searches ``dir()`` of it for annotated methods some fifteen times per
    shard, most of an estimate's time. This lists only methods with attributes, which annotations are."""

    _annotated = [
        name
        for name, member in inspect.getmembers(EmbeddingPerfEstimatorConfig, callable)
        if not name.startswith("_") and getattr(member, "__dict__", True)
    ]

    def __dir__(self) -> list[str]:
        return self._annotated


def perf_estimator(
    topology: Topology, constraints: dict[str, ParameterConstraints] | None, is_inference: bool
) -> EmbeddingPerfEstimator:
    """Return the perf estimator that ``EmbeddingEnumerator`` makes, with less searching."""
    estimator = EmbeddingPerfEstimatorFactory.create(DEFAULT_PERF_ESTIMATOR, is_inference, topology, constraints)
    if type(estimator.config) is EmbeddingPerfEstimatorConfig:
        estimator = EmbeddingPerfEstimator(topology, constraints, is_inference, _QuicklyScanned())
    return estimator


def sharders_for_estimators(sharders: Iterable[ModuleSharder[nn.Module]]) -> dict[str, Any]:
    """Return the argument of ``ShardEstimator.estimate`` that describes sharders: live ones in TorchRec 1.6, their data
    from 1.7 on."""
    live = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    if "sharder_data_map" in inspect.signature(EmbeddingPerfEstimator.estimate).parameters:
        return {"sharder_data_map": build_sharder_data_map(live)}
    return {"sharder_map": live}


# Topologies


def resize_topology(
    topology: Topology, world_size: int, local_world_size: int, intra_group_size: int, devices: list[DeviceHardware]
) -> None:
    """Give a ``Topology`` other ranks, in place."""
    topology._world_size, topology._local_world_size = world_size, local_world_size
    topology._intra_group_size, topology._devices = intra_group_size, devices


def dense_tensor_bytes(
    reservation: HeuristicalStorageReservation,
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    batch_size: int,
    constraints: dict[str, ParameterConstraints] | None,
) -> int:
    """Return the bytes of a module's dense tensors as ``HeuristicalStorageReservation`` counts them."""
    _, sharded = storage_reservations._get_batch_inputs_and_shardable_parameters(
        module, sharders, batch_size, constraints
    )
    return int(storage_reservations._get_dense_tensor_size(module, sharded, reservation._parameter_multiplier))


def set_dense_tensor_bytes(reservation: HeuristicalStorageReservation, dense_bytes: int) -> None:
    """Give a ``HeuristicalStorageReservation`` its ``dense_tensor_estimate``."""
    reservation._dense_tensor_estimate = dense_bytes


def let_lack_of_room_be_told(reservation: StorageReservation) -> None:
    """Give a reservation the percentage that TorchRec's text on a lack of room reads of any, unless it has one."""
    reservation.__dict__.setdefault("_percentage", None)


def place_shard(shard: ShardMetadata, compute_device: str, local_world_size: int) -> None:
    """Give a shard the device that its rank has on hosts of so many ranks."""
    shard.placement = _remote_device(placement(compute_device, shard.placement.rank(), local_world_size))


# Sharded modules


def lookups_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the sharding type and the lookup of every group of a sharded module's tables; nothing for other modules.
    ``ShardedEmbeddingBagCollection`` and ``ShardedEmbeddingCollection`` keep lookups in a plain list, out of reach
    of ``modules()``; the lookup of replicas is wrapped in DDP."""
    kinds: Any = getattr(module, "_sharding_types", None) or getattr(module, "_sharding_type_to_sharding", ())
    lookups: Any = getattr(module, "_lookups", ())
    yield from zip(kinds, lookups, strict=False)


def ranks_of_module(module: Any) -> int:
    """Return the ranks over which a ``ShardedEmbeddingBagCollection`` or ``ShardedEmbeddingCollection`` lies: in 2D
    parallelism those of a sharding group."""
    return module._env.world_size


def sequence_features(module: Any) -> dict[str, list[str]]:
    """Return the features of a ``ShardedEmbeddingCollection`` by sharding type, in the order of its exchanges."""
    return {kind: sharding.feature_names() for kind, sharding in module._sharding_type_to_sharding.items()}


def sharded_values(module: Any, tables: Iterable[str]) -> list[object]:
    """Return the values that a ``ShardedEmbeddingCollection`` puts into its state dict for tables."""
    values = {**module._model_parallel_name_to_sharded_tensor, **module._model_parallel_name_to_dtensor}
    return [values[name] for name in tables]


def replace_sequence_output(
    outputs: Any,
    number: int,
    batch: KeyedJaggedTensor,
    replacement: Callable[[Awaitable[Tensor], Tensor | None], Awaitable[Tensor]],
) -> None:
    """Replace what an ``EmbeddingCollectionAwaitable`` waits for, for the sharding type with this number, by the
    embeddings of lookups in ``batch``. ``replacement`` makes them from those that came, and from the number of each
    lookup among them (None without index dedup)."""
    context = outputs._ctx = copy.copy(outputs._ctx)
    unique = None
    if context.reverse_indices:
        unique, context.reverse_indices = context.reverse_indices[number], list(context.reverse_indices)
        context.reverse_indices[number] = None
        context.input_features = list(context.input_features)
        context.input_features[number] = batch
    outputs._features_per_sharding[number] = batch
    outputs._awaitables_per_sharding[number] = replacement(outputs._awaitables_per_sharding[number], unique)


def add_fused_optimizers(module: Any, optimizers: Iterable[KeyedOptimizer]) -> None:
    """Let optimizers join the fused optimizer of a ``ShardedEmbeddingBagCollection`` or
    ``ShardedEmbeddingCollection``."""
    module._optim.optimizers.extend(("", optimizer) for optimizer in optimizers)


def table_of_feature(kernel: Any) -> list[int]:
    """Return the index of every feature's table in TorchRec's module around a kernel (``BaseBatchedEmbedding``)."""
    return kernel._feature_table_map


# Autograd and process groups of torch


def after_backward(callback: Callable[[], None]) -> None:
    """Call back when autograd's engine has nothing left to do in the current backward pass."""
    Variable._execution_engine.queue_callback(callback)


def is_in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def default_store() -> Any:
    """Return the store at which the ranks of the default process group meet."""
    return dist.distributed_c10d._get_default_store()


# Texts of errors


def tells_of_buckets(error: ValueError) -> bool:
    """Return whether ``EmbeddingEnumerator`` refused a managed collision module's number of buckets."""
    return "buckets" in str(error)


def last_planner_error(error: Exception) -> tuple[str, str | None]:
    """Split the text of ``EmbeddingShardingPlanner`` into its advice and the reason why the last proposal failed; the
    reason is empty if it gives none, and None if no proposal failed."""
    advice, _, reason = str(error).partition("Last planner error:")
    return advice.strip(), None if reason.strip() == str(None) else reason.strip()


def unread_metadata(error: BaseException) -> str | None:
    """Return why ``torch.distributed.checkpoint`` read no metadata; None for other errors."""
    return str(error).rpartition("failed: ")[2] if "metadata is None" in str(error) else None
