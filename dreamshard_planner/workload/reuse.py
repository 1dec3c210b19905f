# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms: shares of a batch's distinct rows by how often the batch reads them.

The 17 bins (0,1], (1,2], (2,4] ... (16384,32768], (32768,inf) are those of Meta's dlrm_datasets and of the DreamShard
paper. Reuse counts are log-uniform within a bin: the share of a count is proportional to its inverse.

A histogram belongs to a batch size. A power law over all rows rescales it if one explains it within sampling noise,
since only a law predicts rows that were not read. Otherwise counts thin binomially for a smaller batch, and a free
mixture of Poisson rates gives a larger one.

Shapes: T tables, K = 17 bins, Q Poisson rates, N indices, R distinct rows, C reuse counts, A exponents.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from dreamshard_planner.support.torch_state import neutral

NUM_REUSE_BINS = 17
BIN_UPPER = tuple(2**k for k in range(NUM_REUSE_BINS - 1))
TOP_COUNT = 131_072
"""Assumed end of the last, open bin."""

POPULARITY_EXPONENT = 1.05
"""Default exponent of row popularity by rank, from Merlin's synthetic models. It gives a mean reuse of 6.8 on the
Meta-like pool; 6.9 is published."""

_MIXTURE_RATES = (-10, 17, 2)
"""Rates of the free mixture: log2 of the lowest and highest rate, rates per octave."""
_POWER_LAW_RATES = (-40, 24, 2)
"""Wider rates, because the rarest of 10^9 rows count in sum."""
with neutral():
    _EXPONENTS = torch.arange(0.201, 2.0, 0.05, dtype=torch.float64)
"""Candidate exponents; none is 1, for which the harmonic sum has another form."""
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


def reuse_histogram(indices: Tensor) -> tuple[Tensor, float]:
    """Return histogram [K] and distinct rows of one batch's indices of one table; zeros without indices."""
    return histogram_of_counts(torch.unique(indices, return_counts=True)[1])


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


def mean_reuse(histograms_TK: Tensor) -> Tensor:
    """Return the mean reuse of distinct rows, [T]."""
    return histograms_TK.double() @ bin_mean_reuse()


def rescale_reuse(
    histograms: Sequence[Sequence[float]],
    rows: Sequence[int],
    lookups: Sequence[float],
    factor: Sequence[float],
    distinct: Sequence[float | None] | None = None,
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
    known = distinct or [None] * len(rows_T)
    given_T = torch.tensor([math.nan if count is None else count for count in known], dtype=torch.float64)
    counted_T = ~given_T.isnan()
    distinct_T = torch.where(counted_T, given_T, lookups_T / mean_reuse(histogram_TK).clamp_min(1.0))
    distinct_T = torch.minimum(distinct_T, torch.minimum(rows_T, lookups_T))
    count_TK = histogram_TK * distinct_T[:, None]
    changed = ((factor_T != 1) & (factor_T > 0) & (lookups_T > 0)).nonzero()[:, 0]
    for part in changed.split(512):  # bounds memory
        given = (histogram_TK, distinct_T, counted_T, rows_T, lookups_T, factor_T)
        count_TK[part] = _rescaled_counts(*(value[part] for value in given))
    new_TK, new_T = _normalise(count_TK, rows_T, lookups_T * factor_T)
    same_T = (factor_T == 1) & (lookups_T > 0)
    return torch.where(same_T[:, None], histogram_TK, new_TK), torch.where(same_T, distinct_T, new_T)


@cache
@neutral()
def _thinning(factor: float) -> Tensor:
    """Return the probability [K, K] of each new bin by old bin if a batch shrinks by ``factor`` < 1.

    Rows sum to less than 1: some rows are not read any more.
    """
    import numpy as np
    from scipy.stats import binom

    exact = BIN_UPPER[8]  # every count up to here, log-spaced ones above
    count_C = np.unique(np.concatenate([np.arange(1, exact + 1), np.geomspace(exact, TOP_COUNT, 400).round()]))
    edge_C = np.concatenate([[1.0], (count_C[1:] + count_C[:-1] + 1) / 2, [TOP_COUNT + 1.0]])
    weight_C = np.where(count_C <= exact, 1 / count_C, np.log(edge_C[1:] / edge_C[:-1]))
    weight_KC = weight_C * (np.searchsorted(BIN_UPPER, count_C) == np.arange(NUM_REUSE_BINS)[:, None])
    at_most_CK = binom.cdf((0, *BIN_UPPER), count_C[:, None], factor)
    bins_CK = np.diff(at_most_CK, axis=1, append=1.0)
    return torch.from_numpy(weight_KC / weight_KC.sum(1, keepdims=True) @ bins_CK)


def _rescaled_counts(
    histogram_TK: Tensor, distinct_T: Tensor, counted_T: Tensor, rows_T: Tensor, lookups_T: Tensor, factor_T: Tensor
) -> Tensor:
    """Return the expected distinct rows by bin, [T, K], of batches ``factor`` times as large."""
    law_TQ, explained_T = _fit_power_law(histogram_TK, distinct_T, counted_T, rows_T, lookups_T)
    count_TK = torch.empty_like(histogram_TK)
    for factor in factor_T.unique().tolist():
        here_T = factor_T == factor
        law_TK = law_TQ[here_T] @ _probabilities_at(factor, _POWER_LAW_RATES)
        count_TK[here_T] = torch.where(explained_T[here_T, None], law_TK, 0.0)
        rest_T = here_T & ~explained_T
        if factor < 1:
            count_TK[rest_T] = (histogram_TK * distinct_T[:, None])[rest_T] @ _thinning(factor)
    solved: dict[tuple[float, ...], Tensor] = {}
    for table in (~explained_T & (factor_T > 1)).nonzero()[:, 0].tolist():
        known = float(distinct_T[table]), float(rows_T[table]), float(lookups_T[table])
        key = (*histogram_TK[table].tolist(), *known)
        if key not in solved:
            solved[key] = _mixture(histogram_TK[table], *known)
        count_TK[table] = solved[key] @ _probabilities_at(float(factor_T[table]), _MIXTURE_RATES)
    return count_TK


def _fit_power_law(
    histogram_TK: Tensor, distinct_T: Tensor, counted_T: Tensor, rows_T: Tensor, lookups_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return rows per Poisson rate, [T, Q], averaged over exponents by likelihood, and if they explain the bins."""
    law_TAQ = _power_laws(rows_T, lookups_T)
    law_TAK = law_TAQ @ _probabilities_at(1.0, _POWER_LAW_RATES)
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
def _rates(grid: tuple[int, int, int]) -> Tensor:
    low, high, per_octave = grid
    return torch.logspace(low, high, (high - low) * per_octave + 1, base=2.0, dtype=torch.float64)


@cache
@neutral()
def _probabilities_at(factor: float, grid: tuple[int, int, int]) -> Tensor:
    """Return bin probabilities [Q, K] of a rate grid for a batch ``factor`` times as large."""
    return bin_probabilities(_rates(grid) * factor)


def _power_laws(rows_T: Tensor, lookups_T: Tensor) -> Tensor:
    """Return rows per Poisson rate, [T, A, Q], of power laws of row popularity, by exponent."""

    def harmonic(count: Tensor) -> Tensor:  # sum of rank ** -exponent, Euler-Maclaurin without its constant
        a = _EXPONENTS
        return count ** (1 - a) / (1 - a) + count**-a / 2 - a * count ** (-a - 1) / 12

    ranks = torch.arange(1, 65, dtype=torch.float64)
    constant_A = (ranks[:, None] ** -_EXPONENTS).sum(0) - harmonic(ranks[-1])
    top_rate_TA = lookups_T[:, None] / (constant_A + harmonic(rows_T[:, None]))
    rate_Q = _rates(_POWER_LAW_RATES)
    edge_Q = (rate_Q[:-1] * rate_Q[1:]).sqrt()
    above_TAQ = (top_rate_TA[..., None] / edge_Q) ** (1 / _EXPONENTS[:, None])
    above_TAQ = torch.minimum(above_TAQ, rows_T[:, None, None]).floor()
    all_TA1 = rows_T[:, None, None].expand(-1, len(_EXPONENTS), 1)
    return -torch.cat([all_TA1, above_TAQ, torch.zeros_like(all_TA1)], dim=-1).diff(dim=-1)


def _mixture(histogram_K: Tensor, distinct: float, rows: float, lookups: float) -> Tensor:
    """Return rows per Poisson rate, [Q], that explain a histogram and give the distinct rows.

    Non-negative least squares on the bins and the total lookups, with at most ``rows`` rows in all (a slack takes the
    rest) and a little smoothness.
    """
    import numpy as np
    from scipy.optimize import nnls

    rate_Q, probability_QK = _rates(_MIXTURE_RATES), _probabilities_at(1.0, _MIXTURE_RATES)
    scale_K = 1 / (histogram_K + 1e-3).sqrt()
    bins_KQ = (probability_QK * scale_K).T
    strong, smooth = 10.0, 0.003
    lookups_Q = strong * rate_Q * distinct / lookups
    rows_Q = torch.full_like(rate_Q, strong * distinct / rows)
    curvature = smooth * (torch.eye(len(rate_Q), dtype=torch.float64).diff(n=2, dim=0))
    design = torch.cat([bins_KQ, lookups_Q[None], rows_Q[None], curvature])
    slack = torch.zeros(len(design), 1, dtype=torch.float64)
    slack[NUM_REUSE_BINS + 1] = strong
    target = torch.cat([histogram_K * scale_K, torch.tensor([strong, strong]), torch.zeros(len(curvature))])
    solution, _ = nnls(torch.cat([design, slack], dim=1).numpy(), target.double().numpy(), maxiter=3000)
    rows_Q = torch.from_numpy(np.asarray(solution[:-1]))
    # Poisson counts spread more than equal ones, for which too few rows fit best.
    return rows_Q * distinct / (rows_Q @ probability_QK).sum().clamp_min(1e-300)


def cache_hits(
    histograms: Sequence[Sequence[float]],
    rows: Sequence[int],
    lookups: Sequence[float],
    distinct: Sequence[float],
    cached_rows: Sequence[float],
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
    for part in ((lookups_T > 0) & (cached_T < rows_T)).nonzero()[:, 0].split(512):  # bounds memory
        given = histogram_TK[part], distinct_T[part], torch.ones(len(part), dtype=torch.bool)
        law_TQ, explained_T = _fit_power_law(*given, rows_T[part], lookups_T[part])
        hit_T[part] = _hits(law_TQ, _rates(_POWER_LAW_RATES), cached_T[part])
        for table in part[~explained_T].tolist():
            known = float(distinct_T[table]), float(rows_T[table]), float(lookups_T[table])
            mixture_1Q = _mixture(histogram_TK[table], *known)[None]
            mixture_1Q = mixture_1Q * (rows_T[table] / mixture_1Q.sum()).clamp_max(1.0)
            hit_T[table] = _hits(mixture_1Q, _rates(_MIXTURE_RATES), cached_T[table : table + 1])[0]
    return hit_T


def _hits(rows_TQ: Tensor, rate_Q: Tensor, cached_T: Tensor) -> Tensor:
    """Return shares of distinct rows, [T], in a cache of ``cached_T`` rows."""
    low_T1, high_T1 = (torch.full_like(cached_T[:, None], bound) for bound in _LOG2_BATCHES)
    for _ in range(_HALVINGS):
        middle_T1 = (low_T1 + high_T1) / 2
        held_TQ = -torch.expm1(-rate_Q * torch.exp2(middle_T1))
        fits_T1 = (rows_TQ * held_TQ).sum(-1, keepdim=True) <= cached_T[:, None]
        low_T1, high_T1 = torch.where(fits_T1, middle_T1, low_T1), torch.where(fits_T1, high_T1, middle_T1)
    held_TQ, read_Q = -torch.expm1(-rate_Q * torch.exp2(low_T1)), -torch.expm1(-rate_Q)
    return ((rows_TQ * held_TQ) @ read_Q / (rows_TQ @ read_Q).clamp_min(1e-300)).clamp(0, 1)


def merge_reuse(histograms: Sequence[Sequence[float]], distinct: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Return histogram and distinct rows of a shared table, whose kernel sees a row once per feature that reads it."""
    total = float(sum(distinct))
    if total <= 0:
        return (0.0,) * NUM_REUSE_BINS, 0.0
    merged = (
        sum(share * count / total for share, count in zip(share_T, distinct, strict=True))
        for share_T in zip(*histograms, strict=True)
    )
    return tuple(merged), total


def shift_reuse(histogram: tuple[float, ...], ratio: float) -> tuple[float, ...]:
    """Return the histogram with ``ratio`` times the mean reuse, within 17 bins.

    All rows move by the two whole numbers of bins whose means enclose the new mean.
    """
    means = _shifted_means(histogram)
    target = means[NUM_REUSE_BINS - 1] * ratio
    upper = min(max(bisect_left(means, target), 1), len(means) - 1)
    low, high = means[upper - 1], means[upper]
    part = min(1.0, max(0.0, (target - low) / (high - low))) if high > low else 1.0
    lower_bins, upper_bins = (_shifted(histogram, at - NUM_REUSE_BINS + 1) for at in (upper - 1, upper))
    return tuple((1 - part) * a + part * b for a, b in zip(lower_bins, upper_bins, strict=True))


def _shifted(histogram: Sequence[float], bins: int) -> list[float]:
    """Move up by ``bins``; the outermost bins take the overflow."""
    moved = [0.0] * NUM_REUSE_BINS
    for k, share in enumerate(histogram):
        moved[min(max(k + bins, 0), NUM_REUSE_BINS - 1)] += share
    return moved


@lru_cache(maxsize=4096)
def _shifted_means(histogram: tuple[float, ...]) -> list[float]:
    """Return the mean reuse of a histogram 16 bins down to 16 bins up, ascending."""
    mean_K = bin_mean_reuse().tolist()
    return [
        sum(share * mean for share, mean in zip(_shifted(histogram, bins), mean_K, strict=True))
        for bins in range(1 - NUM_REUSE_BINS, NUM_REUSE_BINS)
    ]
