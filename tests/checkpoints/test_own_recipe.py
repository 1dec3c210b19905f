# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Another cost architecture is one object in one file: fitted, saved, loaded and planned with, and nothing else knows
of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from placement_tasks import ROOFLINE
from small_models import SHARDERS, planner, small_model
from torch import Tensor, nn

from dreamshard_planner import Checkpoint, CheckpointError
from dreamshard_planner.checkpoints.default_recipe import DEFAULT
from dreamshard_planner.checkpoints.recipes import RECIPES
from dreamshard_planner.cost.compute import CostSource
from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.fit import LabelledSets
from dreamshard_planner.cost.network import AnyCostNetwork
from dreamshard_planner.measure.collect import draw_sets
from dreamshard_planner.training import QUICK, learn, pool_tables
from dreamshard_planner.workload.features import WORK, columns


@dataclass(frozen=True)
class TinyConfig:
    """Of :class:`TinyCost`."""

    hidden: int = 8


@dataclass(frozen=True)
class TinyFit:
    """Of :func:`fit_tiny`."""

    updates: int = 300

    def steps(self, sets: int) -> int:
        """Reported ones."""
        return self.updates


class TinyCost(AnyCostNetwork):
    """Powers of a table's work, summed over a group; powers of these sums are its times."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config, self.source = config, CostSource("network", "tiny")
        self.table = nn.Linear(len(WORK), config.hidden)
        self.head = nn.Linear(config.hidden, 2)

    def encode(self, features_SF: Tensor) -> Tensor:
        """A count, and the channels."""
        hidden_SH = self.table(features_SF[:, columns(WORK)].log1p()).clamp(max=20).exp()
        return torch.cat([torch.ones(len(hidden_SH), 1), hidden_SH], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Nothing for an empty group."""
        cost_X2 = self.head(latent_XH[..., 1:].float().clamp_min(1e-6).log()).exp()
        return torch.where(latent_XH[..., :1] > 0.5, cost_X2, 0.0).to(latent_XH.dtype)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """One, to be found in the report."""
        return ("costs are those of a tiny network",)


def fit_tiny(train: LabelledSets, config: TinyFit, on_step: Callable[[int, float], None]) -> TinyCost:
    """Mean absolute error of logarithms."""
    torch.manual_seed(0)
    network = TinyCost(TinyConfig())
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for step in range(config.updates):
        predicted_X2 = network.group_cost_ms(train.sum(network.encode(train.features_SF)))
        loss = (predicted_X2.log() - train.labels_ms_X2.log()).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        on_step(step, loss.item())
    return network.eval()


TINY = replace(
    DEFAULT,
    name="tiny",
    cost=TinyCost,
    cost_config=TinyConfig,
    fit=fit_tiny,
    fit_config=TinyFit(),
    quick_fit_config=TinyFit(updates=200),
)


def synthetic(held_out: bool) -> CostDataset:
    """Sets with times of the roofline model."""
    tables = pool_tables(QUICK.pools)[held_out]
    sets = draw_sets(tables, 60, seed=int(held_out), batch_sizes=(256,), max_tables=10)
    known = LabelledSets.of(sets, torch.ones(len(sets), 2))
    times_X2 = ROOFLINE.group_cost_ms(known.sum(ROOFLINE.encode(known.features_SF).double()))
    return CostDataset.from_sets(sets, times_X2[:, None].repeat(1, 2, 1), {"device": "cpu", "name": "roofline"})


def test_a_recipe_of_your_own_is_fitted_saved_loaded_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", TINY)
    config = replace(QUICK, recipe=TINY.quick())
    made, _ = learn(config, synthetic(held_out=False), synthetic(held_out=True), progress=False)
    errors = made.metadata["validation"]
    assert isinstance(made.cost, TinyCost) and max(errors["network_mape"]) < 0.5
    path = tmp_path / "tiny.safetensors"
    made.save(path)
    loaded = Checkpoint.load(path)
    assert loaded.recipe == "tiny" and loaded.cost.config == TinyConfig() and loaded.digest() == made.digest()
    ours = planner(recipe="tiny", checkpoint=path)
    assert ours.plan(small_model(), SHARDERS).plan
    report = ours.report()
    assert "tiny.safetensors" in report.cost_source and "costs are those of a tiny network" in [
        note.text for note in report.notes
    ]
    assert report.candidates > 0
    for recipe in ("default", "paper"):
        with pytest.raises(CheckpointError, match=f"made by recipe 'tiny', asked for '{recipe}'"):
            planner(recipe=recipe, checkpoint=path)


def test_a_recipe_that_is_not_known_is_refused_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.safetensors"
    with monkeypatch.context() as known:
        known.setitem(RECIPES, "tiny", TINY)
        Checkpoint(DEFAULT.policy(DEFAULT.policy_config()), TinyCost(TinyConfig()), {"recipe": "tiny"}).save(path)
    with pytest.raises(CheckpointError, match="tiny.safetensors.*default, paper, autoshard.*'tiny'"):
        Checkpoint.load(path)
