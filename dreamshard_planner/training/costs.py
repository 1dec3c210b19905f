# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks fitted to measured sets, and judged on sets of held-out tables."""

from __future__ import annotations

from typing import Any

from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.fit import LabelledSets, fit_cost_network, mape_2, predict_ms
from dreamshard_planner.cost.network import CostNetwork
from dreamshard_planner.research.linear_cost import LinearCost
from dreamshard_planner.research.paper_network import PaperCostNetwork, fit_paper_network
from dreamshard_planner.support.progress import progress_bar
from dreamshard_planner.training.config import TrainingConfig


def fit(config: TrainingConfig, train_sets: LabelledSets, progress: bool) -> CostNetwork | PaperCostNetwork:
    """Fit the recipe's cost network."""
    total = config.paper_fit.updates if config.recipe == "paper" else config.fit.passes(len(train_sets))
    with progress_bar("fitting", total, progress) as advance:

        def on_step(_: int, loss: float) -> None:
            advance(f"loss {loss:.4f}")

        if config.recipe == "paper":
            return fit_paper_network(train_sets, config.paper_fit, on_step)
        return fit_cost_network(train_sets, config.network, config.fit, on_step)


def validate_cost(network: ComputeCost, train_sets: LabelledSets, test_sets: LabelledSets) -> dict[str, Any]:
    """Mean absolute percentage errors on sets of held-out tables, beside the linear baseline's."""
    labels = test_sets.labels_ms_X2
    network_2 = mape_2(predict_ms(network, test_sets), labels)
    linear_2 = mape_2(predict_ms(LinearCost.fit(train_sets), test_sets), labels)
    return {
        "network_mape": [round(value, 4) for value in network_2.tolist()],
        "linear_mape": [round(value, 4) for value in linear_2.tolist()],
    }
