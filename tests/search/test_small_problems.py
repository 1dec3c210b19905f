# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans of small problems against all shardings."""

import pytest

from tests.exhaustive import planned_and_best_ms

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("cost_source", ["roofline", "torchrec"])
@pytest.mark.parametrize("seed", [0, 4, 5, 10])
def test_plans_of_small_problems_are_within_a_hundredth_of_the_best(cost_source: str, seed: int) -> None:
    planned_ms, best_ms = planned_and_best_ms(seed, cost_source)
    assert best_ms * (1 - 1e-6) <= planned_ms <= best_ms * 1.01
