# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What measured sets say of the cost model's errors: Gaussian-process regression on the log of measured over predicted.

    log ratio of one measurement = sum over the set's shards of share x factor  +  machine  +  the set's own
                                   +  the spell's  +  noise

Every term is Gaussian with mean zero. *Share* is a shard's part of what the set's shards would cost alone; its *factor*
is common to all sets that hold it, so that sets never measured are predicted better as well. The *set's own* is what no
shard explains. A *spell* is a call in which one rank measured sets side by side: what slowed all of them then, and says
nothing of any, is its. How large factors and noise are is read off the measurements (type-II maximum likelihood).

Shapes: N measurements, S shards, V sets asked for.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ErrorModel:
    """Standard deviations of the terms."""

    factors: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    """Of a shard's factor: those to choose from. A measured cost network needs about 0.1, bandwidths 0.4."""
    noises: tuple[float, ...] = (1.0, 2.0, 4.0)
    """How many times the noise below there is: to choose from as well. Busy machines have more."""
    own_share: float = 0.25
    """Of the set's own term, as a share of that."""
    machine: float = 0.5
    spell: float = 0.2
    """Large: machines that others use as well slow down by that much for minutes."""
    run: float = 0.06
    """Of the noise of one timed run, and"""
    measurement: float = 0.02
    """what more runs in the same spell don't remove."""


@dataclass(frozen=True)
class Measurements:
    """Measured sets, with repetition."""

    share_NS: Tensor
    """Rows sum to one."""
    set_N: Tensor
    """Index of the set, int64."""
    spell_N: Tensor
    """Index of the spell, int64."""
    runs_N: Tensor
    log_ratio_N: Tensor

    def latest(self, count: int) -> Measurements:
        """The last ones."""
        columns = (self.share_NS, self.set_N, self.spell_N, self.runs_N, self.log_ratio_N)
        return Measurements(*(column[-count:] for column in columns))


MAX_TO_CHOOSE = 300
"""Measurements by which it is chosen how large the terms are."""


class Evidence:
    """The posterior of factors, machine and sets.

    Args:
        seen: measurements, at least one.
        model: how large the terms are.
    """

    def __init__(self, seen: Measurements, model: ErrorModel) -> None:
        self._model = model
        self._seen = seen.latest(MAX_TO_CHOOSE)
        choices = itertools.product(model.factors, model.noises)
        self.factor, self.noise = max(choices, key=lambda choice: self._fitted(*choice)[0])
        self._seen = seen
        _, self._factor_NN, self._weight_N = self._fitted(self.factor, self.noise)

    def _covariance(self, share_VS: Tensor, set_V: Tensor, factor: float) -> Tensor:
        """Between the log ratios of sets [V] and of the measured sets [N], spells and noise aside."""
        shared_VN = share_VS @ self._seen.share_NS.T * factor**2 + self._model.machine**2
        own = (factor * self._model.own_share) ** 2
        return shared_VN + own * (set_V[:, None] == self._seen.set_N).double()

    def _noise_N(self, noise: float) -> Tensor:
        model = self._model
        return noise * (model.measurement**2 + model.run**2 / self._seen.runs_N.double()).sqrt()

    def _fitted(self, factor: float, noise: float) -> tuple[float, Tensor, Tensor]:
        """Log likelihood, Cholesky factor of the covariance, and its inverse times the log ratios."""
        seen = self._seen
        covariance_NN = self._covariance(seen.share_NS, seen.set_N, factor)
        same_spell_NN = (seen.spell_N[:, None] == seen.spell_N).double()
        covariance_NN += same_spell_NN * self._model.spell**2 + self._noise_N(noise).square().diag()
        factor_NN = torch.linalg.cholesky(covariance_NN)
        weight_N = torch.cholesky_solve(seen.log_ratio_N[:, None], factor_NN)[:, 0]
        likelihood = -0.5 * float(seen.log_ratio_N @ weight_N) - float(factor_NN.diagonal().log().sum())
        return likelihood, factor_NN, weight_N

    def of_sets(self, share_VS: Tensor, set_V: Tensor) -> Tensor:
        """Expected log ratios of sets [V], in no spell."""
        return self._covariance(share_VS, set_V, self.factor) @ self._weight_N

    def draw(self, generator: torch.Generator) -> tuple[Tensor, float]:
        """Factors [S] from their posterior, by Matheron's rule; and the machine's expected one, which is common to all
        sets: other draws of it would tell no plan from another."""
        seen, model = self._seen, self._model

        def normal(count: int) -> Tensor:
            return torch.randn(count, generator=generator, dtype=torch.float64)

        factor_S = self.factor * normal(seen.share_NS.shape[1])
        simulated_N = seen.share_NS @ factor_S + model.machine * normal(1)
        simulated_N += self._noise_N(self.noise) * normal(len(seen.set_N))
        simulated_N += self.factor * model.own_share * normal(int(seen.set_N.max()) + 1)[seen.set_N]
        simulated_N += model.spell * normal(int(seen.spell_N.max()) + 1)[seen.spell_N]
        missed_N1 = (seen.log_ratio_N - simulated_N)[:, None]
        weight_N = torch.cholesky_solve(missed_N1, self._factor_NN)[:, 0]
        factor_S = factor_S + self.factor**2 * (seen.share_NS.T @ weight_N)
        return factor_S, model.machine**2 * float(self._weight_N.sum())


def shares(single_ms_S: Tensor, sets: list[tuple[int, ...]]) -> Tensor:
    """[X, S]: of each set, what part each shard has of what its shards cost alone. A set may hold a shard twice."""
    share_XS = torch.zeros(len(sets), len(single_ms_S), dtype=torch.float64)
    rows = torch.repeat_interleave(torch.arange(len(sets)), torch.tensor([len(group) for group in sets]))
    columns = torch.tensor([shard for group in sets for shard in group], dtype=torch.int64)
    share_XS.index_put_((rows, columns), single_ms_S.double()[columns], accumulate=True)
    return share_XS / share_XS.sum(-1, keepdim=True).clamp_min(math.ulp(1.0))
