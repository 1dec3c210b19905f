# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding planner for TorchRec that learned from measured kernels what sets of tables cost.

Importing this package starts neither CUDA nor a process group.
"""

from dreamshard_planner.checkpoint import Checkpoint
from dreamshard_planner.errors import CheckpointError, DatasetError, DreamShardError, StatisticsError, TaskError
from dreamshard_planner.planner import DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.report import Report
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DatasetError",
    "DistributedModelParallel",
    "DreamShardError",
    "DreamShardPlanner",
    "FeatureStatistics",
    "Report",
    "StatisticsError",
    "TableStatistics",
    "TaskError",
]

__version__ = "0.1.0"
