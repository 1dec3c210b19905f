# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Corrections of a compute cost for the hardware at hand, by optimizer and direction, from few measured sets.

What differs most between processors is what an optimizer takes: whether its kernel is vectorised, how it finds its
states. So each optimizer's forward and backward is *scale* x network + *a* x distinct rows + *b* x weights of these
+ *c* x weights that lookups read, again and again where rows are hot, + *d* x lookups, however narrow their rows: five
numbers, of which few sets carry some and a dozen most. They apply where held-out sets say that they are better than
what was in use. Calibration and learning from training steps choose them alike.

Shapes: S shards, X sets of one optimizer, or groups of any leading dimensions, N = 5 numbers, K of them that are
fitted, O optimizers, H latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import predict_ms
from dreamshard_planner.cost.problem import NOT_MEASURED, ComputeCost, CostSource
from dreamshard_planner.workload.tables import columns, optimizer_of

OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad"}
"""Optimizers with corrections of their own, in the order of :func:`optimizer_of`, and their names; all others go with
row-wise Adagrad."""
UNCHANGED = (1.0, 0.0, 0.0, 0.0, 0.0)
"""Numbers of a direction without a correction."""
EXTENT = ("distinct_rows", "distinct_elements", "lookup_elements", "lookups")
"""Features that the numbers behind the scale are multiplied with."""
LEAST_SCALE = 0.1
"""Smallest scale of a kernel cost, which knows what else there is than rows."""
Corrections = Mapping[str, Sequence[Sequence[float]]]
"""By optimizer: forward and backward, each a scale and milliseconds per unit of each :data:`EXTENT`."""


class AdjustedCost(ComputeCost):
    """A compute cost with corrections by optimizer, and milliseconds of parts outside of their fused kernel, such as
    for the table-sized gradient of data-parallel.

    Latents begin with the named sums below; the latents of the compute cost follow.

    Args:
        compute: costs of fused kernels.
        corrections: by optimizer; see :data:`Corrections`.
        learned: training steps that the corrections were learned from, in words; empty for measured sets.
    """

    COUNT, SCALE, ADDED_MS, EXTRA_MS = slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 7)
    """Channels: fused shards, sums of their scales, milliseconds of corrections, and milliseconds beside kernels; each
    but the count forward and backward."""
    _OWN = 7

    def __init__(self, compute: ComputeCost, corrections: Corrections | None = None, learned: str = "") -> None:
        self._compute, self.source, self.approximates = compute, compute.source, compute.approximates
        self._learned = learned
        if learned:
            prior = self.source.detail.removesuffix(f", {NOT_MEASURED}")
            self.source = CostSource(self.source.kind, f"{prior}, learned from {learned}")
        self._rates_O2N = torch.tensor([(corrections or {}).get(name, (UNCHANGED, UNCHANGED)) for name in OPTIMIZERS])

    def needed_by(self, features_SF: Tensor) -> ComputeCost:
        """The compute cost itself, if nothing is corrected of these shards' optimizers."""
        rates_O2N = self._rates_O2N[optimizer_of(features_SF).unique()]
        unchanged = bool((rates_O2N == torch.tensor(UNCHANGED)).all())
        return self._compute if unchanged and not self._learned else self

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`; the shards take nothing outside of their kernels."""
        latent_SH, rates_S2N = self._compute.encode(features_SF), self._rates_O2N[optimizer_of(features_SF)]
        added_S2 = torch.einsum("sdk,sk->sd", rates_S2N[..., 1:], features_SF[:, columns(EXTENT)])
        count_S1 = torch.ones_like(added_S2[:, :1])
        return torch.cat([count_S1, rates_S2N[..., 0], added_S2, torch.zeros_like(added_S2), latent_SH], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.group_cost_ms`."""
        return self._adjusted(self._compute.group_cost_ms(latent_XH[..., self._OWN :]), latent_XH)

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.approximate_ms`."""
        return self._adjusted(self._compute.approximate_ms(latent_XH[..., self._OWN :]), latent_XH)

    def _adjusted(self, cost_X2: Tensor, latent_XH: Tensor) -> Tensor:
        """Apply corrections; a group of several optimizers has the mean of their scales. Clamps absorb the rounding
        of sums that a search subtracted."""
        # In numpy, whose calls cost a third of torch's.
        own_XN, cost_NX2 = latent_XH[..., : self._OWN].detach().numpy(), cost_X2.detach().numpy()
        count_X1 = own_XN[..., self.COUNT]
        kernel_X2 = own_XN[..., self.SCALE] / np.maximum(count_X1, 1) * cost_NX2
        kernel_X2 = np.where(count_X1 > 0.5, kernel_X2 + np.maximum(own_XN[..., self.ADDED_MS], 0), 0.0)
        return torch.from_numpy(kernel_X2 + np.maximum(own_XN[..., self.EXTRA_MS], 0))

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's notes, but none of a prior that was learned from training steps."""
        if self._learned and self.source.kind == "roofline":
            return ()
        return self._compute.notes(features_SF, latent_XH[..., self._OWN :])


DIRECTIONS = ("forward", "backward")

GOOD, OTHER_SETS, DOUBT = 0.20, 10, 2.0
"""Mean error up to which costs are good, if that of so many other sets would be; standard errors that are certain."""
OTHER_TABLES = 0.03
"""Allowance for sets of tables of another kind than those checked."""
FEW_SETS, ENOUGH_SETS = 6, 40
"""Sets of one optimizer: fewer than the first tell nothing; more than the second change little."""
LEAST_GAIN, LEAST_GAIN_OF_GOOD = 0.02, 0.05
"""Least gain of the mean error for a change: levels drift from one hour to the next, and errors of good costs
have to be halved as well, or a quiet minute does harm in the next."""
MOST_FOLDS = 20
"""Parts that sets are divided into, to be held out in turn."""
TERMS = ((0,), (1,), (2,), (0, 1), (0, 2), (0, 3), (0, 4), (0, 1, 2), (0, 1, 4))
"""Which of the numbers are fitted together."""


@dataclass(frozen=True)
class StageCheck:
    """Errors of the costs of one optimizer and direction on held-out sets, as shares of the timed milliseconds."""

    optimizer: str
    direction: str
    sets: int
    before: float
    """Mean error of the costs in use."""
    bias: float
    """Their median error with its sign: negative for too low."""
    after: float
    """Mean error of what was chosen, and its standard deviation between sets."""
    spread: float
    changed: bool = False

    @property
    def good(self) -> bool:
        """True if errors on other sets, also of other tables, are small as well."""
        doubt = DOUBT * self.spread * math.sqrt(1 / self.sets + 1 / OTHER_SETS)
        return self.sets >= FEW_SETS and self.after + doubt + OTHER_TABLES <= GOOD

    def to_dict(self, observed: bool = False) -> dict[str, Any]:
        """Return fields for JSON; ``said`` has a sentence with advice on kernels ``observed`` in training, or sets."""
        side = "off" if abs(self.bias) < self.before / 2 else "too low" if self.bias < 0 else "too high"
        now = f"is {100 * self.before:.0f} % {side}"
        if self.changed:
            now = f"was{now[2:]}, is now {100 * self.after:.0f} % off"
        longer = "measure longer" if self.sets < ENOUGH_SETS else "dreamshard train would learn it"
        verdict = "good" if self.good else "observe other plans as well" if observed else longer
        said = f"{self.direction} of {OPTIMIZERS[self.optimizer]} {now}: {verdict}"
        return {**asdict(self), "good": self.good, "said": said}


def errors_in_words(checks: Sequence[StageCheck]) -> str:
    """Return the errors that are left, as ``SGD (forward 4 % off, backward 6 % off)``."""
    off: dict[str, list[str]] = {}
    for check in checks:
        off.setdefault(OPTIMIZERS[check.optimizer], []).append(f"{check.direction} {100 * check.after:.0f} % off")
    return ", ".join(f"{name} ({', '.join(errors)})" for name, errors in off.items())


def choose_corrections(
    compute: ComputeCost, in_use: Corrections, sets: LabelledSets, half_X: Tensor | None = None
) -> tuple[dict[str, list[list[float]]], list[StageCheck]]:
    """Choose corrections that sets confirm, and tell how far costs are off.

    Each set is held out once from fits to other sets of its optimizer, which choose, by direction, among :data:`TERMS`
    and the corrections in use. These stay where the gain is small, or may be chance. A number takes two sets to be
    fitted.

    Args:
        compute: the cost, uncorrected.
        in_use: corrections to do better than.
        sets: measured sets, or kernels observed in training.
        half_X: of sets drawn at random, which half each is in, 0 or 1: each is held out as a whole, since its tables
            are others. None for kernels of plans, which are held out one by one, and whose errors count by their times.

    Returns:
        The corrections, and a check of every optimizer and direction that there are sets of.
    """
    chosen = {name: [list(rates) for rates in in_use.get(name, (UNCHANGED, UNCHANGED))] for name in OPTIMIZERS}
    checks = []

    def chance_of(gain_X: Tensor) -> float:
        """Return the mean gain of random sets that may be chance; of kernels of plans, the gain of a single one."""
        if half_X is None:
            return float(gain_X.max()) / len(gain_X)
        return DOUBT * float(gain_X.std(unbiased=False)) / math.sqrt(len(gain_X))

    for stage in _stages(compute, sets):
        used_N = torch.tensor(chosen[stage.optimizer][stage.way], dtype=torch.float64)
        used_X = stage.errors(used_N)
        fold_X = torch.arange(len(stage.at_X)) % MOST_FOLDS if half_X is None else half_X[stage.at_X]
        weight_X = torch.ones_like(used_X) if half_X is not None else stage.label_X / stage.label_X.mean()
        before = float((used_X.abs() * weight_X).mean())
        least = max(LEAST_GAIN_OF_GOOD, before / 2) if before <= GOOD else LEAST_GAIN
        best_terms, best_X, best_gain = None, used_X, 0.0
        for terms in TERMS:
            error_X = stage.held_out_errors(terms, fold_X, used_N)
            gain_X = (used_X.abs() - error_X.abs()) * weight_X
            gain = float(gain_X.mean())
            if gain > max(best_gain, least, chance_of(gain_X)):
                best_terms, best_X, best_gain = terms, error_X, gain
        if best_terms is not None:
            chosen[stage.optimizer][stage.way] = stage.fitted(best_terms).tolist()
        checks.append(stage.check(used_X * weight_X, best_X * weight_X, best_terms is not None))
    corrections = {name: both for name, both in chosen.items() if any(tuple(rates) != UNCHANGED for rates in both)}
    return corrections, checks


@dataclass(frozen=True)
class _Stage:
    """The sets of one optimizer in one direction."""

    optimizer: str
    way: int
    """Index of the direction."""
    at_X: Tensor
    """Indices of the sets."""
    terms_XN: Tensor
    """Factors of the numbers: milliseconds without a correction, then :data:`EXTENT`."""
    label_X: Tensor
    """Measured milliseconds."""

    def errors(self, factor_N: Tensor) -> Tensor:
        """Return signed relative errors with these numbers, [X]."""
        return self.terms_XN @ factor_N / self.label_X - 1

    def held_out_errors(self, terms: Sequence[int], fold_X: Tensor, used_N: Tensor) -> Tensor:
        """Return signed relative errors of sets by fits to the other folds, [X]; by ``used_N`` if these are too few."""
        error_X = self.errors(used_N)
        for fold in fold_X.unique():
            held_out_X = fold_X == fold
            if int((~held_out_X).sum()) >= 2 * len(terms) - 1:
                error_X[held_out_X] = self.errors(self.fitted(terms, ~held_out_X))[held_out_X]
        return error_X

    def fitted(self, terms: Sequence[int], of_X: Tensor | None = None) -> Tensor:
        """Return all numbers, [N], some of them fitted to some sets (default: all). Without a scale, rates are added to
        the uncorrected cost."""
        terms_XN, label_X = (self.terms_XN, self.label_X) if of_X is None else (self.terms_XN[of_X], self.label_X[of_X])
        factor_N = torch.tensor(UNCHANGED, dtype=torch.float64)
        fixed_X = terms_XN[:, 0] * (0 not in terms)
        factor_N[list(terms)] = _least_relative_error(terms_XN[:, list(terms)], fixed_X, label_X, 0 in terms)
        return factor_N

    def check(self, before_X: Tensor, after_X: Tensor, changed: bool) -> StageCheck:
        """Sum up errors before and after."""
        figures = before_X.abs().mean(), before_X.median(), after_X.abs().mean(), after_X.abs().std(unbiased=False)
        before, bias, after, spread = (round(float(x), 4) for x in figures)
        return StageCheck(self.optimizer, DIRECTIONS[self.way], len(self.at_X), before, bias, after, spread, changed)


def _stages(compute: ComputeCost, sets: LabelledSets) -> Iterator[_Stage]:
    """Yield every optimizer that there are sets of, in both directions."""
    optimizer_X = optimizer_of(sets.features_SF[sets.offsets_X1[:-1]])
    predicted_X2 = predict_ms(compute, sets).double()
    extent_XE = sets.sum(sets.features_SF[:, columns(EXTENT)].double())
    for index, name in enumerate(OPTIMIZERS):
        at_X = (optimizer_X == index).nonzero()[:, 0]
        for way in range(2 if len(at_X) else 0):
            terms_XN = torch.cat([predicted_X2[at_X, way, None], extent_XE[at_X]], dim=-1)
            yield _Stage(name, way, at_X, terms_XN, sets.labels_ms_X2[at_X, way].double())


def _least_relative_error(terms_XK: Tensor, fixed_X: Tensor, label_X: Tensor, scaled: bool) -> Tensor:
    """Return factors [K] of terms, none negative, the first one a scale if ``scaled``; outlying sets count little."""
    from scipy.optimize import least_squares

    unit_K = (terms_XK / label_X[:, None]).mean(0).clamp_min(1e-12)
    unit_K[: int(scaled)] = 1.0
    design_XK = (terms_XK / unit_K / label_X[:, None]).numpy()
    rest_X = (1 - fixed_X / label_X).numpy()
    rates = design_XK.shape[1] - scaled
    solved = least_squares(
        lambda factors_K: design_XK @ factors_K - rest_X,
        [1.0] * scaled + [0.1] * rates,
        lambda _: design_XK,
        bounds=([LEAST_SCALE] * scaled + [0.0] * rates, math.inf),
        loss="soft_l1",
        f_scale=0.05,
    )
    return torch.from_numpy(solved.x) / unit_K
