# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checkpoints that load under any plan of the same tables, with the states of their optimizers."""

from dreamshard_planner.across_plans.loading import AcrossPlansLoadPlanner, load_across_plans
from dreamshard_planner.across_plans.saving import save_across_plans

__all__ = ["AcrossPlansLoadPlanner", "load_across_plans", "save_across_plans"]
