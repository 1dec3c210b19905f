# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Storage of options against what FBGEMM's modules allocate: the modules for GPUs, made on the meta device."""

import math
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from small_models import collection, planned, table
from torchrec.distributed.batched_embedding_kernel import _populate_ssd_tbe_params
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    ShardedEmbeddingTable,
    compute_kernel_to_embedding_location,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import CacheParams, KeyValueParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import SGD, Adagrad
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.rater import PlanRater
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.constraints import PlanningConstraints

ROWS, DIM, WORLD = 10_000, 64, 4
GPUS = Topology(WORLD, "cuda", hbm_cap=2**40, ddr_cap=2**42, ssd_cap=2**44)
SLACK_BYTES = 4096
"""Small buffers, such as offsets of tables, and the rounding of estimates."""
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
OPTIMIZERS = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "LARS_SGD")


def options(given: ParameterConstraints, data_type: DataType = DataType.FP32, **params: Any) -> list[ShardingOption]:
    """Options of one table that is never looked up, as planning enumerates them."""
    model = collection(table("t", ROWS, DIM, data_type=data_type))
    sharders = [EmbeddingBagCollectionSharder(fused_params=params)]
    given.pooling_factors = [0.0]
    constraints = PlanningConstraints({"t": given})
    reader = OptionReader(constraints, sharders=sharders)
    rater = PlanRater(PlannedRanks.of(GPUS), reader, "torchrec", constraints, sharders)
    return rater.enumerator(64).enumerate(model, sharders)


def module_bytes(kernel: str, size: list[int], data_type: DataType, share: float, **params: Any) -> tuple[int, int]:
    """Bytes of device and of unified memory in FBGEMM's module for one shard."""
    location = compute_kernel_to_embedding_location(EmbeddingComputeKernel(kernel))
    sets = -(-int(share * size[0]) // 32) if location is EmbeddingLocation.MANAGED_CACHING else 0
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(*size, location, ComputeDevice.CUDA)],
        weights_precision=SparseType[data_type.name],
        device=torch.device("meta"),
        cache_sets=sets,
        **params,
    )
    tensors = [*module.named_buffers(), *module.named_parameters()]
    managed = sum(tensor.nbytes for name, tensor in tensors if name.endswith("_uvm"))
    return sum(tensor.nbytes for _, tensor in tensors) - managed, managed


def check(option: ShardingOption, device: int, host: int, most: float = 1.01) -> None:
    """Storage is no less than these bytes, and of device memory at most a share more."""
    storage = option.shards[0].storage
    assert device <= storage.hbm + SLACK_BYTES and host <= storage.ddr + SLACK_BYTES
    assert storage.hbm <= most * device + SLACK_BYTES


@pytest.mark.parametrize(
    ("optimizer", "data_type"), [*((name, DataType.FP32) for name in OPTIMIZERS), ("EXACT_ADAGRAD", DataType.FP16)]
)
@pytest.mark.parametrize("kernel", ["fused", *UVM_KERNELS])
def test_storage_is_what_the_module_allocates(kernel: str, optimizer: str, data_type: DataType) -> None:
    given = ParameterConstraints(compute_kernels=[kernel], min_partition=16)
    params = {"optimizer": EmbOptimType[optimizer]}
    found = options(given, data_type, **params)
    assert {option.sharding_type for option in found} >= {"table_wise", "row_wise", "column_wise"}
    for option in found:
        check(option, *module_bytes(kernel, option.shards[0].size, data_type, 0.2, **params))


@pytest.mark.parametrize(
    "params",
    [
        {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL},
        {
            "optimizer": EmbOptimType.ADAM,
            "extra_optimizer_config": UserEnabledConfigDefinition(use_rowwise_bias_correction=True),
        },
        {"optimizer": EmbOptimType.EXACT_ADAGRAD, "uvm_non_rowwise_momentum": True},
        {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "prefetch_pipeline": True},
    ],
)
@pytest.mark.parametrize("kernel", ["fused", *UVM_KERNELS])
def test_storage_with_options_of_the_optimizer(kernel: str, params: dict[str, Any]) -> None:
    made = dict(params)
    if "weight_decay_mode" in params:
        made["global_weight_decay"] = GlobalWeightDecayDefinition()
    for option in options(ParameterConstraints(compute_kernels=[kernel], sharding_types=["table_wise"]), **made):
        taken = module_bytes(kernel, option.shards[0].size, DataType.FP32, 0.2, **made)
        check(option, *taken, most=2.1 if "uvm_non_rowwise_momentum" in params else 1.01)


def test_storage_of_caches_with_parameters_of_their_own() -> None:
    for cache, params in [
        (CacheParams(load_factor=0.5, algorithm=CacheAlgorithm.LFU), {"cache_algorithm": CacheAlgorithm.LFU}),
        (CacheParams(load_factor=0.5, precision=DataType.FP32), {"cache_precision": SparseType.FP32}),
        (CacheParams(load_factor=0.5, prefetch_pipeline=True), {"prefetch_pipeline": True}),
    ]:
        given = ParameterConstraints(["table_wise"], ["fused_uvm_caching"], cache_params=cache)
        (option,) = options(given, DataType.FP16)
        params["optimizer"] = EmbOptimType.EXACT_SGD
        check(option, *module_bytes("fused_uvm_caching", [ROWS, DIM], DataType.FP16, 0.5, **params))
    (option,) = options(ParameterConstraints(["table_wise"], ["fused_uvm_caching"]), cache_sets=-(-ROWS // 64))
    check(option, *module_bytes("fused_uvm_caching", [ROWS, DIM], DataType.FP32, 0.5, optimizer=EmbOptimType.EXACT_SGD))
    given = ParameterConstraints(["table_wise"], ["fused_uvm"], enforce_hbm=True)
    (option,) = options(given, optimizer=EmbOptimType.ADAM)
    assert option.shards[0].storage.hbm == 2 * ROWS * DIM * 4


@pytest.mark.parametrize(
    ("stored", "own"), [(None, {}), (None, {"cache_sets": 9}), (KeyValueParams(max_l1_cache_size=1), {})]
)
@pytest.mark.parametrize("optimizer", ["EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM"])
def test_storage_of_key_value_stores(optimizer: str, stored: KeyValueParams | None, own: dict[str, int]) -> None:
    """Bytes follow from TorchRec's cache sets, FBGEMM's states, and the buffers in its source."""
    params = {"optimizer": EmbOptimType[optimizer], **own}
    found = options(ParameterConstraints(compute_kernels=["key_value"], key_value_params=stored), **params)
    assert {option.sharding_type for option in found} >= {"table_wise", "row_wise"}
    for option in found:
        rows, dim = option.shards[0].size
        sharded = ShardedEmbeddingTable(
            num_embeddings=rows, embedding_dim=dim, local_rows=rows, local_cols=dim, name="t", data_type=DataType.FP32
        )
        fused = {**params, **({} if stored is None else {"max_l1_cache_size": stored.max_l1_cache_size})}
        config = GroupedEmbeddingConfig(DataType.FP32, PoolingType.SUM, False, False, False, [sharded], fused)
        slots = _populate_ssd_tbe_params(config)["cache_sets"] * 32
        states = sum(
            split.dev_size * dtype.itemsize
            for split, _, dtype in EmbOptimType[optimizer].ssd_state_splits([(rows, dim)])
        )
        # lxu_cache_weights, lxu_cache_state and lru_state; two sets of lxu_cache_evicted_weights, _indices and _slots
        # TorchRec counts the cache of a whole table for each shard, where its size has a limit.
        most = 1.01 if stored is None else math.inf
        check(option, slots * (dim * 4 + 16) + states, 2 * slots * (dim * 4 + 12), most)


@pytest.mark.parametrize(("optimizer", "values_per_row"), [(SGD, 0), (Adagrad, DIM), (RowWiseAdagrad, 1)])
def test_replicas_have_gradients_buckets_and_the_states_of_attached_optimizers(
    optimizer: type[torch.optim.Optimizer], values_per_row: int
) -> None:
    constraints = {"t": ParameterConstraints(["data_parallel"], ["dense"], pooling_factors=[0.0])}
    model = collection(table("t", ROWS, DIM), optimizer=optimizer)
    made = planned(model, constraints=constraints, batch_size=1, optimizers_attached=True)
    weights, states = ROWS * DIM * 4, ROWS * values_per_row * 4
    assert made.options[0].shards[0].storage.ddr == pytest.approx(3 * weights + states, rel=1e-3)
