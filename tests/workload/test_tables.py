# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables that can be, the states of their optimizers, and published pools."""

from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from dreamshard_planner import FeatureStatistics, TaskError
from dreamshard_planner.workload.pools import named_pool
from dreamshard_planner.workload.tables import (
    OPTIMIZERS,
    Table,
    columns,
    costed_optimizer,
    feature_matrix,
    optimizer_of,
    workloads_of,
)


def test_tables_refuse_what_cannot_be() -> None:
    with pytest.raises(TaskError, match="'t'"):
        Table("t", 0, 4, (FeatureStatistics(1.0),))
    with pytest.raises(TaskError, match="serves no feature"):
        Table("t", 1, 4, ())
    with pytest.raises(TaskError, match="optimizer"):
        Table("t", 1, 4, (FeatureStatistics(1.0),), optimizer="lamb")


@pytest.mark.parametrize("optimizer", EmbOptimType)
def test_optimizers_keep_the_states_that_costs_count(optimizer: EmbOptimType) -> None:
    """As FBGEMM allocates them, for every optimizer that it has GPU kernels of."""
    table = (100, 8, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    try:
        kernel = SplitTableBatchedEmbeddingBagsCodegen([table], optimizer=optimizer, device=torch.device("meta"))
    except AssertionError as error:
        assert "deprecated" in str(error) or "not supported" in str(error)
        return
    kept = [getattr(kernel, f"momentum{which}_dev", torch.empty(0)).numel() for which in (1, 2)]
    costed = costed_optimizer(optimizer.name)
    assert costed != "other" and OPTIMIZERS[costed] == (kept.count(800), kept.count(100))
    workload = replace(workloads_of(named_pool("mlperf_dlrm_dcnv2"), 8)[0], optimizer=costed)
    names = ("weight_states", "row_states", "stateful_optimizer")
    states = feature_matrix([workload])[0, columns(names)].tolist()
    assert states == [*OPTIMIZERS[costed], any(OPTIMIZERS[costed])]
    kind = 2 if costed == "adagrad" else int(any(OPTIMIZERS[costed]))
    assert optimizer_of(feature_matrix([workload])).tolist() == [kind]


def test_pools_are_what_was_published() -> None:
    criteo = named_pool("mlperf_dlrm_dcnv2")
    assert len(criteo) == 26 and sum(table.rows for table in criteo) == 204_184_588
    assert sum(table.pooling_factor for table in criteo) == 214
    counts = {"tiny": 55, "small": 107, "medium": 311, "large": 612, "jumbo": 1022, "colossal": 2002}
    for model, count in counts.items():
        tables = named_pool(f"merlin_{model}")
        assert len(tables) == count == len({table.name for table in tables})
    assert len(named_pool("merlin_tiny")[0].features) == 2 and len(named_pool("meta_like_2022")) == 788
    for model, count, weights in (("t180", 177, 66e9), ("t200", 200, 104e9), ("t510", 510, 115e9), ("t7", 7, 446e9)):
        pool = named_pool(f"embark_{model}")
        assert len(pool) == count == len({table.name for table in pool})
        assert sum(table.rows * table.dim for table in pool) == pytest.approx(weights, rel=0.01)
        busiest = max(pool, key=lambda table: table.pooling_factor)
        assert busiest.features[0].reuse_histogram[0] < 0.9  # a power law: some rows of a batch are read often
    with pytest.raises(TaskError, match="mlperf_dlrm_dcnv2"):
        named_pool("mlperf")
