# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks fitted to measured sets, and judged on sets of held-out tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dreamshard_planner.checkpoints.recipes import Recipe
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.fit import LabelledSets, mape_2, predict_ms
from dreamshard_planner.cost.network import AnyCostNetwork
from dreamshard_planner.support.progress import progress_bar
from dreamshard_planner.support.registry import Registry

BASELINES: Registry[Callable[[LabelledSets], ComputeCost]] = Registry(
    linear="dreamshard_planner.research.linear_cost:LinearCost.fit"
)
"""Costs that a network has to predict better than, fitted to the same sets."""


def fit(
    recipe: Recipe, train_sets: LabelledSets, progress: bool, start: AnyCostNetwork | None = None
) -> AnyCostNetwork:
    """Fit the recipe's cost network; with ``start``, from that network on, which the recipe's ``fit_from`` does."""
    with progress_bar("fitting", recipe.fit_config.steps(len(train_sets)), progress) as advance:

        def on_step(_: int, loss: float) -> None:
            advance(f"loss {loss:.4f}")

        if start is None or recipe.fit_from is None:
            return recipe.fit(train_sets, recipe.fit_config, on_step)
        return recipe.fit_from(train_sets, recipe.fit_config, on_step, start)


def validate_cost(network: ComputeCost, train_sets: LabelledSets, test_sets: LabelledSets) -> dict[str, Any]:
    """Mean absolute percentage errors on sets of held-out tables, beside those of the baselines."""
    fitted = {"network": network, **{name: baseline(train_sets) for name, baseline in BASELINES.items()}}
    return {
        f"{name}_mape": [
            round(value, 4) for value in mape_2(predict_ms(cost, test_sets), test_sets.labels_ms_X2).tolist()
        ]
        for name, cost in fitted.items()
    }
