# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding planner for TorchRec that learned from measured kernels what sets of tables cost.

Importing this package starts neither CUDA nor a process group.
"""

from dreamshard_planner.checkpoint import Checkpoint
from dreamshard_planner.compare import Comparison, compare
from dreamshard_planner.errors import (
    CheckpointError,
    DatasetError,
    DreamShardError,
    FileError,
    PlanError,
    StatisticsError,
    TaskError,
)
from dreamshard_planner.explain import Explanation
from dreamshard_planner.placement_rules import PlacementRules
from dreamshard_planner.plan_file import SavedPlan
from dreamshard_planner.planner import DistributedModelParallel, DreamShardPlanner
from dreamshard_planner.plugin.plan_loader import JsonPlanLoader
from dreamshard_planner.report import Report
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "DatasetError",
    "DistributedModelParallel",
    "DreamShardError",
    "DreamShardPlanner",
    "Explanation",
    "FeatureStatistics",
    "FileError",
    "JsonPlanLoader",
    "PlacementRules",
    "PlanError",
    "Report",
    "SavedPlan",
    "StatisticsError",
    "TableStatistics",
    "TaskError",
    "compare",
]

__version__ = "0.1.0"
