# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Corrections of costs by optimizer and direction, on invented measurements: what they find, and what they leave."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dreamshard_planner import Checkpoint
from dreamshard_planner.checkpoints.choice import SHIPPED
from dreamshard_planner.cost.compute import OPTIMIZERS, AdjustedCost, Corrections
from dreamshard_planner.cost.correction import StageCheck, choose_corrections
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import predict_ms
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.measure.sets import GroupMix, draw_sets
from dreamshard_planner.training.config import pool_tables
from dreamshard_planner.workload.features import columns, feature_matrix, optimizer_of
from dreamshard_planner.workload.tables import Workload

ROOFLINE = RooflineCost(1e7, 1e6)
EXTENT = columns(("distinct_rows", "distinct_elements", "lookup_elements", "lookups"))


def drawn(count: int, seed: int) -> list[list[Workload]]:
    """Random sets, one optimizer after the other."""
    sets = draw_sets(pool_tables(("broad",))[0], 3 * count, seed, (512,), 8, GroupMix(rowwise_adagrad=0))
    return [[replace(w, optimizer=list(OPTIMIZERS)[k % 3]) for w in group] for k, group in enumerate(sets)]


def measured(count: int, seed: int, rates: dict[str, list[list[float]]], noise: float = 0.05) -> LabelledSets:
    """As if hardware took these scales and rates of the roofline's costs."""
    sets = drawn(count, seed)
    plain = LabelledSets.of(sets, torch.ones(len(sets), 2))
    rates_X2N = torch.tensor([rates[group[0].optimizer] for group in sets])
    extent_XE = plain.sum(plain.features_SF[:, EXTENT].double())
    labels_X2 = rates_X2N[..., 0] * predict_ms(ROOFLINE, plain) + (rates_X2N[..., 1:] * extent_XE[:, None]).sum(-1)
    factor_X2 = (noise * torch.randn(len(sets), 2, generator=torch.Generator().manual_seed(seed))).exp()
    return replace(plain, labels_ms_X2=(labels_X2 * factor_X2).float())


OTHER_CPU = {
    "sgd": [[1.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]],
    "rowwise_adagrad": [[1.0, 0.0, 0.0, 0.0, 0.0], [0.8, 3e-4, 0.0, 0.0, 0.0]],
    "adagrad": [[2.0, 0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 5e-6, 0.0, 0.0]],
}
"""SGD as known; row-wise Adagrad pays per row, Adagrad per weight, in the backward; its forward is twice as slow."""


def errors(compute, sets: LabelledSets) -> Tensor:
    """Mean errors, [O, 2]."""
    _, checks = choose_corrections(compute, {}, sets, torch.zeros(len(sets)))
    return torch.tensor([check.before for check in checks]).view(3, 2)


def chosen(*halves: LabelledSets, in_use: Corrections | None = None) -> tuple[Corrections, list[StageCheck]]:
    """Corrections by two halves of measured sets."""
    sets = LabelledSets(
        torch.cat([half.features_SF for half in halves]),
        torch.cat([halves[0].offsets_X1, halves[0].offsets_X1[-1] + halves[1].offsets_X1[1:]]),
        torch.cat([half.labels_ms_X2 for half in halves]),
    )
    half_X = torch.arange(2).repeat_interleave(torch.tensor([len(half) for half in halves]))
    return choose_corrections(ROOFLINE, in_use or {}, sets, half_X)


def test_a_few_sets_correct_each_optimizer_and_direction() -> None:
    some, others, unseen = (measured(count, seed, OTHER_CPU) for count, seed in ((20, 1), (20, 2), (60, 3)))
    corrections, checks = chosen(some, others)
    assert set(corrections) == {"rowwise_adagrad", "adagrad"}  # SGD's costs are right
    changed = {(one.optimizer, one.direction) for one in checks if one.changed}
    assert changed == {("rowwise_adagrad", "backward"), ("adagrad", "forward"), ("adagrad", "backward")}
    assert corrections["rowwise_adagrad"][1] == pytest.approx([0.8, 3e-4, 0, 0, 0], rel=0.3, abs=1e-6)
    before_O2, after_O2 = errors(ROOFLINE, unseen), errors(AdjustedCost(ROOFLINE, corrections), unseen)
    assert (before_O2[1, 1], before_O2[2, 0]) > (0.4, 0.4) and (after_O2 < 0.10).all(), (before_O2, after_O2)
    assert all(one.good and one.after < 0.1 for one in checks)


def test_noise_changes_nothing_and_neither_do_small_gains() -> None:
    level = {name: [[0.97, 0.0, 0.0, 0.0, 0.0]] * 2 for name in OPTIMIZERS}
    corrections, checks = chosen(*(measured(10, seed, level, noise=0.3) for seed in (1, 2)))
    assert corrections == {} and not any(one.changed for one in checks)
    assert not any(one.good for one in checks)  # ten others might be off by more


def test_what_is_in_use_stays_unless_the_new_is_better() -> None:
    some, others = (measured(20, seed, OTHER_CPU) for seed in (1, 2))
    corrections, checks = chosen(some, others, in_use=OTHER_CPU)
    assert not any(one.changed for one in checks) and corrections["adagrad"] == OTHER_CPU["adagrad"]
    # A half that comes from another hour, or is wrong, confirms nothing.
    wrong = measured(20, 3, {name: [[3.0, 0.0, 0.0, 0.0, 0.0]] * 2 for name in OPTIMIZERS})
    kept, checks = chosen(wrong, others, in_use=OTHER_CPU)
    assert kept == corrections and all(one.before == one.after for one in checks)


@pytest.mark.parametrize("number, ms", [(3, 2e-6), (4, 1e-4)])
def test_what_lookups_take_is_told_from_a_few_kernels(number: int, ms: float) -> None:
    """Learn the times that no bandwidth limits: of each weight read again and again, and of each lookup."""
    slow = [3.0, *(ms if index == number else 0.0 for index in range(1, 5))]
    rates = {name: [slow, [1.0, 0.0, 0.0, 0.0, 0.0]] for name in OPTIMIZERS}
    some, other = measured(6, 31, rates, noise=0.01), measured(20, 32, rates, noise=0.01)
    corrections, _ = choose_corrections(ROOFLINE, {}, some)
    for name in OPTIMIZERS:
        assert corrections[name][0] == pytest.approx(slow, rel=0.2, abs=1e-12), name
    assert max(errors(AdjustedCost(ROOFLINE, corrections), other)[:, 0].tolist()) < 0.03


@pytest.mark.parametrize("compute", ["network", "roofline"])
def test_corrected_costs_are_those_of_the_compute_cost_by_the_rates(compute: str) -> None:
    inner = Checkpoint.load(SHIPPED / "cpu.safetensors").cost if compute == "network" else ROOFLINE
    corrected, unchanged = AdjustedCost(inner, OTHER_CPU), AdjustedCost(inner, {})
    for group in drawn(4, 5):
        features_SF, name = feature_matrix(group), group[0].optimizer
        assert set(optimizer_of(features_SF).tolist()) == {list(OPTIMIZERS).index(name)}
        inner_XH, latent_XH = (cost.encode(features_SF).sum(0, keepdim=True) for cost in (inner, corrected))
        rates_2N, extent_E = torch.tensor(OTHER_CPU[name]), features_SF[:, EXTENT].sum(0)
        added_2 = rates_2N[:, 1:] @ extent_E
        seen = corrected.approximate_channels
        for made_X2, plain_X2 in (
            (corrected.group_cost_ms(latent_XH), inner.group_cost_ms(inner_XH)),
            (corrected.approximate_ms(latent_XH[:, :seen]), inner.approximate_ms(inner_XH)),
        ):
            assert torch.allclose(made_X2.float(), (rates_2N[:, 0] * plain_X2 + added_2).float(), rtol=1e-4)
        unchanged_X2 = unchanged.group_cost_ms(unchanged.encode(features_SF).sum(0, keepdim=True))
        assert torch.allclose(unchanged_X2, inner.group_cost_ms(inner_XH))
        assert corrected.notes(features_SF, latent_XH) == inner.notes(features_SF, inner_XH)
    assert (corrected.group_cost_ms(torch.zeros_like(latent_XH)) == 0).all()


def test_checkpoints_keep_corrections(tmp_path: Path) -> None:
    shipped, path = Checkpoint.load(SHIPPED / "cpu.safetensors"), tmp_path / "x.safetensors"
    replace(shipped, metadata={**shipped.metadata, "corrections": OTHER_CPU}).save(path)
    made = Checkpoint.load(path)
    assert isinstance(made.compute_cost(None), AdjustedCost) and made.compute_cost(None).source == made.cost.source
    bare = replace(shipped, metadata={**shipped.metadata, "corrections": {}})
    assert bare.compute_cost(None) is shipped.cost and made.digest() != shipped.digest()
    ordinary = LabelledSets.of([[group[0]] for group in drawn(1, 1)], torch.ones(3, 2))
    assert not torch.equal(predict_ms(made.compute_cost(None), ordinary), predict_ms(shipped.cost, ordinary))
