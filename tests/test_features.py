# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables that can be, and their features."""

from __future__ import annotations

import pytest

from dreamshard_planner import FeatureStatistics, TaskError
from dreamshard_planner.workload.features import FEATURE_INDEX, FEATURE_NAMES, PAPER_FEATURES, Scaler, feature_matrix
from dreamshard_planner.workload.pools import mlperf_dlrm_dcnv2
from dreamshard_planner.workload.tables import Table, workloads_of


def test_features_have_one_order_and_no_nan() -> None:
    tables = [Table("one row", 1, 4, (FeatureStatistics(0.0),)), *mlperf_dlrm_dcnv2()]
    features_SF = feature_matrix(workloads_of(tables, 512))
    assert features_SF.shape == (27, len(FEATURE_NAMES)) and features_SF.isfinite().all()
    assert len(set(FEATURE_NAMES)) == len(FEATURE_NAMES) and len(PAPER_FEATURES) == 21
    assert features_SF[1, FEATURE_INDEX["lookups"]] == 3 * 512
    scaled_SF = Scaler.fit(features_SF)(features_SF)
    assert scaled_SF.isfinite().all()  # constant columns are centred, not divided by zero
    assert scaled_SF[:, FEATURE_INDEX["weight_bytes"]].abs().max() == 0


def test_tables_refuse_what_cannot_be() -> None:
    with pytest.raises(TaskError, match="'t'"):
        Table("t", 0, 4, (FeatureStatistics(1.0),))
    with pytest.raises(TaskError, match="serves no feature"):
        Table("t", 1, 4, ())
    with pytest.raises(TaskError, match="optimizer"):
        Table("t", 1, 4, (FeatureStatistics(1.0),), optimizer="lamb")
