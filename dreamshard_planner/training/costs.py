# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks fitted to measured sets, and judged on sets of held-out tables."""

from __future__ import annotations

from typing import Any

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import (
    CostNetwork,
    CostNetworkConfig,
    FitConfig,
    fit_cost_network,
    mape_2,
    predict_ms,
)
from dreamshard_planner.support.progress import progress_bar


def start_of(start: Checkpoint | None, train_sets: LabelledSets) -> Checkpoint | None:
    """The checkpoint whose network fitting starts from; None if it has none of today's sizes, or if the sets have a
    prior of their own to start from."""
    if start is None or start.cost is None or train_sets.prior is not None or start.cost.roofline is not None:
        return None
    return start if start.cost.config == CostNetworkConfig() else None


def fit(config: FitConfig, train_sets: LabelledSets, progress: bool, start: CostNetwork | None = None) -> CostNetwork:
    """Fit a cost network; from ``start`` on, if :func:`start_of` found one."""
    with progress_bar("fitting", config.steps(len(train_sets)), progress) as advance:

        def on_step(_: int, loss: float) -> None:
            advance(f"loss {loss:.4f}")

        return fit_cost_network(train_sets, None, config, on_step, start)


def validate_cost(network: ComputeCost, test_sets: LabelledSets) -> dict[str, Any]:
    """Return the mean absolute percentage errors on sets of held-out tables."""
    errors_2 = mape_2(predict_ms(network, test_sets), test_sets.labels_ms_X2)
    return {"network_mape": [round(value, 4) for value in errors_2.tolist()]}
