# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding planner for TorchRec that learned from measured kernels what sets of tables cost.

Importing this package starts neither CUDA nor a process group, and loads torch only when one of its names is used. It
warns where torch, FBGEMM or TorchRec is missing or of a release that was not tried.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dreamshard_planner.environment import EnvironmentWarning, explained, warn_of_problems
from dreamshard_planner.errors import MissingLibraryError

if TYPE_CHECKING:
    from dreamshard_planner.across_plans.loading import AcrossPlansLoadPlanner, load_across_plans
    from dreamshard_planner.across_plans.saving import save_across_plans
    from dreamshard_planner.checkpoints.checkpoint import Checkpoint
    from dreamshard_planner.errors import (
        CheckpointError,
        DatasetError,
        DreamShardError,
        FileError,
        ObservationError,
        PlanError,
        StatisticsError,
        TaskError,
    )
    from dreamshard_planner.observing.observation import Observation
    from dreamshard_planner.observing.observer import observe
    from dreamshard_planner.planner import DreamShardPlanner
    from dreamshard_planner.plans.comparison import Comparison, compare
    from dreamshard_planner.plans.explanation import Explanation
    from dreamshard_planner.plans.plan_file import SavedPlan
    from dreamshard_planner.plans.replan import Replan
    from dreamshard_planner.plans.report import Report
    from dreamshard_planner.problem.sharding_groups import ShardingGroups
    from dreamshard_planner.search_space.placement_rules import PlacementRules
    from dreamshard_planner.torchrec_components.model_parallel import DistributedModelParallel
    from dreamshard_planner.torchrec_components.plan_loader import JsonPlanLoader
    from dreamshard_planner.torchrec_components.replica_optimizers import attach_optimizers
    from dreamshard_planner.watch import DriftWatch
    from dreamshard_planner.workload.statistics import TableStatistics
    from dreamshard_planner.workload.tables import FeatureStatistics

__all__ = [
    "AcrossPlansLoadPlanner",
    "Checkpoint",
    "CheckpointError",
    "Comparison",
    "DatasetError",
    "DistributedModelParallel",
    "DreamShardError",
    "DreamShardPlanner",
    "DriftWatch",
    "EnvironmentWarning",
    "Explanation",
    "FeatureStatistics",
    "FileError",
    "JsonPlanLoader",
    "MissingLibraryError",
    "Observation",
    "ObservationError",
    "PlacementRules",
    "PlanError",
    "Replan",
    "Report",
    "SavedPlan",
    "ShardingGroups",
    "StatisticsError",
    "TableStatistics",
    "TaskError",
    "attach_optimizers",
    "compare",
    "load_across_plans",
    "observe",
    "save_across_plans",
]

__version__ = "0.1.0"

_HOMES = (
    "errors",
    "checkpoints.checkpoint",
    "workload.statistics",
    "workload.tables",
    "plans.report",
    "plans.plan_file",
    "plans.comparison",
    "plans.explanation",
    "plans.replan",
    "search_space.placement_rules",
    "problem.sharding_groups",
    "planner",
    "torchrec_components.model_parallel",
    "torchrec_components.plan_loader",
    "torchrec_components.replica_optimizers",
    "across_plans.loading",
    "across_plans.saving",
    "observing.observation",
    "observing.observer",
    "watch",
)
"""Modules of these names, the quickest to load first; none is called as a name is."""

warn_of_problems(stacklevel=2)

if "torch" in sys.modules:  # scripts that train: before there is a process group, see planner.py
    import torch.distributed.optim  # noqa: F401


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            try:
                module = import_module(f"{__name__}.{home}")
            except ModuleNotFoundError as error:
                if missing := explained(error):
                    raise missing from error
                raise
            found = module.__dict__.get(name)
            if getattr(found, "__module__", None) == module.__name__:
                globals()[name] = found
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
