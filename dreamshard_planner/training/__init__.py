# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Learning: collect -> fit -> improve, then again with placements that the current policy proposes.

The only part that needs hardware is the collection; everything after it works on the dataset.
"""

from dreamshard_planner.training.calibration import calibrate
from dreamshard_planner.training.rounds import QUICK, TrainingConfig, drawn_tasks, learn, train, train_on_roofline

__all__ = ["QUICK", "TrainingConfig", "calibrate", "drawn_tasks", "learn", "train", "train_on_roofline"]
