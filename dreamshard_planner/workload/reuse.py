# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reuse histograms: how often one batch reads the rows of a table.

A histogram has 17 bins, (0,1], (1,2], (2,4] ... (16384,32768], (32768,inf): the share of the distinct rows of
one batch by how often the batch reads them (the bins of Meta's dlrm_datasets and of the DreamShard paper).
Within a bin, reuse counts are taken to be log-uniform: the share of a count is proportional to its inverse.

A histogram belongs to a batch size. Another size is reached through a model of the table: its rows have
Poisson rates of being read, and a mixture of rates explains the histogram.

Shapes: T tables, K = 17 bins, Q Poisson rates, N indices, R distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

NUM_REUSE_BINS = 17
BIN_UPPER = tuple(2**k for k in range(NUM_REUSE_BINS - 1))
TOP_COUNT = 131_072
"""Where the last, open bin is taken to end."""
REUSE_BIN_LABELS = ("(0,1]", *(f"({edge // 2},{edge}]" for edge in BIN_UPPER[1:]), f"({BIN_UPPER[-1]},inf)")

POPULARITY_EXPONENT = 1.05
"""Row popularity falls as rank to this power where nothing is known of a table: the exponent of Merlin's
synthetic models. On the Meta-like pool it gives a mean reuse of 6.8; 6.9 is published."""

_RATES_PER_OCTAVE = 3
_LOWEST_RATE, _HIGHEST_RATE = 2.0**-10, 2.0**17
_POPULARITY_BUCKETS = 64


@cache
def bin_mean_reuse() -> Tensor:
    """Mean reuse count within each bin, [K] float64."""
    means = [1.0]
    for lower, upper in zip(BIN_UPPER, (*BIN_UPPER[1:], TOP_COUNT), strict=True):
        counts = torch.arange(lower + 1, upper + 1, dtype=torch.float64)
        means.append(float(len(counts) / (1 / counts).sum()))
    return torch.tensor(means, dtype=torch.float64)


def reuse_histogram(indices: Tensor) -> tuple[Tensor, float]:
    """Histogram [K] and number of distinct rows of one batch's indices of one table; zeros if there are none."""
    if indices.numel() == 0:
        return torch.zeros(NUM_REUSE_BINS, dtype=torch.float64), 0.0
    counts_R = torch.unique(indices, return_counts=True)[1]
    bin_R = torch.bucketize(counts_R, torch.tensor(BIN_UPPER))
    histogram = torch.bincount(bin_R, minlength=NUM_REUSE_BINS).double()
    return histogram / len(counts_R), float(len(counts_R))


def _bin_probabilities(rate_Q: Tensor) -> Tensor:
    """Probability that a Poisson count of each rate falls into each bin, [..., K]; zero counts fall into none."""
    edges = torch.tensor((0, *BIN_UPPER), dtype=torch.float64)
    at_most = torch.special.gammaincc(edges + 1, rate_Q[..., None].double().clamp_min(1e-12))
    at_most = torch.cat([at_most, torch.ones_like(at_most[..., :1])], dim=-1)
    return at_most.diff(dim=-1).clamp_min(0)


def default_reuse(rows: Sequence[int] | Tensor, lookups: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    """Histograms [T, K] and distinct rows [T] of tables of which only ``rows`` and the ``lookups`` of a batch
    are known: row popularity is a power law (:data:`POPULARITY_EXPONENT`)."""
    rows_T = torch.as_tensor(rows, dtype=torch.float64)
    lookups_T = torch.as_tensor(lookups, dtype=torch.float64)
    # Ranks in log-spaced buckets: edges 0 .. rows, popularity from the integral of the power law.
    steps = torch.linspace(0, 1, _POPULARITY_BUCKETS + 1, dtype=torch.float64)
    edge_TQ = (rows_T[:, None] + 1) ** steps - 1
    power = 1 - POPULARITY_EXPONENT
    mass_TQ = (((edge_TQ + 1) ** power) / power).diff(dim=-1)
    share_TQ = mass_TQ / mass_TQ.sum(-1, keepdim=True)
    rows_TQ = edge_TQ.diff(dim=-1)
    bins_TQK = _bin_probabilities(lookups_T[:, None] * share_TQ / rows_TQ)
    count_TK = (rows_TQ[..., None] * bins_TQK).sum(1)
    return _normalise(count_TK, rows_T, lookups_T)


def _normalise(count_TK: Tensor, rows_T: Tensor, lookups_T: Tensor) -> tuple[Tensor, Tensor]:
    distinct_T = count_TK.sum(-1)
    histogram_TK = torch.where(
        (lookups_T > 0)[:, None], count_TK / distinct_T.clamp_min(1e-300)[:, None], torch.zeros(())
    )
    distinct_T = torch.minimum(distinct_T, torch.minimum(rows_T, lookups_T))
    return histogram_TK, torch.where(lookups_T > 0, distinct_T, 0.0)


def mean_reuse(histograms_TK: Tensor) -> Tensor:
    """Mean reuse of distinct rows, [T]."""
    return histograms_TK.double() @ bin_mean_reuse()


def rescale_reuse(
    histograms: Sequence[Sequence[float]],
    rows: Sequence[int],
    lookups: Sequence[float],
    factor: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Histograms at another batch size.

    Args:
        histograms: [T, K], taken at a batch with ``lookups`` lookups.
        rows: of the tables, [T].
        lookups: of the batches that the histograms were taken at, [T].
        factor: new batch size over old, [T].

    Returns:
        Histograms [T, K] and distinct rows [T] at the new batch size.
    """
    histogram_TK = torch.as_tensor(histograms, dtype=torch.float64)
    rows_T = torch.as_tensor(rows, dtype=torch.float64)
    lookups_T = torch.as_tensor(lookups, dtype=torch.float64)
    factor_T = torch.as_tensor(factor, dtype=torch.float64)
    distinct_T = lookups_T / mean_reuse(histogram_TK).clamp_min(1.0)
    distinct_T = torch.minimum(distinct_T, torch.minimum(rows_T, lookups_T))
    result_TK, result_T = histogram_TK.clone(), distinct_T.clone()
    changed = ((factor_T != 1) & (lookups_T > 0)).nonzero()[:, 0].tolist()
    solved: dict[tuple, tuple[Tensor, Tensor]] = {}
    for table in changed:
        factor_here, old_lookups = float(factor_T[table]), float(lookups_T[table])
        key = (tuple(histogram_TK[table].tolist()), float(rows_T[table]), old_lookups, factor_here)
        new_lookups = lookups_T[table] * factor_T[table]
        if key not in solved:
            weight_Q = _mixture(histogram_TK[table], float(distinct_T[table]), float(rows_T[table]), old_lookups)
            count_K = weight_Q @ _probabilities_at(factor_here)
            bins, distinct = _normalise(count_K[None], rows_T[table, None], new_lookups[None])
            solved[key] = bins[0], distinct[0]
        result_TK[table], result_T[table] = solved[key]
    empty = lookups_T * factor_T == 0
    result_TK[empty], result_T[empty] = 0.0, 0.0
    return result_TK, result_T


@cache
def _rates() -> Tensor:
    octaves = torch.tensor([_LOWEST_RATE, _HIGHEST_RATE], dtype=torch.float64).log2()
    count = int((octaves[1] - octaves[0]) * _RATES_PER_OCTAVE) + 1
    return torch.logspace(float(octaves[0]), float(octaves[1]), count, base=2.0, dtype=torch.float64)


@cache
def _probabilities_at(factor: float) -> Tensor:
    """Bin probabilities [Q, K] of the rate grid for a batch ``factor`` times as large."""
    return _bin_probabilities(_rates() * factor)


def _mixture(histogram_K: Tensor, distinct: float, rows: float, lookups: float) -> Tensor:
    """Rows per Poisson rate, [Q], that explain a histogram: non-negative least squares on the bins, with the
    total lookups, at most ``rows`` rows in all (a slack takes the rest), and a little smoothness."""
    import numpy as np
    from scipy.optimize import nnls

    rate_Q, probability_QK = _rates(), _probabilities_at(1.0)
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
    return torch.from_numpy(np.asarray(solution[:-1])) * distinct


def merge_reuse(
    histograms: Sequence[Sequence[float] | None], distinct: Sequence[float]
) -> tuple[tuple[float, ...], float]:
    """Histogram and distinct rows of a shared table from those of its features: the kernel sees a row once per
    feature that reads it. All zero where nothing is looked up."""
    total = float(sum(distinct))
    if total <= 0:
        return (0.0,) * NUM_REUSE_BINS, 0.0
    merged = [0.0] * NUM_REUSE_BINS
    for histogram, count in zip(histograms, distinct, strict=True):
        for k, share in enumerate(histogram or ()):
            merged[k] += share * count / total
    return tuple(merged), total


def draw_indices(
    histogram: Sequence[float],
    rows: int,
    lookups: int,
    generator: torch.Generator,
    distinct_rows: float | None = None,
) -> Tensor:
    """Random indices, int64 [lookups], that realise a histogram as far as integers allow.

    Args:
        histogram: shares of distinct rows, [K].
        rows: of the table.
        lookups: indices to draw.
        generator: source of randomness.
        distinct_rows: by default, lookups over the histogram's mean reuse.
    """
    if lookups <= 0:
        return torch.empty(0, dtype=torch.int64)
    share_K = torch.as_tensor(histogram, dtype=torch.float64).clamp_min(0)
    if distinct_rows is None:
        distinct_rows = lookups / float(mean_reuse(share_K[None]).clamp_min(1.0))
    distinct = max(1, min(round(distinct_rows), rows, lookups))
    share_K = share_K / share_K.sum() if share_K.sum() > 0 else torch.eye(NUM_REUSE_BINS, dtype=torch.float64)[0]
    edge_K = (share_K.cumsum(0) * distinct).round()
    edge_K[-1] = distinct
    per_bin_K = edge_K.diff(prepend=edge_K.new_zeros(1)).clamp_min(0).long()
    lower_K = torch.tensor((1, *(edge + 1 for edge in BIN_UPPER)))
    upper_K = torch.tensor((*BIN_UPPER, TOP_COUNT))
    bin_R = torch.repeat_interleave(torch.arange(NUM_REUSE_BINS), per_bin_K)
    low_R, high_R = lower_K[bin_R].double(), upper_K[bin_R].double()
    uniform_R = torch.rand(distinct, generator=generator, dtype=torch.float64)
    count_R = (low_R * ((high_R + 1) / low_R) ** uniform_R).floor().clamp(low_R, high_R)
    count_R = _fit_total(count_R, low_R, high_R, lookups)
    if distinct <= rows // 4:  # rejection is cheap, and a permutation of all rows is not
        row_R = torch.randint(rows, (2 * distinct,), generator=generator).unique()
        row_R = row_R[torch.randperm(len(row_R), generator=generator)][:distinct]
        while len(row_R) < distinct:
            more = torch.randint(rows, (distinct,), generator=generator)
            row_R = torch.cat([row_R, more]).unique()[:distinct]
    else:
        row_R = torch.randperm(rows, generator=generator)[:distinct]
    index_N = torch.repeat_interleave(row_R[torch.randperm(distinct, generator=generator)], count_R)
    return index_N[torch.randperm(lookups, generator=generator)]


def _fit_total(count_R: Tensor, low_R: Tensor, high_R: Tensor, total: int) -> Tensor:
    """Change counts, within their bins while that suffices, until they sum to ``total`` >= R; int64 [R]."""
    for _ in range(4):
        missing = total - count_R.sum()
        room_R = (high_R - count_R) if missing > 0 else (count_R - low_R)
        if missing == 0 or room_R.sum() == 0:
            break
        share = torch.clamp(missing.abs() / room_R.sum(), max=1.0)
        count_R = count_R + missing.sign() * (room_R * share).floor()
    count_R, low_R, high_R = count_R.long(), low_R.long(), high_R.long()
    while (missing := total - int(count_R.sum())) != 0:
        # One each, from the rows read most, whose bins are wide; out of their bins only if all are full.
        step = 1 if missing > 0 else -1
        inside_R = count_R < high_R if missing > 0 else count_R > low_R
        candidates = inside_R.nonzero()[:, 0] if inside_R.any() else (count_R + step >= 1).nonzero()[:, 0]
        count_R[candidates[-min(len(candidates), abs(missing)) :]] += step
    return count_R
