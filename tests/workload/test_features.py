# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables that can be, and their features."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from dreamshard_planner import FeatureStatistics, TaskError
from dreamshard_planner.cost.dataset import WORKLOAD_FIELDS
from dreamshard_planner.workload.features import (
    FEATURE_INDEX,
    FEATURE_NAMES,
    PAPER_FEATURES,
    columns,
    feature_matrix,
    features_of,
    optimizer_of,
    scaling,
)
from dreamshard_planner.workload.pools import mlperf_dlrm_dcnv2
from dreamshard_planner.workload.tables import OPTIMIZERS, Table, costed_optimizer, workloads_of


def test_features_have_one_order_and_no_nan() -> None:
    tables = [Table("one row", 1, 4, (FeatureStatistics(0.0),)), *mlperf_dlrm_dcnv2()]
    features_SF = feature_matrix(workloads_of(tables, 512))
    assert features_SF.shape == (27, len(FEATURE_NAMES)) and features_SF.isfinite().all()
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES) and len(PAPER_FEATURES) == 21
    assert features_SF[1, FEATURE_INDEX["lookups"]] == 3 * 512
    mean_F, scale_F = scaling(features_SF)
    scaled_SF = (features_SF - mean_F) / scale_F
    assert scaled_SF.isfinite().all()  # constant columns are centred, not divided by zero
    assert scaled_SF[:, FEATURE_INDEX["weight_bytes"]].abs().max() == 0


def test_tables_refuse_what_cannot_be() -> None:
    with pytest.raises(TaskError, match="'t'"):
        Table("t", 0, 4, (FeatureStatistics(1.0),))
    with pytest.raises(TaskError, match="serves no feature"):
        Table("t", 1, 4, ())
    with pytest.raises(TaskError, match="optimizer"):
        Table("t", 1, 4, (FeatureStatistics(1.0),), optimizer="lamb")


def test_features_of_columns_are_those_of_workloads() -> None:
    """A dataset's columns lack what kernels are not measured with, and numbers may exceed 64 bits."""
    workloads = workloads_of(mlperf_dlrm_dcnv2(), 512)
    columns = {name: np.array([getattr(workload, name) for workload in workloads]) for name in WORKLOAD_FIELDS}
    assert torch.equal(features_of(columns), feature_matrix(workloads))
    huge = replace(workloads[0], rows=10**25)
    assert feature_matrix([huge])[0, FEATURE_INDEX["log2_rows"]] == pytest.approx(math.log2(10**25))


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
    workload = replace(workloads_of(mlperf_dlrm_dcnv2(), 8)[0], optimizer=costed)
    names = ("weight_states", "row_states", "stateful_optimizer")
    states = feature_matrix([workload])[0, columns(names)].tolist()
    assert states == [*OPTIMIZERS[costed], any(OPTIMIZERS[costed])]
    kind = 2 if costed == "adagrad" else int(any(OPTIMIZERS[costed]))
    assert optimizer_of(feature_matrix([workload])).tolist() == [kind]
