# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The recipe of this package."""

from dreamshard_planner.checkpoints.recipes import Recipe
from dreamshard_planner.cost.fit import FitConfig, fit_cost_network
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.over_prior import NetworkOverPrior
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.policy.reinforce import ReinforceConfig
from dreamshard_planner.search.local_search import DEFAULT_SEARCH

DEFAULT = Recipe(
    name="default",
    cost=CostNetwork,
    cost_config=CostNetworkConfig,
    policy=Policy,
    policy_config=PolicyConfig,
    fit=lambda train, config, on_step: fit_cost_network(train, None, config, on_step),
    fit_from=lambda train, config, on_step, start: fit_cost_network(train, None, config, on_step, start),
    fit_config=FitConfig(),
    quick_fit_config=FitConfig(epochs=10),
    reinforce=ReinforceConfig(),
    search=DEFAULT_SEARCH,
    cost_over_prior=NetworkOverPrior,
)
