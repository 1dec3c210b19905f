# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks learn, from nothing or a roofline; corrections of costs by optimizer and direction find what is off."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.linear_cost import LinearCost
from dreamshard_planner import Checkpoint
from dreamshard_planner.checkpoints.choice import SHIPPED
from dreamshard_planner.cost.correction import OPTIMIZERS, AdjustedCost, Corrections, StageCheck, choose_corrections
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import (
    CostNetwork,
    CostNetworkConfig,
    FitConfig,
    fit_cost_network,
    mape_2,
    predict_ms,
)
from dreamshard_planner.cost.roofline import GPU_KERNELS, RooflineCost
from dreamshard_planner.errors import CheckpointError, TaskError
from dreamshard_planner.measure.sets import draw_sets
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.training import QUICK
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.pools import meta_like, pool_tables, split_tables
from dreamshard_planner.workload.tables import FEATURE_INDEX, Table, Workload, columns, feature_matrix, workloads_of
from dreamshard_planner.workload.tables import OPTIMIZERS as STATES


def synthetic_ms(workloads: list[Workload]) -> list[float]:
    """A fused cost with a known departure from additivity: small sets pay a floor, many tables slow each other."""
    work = sum(w.lookups * (w.dim + 20) + 30 * w.distinct_rows * w.dim**0.5 for w in workloads) * 1e-6
    crowding = 1 + 0.3 * min(1.0, len(workloads) / 30)
    return [0.05 + work * crowding, 0.1 + 2.2 * work * crowding**2]


def synthetic_sets(tables: list[Table], count: int, seed: int) -> LabelledSets:
    generator = torch.Generator().manual_seed(seed)
    pool = workloads_of(tables, 512)
    sets = []
    for _ in range(count):
        size = int(torch.exp(torch.rand(1, generator=generator) * 3.6))
        sets.append([pool[i] for i in torch.randperm(len(pool), generator=generator)[:size].tolist()])
    return LabelledSets.of(sets, torch.tensor([synthetic_ms(workloads) for workloads in sets]))


@pytest.fixture(scope="module")
def split() -> tuple[LabelledSets, LabelledSets]:
    train, test = split_tables(meta_like(num_tables=200), seed=0)
    return synthetic_sets(train, 400, 1), synthetic_sets(test, 100, 2)


@pytest.fixture(scope="module")
def network(split) -> CostNetwork:
    return fit_cost_network(split[0], CostNetworkConfig(members=2), FitConfig(epochs=30, batch_sets=64))


def test_network_beats_the_additive_baseline_on_unseen_tables(split, network: CostNetwork) -> None:
    train, test = split
    network_2 = mape_2(predict_ms(network, test), test.labels_ms_X2)
    linear_2 = mape_2(predict_ms(LinearCost.fit(train), test), test.labels_ms_X2)
    assert (network_2 < 0.5 * linear_2).all() and (network_2 < 0.04).all()


def test_a_network_goes_on_from_one_of_another_device(split, network: CostNetwork) -> None:
    """Fitted to few sets of a device three times as slow, it knows what these lack; its start stays as it is."""
    train, test = split
    before = copy.deepcopy(network.state_dict())
    lookups_S = train.features_SF[:, FEATURE_INDEX["log2_lookups"]]
    most_X = torch.zeros(len(train)).scatter_reduce(0, train.set_S, lookups_S, "amax", include_self=False)
    few = train.select((most_X < lookups_S.quantile(0.9)).nonzero()[:60, 0])
    few = replace(few, labels_ms_X2=3 * few.labels_ms_X2)
    on, anew = (fit_cost_network(few, network.config, FitConfig(epochs=40), start=one) for one in (network, None))
    error, error_anew = (mape_2(predict_ms(cost, test), 3 * test.labels_ms_X2) for cost in (on, anew))
    assert (error < 0.5 * error_anew).all() and (error < 0.1).all(), (error, error_anew)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert (on.descriptor_high >= network.descriptor_high).all()
    assert torch.equal(on.descriptor_mean, network.descriptor_mean)
    with pytest.raises(TaskError, match="its size is another one"):
        fit_cost_network(few, CostNetworkConfig(members=1), FitConfig(epochs=1), start=network)


def test_cost_is_finite_and_grows_far_outside_of_training(network: CostNetwork) -> None:
    def cost(factor: float) -> torch.Tensor:
        table = Table("t", 10_000_000, 256, (FeatureStatistics(factor),))
        sets = LabelledSets.of([workloads_of([table], 4096)], torch.ones(1, 2))
        return predict_ms(network, sets)[0]

    small, large = cost(300), cost(3000)
    assert large.isfinite().all() and (large > 3 * small).all()
    table = Table("t", 10**9, 256, (FeatureStatistics(3000.0),))
    features_SF = feature_matrix(workloads_of([table], 4096))
    notes = network.notes(features_SF, network.encode(features_SF))
    assert any("fused group(s) have more lookups than measured" in note for note in notes)
    assert any("table(s) have more rows than measured (1,000,000,000 against" in note for note in notes)


def test_fitting_is_deterministic(split) -> None:
    config = FitConfig(epochs=2)
    runs = [fit_cost_network(split[0], CostNetworkConfig(members=1), config) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True))
    with pytest.raises(ValueError, match="at least 8"):
        fit_cost_network(split[0].select(torch.arange(3)))


def _measured_by_a_gpu(count: int, seed: int) -> LabelledSets:
    """Sets that take the roofline's time, but for one fifth more in the forward, and as much again for fp16."""
    tables = pool_tables(QUICK.pools)[seed % 2]
    sets = draw_sets(tables, count, seed, batch_sizes=(256, 4096), max_tables=10, device="cuda")
    prior = RooflineCost.of_card("NVIDIA H100 80GB HBM3")
    bare = LabelledSets.of(sets, torch.ones(count, 2))
    fp16_X = torch.tensor([workloads[0].weight_bytes == 2 for workloads in sets])
    factor_X2 = torch.stack([1.2 + 0.8 * fp16_X, torch.ones(count)], dim=-1)
    return replace(bare, labels_ms_X2=(predict_ms(prior, bare) * factor_X2).clamp_min(1e-3).float(), prior=prior)


def test_a_network_over_a_prior_starts_from_it_and_learns_what_it_leaves(tmp_path: Path) -> None:
    train, test = _measured_by_a_gpu(200, 0), _measured_by_a_gpu(60, 1)
    untrained = CostNetwork(CostNetworkConfig(), prior=train.prior)
    torch.testing.assert_close(
        predict_ms(untrained, test).double(), predict_ms(train.prior, test).clamp_min(1e-6), rtol=1e-5, atol=1e-5
    )
    network = fit_cost_network(train, CostNetworkConfig(members=2), FitConfig(epochs=40))
    prior_error, error = (mape_2(predict_ms(cost, test), test.labels_ms_X2)[0] for cost in (train.prior, network))
    assert error < 0.5 * prior_error and error < 0.12

    # It knows what no set was measured in.
    table = Workload("t", 10**7, 256, 65_536, 10.0, 655_360.0, (1.0,) + (0.0,) * 16, optimizer="rowwise_adagrad")
    uvm, adagrad = replace(table, memory="uvm"), replace(table, optimizer="adagrad")
    device_ms, uvm_ms, adagrad_ms = predict_ms(network, LabelledSets.of([[table], [uvm], [adagrad]], torch.ones(3, 2)))
    assert uvm_ms[0] > 5 * device_ms[0] and adagrad_ms[1] > 1.1 * device_ms[1]

    # The prior it was fitted around is in the file, whatever this package's is by then.
    path = tmp_path / "gpu.safetensors"
    other = RooflineCost(1e6, 1e5, replace(GPU_KERNELS, lookup_ns=0.5), 4e7)
    network.set_prior(other)
    Checkpoint(Policy(PolicyConfig(hidden=8)), network, {"hardware_name": "a GPU"}).save(path)
    loaded = Checkpoint.load(path).cost
    assert {*loaded.optimizers} == STATES.keys() - {"other"}
    assert torch.equal(predict_ms(loaded, test), predict_ms(network, test))
    assert not torch.equal(loaded.prior, untrained.prior)
    for again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        assert torch.equal(predict_ms(again, test), predict_ms(network, test))

    # Figures that no device has are refused by name.
    for place, value, name in (
        (0, 0.0, "memory_bytes_per_ms"),
        (1, -1.0, "uvm_bytes_per_ms"),
        (4, 0.0, "forward_share"),
    ):
        network.prior[place] = value
        Checkpoint(Policy(PolicyConfig(hidden=8)), network, {"hardware_name": "a GPU"}).save(path)
        with pytest.raises(CheckpointError, match=rf"gpu.safetensors.*prior has {name} "):
            Checkpoint.load(path)
        network.set_prior(other)


ROOFLINE = RooflineCost(1e7, 1e6)
EXTENT = columns(("distinct_rows", "distinct_elements", "lookup_elements", "lookups"))


def drawn(count: int, seed: int) -> list[list[Workload]]:
    """Random sets, one optimizer after the other."""
    sets = draw_sets(pool_tables(("broad",))[0], 3 * count, seed, (512,), 8)
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


def test_checkpoints_keep_corrections(tmp_path: Path) -> None:
    shipped, path = Checkpoint.load(SHIPPED / "cpu.safetensors"), tmp_path / "x.safetensors"
    replace(shipped, metadata={**shipped.metadata, "corrections": OTHER_CPU}).save(path)
    made = Checkpoint.load(path)
    assert isinstance(made.compute_cost(None), AdjustedCost) and made.compute_cost(None).source == made.cost.source
    bare = replace(shipped, metadata={**shipped.metadata, "corrections": {}})
    assert bare.compute_cost(None) is shipped.cost and made.digest() != shipped.digest()
    ordinary = LabelledSets.of([[group[0]] for group in drawn(1, 1)], torch.ones(3, 2))
    assert not torch.equal(predict_ms(made.compute_cost(None), ordinary), predict_ms(shipped.cost, ordinary))
