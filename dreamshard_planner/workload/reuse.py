# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms: shares of a batch's distinct rows by how often the batch reads them.

The 17 bins (0,1], (1,2], (2,4] ... (16384,32768], (32768,inf) are those of Meta's dlrm_datasets and of the DreamShard
paper. Reuse counts are log-uniform within a bin: the share of a count is proportional to its inverse.

A histogram belongs to a batch size. A power law over all rows rescales it if one explains it within sampling noise,
since only a law predicts rows that were not read. Otherwise a free mixture of Poisson rates does.

Shapes: T tables, K = 17 bins, Q Poisson rates, M of them in the free mixture, R distinct rows, A exponents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.support.reproducible import neutral

NUM_REUSE_BINS = 17
BIN_UPPER = tuple(2**k for k in range(NUM_REUSE_BINS - 1))
TOP_COUNT = 131_072
"""Assumed end of the last, open bin."""

POPULARITY_EXPONENT = 1.05
"""Default exponent of row popularity by rank, from Merlin's synthetic models. It gives a mean reuse of 6.8 on the
Meta-like pool; 6.9 is published."""

with neutral():
    _RATE_Q = torch.logspace(-40, 24, 129, base=2.0, dtype=torch.float64)
    _EXPONENTS = torch.arange(0.201, 2.0, 0.05, dtype=torch.float64)
"""Poisson rates of rows, two per octave, since the rarest of 10^9 rows count in sum; and candidate exponents, none of
them 1, for which the harmonic sum has another form."""
_MIXED = slice(60, 115)
"""Rates of the free mixture: 2^-10 to 2^17."""
_POWER_LAW_NATS, _POWER_LAW_NATS_PER_ROW = 6.0, 0.001
"""A power law explains a histogram if its log-likelihood ratio is below the first plus the second times the distinct
rows: sampling noise over 17 bins, and an allowance for the grids."""
_DISTINCT_SPREAD = 0.1
"""Relative standard deviation of a power law's distinct rows from the batch's."""
_POPULARITY_BUCKETS = 64
_LOG2_BATCHES, _HALVINGS = (-40.0, 60.0), 24
"""Bounds of the time that a row stays cached, log2 of batches, and bisections of it."""


@cache
@neutral()
def bin_mean_reuse() -> Tensor:
    """Return the mean reuse count within each bin, [K] float64."""
    means = [1.0]
    for lower, upper in zip(BIN_UPPER, (*BIN_UPPER[1:], TOP_COUNT), strict=True):
        counts = torch.arange(lower + 1, upper + 1, dtype=torch.float64)
        means.append(float(len(counts) / (1 / counts).sum()))
    return torch.tensor(means, dtype=torch.float64)


def histogram_of_counts(count_R: Tensor) -> tuple[Tensor, float]:
    """Return histogram [K] and distinct rows by how often each distinct row is read, int64 [R]."""
    if not len(count_R):
        return torch.zeros(NUM_REUSE_BINS, dtype=torch.float64), 0.0
    bin_R = torch.bucketize(count_R, torch.tensor(BIN_UPPER))
    histogram = torch.bincount(bin_R, minlength=NUM_REUSE_BINS).double()
    return histogram / len(count_R), float(len(count_R))


def bin_probabilities(rate_Q: Tensor) -> Tensor:
    """Return the probability of a Poisson count in each bin, [..., K], by rate; zero counts are in none."""
    edges = torch.tensor((0, *BIN_UPPER), dtype=torch.float64)
    at_most = torch.special.gammaincc(edges + 1, rate_Q[..., None].double().clamp_min(1e-12))
    at_most = torch.cat([at_most, torch.ones_like(at_most[..., :1])], dim=-1)
    return at_most.diff(dim=-1).clamp_min(0)


def default_reuse(
    rows: Sequence[int] | Tensor, lookups: Sequence[float] | Tensor, exponent: float | Tensor = POPULARITY_EXPONENT
) -> tuple[Tensor, Tensor]:
    """Return histograms [T, K] and distinct rows [T] by a power law of row popularity.

    Args:
        rows: rows of each table.
        lookups: lookups of a batch.
        exponent: popularity falls as rank to this power; one or [T], not 1.
    """
    rows_T = torch.as_tensor(rows, dtype=torch.float64)
    lookups_T = torch.as_tensor(lookups, dtype=torch.float64)
    # Ranks in log-spaced buckets: edges 0 .. rows, popularity from the integral of the power law.
    steps = torch.linspace(0, 1, _POPULARITY_BUCKETS + 1, dtype=torch.float64)
    edge_TQ = (rows_T[:, None] + 1) ** steps - 1
    power_T1 = (1 - torch.as_tensor(exponent, dtype=torch.float64)).expand(len(rows_T))[:, None]
    mass_TQ = (((edge_TQ + 1) ** power_T1) / power_T1).diff(dim=-1)
    share_TQ = mass_TQ / mass_TQ.sum(-1, keepdim=True)
    rows_TQ = edge_TQ.diff(dim=-1)
    bins_TQK = bin_probabilities(lookups_T[:, None] * share_TQ / rows_TQ)
    count_TK = (rows_TQ[..., None] * bins_TQK).sum(1)
    return _normalise(count_TK, rows_T, lookups_T)


def _normalise(count_TK: Tensor, rows_T: Tensor, lookups_T: Tensor) -> tuple[Tensor, Tensor]:
    # The only row of a table takes every lookup.
    only_TK = torch.eye(NUM_REUSE_BINS, dtype=torch.float64)[torch.bucketize(lookups_T, torch.tensor(BIN_UPPER))]
    count_TK = torch.where((rows_T == 1)[:, None], only_TK, count_TK)
    distinct_T = count_TK.sum(-1)
    histogram_TK = torch.where(
        (lookups_T > 0)[:, None], count_TK / distinct_T.clamp_min(1e-300)[:, None], torch.zeros(())
    )
    distinct_T = torch.minimum(distinct_T, torch.minimum(rows_T, lookups_T))
    return histogram_TK, torch.where(lookups_T > 0, distinct_T, 0.0)


def rescale_reuse(
    histograms: Sequence[Sequence[float]],
    rows: Sequence[int],
    lookups: Sequence[float],
    factor: Sequence[float],
    distinct: Sequence[float | None],
) -> tuple[Tensor, Tensor]:
    """Return histograms [T, K] and distinct rows [T] at another batch size.

    Args:
        histograms: [T, K].
        rows: rows of each table, [T].
        lookups: lookups of the batch of each histogram, [T].
        factor: new batch size over old, [T].
        distinct: distinct rows of the batch of each histogram, [T]. None: lookups over the mean reuse, a few percent
            off, since a histogram is coarse in its last bins.
    """
    histogram_TK = torch.as_tensor(histograms, dtype=torch.float64)
    rows_T, lookups_T, factor_T = (torch.as_tensor(values, dtype=torch.float64) for values in (rows, lookups, factor))
    distinct_T = torch.tensor([math.nan if count is None else count for count in distinct], dtype=torch.float64)
    counted_T = ~distinct_T.isnan()
    distinct_T = torch.where(counted_T, distinct_T, lookups_T / (histogram_TK @ bin_mean_reuse()).clamp_min(1.0))
    distinct_T = torch.minimum(distinct_T, torch.minimum(rows_T, lookups_T))
    histogram_TK = histogram_TK * (lookups_T > 0)[:, None]
    changed = ((factor_T != 1) & (lookups_T > 0)).nonzero()[:, 0]
    given = [value[changed] for value in (histogram_TK, distinct_T, counted_T, rows_T, lookups_T)]
    rows_TQ, _ = _rows_by_rate(*given)
    count_TK = torch.empty(len(changed), NUM_REUSE_BINS, dtype=torch.float64)
    for factor in factor_T[changed].unique().tolist():
        here_T = factor_T[changed] == factor
        count_TK[here_T] = rows_TQ[here_T] @ _probabilities_at(factor)
    histogram_TK[changed], distinct_T[changed] = _normalise(count_TK, rows_T[changed], (lookups_T * factor_T)[changed])
    return histogram_TK, distinct_T


def _rows_by_rate(
    histogram_TK: Tensor, distinct_T: Tensor, counted_T: Tensor, rows_T: Tensor, lookups_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rows per Poisson rate, [T, Q], and if a power law explains the bins; if not, the rows are a mixture's."""
    given = (histogram_TK, distinct_T, counted_T, rows_T, lookups_T)
    parts = zip(*(value.split(512) for value in given), strict=True)  # bounds memory
    rows_TQ, explained_T = (torch.cat(fits) for fits in zip(*(_fit_power_law(*part) for part in parts), strict=True))
    for table in (~explained_T).nonzero()[:, 0].tolist():
        known = (float(value_T[table]) for value_T in (distinct_T, rows_T, lookups_T))
        rows_TQ[table] = _mixture(tuple(histogram_TK[table].tolist()), *known)
    return rows_TQ, explained_T


def _fit_power_law(
    histogram_TK: Tensor, distinct_T: Tensor, counted_T: Tensor, rows_T: Tensor, lookups_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rows per Poisson rate, [T, Q], averaged over exponents by likelihood, and if they explain the bins."""
    law_TAQ = _power_laws(rows_T, lookups_T)
    law_TAK = law_TAQ @ _probabilities_at(1.0)
    law_TA1 = law_TAK.sum(-1, keepdim=True).clamp_min(1e-300)
    law_TAK = law_TAK / law_TA1
    floor = 1e-4  # bins that a law all but excludes hold a stray row now and then
    ratio_TAK = (histogram_TK[:, None] + floor) / (law_TAK + floor)
    nats_TA = distinct_T[:, None] * (histogram_TK[:, None] * ratio_TAK.log()).sum(-1)
    distinct_TA = (law_TA1[..., 0] / distinct_T[:, None].clamp_min(1e-300)).log() / _DISTINCT_SPREAD
    weight_TA = torch.softmax(-nats_TA - distinct_TA**2 / 2, dim=-1)
    law_TQ = (weight_TA[..., None] * law_TAQ).sum(1)
    law_TQ[counted_T] *= (distinct_T / (weight_TA * law_TA1[..., 0]).sum(-1))[counted_T, None]
    return law_TQ, nats_TA.amin(-1) < _POWER_LAW_NATS + _POWER_LAW_NATS_PER_ROW * distinct_T


@cache
@neutral()
def _probabilities_at(factor: float) -> Tensor:
    """Return bin probabilities of the rates, [Q, K], for a batch ``factor`` times as large."""
    return bin_probabilities(_RATE_Q * factor)


def _power_laws(rows_T: Tensor, lookups_T: Tensor) -> Tensor:
    """Return rows per Poisson rate, [T, A, Q], of power laws of row popularity, by exponent."""

    def harmonic(count: Tensor) -> Tensor:  # sum of rank ** -exponent, Euler-Maclaurin without its constant
        a = _EXPONENTS
        return count ** (1 - a) / (1 - a) + count**-a / 2 - a * count ** (-a - 1) / 12

    ranks = torch.arange(1, 65, dtype=torch.float64)
    constant_A = (ranks[:, None] ** -_EXPONENTS).sum(0) - harmonic(ranks[-1])
    top_rate_TA = lookups_T[:, None] / (constant_A + harmonic(rows_T[:, None]))
    edge_Q = (_RATE_Q[:-1] * _RATE_Q[1:]).sqrt()
    above_TAQ = (top_rate_TA[..., None] / edge_Q) ** (1 / _EXPONENTS[:, None])
    above_TAQ = torch.minimum(above_TAQ, rows_T[:, None, None]).floor()
    all_TA1 = rows_T[:, None, None].expand(-1, len(_EXPONENTS), 1)
    return -torch.cat([all_TA1, above_TAQ, torch.zeros_like(all_TA1)], dim=-1).diff(dim=-1)


@lru_cache(maxsize=4096)
@neutral()
def _mixture(histogram: tuple[float, ...], distinct: float, rows: float, lookups: float) -> Tensor:
    """Return rows per Poisson rate, [Q], that explain a histogram and give the distinct rows.

    Non-negative least squares on the bins and the total lookups, with at most ``rows`` rows in all (a slack takes the
    rest) and a little smoothness.
    """
    from scipy.optimize import nnls

    histogram_K = torch.tensor(histogram, dtype=torch.float64)
    rate_M, probability_MK = _RATE_Q[_MIXED], _probabilities_at(1.0)[_MIXED]
    scale_K = 1 / (histogram_K + 1e-3).sqrt()
    bins_KM = (probability_MK * scale_K).T
    strong, smooth = 10.0, 0.003
    lookups_M = strong * rate_M * distinct / lookups
    rows_M = torch.full_like(rate_M, strong * distinct / rows)
    curvature = smooth * (torch.eye(len(rate_M), dtype=torch.float64).diff(n=2, dim=0))
    design = torch.cat([bins_KM, lookups_M[None], rows_M[None], curvature])
    slack = torch.zeros(len(design), 1, dtype=torch.float64)
    slack[NUM_REUSE_BINS + 1] = strong
    target = torch.cat([histogram_K * scale_K, torch.tensor([strong, strong]), torch.zeros(len(curvature))])
    solution, _ = nnls(torch.cat([design, slack], dim=1).numpy(), target.double().numpy(), maxiter=3000)
    rows_Q = torch.zeros_like(_RATE_Q)
    rows_Q[_MIXED] = torch.from_numpy(solution[:-1])
    # Poisson counts spread more than equal ones, for which too few rows fit best.
    return rows_Q * distinct / (rows_Q @ _probabilities_at(1.0)).sum().clamp_min(1e-300)


def cache_hits(
    histograms: np.ndarray, rows: np.ndarray, lookups: np.ndarray, distinct: np.ndarray, cached_rows: np.ndarray
) -> Tensor:
    """Return shares of a batch's distinct rows that an LRU cache, FBGEMM's default, holds at its start, [T].

    A power law or a free mixture gives the rows n(r) that a batch reads r times on average, as in
    :func:`rescale_reuse`. A cache of C rows then holds the rows read within the last t batches, with
    sum n (1 - exp(-r t)) = C (Che, Tung and Wang, 2002). Popularity is constant across batches.

    Args:
        histograms: of a batch, [T, K].
        rows: rows of each table, [T].
        lookups, distinct: of the batch, [T]; the share is 1 without lookups.
        cached_rows: rows that the cache holds, [T].
    """
    histogram_TK = torch.as_tensor(histograms, dtype=torch.float64)
    rows_T, lookups_T, distinct_T, cached_T = (
        torch.as_tensor(values, dtype=torch.float64) for values in (rows, lookups, distinct, cached_rows)
    )
    hit_T = torch.ones(len(rows_T), dtype=torch.float64)
    part = ((lookups_T > 0) & (cached_T < rows_T)).nonzero()[:, 0]
    counted = torch.ones(len(part), dtype=torch.bool)
    rows_TQ, explained_T = _rows_by_rate(histogram_TK[part], distinct_T[part], counted, rows_T[part], lookups_T[part])
    fitting_T = torch.where(explained_T, 1.0, (rows_T[part] / rows_TQ.sum(-1)).clamp_max(1.0))
    hit_T[part] = _hits(rows_TQ * fitting_T[:, None], cached_T[part])
    return hit_T


def _hits(rows_TQ: Tensor, cached_T: Tensor) -> Tensor:
    """Return shares of distinct rows, [T], in a cache of ``cached_T`` rows."""
    low_T1, high_T1 = (torch.full_like(cached_T[:, None], bound) for bound in _LOG2_BATCHES)
    for _ in range(_HALVINGS):
        middle_T1 = (low_T1 + high_T1) / 2
        held_TQ = -torch.expm1(-_RATE_Q * torch.exp2(middle_T1))
        fits_T1 = (rows_TQ * held_TQ).sum(-1, keepdim=True) <= cached_T[:, None]
        low_T1, high_T1 = torch.where(fits_T1, middle_T1, low_T1), torch.where(fits_T1, high_T1, middle_T1)
    held_TQ, read_Q = -torch.expm1(-_RATE_Q * torch.exp2(low_T1)), -torch.expm1(-_RATE_Q)
    return ((rows_TQ * held_TQ) @ read_Q / (rows_TQ @ read_Q).clamp_min(1e-300)).clamp(0, 1)


def merge_reuse(histograms: Sequence[Sequence[float]], distinct: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Return histogram and distinct rows of a shared table, whose kernel sees a row once per feature that reads it."""
    count_K, total = np.asarray(distinct) @ np.asarray(histograms), float(sum(distinct))
    return tuple((count_K / max(total, 1e-300)).tolist()), total


def shift_reuse(histogram: tuple[float, ...], ratio: float) -> tuple[float, ...]:
    """Return the histogram with ``ratio`` times the mean reuse, within 17 bins.

    All rows move by the two whole numbers of bins whose means enclose the new mean.
    """
    moved_BK, mean_B = _moved(histogram)
    moves = np.interp(mean_B[NUM_REUSE_BINS - 1] * ratio, mean_B, np.arange(len(mean_B)))
    low = min(int(moves), len(mean_B) - 2)
    return tuple((moved_BK[low] + (moves - low) * (moved_BK[low + 1] - moved_BK[low])).tolist())


@lru_cache(maxsize=4096)
def _moved(histogram: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return a histogram moved by -16 to 16 bins, [33, K], and the ascending means; outermost bins take overflow."""
    bins = np.arange(NUM_REUSE_BINS)
    target_BK = np.clip(np.arange(1 - NUM_REUSE_BINS, NUM_REUSE_BINS)[:, None] + bins, 0, NUM_REUSE_BINS - 1)
    moved_BK = np.array(histogram) @ (target_BK[..., None] == bins)
    return moved_BK, moved_BK @ bin_mean_reuse().numpy()
