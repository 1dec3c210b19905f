# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks: learning beats the additive baseline, goes on from other devices, and starts from a roofline."""

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.linear_cost import LinearCost
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
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
from dreamshard_planner.training import pool_tables
from dreamshard_planner.training.config import QUICK
from dreamshard_planner.workload.features import FEATURE_INDEX, feature_matrix
from dreamshard_planner.workload.pools import meta_like, split_tables
from dreamshard_planner.workload.tables import OPTIMIZERS, FeatureStatistics, Table, Workload, workloads_of


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
    return fit_cost_network(split[0], CostNetworkConfig(members=2), FitConfig(epochs=60, batch_sets=64))


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

    # The prior it was fitted around is in the file, whatever this package's is by then.
    path = tmp_path / "gpu.safetensors"
    other = RooflineCost(1e6, 1e5, replace(GPU_KERNELS, lookup_ns=0.5), 4e7)
    network.set_prior(other)
    Checkpoint(Policy(PolicyConfig(hidden=8)), network, {"hardware_name": "a GPU"}).save(path)
    loaded = Checkpoint.load(path).cost
    assert {*loaded.optimizers} == OPTIMIZERS.keys() - {"other"}
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


def test_a_network_over_a_prior_knows_what_no_set_was_measured_in() -> None:
    network = fit_cost_network(_measured_by_a_gpu(40, 0), CostNetworkConfig(members=1), FitConfig(epochs=2))
    table = Workload("t", 10**7, 256, 65_536, 10.0, 655_360.0, (1.0,) + (0.0,) * 16, optimizer="rowwise_adagrad")

    def ms(**changes: Any) -> list[float]:
        return predict_ms(network, LabelledSets.of([[replace(table, **changes)]], torch.ones(1, 2)))[0].tolist()

    assert ms(memory="uvm")[0] > 5 * ms()[0] and ms(optimizer="adagrad")[1] > 1.1 * ms()[1]
