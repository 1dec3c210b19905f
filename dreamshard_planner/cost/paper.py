# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The DreamShard paper's cost network, for ablation: 21 features, the published layer sizes and heads.

Table MLP 21-128-32; *sum* over the shards of a device; heads 32-64-1 for its forward, backward and
communication; *max* over devices; a head 32-64-1 for the overall cost (sections 3.2 and 4.1 of the paper).
Two things differ from the paper: features are normalised once, with constants of the training tables,
and targets by their mean, so that one network serves tasks of any size.

Shapes: B placements, S shards, D devices, G fused groups, X groups, H = 1 + 32 latent channels, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.fit import LabelledSets
from dreamshard_planner.cost.model import CostSource
from dreamshard_planner.workload.features import FEATURE_INDEX, PAPER_FEATURES, Scaler, columns

OUTPUT_BYTES = 4
MIN_SHARE = 1e-3
HEADS = ("forward_compute", "backward_compute", "communication", "overall")


@dataclass(frozen=True, kw_only=True)
class PaperCostConfig:
    """Published sizes and hyper-parameters (see the paper's appendix)."""

    table_hidden: int = 128
    representation: int = 32
    head_hidden: int = 64


@dataclass(frozen=True, kw_only=True)
class PaperFitConfig:
    """The published training: ten iterations of 300 updates of 64 placements, Adam at 5e-4."""

    updates: int = 3000
    batch_placements: int = 64
    learning_rate: float = 5e-4
    devices: int = 4
    """Devices of the placements composed from measured sets."""
    bytes_per_ms: float = 1e7
    """All-to-all bandwidth in their labels."""
    seed: int = 0


class PaperCostNetwork(nn.Module):
    """A :class:`~dreamshard_planner.cost.model.ComputeCost` with a learned overall head beside it."""

    def __init__(self, config: PaperCostConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.source = CostSource("network", "not trained")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            representation, hidden = config.representation, config.head_hidden
            self.table = nn.Sequential(
                nn.Linear(len(PAPER_FEATURES), config.table_hidden),
                nn.ReLU(),
                nn.Linear(config.table_hidden, representation),
            )
            self.heads = nn.ModuleDict(
                {
                    name: nn.Sequential(nn.Linear(representation, hidden), nn.ReLU(), nn.Linear(hidden, 1))
                    for name in HEADS
                }
            )
        self.register_buffer("feature_mean", torch.zeros(len(PAPER_FEATURES)))
        self.register_buffer("feature_scale", torch.ones(len(PAPER_FEATURES)))
        self.register_buffer("target_ms", torch.ones(4))
        self.eval()

    def encode(self, features_SF: Tensor) -> Tensor:
        """See :meth:`ComputeCost.encode`: a count, then the table's representation."""
        scaled = (features_SF[:, columns(PAPER_FEATURES)] - self.feature_mean) / self.feature_scale
        return torch.cat([torch.ones(len(scaled), 1), self.table(scaled)], dim=-1)

    def _head(self, name: str, representation_XR: Tensor) -> Tensor:
        return self.heads[name](representation_XR.float())[..., 0] * self.target_ms[HEADS.index(name)]

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """See :meth:`ComputeCost.group_cost_ms`."""
        cost_X2 = torch.stack([self._head(name, latent_XH[..., 1:]) for name in HEADS[:2]], dim=-1)
        # Nothing keeps a linear head positive; a thousandth of the mean cost is the least it may say.
        cost_X2 = torch.maximum(cost_X2, MIN_SHARE * self.target_ms[:2])
        return torch.where(latent_XH[..., :1] > 0.5, cost_X2, 0.0).to(latent_XH.dtype)

    glance_ms = group_cost_ms
    glance_channels = None

    def overall_ms(self, latent_BDGH: Tensor) -> Tensor:
        """Predicted overall cost of placements, [B], from the maximum over their devices."""
        return self._head("overall", latent_BDGH.sum(-2)[..., 1:].amax(-2))

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """That this is the recipe for ablation."""
        return ("recipe 'paper': the method as published, for comparison",)


def fit_paper_network(
    train: LabelledSets,
    config: PaperFitConfig | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> PaperCostNetwork:
    """Fit on placements composed of measured sets, one per device, with squared errors of equal weight."""
    config = config or PaperFitConfig()
    network = PaperCostNetwork(PaperCostConfig(), seed=config.seed)
    scaler = Scaler.fit(train.features_SF[:, columns(PAPER_FEATURES)])
    network.feature_mean.copy_(scaler.mean_F)
    network.feature_scale.copy_(scaler.scale_F)
    elements_SX = train.features_SF[:, [FEATURE_INDEX["output_elements"]]].double()
    bytes_X = train.sum(elements_SX)[:, 0] * OUTPUT_BYTES / config.devices
    collectives = CollectiveModel(config.devices, config.bytes_per_ms)

    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=config.updates)
    sample_BD = torch.randint(len(train), (4096, config.devices), generator=generator)
    targets = _labels(train, sample_BD, bytes_X, collectives)
    network.target_ms.copy_(torch.stack([target.mean() for target in targets]))
    network.train()
    for update in range(config.updates):
        index_BD = torch.randint(len(train), (config.batch_placements, config.devices), generator=generator)
        sets = train.select(index_BD.flatten())
        latent_BDH = sets.sum(network.encode(sets.features_SF)).view(*index_BD.shape, -1)
        targets = _labels(train, index_BD, bytes_X, collectives)
        predictions = (
            *(network._head(name, latent_BDH[..., 1:]) for name in HEADS[:3]),
            network.overall_ms(latent_BDH[:, :, None]),
        )
        loss = sum(
            ((prediction - target) / scale).square().mean()
            for prediction, target, scale in zip(predictions, targets, network.target_ms, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if on_update is not None:
            on_update(update, float(loss))
    return network.eval()


def _labels(
    train: LabelledSets, index_BD: Tensor, bytes_X: Tensor, collectives: CollectiveModel
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward, backward and communication per device [B, D], and overall [B], by the formula of cost.model."""
    cost_BD2 = train.labels_ms_X2[index_BD]
    forward_B, backward_B = collectives.all_to_all_ms(bytes_X[index_BD])
    sent_BD = bytes_X[index_BD] * (collectives.world_size - 1) / collectives.bytes_per_ms
    overall_B = cost_BD2.sum(-1).amax(-1) + forward_B + backward_B
    return cost_BD2[..., 0], cost_BD2[..., 1], sent_BD.float(), overall_B.float()
