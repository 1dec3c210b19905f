# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding planner for TorchRec that learned from measured kernels what sets of tables cost.

Importing this package starts neither CUDA nor a process group, and loads torch only when one of its names is used. It
warns where torch, FBGEMM or TorchRec is missing or of a release that was not tried.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dreamshard_planner.environment import EnvironmentWarning as EnvironmentWarning
from dreamshard_planner.environment import explained, warn_of_problems
from dreamshard_planner.errors import CheckpointError as CheckpointError
from dreamshard_planner.errors import DatasetError as DatasetError
from dreamshard_planner.errors import DreamShardError as DreamShardError
from dreamshard_planner.errors import FileError as FileError
from dreamshard_planner.errors import MissingLibraryError as MissingLibraryError
from dreamshard_planner.errors import ObservationError as ObservationError
from dreamshard_planner.errors import PlanError as PlanError
from dreamshard_planner.errors import StatisticsError as StatisticsError
from dreamshard_planner.errors import TaskError as TaskError

if TYPE_CHECKING:
    from dreamshard_planner.across_plans.state_dicts import AcrossPlansLoadPlanner as AcrossPlansLoadPlanner
    from dreamshard_planner.across_plans.state_dicts import load_across_plans as load_across_plans
    from dreamshard_planner.across_plans.state_dicts import save_across_plans as save_across_plans
    from dreamshard_planner.checkpoints.checkpoint import Checkpoint as Checkpoint
    from dreamshard_planner.model_parallel import DistributedModelParallel as DistributedModelParallel
    from dreamshard_planner.observing.observation import Observation as Observation
    from dreamshard_planner.observing.observer import observe as observe
    from dreamshard_planner.observing.step_comparison import StepComparison as StepComparison
    from dreamshard_planner.observing.step_comparison import compare_steps as compare_steps
    from dreamshard_planner.planner import DreamShardPlanner as DreamShardPlanner
    from dreamshard_planner.planning.explanation import Explanation as Explanation
    from dreamshard_planner.planning.page import save_html as save_html
    from dreamshard_planner.planning.ranks import ShardingGroups as ShardingGroups
    from dreamshard_planner.planning.replanning import Replan as Replan
    from dreamshard_planner.plans.comparison import Comparison as Comparison
    from dreamshard_planner.plans.comparison import compare as compare
    from dreamshard_planner.plans.plan_file import SavedPlan as SavedPlan
    from dreamshard_planner.plans.report import Report as Report
    from dreamshard_planner.search_space.placement_rules import PlacementRules as PlacementRules
    from dreamshard_planner.torchrec_components.components import JsonPlanLoader as JsonPlanLoader
    from dreamshard_planner.torchrec_components.replica_optimizers import attach_optimizers as attach_optimizers
    from dreamshard_planner.workload.lookups import FeatureStatistics as FeatureStatistics
    from dreamshard_planner.workload.statistics import TableStatistics as TableStatistics

_HOMES = {
    "AcrossPlansLoadPlanner": "across_plans.state_dicts",
    "Checkpoint": "checkpoints.checkpoint",
    "Comparison": "plans.comparison",
    "DistributedModelParallel": "model_parallel",
    "DreamShardPlanner": "planner",
    "Explanation": "planning.explanation",
    "FeatureStatistics": "workload.lookups",
    "JsonPlanLoader": "torchrec_components.components",
    "Observation": "observing.observation",
    "PlacementRules": "search_space.placement_rules",
    "Replan": "planning.replanning",
    "Report": "plans.report",
    "SavedPlan": "plans.plan_file",
    "ShardingGroups": "planning.ranks",
    "StepComparison": "observing.step_comparison",
    "TableStatistics": "workload.statistics",
    "attach_optimizers": "torchrec_components.replica_optimizers",
    "compare": "plans.comparison",
    "compare_steps": "observing.step_comparison",
    "load_across_plans": "across_plans.state_dicts",
    "observe": "observing.observer",
    "save_across_plans": "across_plans.state_dicts",
    "save_html": "planning.page",
}
"""Modules of the names that are imported at their first use; type checkers read the imports above."""

if not TYPE_CHECKING:  # a type checker takes no name that the list does not spell out for public
    __all__ = [*_HOMES, *(name for name in globals() if name.endswith(("Error", "Warning")))]

__version__ = "0.1.0"

warn_of_problems(stacklevel=2)

if "torch" in sys.modules:  # scripts that train: before there is a process group, see planner.py
    import torch.distributed.optim  # noqa: F401


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch.distributed.optim  # noqa: F401  # early, as above

        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if missing := explained(error):
            raise missing from error
        raise
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
