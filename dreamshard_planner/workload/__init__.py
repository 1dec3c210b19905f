# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What tables ask of a device: value types, statistics from batches, features, pools."""

from dreamshard_planner.workload.pools import (
    load_dlrm_dataset,
    load_tables,
    named_pool,
    save_tables,
    scale_rows,
    split_tables,
)
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics, Table, Workload, workloads_of

__all__ = [
    "FeatureStatistics",
    "Table",
    "TableStatistics",
    "Workload",
    "load_dlrm_dataset",
    "load_tables",
    "named_pool",
    "save_tables",
    "scale_rows",
    "split_tables",
    "workloads_of",
]
