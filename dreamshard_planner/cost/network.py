# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The cost network: what a set of tables costs when one fused kernel computes them, and its fit to measured sets.

A table MLP reads each shard's descriptors. It gives (a) the milliseconds that each unit of its work would cost, so that
a group starts from an additive cost with learned coefficients, and (b) a few positive context channels. Both are summed
over the shards of a group (DreamShard, section 3). A head reads the logarithms of the sums, since costs span three
orders of magnitude, and corrects the additive cost for what fusion changes.

On GPUs a group starts from the roofline model instead. That knows more than a few thousand measured sets show: what the
widest table of a kernel does to the others, what a cache holds, which optimizer states there are, and memory that no
set was measured in. A network that learns from nothing is off where tables are of another kind.

Several networks of the same shape form an ensemble; their parameters are stacked and evaluated at once.

Shapes: E ensemble members, S shards, X groups (any leading shape), F features, P kinds of work, R latents of the
roofline, K context channels, H latent channels = P + E * (2 + K), or P + R + E * K, 2 = forward and backward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.problem import ComputeCost, CostSource
from dreamshard_planner.cost.roofline import Kernels, RooflineCost
from dreamshard_planner.errors import TaskError
from dreamshard_planner.support.formatting import progress_bar
from dreamshard_planner.workload.tables import (
    DESCRIPTORS,
    FEATURE_INDEX,
    OPTIMIZERS,
    WORK,
    columns,
    optimizer_of,
    scaling,
)

NAMED_DESCRIPTORS = {
    "log2_rows": "rows",
    "log2_dim": "columns",
    "log2_batch_size": "samples per batch",
    "log2_num_features": "features",
    "weight_bytes": "bytes per weight",
}
"""Descriptors whose trained range a user can make sense of."""

MIN_LOG_SUM = 1e-9
"""Keeps logarithms finite where subtraction left a sum at zero; far below any cost in milliseconds."""
LEAST_PRIOR_MS = 1e-3
"""Least milliseconds of a prior: what a GPU's backward takes to return at once where nothing was looked up."""
_STATISTICS = ("mean", "scale", "low", "high")
_DEVICE = ("memory_bytes_per_ms", "uvm_bytes_per_ms", "cache_bytes", "slowness")
_KERNELS = tuple(each.name for each in fields(Kernels))
_DIVISORS = {*_DEVICE, "forward_share", "backward_share", "cache_speedup", "gradient_speedup", "far_table_bytes"}
_MOST = 1e15
"""Largest figure of a prior: bytes of a cache."""


@dataclass(frozen=True, kw_only=True)
class CostNetworkConfig:
    """Size of the network."""

    members: int = 4
    """Networks in the ensemble."""
    table_hidden: int = 128
    """Width of the table MLP, which runs once per shard: wide is cheap."""
    context: int = 16
    """Context channels beside the additive cost."""
    head_hidden: int = 64
    """Width of the head, which runs for every candidate of a search."""


class StackedMLP(nn.Module):
    """E multi-layer perceptrons of the same shape, evaluated as one batched matrix product per layer."""

    def __init__(self, members: int, sizes: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
            bound = math.sqrt(3.0 / fan_in)
            weight = torch.rand(members, fan_in, fan_out, generator=generator) * 2 - 1
            self.weights.append(nn.Parameter(weight * bound))
            self.biases.append(nn.Parameter(torch.zeros(members, 1, fan_out)))
        # Looking them up in torch's lists takes as long as a small product.
        self._layers = [*zip(self.weights, self.biases, strict=True)]

    def forward(self, x_EXI: Tensor) -> Tensor:
        """[E, X, in] -> [E, X, out]; of fewer members than there are, the first."""
        members = len(x_EXI)
        for layer, (weight, bias) in enumerate(self._layers):
            x_EXI = torch.baddbmm(bias[:members], x_EXI if layer == 0 else torch.relu(x_EXI), weight[:members])
        return x_EXI


class CostNetwork(nn.Module, ComputeCost):
    """An ensemble of cost networks.

    Args:
        config: size.
        seed: of the initial weights.
        prior: roofline to start from, whose figures become part of the state: a later one changes nothing. None to
            start from an additive cost that is learned.
    """

    approximates = True
    prior: Tensor

    def __init__(self, config: CostNetworkConfig, seed: int = 0, prior: RooflineCost | None = None) -> None:
        super().__init__()
        self.config = config
        self.source = CostSource("network", "not trained")
        generator = torch.Generator().manual_seed(seed)
        members, hidden, head = config.members, config.table_hidden, config.head_hidden
        rates = 2 * len(WORK) if prior is None else 0
        self.table = StackedMLP(members, (len(DESCRIPTORS), hidden, hidden, rates + config.context), generator)
        self.head = StackedMLP(members, (len(WORK) + 2 + config.context, head, head, 2), generator)
        with torch.no_grad():  # the correction begins at nothing
            self.table.weights[-1].mul_(0.1)
            self.head.weights[-1].zero_()
        self.roofline: RooflineCost | None = None
        if prior is None:
            self.log_floor_E2 = nn.Parameter(torch.full((members, 2), -4.0))
        else:
            self.set_prior(prior)
        for name, size in (("descriptor", len(DESCRIPTORS)), ("log_work", len(WORK)), ("log_cost", 2)):
            for statistic, value in zip(_STATISTICS, (0.0, 1.0, -math.inf, math.inf), strict=True):
                self.register_buffer(f"{name}_{statistic}", torch.full((size,), value))
        self.eval()

    def set_prior(self, prior: RooflineCost) -> None:
        """Start from this roofline; for networks that were made with one."""
        values = [getattr(prior, name) for name in _DEVICE] + [getattr(prior.kernels, name) for name in _KERNELS]
        self.register_buffer("prior", torch.tensor(values, dtype=torch.float64))
        self.roofline = prior

    def _load_from_state_dict(self, *arguments: object, **options: object) -> None:
        super()._load_from_state_dict(*arguments, **options)
        if self.roofline is None:
            return
        values = self.prior.tolist()
        for name, value in zip((*_DEVICE, *_KERNELS), values, strict=True):
            if not (0 < value if name in _DIVISORS else 0 <= value) or value > _MOST:
                raise ValueError(f"its prior has {name} {value:g}, which no device has")
        kernels = Kernels(**dict(zip(_KERNELS, values[len(_DEVICE) :], strict=True)))
        self.set_prior(RooflineCost(**dict(zip(_DEVICE, values, strict=False)), kernels=kernels))

    @property
    def optimizers(self) -> Collection[str]:
        """Optimizers of :data:`~dreamshard_planner.workload.tables.OPTIMIZERS` that the network tells apart."""
        if self.roofline is not None:
            return tuple(name for name in OPTIMIZERS if name != "other")
        last_kind = float(self._trained_bounds("descriptor")[1][DESCRIPTORS.index("stateful_optimizer")])
        return ("sgd", "rowwise_adagrad", *(["adagrad"] if 1.5 < last_kind < math.inf else []))

    @torch.no_grad()
    def initialize(self, train: LabelledSets) -> None:
        """Set the scalers, the trained ranges and the additive start from measured sets."""
        for name, values in self._scaled_inputs(train).items():
            mean_F, scale_F = scaling(values)
            scaled = (values - mean_F) / scale_F
            fitted = {"mean": mean_F, "scale": scale_F, "low": scaled.amin(0), "high": scaled.amax(0)}
            for statistic, value in fitted.items():
                getattr(self, f"{name}_{statistic}").copy_(value)
        if self.roofline is not None:
            return
        labels_ms_X2 = train.labels_ms_X2
        rates_2P = _additive_rates(_work(train), labels_ms_X2.double())
        self.table.biases[-1].zero_()
        self.table.biases[-1][:, 0, : 2 * len(WORK)] = rates_2P.log().flatten().float()
        self.log_floor_E2.copy_((labels_ms_X2.double().quantile(0.01, dim=0) * 0.1).log().float())

    @torch.no_grad()
    def go_on(self, train: LabelledSets) -> None:
        """Instead of :meth:`initialize`, where the network is one already: scalers stay, trained ranges grow, and its
        level becomes that of the sets."""
        for name, values in self._scaled_inputs(train).items():
            scaled = (values - getattr(self, f"{name}_mean")) / getattr(self, f"{name}_scale")
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            low.copy_(torch.minimum(low, scaled.amin(0)))
            high.copy_(torch.maximum(high, scaled.amax(0)))
        predicted_X2 = self.group_cost_ms(train.sum(self.encode(train.features_SF)))
        self.head.biases[-1] += (train.labels_ms_X2 / predicted_X2).log().median(0).values

    def _scaled_inputs(self, train: LabelledSets) -> dict[str, Tensor]:
        """Return the values of measured sets that each scaler is fitted to."""
        return {
            "descriptor": described(train.features_SF),
            "log_work": _work(train).log1p().float(),
            "log_cost": train.labels_ms_X2.log().float(),
        }

    def _scaled(self, name: str, values: Tensor, beyond: float = 0.0) -> Tensor:
        """Return an input scaled, and limited to the trained range and so much beyond it."""
        mean, scale, low, high = (
            getattr(self, f"{name}_{statistic}") for statistic in ("mean", "scale", "low", "high")
        )
        return ((values - mean) / scale).clamp(low - beyond, high + beyond)

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`; channel 0 is the work named ``tables``, one per shard."""
        num_work, work_SP = len(WORK), features_SF[:, columns(WORK)]
        descriptor_SF = self._scaled("descriptor", described(features_SF))
        out_ESO = self.table(descriptor_SF.expand(self.config.members, -1, -1))
        if self.roofline is not None:
            context_SEK = out_ESO.clamp(-8, 8).exp().transpose(0, 1)
            roofline_SR = self.roofline.encode(features_SF).to(features_SF.dtype)
            return torch.cat([work_SP, roofline_SR, context_SEK.flatten(1)], dim=-1)
        rate_ES2P = out_ESO[..., : 2 * num_work].clamp(-40, 8).exp().unflatten(-1, (2, num_work))
        additive_ES2 = torch.einsum("estp,sp->est", rate_ES2P, work_SP)
        context_ESK = out_ESO[..., 2 * num_work :].clamp(-8, 8).exp()
        member_SEH = torch.cat([additive_ES2, context_ESK], dim=-1).transpose(0, 1)
        return torch.cat([work_SP, member_SEH.flatten(1)], dim=-1)

    def member_log_cost(self, latent_XH: Tensor, members: int | None = None) -> Tensor:
        """Logarithm of forward and backward milliseconds by each of the first ``members`` (default: all),
        [E, X, 2]; X is one dimension."""
        members = members or self.config.members
        work_XP = latent_XH[:, : len(WORK)]
        log_start_EX2, context_EXK = self._start(latent_XH[:, len(WORK) :], members)
        log_work_XP = self._scaled("log_work", work_XP.float().clamp_min(0).log1p())
        log_context_EXK = context_EXK.clamp_min(MIN_LOG_SUM).log().clamp(-8, 16)
        # Outside the trained range the correction keeps its last value, and the cost that it starts from carries on.
        scaled_EX2 = self._scaled("log_cost", log_start_EX2, 0.5)
        inputs = [log_work_XP.expand(members, -1, -1), scaled_EX2, log_context_EXK * 0.3]
        return log_start_EX2 + self.head(torch.cat(inputs, dim=-1))

    def _start(self, latent_XR: Tensor, members: int) -> tuple[Tensor, Tensor]:
        """Logarithm of the milliseconds that the heads correct, [E, X, 2], and sums of the context, [E, X, K], from the
        latents behind those of the work."""
        if self.roofline is None:
            channels = 2 + self.config.context
            member_EXH = latent_XR[:, : members * channels].unflatten(-1, (members, channels)).transpose(0, 1).float()
            additive_EX2 = member_EXH[..., :2].clamp_min(0) + self.log_floor_E2[:members, None].exp()
            return additive_EX2.log(), member_EXH[..., 2:]
        start, channels = self.roofline.channels, self.config.context
        member_XH = latent_XR[:, start : start + members * channels]
        context_EXK = member_XH.unflatten(-1, (members, channels)).transpose(0, 1).float()
        prior_X2 = self.roofline.group_cost_ms(latent_XR[:, :start]).clamp_min(LEAST_PRIOR_MS)
        return prior_X2.float().log().expand(members, -1, -1), context_EXK

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.group_cost_ms`: the geometric mean of the members."""
        return self._mean_cost_ms(latent_XH, self.config.members)

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.approximate_ms`: the first member alone."""
        return self._mean_cost_ms(latent_XH, 1)

    def _mean_cost_ms(self, latent_XH: Tensor, members: int) -> Tensor:
        flat_XH = latent_XH.flatten(0, -2)
        log_EX2 = self.member_log_cost(flat_XH, members)
        cost_X2 = (log_EX2[0] if members == 1 else log_EX2.mean(0)).exp().to(latent_XH.dtype)
        cost_X2 = torch.where(flat_XH[:, :1] > 0.5, cost_X2, 0.0)
        return cost_X2.view(*latent_XH.shape[:-1], 2)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """Note shards and groups outside the measured range."""
        notes, (low_F, high_F) = [], self._trained_bounds("descriptor")
        for descriptor, name in NAMED_DESCRIPTORS.items():
            index = DESCRIPTORS.index(descriptor)
            values = (features_SF[:, FEATURE_INDEX[descriptor]], low_F[index], high_F[index])
            values_S, low, high = (value.exp2() if descriptor.startswith("log2_") else value for value in values)
            notes += _outside("table(s)", name, values_S, float(low), float(high))
        # Counts: scaling leaves a trace where there was nothing.
        low_P, high_P = (bound_P.expm1().round().tolist() for bound_P in self._trained_bounds("log_work"))
        for column, name in enumerate(WORK):
            values_X, what = latent_XH[:, column], name.replace("_", " ")
            notes += _outside("fused group(s)", what, values_X, low_P[column], high_P[column])
        return tuple(notes)

    def _trained_bounds(self, name: str) -> tuple[Tensor, Tensor]:
        """Smallest and largest training values of the inputs with this scaler, before scaling."""
        mean, scale = getattr(self, f"{name}_mean"), getattr(self, f"{name}_scale")
        return getattr(self, f"{name}_low") * scale + mean, getattr(self, f"{name}_high") * scale + mean


def described(features_SF: Tensor) -> Tensor:
    """Return :data:`DESCRIPTORS` of shards, [S, descriptors], with the kind of their optimizer for whether it keeps
    states. Networks fitted to sets without Adagrad take it for a row-wise one: both are at the end of their range."""
    described_SD = features_SF[:, columns(DESCRIPTORS)]
    described_SD[:, DESCRIPTORS.index("stateful_optimizer")] = optimizer_of(features_SF).to(described_SD)
    return described_SD


def _outside(what: str, name: str, values_X: Tensor, low: float, high: float) -> list[str]:
    """Return notes on values beyond those measured."""
    notes = []
    for outside_X, bound, side in (
        (values_X[values_X > high * 1.01], high, "more"),
        (values_X[values_X < low * 0.99], low, "fewer"),
    ):
        if len(outside_X):
            extreme = (outside_X.max() if side == "more" else outside_X.min()).item()
            figures = " against ".join(f"{float(f'{value:.6g}'):,.0f}" for value in (extreme, bound))
            notes.append(
                f"{len(outside_X)} {what} have {side} {name} than measured ({figures}); their cost is extrapolated"
            )
    return notes


def _work(sets: LabelledSets) -> Tensor:
    """Return the work of each set, [X, P]."""
    return sets.sum(sets.features_SF[:, columns(WORK)].double())


def _additive_rates(work_XP: Tensor, labels_ms_X2: Tensor) -> Tensor:
    """Milliseconds per unit of work, [2, P]: relative non-negative least squares, every rate kept positive."""
    from scipy.optimize import nnls

    unit_P = work_XP.mean(0).clamp_min(1e-9)
    rates_2P = torch.empty(2, work_XP.shape[1], dtype=torch.float64)
    for output in range(2):
        label_X = labels_ms_X2[:, output]
        design_XP = work_XP / unit_P / label_X[:, None]
        solution, _ = nnls(design_XP.numpy(), torch.ones_like(label_X).numpy())
        floor = 0.01 * float(label_X.median()) / work_XP.shape[1]
        rates_2P[output] = torch.from_numpy(solution).clamp_min(floor) / unit_P
    return rates_2P


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """Settings of a cost network's fit."""

    epochs: int = 120
    """Passes over the training sets, at most."""
    max_updates: int = 5500
    """Large datasets get fewer passes. Twice as many passes over 22,000 sets lower no held-out error, and a training
    should take minutes."""
    batch_sets: int = 256
    """Sets per update at most; small datasets get smaller batches."""
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    seed: int = 0


def fit_cost_network(
    train: LabelledSets,
    network_config: CostNetworkConfig = CostNetworkConfig(),
    config: FitConfig = FitConfig(),
    start: CostNetwork | None = None,
    progress: bool = False,
) -> CostNetwork:
    """Fit an ensemble on the mean absolute error of log milliseconds (a relative loss), around the prior of the sets,
    if they have one. Otherwise it may ``start`` from a network of the same configuration, such as one of another
    device, which has seen tables that these sets lack.

    Members differ in initialisation and in the random weights they give to the training sets (the Bayesian
    bootstrap), so that their spread says where data is thin.
    """
    if len(train) < 8:
        raise TaskError(f"a cost network needs at least 8 measured sets, got {len(train)}")
    if start is not None:
        if train.prior is not None or start.roofline is not None or start.config != network_config:
            raise TaskError(
                "no network to start from: the sets or the network have a prior, or its size is another one"
            )
        network = copy.deepcopy(start).requires_grad_(True)
        network.go_on(train)
    else:
        network = CostNetwork(network_config, config.seed, train.prior)
        network.initialize(train)
    generator = torch.Generator().manual_seed(config.seed)
    uniform_EX = torch.rand(network.config.members, len(train), generator=generator).clamp_min(1e-6)
    weight_EX = 0.5 - 0.5 * uniform_EX.log()  # mean one

    optimizer = torch.optim.AdamW(network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    batch_sets = min(config.batch_sets, max(8, len(train) // 8))
    updates = math.ceil(len(train) / batch_sets)
    passes = max(1, min(config.epochs, config.max_updates // updates))
    steps = passes * updates
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    network.train()
    with progress_bar("fitting", passes, progress) as advance:
        for _ in range(passes):
            losses = []
            for index_X in torch.randperm(len(train), generator=generator).split(batch_sets):
                batch = train.select(index_X)
                log_EX2 = network.member_log_cost(batch.sum(network.encode(batch.features_SF)))
                error_EX2 = torch.nn.functional.smooth_l1_loss(
                    log_EX2, batch.labels_ms_X2.log().expand_as(log_EX2), beta=0.02, reduction="none"
                )
                loss = (error_EX2 * weight_EX[:, index_X, None]).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
            advance(f"loss {sum(losses) / len(losses):.4f}")
    return network.eval().requires_grad_(False)


@torch.no_grad()
def predict_ms(network: ComputeCost, sets: LabelledSets) -> Tensor:
    """Return predicted forward and backward milliseconds of sets, [X, 2], by any compute cost."""
    return network.group_cost_ms(sets.sum(network.encode(sets.features_SF)))


def mape_2(predicted_ms_X2: Tensor, labels_ms_X2: Tensor) -> Tensor:
    """Return mean absolute percentage errors of forward and backward, as shares, [2]."""
    return ((predicted_ms_X2 - labels_ms_X2) / labels_ms_X2).abs().mean(0)
