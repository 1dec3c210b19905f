# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The published networks: the DreamShard paper's cost network and policy, and AutoShard's policy.

The cost network has 21 features, the published layer sizes and heads:

Table MLP 21-128-32; *sum* over the shards of a device; heads 32-64-1 for its forward, backward and
communication; *max* over devices; a head 32-64-1 for the overall cost (sections 3.2 and 4.1 of the paper).
Two things differ from the paper: features are normalised once, with constants of the training tables,
and targets by their mean, so that one network serves tasks of any size.

Shapes: B placements, S shards, D devices, G fused groups, X groups, N measured placements,
R = 32 representation channels, H = 1 + R latent channels, F features; those of the policies as in
:mod:`paper.placement_policy`; C channels of the recurrent core.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.problem import ComputeCost, CostSource, overall_ms
from dreamshard_planner.workload.tables import FEATURE_INDEX, OUTPUT_BYTES, PAPER_FEATURES, columns, scaling
from paper.placement_mdp import OBSERVATION_INDEX
from paper.placement_policy import AnyPolicy
from placements.contests import BYTES_PER_MS

MIN_SHARE = 1e-3
HEADS = ("forward_compute", "backward_compute", "communication", "overall")
TABLE_HIDDEN, REPRESENTATION, HEAD_HIDDEN = 128, 32, 64
BATCH_PLACEMENTS, LEARNING_RATE = 64, 5e-4
"""Placements of a batch, and rate, of the published fit."""


def perceptron(*widths: int) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers = [layer for sizes in pairwise(widths) for layer in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class PublishedTables(nn.Module):
    """The part that all published networks share: tables represented by an MLP of the 21 features."""

    feature_mean: Tensor
    feature_scale: Tensor

    def __init__(self, more_features: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._columns = columns((*PAPER_FEATURES, *more_features))
        count = len(PAPER_FEATURES) + len(more_features)
        self.table = perceptron(count, TABLE_HIDDEN, REPRESENTATION)
        self.register_buffer("feature_mean", torch.zeros(count))
        self.register_buffer("feature_scale", torch.ones(count))

    def initialize(self, features_SF: Tensor) -> None:
        """Fit the feature scaler to the shards of the training tables, [S, F]."""
        mean_F, scale_F = scaling(features_SF[:, self._columns])
        self.feature_mean.copy_(mean_F)
        self.feature_scale.copy_(scale_F)

    def represent(self, features_XF: Tensor) -> Tensor:
        """Representations of shards, [..., R]."""
        return self.table((features_XF[..., self._columns] - self.feature_mean) / self.feature_scale)


class PaperCostNetwork(PublishedTables, ComputeCost):
    """Published heads for the stages of a device, and a learned overall head beside them."""

    target_ms: Tensor

    def __init__(
        self, seed: int = 0, more_features: tuple[str, ...] = (), over_tables: str = "sum", over_devices: str = "amax"
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__(more_features)
            self.heads = nn.ModuleDict({name: perceptron(REPRESENTATION, HEAD_HIDDEN, 1) for name in HEADS})
        self._over_tables, self._over_devices = over_tables, over_devices
        self.source = CostSource("network", "not trained")
        self.register_buffer("target_ms", torch.ones(4))
        self.eval()

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`: a count, then the table's representation."""
        return torch.cat([torch.ones(len(features_SF), 1), self.represent(features_SF)], dim=-1)

    def head_ms(self, name: str, representation_XR: Tensor) -> Tensor:
        """One of :data:`HEADS` on summed representations, [...]; of ``overall``, on those of placements."""
        return self.heads[name](representation_XR.float())[..., 0] * self.target_ms[HEADS.index(name)]

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.group_cost_ms`."""
        cost_X2 = torch.stack([self.head_ms(name, latent_XH[..., 1:]) for name in HEADS[:2]], dim=-1)
        # Nothing keeps a linear head positive; a thousandth of the mean cost is the least it may say.
        cost_X2 = torch.maximum(cost_X2, MIN_SHARE * self.target_ms[:2])
        return torch.where(latent_XH[..., :1] > 0.5, cost_X2, 0.0).to(latent_XH.dtype)

    def pool(self, sets: LabelledSets) -> Tensor:
        """Representations of sets, [X, R]: as published, the sum over their shards; zero of none."""
        representation_SR = self.represent(sets.features_SF)
        if self._over_tables == "sum":
            return sets.sum(representation_SR)
        index_SR = sets.set_S[:, None].expand_as(representation_SR)
        zeros_XR = representation_SR.new_zeros(len(sets), REPRESENTATION)
        return zeros_XR.scatter_reduce(0, index_SR, representation_SR, self._over_tables, include_self=False)

    def pool_devices(self, pooled_BDR: Tensor) -> Tensor:
        """Representations of placements, [B, R]: as published, the maximum over their devices."""
        return getattr(pooled_BDR, self._over_devices)(-2)

    def reward_ms(self, latent_XDGH: Tensor) -> Tensor:
        """Predicted overall cost of placements, [...], by the head that has learned it."""
        return self.head_ms("overall", self.pool_devices(latent_XDGH.sum(-2)[..., 1:]))


class PaperFit:
    """The published fit, piece by piece: between pieces more placements may be measured.

    Args:
        devices: of the placements.
        updates: in all; the rate falls to zero over them.
        features_SF: of the training tables, [S, F]; what the inputs are normalised with.
        seed: of batches.
        network: to be trained.
        loss: scale of squared errors: the ``mean`` of the target, nothing (``raw``, as published), or each target
            itself (``relative``).
    """

    def __init__(
        self, devices: int, updates: int, features_SF: Tensor, seed: int, network: PaperCostNetwork, loss: str = "mean"
    ) -> None:
        self.network, self._devices, self._loss = network, devices, loss
        self.network.initialize(features_SF)
        self._collectives = CollectiveModel(devices, BYTES_PER_MS)
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1.0, 0.0, total_iters=updates)
        self._fresh = True

    def descend(self, train: LabelledSets, updates: int, placements_ND: Tensor | None) -> None:
        """So many updates, after which the network is ready to use.

        Args:
            train: measured sets; one without shards stands for a device that nothing was placed on.
            updates: of one batch each.
            placements_ND: measured placements as sets of ``train``, int64; None: composed of random sets.
        """
        network, bytes_X = self.network, sent_bytes(train, self._devices)
        if self._fresh and self._loss != "raw":
            targets = placement_labels(train, self._draw(train, placements_ND, 4096), bytes_X, self._collectives)
            network.target_ms.copy_(torch.stack([target.mean() for target in targets]))
        self._fresh = False
        network.train()
        for _ in range(updates):
            index_BD = self._draw(train, placements_ND, BATCH_PLACEMENTS)
            sets = train.select(index_BD.flatten())
            pooled_BDR = network.pool(sets).view(*index_BD.shape, -1)
            targets = placement_labels(train, index_BD, bytes_X, self._collectives)
            predictions = (
                *(network.head_ms(name, pooled_BDR) for name in HEADS[:3]),
                network.head_ms("overall", network.pool_devices(pooled_BDR)),
            )
            errors = (
                ((prediction - target) / self._scale(target, mean)).square().mean()
                for prediction, target, mean in zip(predictions, targets, network.target_ms, strict=True)
            )
            self._optimizer.zero_grad()
            sum(errors, torch.zeros(())).backward()
            self._optimizer.step()
            self._schedule.step()
        network.eval()

    def _draw(self, train: LabelledSets, placements_ND: Tensor | None, count: int) -> Tensor:
        """Placements as sets, [count, D]."""
        if placements_ND is None:
            return torch.randint(len(train), (count, self._devices), generator=self._generator)
        return placements_ND[torch.randint(len(placements_ND), (count,), generator=self._generator)]

    def _scale(self, target: Tensor, mean: Tensor) -> Tensor:
        """Return the scale by which an error is divided."""
        return target.clamp_min(MIN_SHARE * mean) if self._loss == "relative" else mean


def sent_bytes(sets: LabelledSets, devices: int) -> Tensor:
    """Return the bytes that a device with each set sends to each peer, [X]."""
    elements_S1 = sets.features_SF[:, [FEATURE_INDEX["output_elements"]]].double()
    return sets.sum(elements_S1)[:, 0] * OUTPUT_BYTES / devices


def placement_labels(
    train: LabelledSets, index_BD: Tensor, bytes_X: Tensor, collectives: CollectiveModel
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward, backward and communication per device [B, D], and overall [B], by the one formula."""
    cost_BD2 = train.labels_ms_X2[index_BD]
    all_to_all_ms_B = collectives.all_to_all_ms(bytes_X[index_BD])
    sent_BD = bytes_X[index_BD] * (collectives.world_size - 1) / collectives.bytes_per_ms
    overall_B = overall_ms(cost_BD2.sum(-1).amax(-1), 2 * all_to_all_ms_B)
    return cost_BD2[..., 0], cost_BD2[..., 1], sent_BD.float(), overall_B.float()


class PaperPolicy(PublishedTables, AnyPolicy):
    """The DreamShard paper's policy network (section 3.3), for ablation.

    A device is the sum of its tables' representations (MLP 21-128-32) beside an MLP 3-64-32 of its predicted
    forward, communication and backward cost; a linear layer scores it. Costs are relative to a balanced
    device, and the sum is scaled by devices over shards, so that one network serves tasks of any size.
    """

    def __init__(self, seed: int = 0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__()
            self.costs = perceptron(3, 32, REPRESENTATION)
            self.score = nn.Linear(2 * REPRESENTATION, 1)
        self.eval()

    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """Scores of devices, [..., D], minus infinity where illegal; arguments as in ``AnyPolicy.logits``."""
        observed = [OBSERVATION_INDEX[name] for name in ("forward", "communication", "backward")]
        costs_XDR = self.costs(channels_XDO[..., observed])
        logit_XD = self.score(torch.cat([load_XDR, costs_XDR], dim=-1))[..., 0]
        return logit_XD.masked_fill(~legal_XD, -torch.inf)


OBSERVED = tuple(OBSERVATION_INDEX[name] for name in ("forward", "backward", "free_memory"))
"""AutoShard balances computation alone: no communication."""


class RecurrentPolicy(PublishedTables, AnyPolicy):
    """AutoShard's policy (Zha et al., KDD 2022, arXiv 2208.06399), a rival for comparison: an LSTM remembers the tables
    placed so far; a device is scored from that, from its own tables, and from both.

    A table is an MLP 21-128-32 of its features; a device the sum over its tables beside an MLP of its predicted costs
    and free memory; the score an MLP 192-128-128-64-1 of the LSTM's output, the device, and their product. Published
    sizes; as in our other policies costs are relative to a balanced device and the sum is scaled by devices over
    shards, so that one network serves tasks of any size.
    """

    def __init__(self, seed: int = 0) -> None:
        width = 2 * REPRESENTATION
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            super().__init__()
            self.core = nn.LSTM(REPRESENTATION, width, num_layers=2)
            self.costs = nn.Linear(len(OBSERVED), REPRESENTATION)
            self.score = perceptron(3 * width, 128, 128, 64, 1)
        self.eval()

    def represent(self, features_SF: Tensor) -> Tensor:
        """Representations of tables in the order in which they are placed, [S, R + C]: of the table, and of the
        sequence up to it."""
        table_SR = super().represent(features_SF)
        return torch.cat([table_SR, self.core(table_SR)[0]], dim=-1)

    def logits(self, channels_XDO: Tensor, legal_XD: Tensor, load_XDR: Tensor, shard_XR: Tensor) -> Tensor:
        """Scores of devices, [..., D], minus infinity where illegal; arguments as in ``AnyPolicy.logits``."""
        costs_XDR = torch.relu(self.costs(channels_XDO[..., OBSERVED]))
        device_XDC = torch.cat([load_XDR[..., :REPRESENTATION], costs_XDR], dim=-1)
        core_XDC = shard_XR[..., None, REPRESENTATION:].expand_as(device_XDC)
        logit_XD = self.score(torch.cat([core_XDC, device_XDC, core_XDC * device_XDC], dim=-1))[..., 0]
        return logit_XD.masked_fill(~legal_XD, -torch.inf)
