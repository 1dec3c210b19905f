# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks fitted to measured sets, and judged on sets of held-out tables."""

from __future__ import annotations

from typing import Any

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.checkpoints.recipes import Recipe
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.fit import LabelledSets, mape_2, predict_ms
from dreamshard_planner.cost.network import AnyCostNetwork
from dreamshard_planner.support.progress import progress_bar


def start_of(start: Checkpoint | None, recipe: Recipe, train_sets: LabelledSets) -> Checkpoint | None:
    """The checkpoint whose network fitting starts from; None where it has none of the recipe's kind, or the recipe
    starts none, or the sets have a prior of their own to start from."""
    if start is None or start.cost is None or recipe.fit_from is None or train_sets.prior is not None:
        return None
    return start if type(start.cost) is recipe.cost and start.cost.config == recipe.cost_config() else None


def fit(
    recipe: Recipe, train_sets: LabelledSets, progress: bool, start: AnyCostNetwork | None = None
) -> AnyCostNetwork:
    """Fit the recipe's cost network; from ``start`` on, if :func:`start_of` found one."""
    with progress_bar("fitting", recipe.fit_config.steps(len(train_sets)), progress) as advance:

        def on_step(_: int, loss: float) -> None:
            advance(f"loss {loss:.4f}")

        if start is None or recipe.fit_from is None:
            return recipe.fit(train_sets, recipe.fit_config, on_step)
        return recipe.fit_from(train_sets, recipe.fit_config, on_step, start)


def validate_cost(network: ComputeCost, test_sets: LabelledSets) -> dict[str, Any]:
    """Return the mean absolute percentage errors on sets of held-out tables."""
    errors_2 = mape_2(predict_ms(network, test_sets), test_sets.labels_ms_X2)
    return {"network_mape": [round(value, 4) for value in errors_2.tolist()]}
