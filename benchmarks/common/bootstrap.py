# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Intervals by resampling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def mean_interval(values_N: np.ndarray, generator: np.random.Generator, draws: int = 4000) -> np.ndarray:
    """Bounds [2, ...] of the 95 % bootstrap interval of the mean over the first dimension of [N, ...]; NaN of none."""
    if len(values_N) == 0:
        return np.full((2, *values_N.shape[1:]), np.nan)
    means = values_N[generator.integers(len(values_N), size=(draws, len(values_N)))].mean(1)
    return np.percentile(means, (2.5, 97.5), axis=0)


def interval(statistic: Callable[[np.ndarray], np.ndarray], count: int, draws: int = 4000) -> list[float]:
    """A statistic of ``count`` things between the bounds of its 95 % bootstrap interval over them.

    Args:
        statistic: of things by their indices [draws, count]; one number of each draw.
        count: how many things there are, at least one.
        draws: of the bootstrap.
    """
    some = np.random.default_rng(0).integers(count, size=(draws, count))
    low, high = np.percentile(statistic(some), (2.5, 97.5))
    return [float(low), float(statistic(np.arange(count)[None])[0]), float(high)]


def trimmed_mean(values_NM: np.ndarray, share: float = 0.1) -> np.ndarray:
    """[N] means of rows of [N, M] without this share of their values at either end."""
    cut = int(values_NM.shape[1] * share)
    return np.sort(values_NM, axis=1)[:, cut : values_NM.shape[1] - cut].mean(1)
