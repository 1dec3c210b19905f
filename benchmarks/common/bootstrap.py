# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Intervals by resampling."""

from __future__ import annotations

import numpy as np


def mean_interval(values_N: np.ndarray, generator: np.random.Generator, draws: int = 4000) -> np.ndarray:
    """Bounds [2, ...] of the 95 % bootstrap interval of the mean over the first dimension of [N, ...]; NaN of none."""
    if len(values_N) == 0:
        return np.full((2, *values_N.shape[1:]), np.nan)
    means = values_N[generator.integers(len(values_N), size=(draws, len(values_N)))].mean(1)
    return np.percentile(means, (2.5, 97.5), axis=0)
