# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The published methods as recipes."""

from dataclasses import replace

from dreamshard_planner.checkpoints.default_recipe import DEFAULT
from dreamshard_planner.checkpoints.recipes import Recipe
from dreamshard_planner.policy.reinforce import ReinforceConfig
from dreamshard_planner.research.paper_network import (
    PaperCostConfig,
    PaperCostNetwork,
    PaperFitConfig,
    fit_paper_network,
)
from dreamshard_planner.research.paper_policy import PaperPolicy, PaperPolicyConfig
from dreamshard_planner.research.recurrent_policy import RecurrentPolicy, RecurrentPolicyConfig

PAPER_REINFORCE = ReinforceConfig(
    updates=100, tasks_per_update=1, episodes_per_task=10, learning_rate=5e-4, entropy_weight=0.001, looks=0
)
"""Ten iterations of ten updates of ten episodes of one task, as published."""

PAPER = Recipe(
    name="paper",
    cost=PaperCostNetwork,
    cost_config=PaperCostConfig,
    policy=PaperPolicy,
    policy_config=PaperPolicyConfig,
    fit=fit_paper_network,
    fit_config=PaperFitConfig(),
    quick_fit_config=PaperFitConfig(updates=20),
    reinforce=PAPER_REINFORCE,
    sharding_types=("table_wise",),
)
AUTOSHARD = replace(DEFAULT, name="autoshard", policy=RecurrentPolicy, policy_config=RecurrentPolicyConfig, search=None)
