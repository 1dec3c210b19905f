# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learning: collect -> fit -> improve, then again with placements that the current policy proposes.

The only part that needs hardware is the collection; everything after it works on the dataset.
"""

from dreamshard_planner.training.calibration import calibrate, check
from dreamshard_planner.training.config import QUICK, WITH_ROOM, TrainingConfig, pool_tables
from dreamshard_planner.training.measuring import MAX_SETS_PER_SECOND
from dreamshard_planner.training.policies import PricedTask, priced_tasks, proposed_sets, rated_ms, validate_policy
from dreamshard_planner.training.rounds import learn, train, train_on_roofline

__all__ = [
    "MAX_SETS_PER_SECOND",
    "QUICK",
    "WITH_ROOM",
    "PricedTask",
    "TrainingConfig",
    "calibrate",
    "check",
    "learn",
    "pool_tables",
    "priced_tasks",
    "proposed_sets",
    "rated_ms",
    "train",
    "train_on_roofline",
    "validate_policy",
]
