# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fitting cost networks to measured sets, and judging them on sets of tables never seen.

Shapes: X sets, S shards (of all sets, flat), F features, E ensemble members, 2 = forward and backward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dreamshard_planner.cost.compute import ComputeCost
from dreamshard_planner.cost.labelled_sets import LabelledSets
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.errors import TaskError


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How a cost network is fitted."""

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

    def __post_init__(self) -> None:
        if min(self.epochs, self.max_updates, self.batch_sets) < 1 or not self.learning_rate > 0:
            raise ValueError(f"epochs, updates, batch_sets and learning_rate must be positive, got {asdict(self)}")

    def steps(self, sets: int) -> int:
        """Passes over so many training sets."""
        return max(1, min(self.epochs, self.max_updates // self.updates_per_pass(sets)))

    def updates_per_pass(self, sets: int) -> int:
        """Gradient steps in which so many training sets are seen once."""
        return math.ceil(sets / self.batch_size(sets))

    def batch_size(self, sets: int) -> int:
        """Sets per update, of so many in all."""
        return min(self.batch_sets, max(8, sets // 8))


def fit_cost_network(
    train: LabelledSets,
    network_config: CostNetworkConfig | None = None,
    config: FitConfig | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
    start: CostNetwork | None = None,
) -> CostNetwork:
    """Fit an ensemble on the mean absolute error of log milliseconds (a relative loss), around the prior of the sets,
    where they have one. Where they have none, it may ``start`` from a network of the same configuration, such as one of
    another device, which has seen tables that these sets lack.

    Members differ in initialisation and in the random weights they give to the training sets (the Bayesian
    bootstrap), so that their spread says where data is thin. ``on_epoch(epoch, loss)`` reports progress.
    """
    config = config or FitConfig()
    if len(train) < 8:
        raise TaskError(f"a cost network needs at least 8 measured sets, got {len(train)}")
    network_config = network_config or CostNetworkConfig()
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
    batch_size, passes = config.batch_size(len(train)), config.steps(len(train))
    steps = passes * config.updates_per_pass(len(train))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    network.train()
    for epoch in range(passes):
        losses = []
        for index_X in torch.randperm(len(train), generator=generator).split(batch_size):
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
        if on_epoch is not None:
            on_epoch(epoch, sum(losses) / len(losses))
    return network.eval().requires_grad_(False)


@torch.no_grad()
def predict_ms(network: ComputeCost, sets: LabelledSets) -> Tensor:
    """Predicted forward and backward milliseconds of sets, [X, 2]; any compute cost will do."""
    return network.group_cost_ms(sets.sum(network.encode(sets.features_SF)))


def mape_2(predicted_ms_X2: Tensor, labels_ms_X2: Tensor) -> Tensor:
    """Mean absolute percentage error of forward and backward, as shares, [2]."""
    return ((predicted_ms_X2 - labels_ms_X2) / labels_ms_X2).abs().mean(0)
