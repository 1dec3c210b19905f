# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Corrections of a cost network for the hardware at hand, by optimizer and direction, from few measured sets.

What differs most between processors is what an optimizer takes: whether its kernel is vectorised, how it finds its
states. So each optimizer's forward and backward is *scale* x network + *a* x distinct rows + *b* x weights of these
+ *c* x weights that lookups read, again and again where rows are hot, + *d* x lookups, however narrow their rows: five
numbers, of which few sets carry some and a dozen most. They apply where held-out sets say that they are better than
what was in use.

Shapes: S shards, X sets, O optimizers, F features, H latent channels, 2 = forward and backward, N = 5 numbers of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dreamshard_planner.cost.compute import NOT_MEASURED, ComputeCost, CostSource
from dreamshard_planner.cost.fit import LabelledSets, predict_ms
from dreamshard_planner.workload.features import FEATURE_INDEX, columns, optimizer_of

OPTIMIZERS = {"sgd": "SGD", "rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad"}
"""Those that are corrected apart, in the order of :func:`optimizer_of`, and their names; all others go with row-wise
Adagrad."""
DIRECTIONS = ("forward", "backward")
UNCHANGED = ((1.0, 0.0, 0.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0))

GOOD, OTHER_SETS, DOUBT = 0.20, 10, 2.0
"""Mean error up to which costs are good, if that of so many other sets would be; standard errors that are certain."""
OTHER_TABLES = 0.03
"""How much further sets of tables of another kind may be off than those that costs were checked with."""
FEW_SETS, ENOUGH_SETS = 6, 40
"""Of one optimizer: below the first a fit or a check tells nothing; from the second on, more sets change little."""
LEAST_GAIN, LEAST_GAIN_OF_GOOD, BUSY_GAIN = 0.02, 0.05, 0.20
"""Of the mean error, below which nothing is changed: levels drift from one hour to the next, and errors of good costs
have to be halved as well, or a quiet minute does harm in the next. The last is added where others had the core, by the
share of time: where they had it for 80 to 90 %, levels drifted by 17 % within minutes."""
MOST_FOLDS = 20
"""Into which sets are divided to be held out in turn."""
LEARNED_TERMS = ((0,), (1,), (2,), (0, 1), (0, 2), (0, 3), (0, 4), (0, 1, 2), (0, 1, 4))
"""Which of the numbers are learned together from observed kernels."""
_LEAST_SCALE = 0.1
"""Of the network's part, which knows what else there is than rows."""

Corrections = Mapping[str, Sequence[Sequence[float]]]
"""By optimizer: forward and backward, each a scale, milliseconds per distinct row, per weight of these, per weight that
lookups read, and per lookup; the last ones may be left out."""


class CorrectedCost(ComputeCost):
    """A compute cost with corrections. Its latents begin with a count and sums of scales and of milliseconds to add."""

    _OWN = 5

    def __init__(self, compute: ComputeCost, corrections: Corrections, learned: str = "") -> None:
        """``learned`` says from what, where training steps were observed."""
        self._compute, self.source, self.approximates = compute, compute.source, compute.approximates
        inner = compute.approximate_channels
        self.approximate_channels = None if inner is None else self._OWN + inner
        self._learned = learned
        if learned:
            prior = self.source.detail.removesuffix(f", {NOT_MEASURED}")
            self.source = CostSource(self.source.kind, f"{prior}, learned from {learned}")
        self._rates_O2N = torch.tensor(list(_all_of(corrections).values()))

    def needed_by(self, features_SF: Tensor) -> ComputeCost:
        """The compute cost itself, where nothing is corrected of these shards' optimizers."""
        rates_O2N = self._rates_O2N[optimizer_of(features_SF).unique()]
        unchanged = bool((rates_O2N == torch.tensor(UNCHANGED)).all())
        return self._compute if unchanged and not self._learned else self

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`."""
        latent_SH, rates_S2N = self._compute.encode(features_SF), self._rates_O2N[optimizer_of(features_SF)]
        added_S2 = torch.einsum("sdk,sk->sd", rates_S2N[..., 1:], features_SF[:, columns(_EXTENT)])
        return torch.cat([torch.ones_like(added_S2[:, :1]), rates_S2N[..., 0], added_S2, latent_SH], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.group_cost_ms`."""
        return self._corrected(self._compute.group_cost_ms(latent_XH[..., self._OWN :]), latent_XH)

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.approximate_ms`."""
        return self._corrected(self._compute.approximate_ms(latent_XH[..., self._OWN :]), latent_XH)

    def _corrected(self, cost_X2: Tensor, latent_XH: Tensor) -> Tensor:
        """A group has one optimizer, and else the mean of its scales."""
        scale_X2 = latent_XH[..., 1:3] / latent_XH[..., :1].clamp_min(1)
        corrected_X2 = scale_X2 * cost_X2 + latent_XH[..., 3:5].clamp_min(0)
        return torch.where(latent_XH[..., :1] > 0.5, corrected_X2, 0.0)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's, but what a prior says of itself where steps were observed."""
        if self._learned and self.source.kind == "roofline":
            return ()
        return self._compute.notes(features_SF, latent_XH[..., self._OWN :])


_EXTENT = ("distinct_rows", "distinct_elements", "lookup_elements", "lookups")
"""What the numbers behind the scale are of."""


def check_corrections(given: Any) -> None:
    """ValueError or TypeError where a file holds none: names what is wrong."""
    if not isinstance(given, dict) or not given.keys() <= OPTIMIZERS.keys():
        raise ValueError(f"its corrections must be of {', '.join(OPTIMIZERS)}")
    least_N = torch.tensor([_LEAST_SCALE, *UNCHANGED[0][1:]], dtype=torch.float64)
    for name, rates in given.items():
        try:
            rates_2K = torch.tensor(rates, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(f"its corrections of {name} are no numbers") from error
        known = rates_2K.ndim == 2 and len(rates_2K) == 2 and 3 <= rates_2K.shape[1] <= len(least_N)
        if not known or not bool((rates_2K.isfinite() & (rates_2K >= least_N[: rates_2K.shape[1]])).all()):
            raise ValueError(f"its corrections of {name} must be twice five finite numbers from {least_N.tolist()}")


@dataclass(frozen=True)
class StageCheck:
    """How far costs of one optimizer and direction are off on sets that no fit has seen: shares of what was timed."""

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
    remark: str = ""
    """Which dims or batches are off most, if that can be told."""

    @property
    def good(self) -> bool:
        """Whether other sets, also of other tables, are off by little as well."""
        doubt = DOUBT * self.spread * math.sqrt(1 / self.sets + 1 / OTHER_SETS)
        return self.sets >= FEW_SETS and self.after + doubt + OTHER_TABLES <= GOOD

    @property
    def stage(self) -> str:
        return f"{self.direction} of {OPTIMIZERS[self.optimizer]}"

    @property
    def off(self) -> str:
        """How far the costs in use are off, in words."""
        side = "off" if abs(self.bias) < self.before / 2 else "too low" if self.bias < 0 else "too high"
        return f"{100 * self.before:.0f} % {side}"

    def to_dict(self, seconds: float | None = None, advise: bool = True) -> dict[str, Any]:
        """For JSON; ``said`` is all of it in words, after so many seconds of measuring; None: of observed kernels.
        ``advise``: how much longer, where that would help."""
        if self.good:
            verdict = "good"
        elif seconds is None:
            verdict = "observe other plans as well"
        elif self.sets < FEW_SETS:
            verdict = f"{self.sets} set(s) are too few to tell"
        else:
            missing = math.ceil(seconds * (ENOUGH_SETS / self.sets - 1) / 60)
            verdict = "dreamshard train would learn it"
            if missing > 0:
                verdict = f"measure {missing} minute{'s' * (missing > 1)} longer" if advise else "not good"
        now = f"was {self.off}, is now {100 * self.after:.0f} % off" if self.changed else f"is {self.off}"
        return {**asdict(self), "good": self.good, "said": f"{self.stage} {now}{self.remark}: {verdict}"}


def choose_corrections(
    compute: ComputeCost, in_use: Corrections, fit: LabelledSets, check: LabelledSets, others_share: float = 0.0
) -> tuple[dict[str, list[list[float]]], list[StageCheck]]:
    """Corrections of a network that others are in use of, and how far they are off.

    Args:
        compute: the network, uncorrected.
        in_use: corrections to do better than.
        fit: measured sets that the new ones are fitted to.
        check: measured sets that choose, by optimizer and direction, among scales, scales with rates, and what is in
            use; which stays where the gain is small, or may be chance.
        others_share: of the time for which others had the core.

    Returns:
        The corrections, and a check of every optimizer and direction that ``check`` has sets of.
    """
    chosen = _all_of(in_use)
    options = [chosen, *(_fitted(compute, fit, chosen, terms, FEW_SETS) for terms in ((0,), (0, 1, 2)))]
    error_CX2 = torch.stack([_errors(CorrectedCost(compute, corrections), check) for corrections in options])

    def certain(gain_CX: Tensor) -> Tensor:
        few = gain_CX.shape[1] < FEW_SETS
        return gain_CX.std(1, unbiased=False) * (math.inf if few else DOUBT / math.sqrt(gain_CX.shape[1]))

    return _chosen(chosen, options, error_CX2, check, certain, BUSY_GAIN * others_share)


def learn_corrections(
    compute: ComputeCost,
    in_use: Corrections,
    sets: LabelledSets,
    choices: Sequence[Sequence[int]] = LEARNED_TERMS,
) -> tuple[dict[str, list[list[float]]], list[StageCheck]]:
    """The same from few sets, such as a plan's fused kernels: each is held out once from a fit to the others, to choose
    and to tell the errors, which count by the sets' times. One number takes two sets, each more of them two more. What
    a single set speaks for is not chosen.

    Args:
        compute: uncorrected.
        in_use: corrections to do better than.
        sets: measured or observed.
        choices: which of the numbers may be learned together.
    """
    chosen, folds = _all_of(in_use), min(len(sets), MOST_FOLDS)
    options, error_CX2 = [chosen], [_errors(CorrectedCost(compute, chosen), sets)]
    fold_X = torch.arange(len(sets)) % folds
    for terms in choices:
        few = 2 * len(terms) - 1
        options.append(_fitted(compute, sets, chosen, terms, few + 1))
        error_X2 = torch.zeros(len(sets), 2, dtype=torch.float64)
        for fold in range(folds):
            kept, held_out = ((fold_X != fold).nonzero()[:, 0], (fold_X == fold).nonzero()[:, 0])
            of_others = _fitted(compute, sets.select(kept), chosen, terms, few)
            error_X2[held_out] = _errors(CorrectedCost(compute, of_others), sets.select(held_out))
        error_CX2.append(error_X2)
    weight_X2 = sets.labels_ms_X2.double()
    for _, way, at_X in _stages(sets):
        weight_X2[at_X, way] /= weight_X2[at_X, way].mean()
    weighted_CX2 = torch.stack(error_CX2) * weight_X2
    return _chosen(chosen, options, weighted_CX2, sets, lambda gain_CX: gain_CX.amax(1) / gain_CX.shape[1])


def _all_of(corrections: Corrections) -> dict[str, list[list[float]]]:
    """Of every optimizer, with all numbers."""
    given = {name: corrections.get(name, UNCHANGED) for name in OPTIMIZERS}
    return {name: [[*rates, *UNCHANGED[0][len(rates) :]] for rates in both] for name, both in given.items()}


def _chosen(
    chosen: dict[str, list[list[float]]],
    options: Sequence[Corrections],
    error_CX2: Tensor,
    check: LabelledSets,
    certain: Callable[[Tensor], Tensor],
    more_gain: float = 0.0,
) -> tuple[dict[str, list[list[float]]], list[StageCheck]]:
    """By optimizer and direction the best of some corrections, of which the first are in use. ``certain`` says which
    mean gains [C] are more than chance."""
    checks = []
    for name, direction, at_X in _stages(check):
        error_CX = error_CX2[:, at_X, direction]
        gain_CX = error_CX[0].abs() - error_CX.abs()
        before = float(error_CX[0].abs().mean())
        least = more_gain + (max(LEAST_GAIN_OF_GOOD, before / 2) if before <= GOOD else LEAST_GAIN)
        best = int(torch.where(gain_CX.mean(1) > certain(gain_CX).clamp_min(least), gain_CX.mean(1), 0.0).argmax())
        chosen[name][direction] = list(options[best][name][direction])
        checks.append(_check(name, direction, error_CX[[0, best]], check, at_X, best > 0))
    return {name: rates for name, rates in chosen.items() if rates != list(map(list, UNCHANGED))}, checks


def check_costs(compute: ComputeCost, check: LabelledSets) -> list[StageCheck]:
    """How far costs are off, by optimizer and direction."""
    error_2X2 = _errors(compute, check).expand(2, -1, -1)
    return [_check(name, way, error_2X2[:, at_X, way], check, at_X, False) for name, way, at_X in _stages(check)]


def _stages(sets: LabelledSets) -> list[tuple[str, int, Tensor]]:
    """Every optimizer with every direction, and the indices of its sets; optimizers without sets are left out."""
    optimizer_X = optimizer_of(sets.features_SF[sets.offsets_X1[:-1]])
    present = [(name, (optimizer_X == index).nonzero()[:, 0]) for index, name in enumerate(OPTIMIZERS)]
    return [(name, direction, at_X) for name, at_X in present if len(at_X) for direction in range(2)]


def _errors(compute: ComputeCost, sets: LabelledSets) -> Tensor:
    """Signed relative errors of predictions, [X, 2]."""
    return predict_ms(compute, sets).double() / sets.labels_ms_X2.double() - 1


def _fitted(
    compute: ComputeCost, sets: LabelledSets, in_use: Corrections, terms: Sequence[int], few: int
) -> dict[str, list[list[float]]]:
    """Some of the scale and the rates, of each optimizer that there are at least ``few`` sets of. Without a scale,
    rates are added to the network's."""
    network_X2 = predict_ms(compute, sets).double()
    extent_XE = sets.sum(sets.features_SF[:, columns(_EXTENT)].double())
    found = {name: [list(rates) for rates in both] for name, both in in_use.items()}
    for name, direction, at_X in _stages(sets):
        if len(at_X) >= few:
            terms_XN = torch.cat([network_X2[at_X, direction, None], extent_XE[at_X]], dim=-1)
            factor_N = torch.tensor(UNCHANGED[direction], dtype=torch.float64)
            fixed_X = terms_XN[:, 0] * (0 not in terms)
            label_X = sets.labels_ms_X2[at_X, direction].double()
            factor_N[list(terms)] = _least_relative_error(terms_XN[:, list(terms)], fixed_X, label_X, 0 in terms)
            found[name][direction] = factor_N.tolist()
    return found


def _least_relative_error(terms_XK: Tensor, fixed_X: Tensor, label_X: Tensor, scaled: bool) -> Tensor:
    """Factors [K] of terms, none negative, the first one a scale where ``scaled``; outlying sets count little."""
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
        bounds=([_LEAST_SCALE] * scaled + [0.0] * rates, math.inf),
        loss="soft_l1",
        f_scale=0.05,
    )
    return torch.from_numpy(solved.x) / unit_K


def _check(name: str, way: int, error_2X: Tensor, sets: LabelledSets, at_X: Tensor, changed: bool) -> StageCheck:
    """Of the errors before and after."""
    before_X, after_X = error_2X
    figures = before_X.abs().mean(), before_X.median(), after_X.abs().mean(), after_X.abs().std(unbiased=False)
    before, bias, after, spread = (round(float(x), 4) for x in figures)
    remark = _remark(after_X.abs(), sets, at_X)
    return StageCheck(name, DIRECTIONS[way], len(at_X), before, bias, after, spread, changed, remark)


def _remark(error_X: Tensor, sets: LabelledSets, at_X: Tensor) -> str:
    """Whether large dims, or batches, are off twice as much as small ones, or half, and too much."""
    for feature, what in (("log2_batch_size", "batches"), ("log2_dim", "dims")):
        value_S1 = sets.features_SF[:, [FEATURE_INDEX[feature]]]
        value_X = (sets.sum(value_S1) / sets.offsets_X1.diff()[:, None])[at_X, 0]
        halves = [error_X[(value_X > value_X.median()) == above] for above in (True, False)]
        means = [float(half.mean()) for half in halves]
        if min(map(len, halves)) >= FEW_SETS and max(means) > max(GOOD, 2 * min(means)):
            side = "above" if means[0] > means[1] else "up to"
            return f" ({100 * max(means):.0f} % at {what} {side} {2 ** float(value_X.median()):.0f})"
    return ""
