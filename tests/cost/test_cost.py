# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Cost networks: empty groups are free, sums are order-free, learning beats the additive baseline."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_prior
from common.linear_cost import LinearCost
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS, CollectiveFit, CollectiveModel
from dreamshard_planner.cost.fit import FitConfig, LabelledSets, fit_cost_network, mape_2, predict_ms
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.roofline import AMD_KERNELS, GPU_KERNELS, Kernels, RooflineCost
from dreamshard_planner.errors import CheckpointError, TaskError
from dreamshard_planner.measure.sets import draw_sets
from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.training import pool_tables
from dreamshard_planner.training.config import QUICK
from dreamshard_planner.workload.features import FEATURE_INDEX, FEATURE_NAMES, feature_matrix
from dreamshard_planner.workload.pools import meta_like, split_tables
from dreamshard_planner.workload.reuse import bin_mean_reuse
from dreamshard_planner.workload.tables import OPTIMIZERS, FeatureStatistics, Table, Workload, workloads_of
from paper.paper_network import PaperCostNetwork, PaperFit, PaperFitConfig


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
    return synthetic_sets(train, 600, 1), synthetic_sets(test, 150, 2)


@pytest.fixture(scope="module")
def network(split) -> CostNetwork:
    return fit_cost_network(split[0], CostNetworkConfig(members=2), FitConfig(epochs=60, batch_sets=64))


def test_network_beats_the_additive_baseline_on_unseen_tables(split, network: CostNetwork) -> None:
    train, test = split
    network_2 = mape_2(predict_ms(network, test), test.labels_ms_X2)
    linear_2 = mape_2(predict_ms(LinearCost.fit(train), test), test.labels_ms_X2)
    assert (network_2 < 0.5 * linear_2).all() and (network_2 < 0.04).all()


def test_optimizers_are_told_apart_as_far_as_they_were_measured(split) -> None:
    """Adagrad goes with row-wise Adagrad where no set had it."""
    train, test = split
    slower = {"sgd": 1.0, "rowwise_adagrad": 4.0, "adagrad": 2.0}
    states_XK = torch.tensor([[float(any(OPTIMIZERS[name])), *OPTIMIZERS[name]] for name in slower])
    columns = [FEATURE_INDEX[name] for name in ("stateful_optimizer", "weight_states", "row_states")]

    def with_optimizers(sets: LabelledSets, kinds: int) -> LabelledSets:
        kind_X = torch.arange(len(sets)) % kinds
        features_SF, labels_X2 = sets.features_SF.clone(), sets.labels_ms_X2.clone()
        features_SF[:, columns] = states_XK[kind_X][sets.set_S]
        labels_X2[:, 1] *= torch.tensor(list(slower.values()))[kind_X]
        return LabelledSets(features_SF, sets.offsets_X1, labels_X2)

    every = with_optimizers(test, 3)
    few, all_three = (
        fit_cost_network(with_optimizers(train, kinds), CostNetworkConfig(members=1), FitConfig(epochs=60))
        for kinds in (2, 3)
    )
    assert {*few.optimizers} == {"sgd", "rowwise_adagrad"} and {*all_three.optimizers} == {*slower}
    assert (mape_2(predict_ms(all_three, every), every.labels_ms_X2) < 0.06).all()
    under = {}
    for network in (few, all_three):
        for kind, name in enumerate(slower):
            features_SF = test.features_SF.clone()
            features_SF[:, columns] = states_XK[kind]
            under[network, name] = predict_ms(network, replace(test, features_SF=features_SF))
    assert torch.equal(under[few, "adagrad"], under[few, "rowwise_adagrad"])
    for name in ("adagrad", "rowwise_adagrad"):
        forward_X, backward_X = (under[all_three, name] / under[all_three, "sgd"]).unbind(-1)
        assert (forward_X - 1).abs().mean() < 0.02 and (backward_X / slower[name] - 1).abs().mean() < 0.1


def test_a_network_goes_on_from_one_of_another_device(split) -> None:
    """Fitted to few sets of a device three times as slow, it knows what these lack; its start stays as it is."""
    train, test = split
    start = fit_cost_network(train, None, FitConfig(epochs=60))
    before = {name: value.clone() for name, value in start.state_dict().items()}
    rare = train.features_SF[:, FEATURE_INDEX["log2_lookups"]].quantile(0.9)
    most_X = torch.zeros(len(train)).scatter_reduce(
        0, train.set_S, train.features_SF[:, FEATURE_INDEX["log2_lookups"]], "amax", include_self=False
    )
    few = train.select((most_X < rare).nonzero()[:60, 0])
    few = replace(few, labels_ms_X2=3 * few.labels_ms_X2)
    on, anew = (fit_cost_network(few, None, FitConfig(epochs=40), start=one) for one in (start, None))
    error, error_anew = (mape_2(predict_ms(cost, test), 3 * test.labels_ms_X2) for cost in (on, anew))
    assert (error < 0.5 * error_anew).all() and (error < 0.1).all(), (error, error_anew)
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())
    assert (on.descriptor_high >= start.descriptor_high).all() and torch.equal(
        on.descriptor_mean, start.descriptor_mean
    )
    with pytest.raises(TaskError, match="its size is another one"):
        fit_cost_network(few, CostNetworkConfig(members=1), FitConfig(epochs=1), start=start)


def test_empty_groups_cost_nothing(network: CostNetwork) -> None:
    channels = network.encode(torch.zeros(1, len(FEATURE_NAMES))).shape[1]
    assert network.group_cost_ms(torch.zeros(2, 3, channels)).abs().max() == 0


def test_latents_add_up(split, network: CostNetwork) -> None:
    """Order does not matter, and channel 0 counts shards."""
    test = split[1]
    latent_SH = network.encode(test.features_SF).double()
    forward = test.sum(latent_SH)
    assert torch.equal(forward[:, 0].round().long(), test.offsets_X1.diff())
    reversed_order = torch.arange(len(latent_SH)).flip(0)
    backward = torch.zeros_like(forward).index_add_(0, test.set_S[reversed_order], latent_SH[reversed_order])
    torch.testing.assert_close(network.group_cost_ms(forward), network.group_cost_ms(backward), rtol=1e-5, atol=0)


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
    assert any("fused group(s) have more lookups than was measured" in note for note in notes)
    assert any("table(s) have more rows than was measured (1,000,000,000 against" in note for note in notes)


@pytest.mark.parametrize("factors", [(0.0, 1.0, 2.0), (0.0, 3.0, 10.0, 30.0), (0.0, 0.5, 4.0)])
def test_nothing_is_not_less_than_nothing_that_was_measured(factors: tuple[float, ...]) -> None:
    tables = [Table("t", 10_000, 64, (FeatureStatistics(factor),)) for factor in factors]
    sets = LabelledSets.of([workloads_of([table], 4096) for table in tables], torch.ones(len(tables), 2))
    network = CostNetwork(CostNetworkConfig(members=1))
    network.initialize(sets)
    unread_SF = sets.features_SF[:1]
    assert network.notes(unread_SF, network.encode(unread_SF)) == ()


def test_fitting_is_deterministic(split) -> None:
    config = FitConfig(epochs=2)
    runs = [fit_cost_network(split[0], CostNetworkConfig(members=1), config) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(runs[0].parameters(), runs[1].parameters(), strict=True))


def test_too_few_sets_is_an_error(split) -> None:
    with pytest.raises(ValueError, match="at least 8"):
        fit_cost_network(split[0].select(torch.arange(3)))


def fit_paper_network(train: LabelledSets, config: PaperFitConfig) -> PaperCostNetwork:
    return PaperFit(config, train.features_SF).descend(train, config.updates).requires_grad_(False)


def test_paper_network_learns(split) -> None:
    train, test = split
    network = fit_paper_network(train, PaperFitConfig(updates=300, learning_rate=2e-3))
    before = fit_paper_network(train, PaperFitConfig(updates=1))
    error = (predict_ms(network, test) - test.labels_ms_X2).square().mean()
    assert error < 0.3 * (predict_ms(before, test) - test.labels_ms_X2).square().mean()


def test_paper_fit_in_pieces_is_the_same_fit(split) -> None:
    """Between the pieces of the published training more placements are measured; here none are."""
    train, config = split[0], PaperFitConfig(updates=6, devices=3)
    placements_ND = torch.arange(60).view(20, 3)
    pieces, whole = (PaperFit(config, train.features_SF) for _ in range(2))
    pieces.descend(train, 4, placements_ND)
    pieces.descend(train, 2, placements_ND)
    whole.descend(train, 6, placements_ND)
    states = pieces.network.state_dict(), whole.network.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(whole.network.table[0].weight, PaperFit(config, train.features_SF).network.table[0].weight)


def test_paper_fit_weighs_errors_as_asked(split) -> None:
    """Relative errors serve small sets, squared milliseconds large ones."""
    train = split[0]
    order = train.labels_ms_X2.sum(-1).argsort()
    small, large = (train.select(some) for some in (order[: len(order) // 4], order[-len(order) // 4 :]))

    def errors(loss: str) -> tuple[float, float]:
        network = fit_paper_network(train, PaperFitConfig(updates=300, learning_rate=2e-3, loss=loss))
        return tuple(float(mape_2(predict_ms(network, sets), sets.labels_ms_X2).mean()) for sets in (small, large))

    relative, raw = errors("relative"), errors("raw")
    assert relative[0] < raw[0] and relative[0] / relative[1] < raw[0] / raw[1]
    with pytest.raises(ValueError, match="loss must be one of mean, raw, relative, got 'log'"):
        PaperFitConfig(loss="log")


def test_selecting_sets_keeps_their_shards(split) -> None:
    test = split[1]
    chosen = test.select(torch.tensor([5, 2]))
    expected = test.features_SF[test.offsets_X1[5] : test.offsets_X1[6]]
    assert torch.equal(chosen.features_SF[: len(expected)], expected)
    assert torch.equal(chosen.labels_ms_X2, test.labels_ms_X2[[5, 2]])


NO_FLOOR = Kernels(forward_launch_ms=0.0, backward_launch_ms=0.0)


def test_roofline_by_hand() -> None:
    roofline = RooflineCost(
        memory_bytes_per_ms=1000.0,
        uvm_bytes_per_ms=100.0,
        kernels=Kernels(forward_launch_ms=0.5, backward_launch_ms=1.0),
    )
    workload = Workload("t", 100, 4, 10, 2.0, 20.0, (1.0,) + (0.0,) * 16)
    sets = LabelledSets.of([[workload]], torch.ones(1, 2))
    # 20 rows of 16 bytes, 40 outputs of 4 bytes, 20 indices of 8 bytes.
    forward, backward = predict_ms(roofline, sets)[0].tolist()
    assert forward == pytest.approx(0.5 + (20 * 16 + 160 + 160) / 1000)
    # Rows are read and written; gradients read once per lookup, of which 160 bytes are the outputs'; indices sorted.
    assert backward == pytest.approx(1.0 + (2 * 320 + 160 + 4 * 2 * 160) / 1000 + (320 - 160) / 4000)


def test_a_cache_serves_what_it_holds_and_narrow_rows_cost_a_least() -> None:
    kernels = replace(NO_FLOOR, cache_speedup=2.0, gradient_speedup=2.0, row_bytes=64.0, lane_dims=8.0)
    workload = Workload("t", 100, 4, 10, 4.0, 20.0, (0.0, 1.0) + (0.0,) * 15)  # 40 lookups of 20 rows

    def ms(tables: int, cache_bytes: float) -> tuple[float, float]:
        roofline = RooflineCost(1000.0, 100.0, kernels, cache_bytes)
        return tuple(predict_ms(roofline, LabelledSets.of([[workload] * tables], torch.ones(1, 2)))[0].tolist())

    rows, outputs, indices = 20 * 64, 160, 40 * 8
    first = rows + outputs + indices
    for tables in (1, 2):
        # The forward's cache holds the rows of a table, one at a time.
        forward, backward = ms(tables, rows)
        assert forward == pytest.approx(tables * (first + rows / 2) / 1000)
        # Gradients are read in passes of 8 columns; the cache holds all of a table's outputs.
        assert backward == pytest.approx(tables * (2 * rows + outputs + 8 * indices + (40 * 32 - outputs) / 2) / 1000)
        forward, backward = ms(tables, outputs / 2)
        assert forward == pytest.approx(tables * (first + rows * (1 - outputs / 4 / rows)) / 1000)
        again = (40 * 32 - outputs) * 0.75
        assert backward == pytest.approx(tables * (2 * rows + outputs + 8 * indices + again) / 1000)


def test_the_gpu_prior_agrees_with_measured_kernels() -> None:
    """The level where the card is known, and the order of every source."""
    sources = gpu_prior.by_source([*gpu_prior.published(), gpu_prior.measured()])
    assert len(sources) == 12
    for source, times in sources.items():
        found = gpu_prior.Agreement.of(times, AMD_KERNELS)
        level = 1.1 if "H100" in source or "recsys" in source else 1.45
        assert any(part.setup.inferred for part in times) or 1 / level < found.factor < level, source
        assert found.error < 0.25, source
        assert found.tau is None or found.tau > 0.9, source


def test_optimizers_take_what_an_h100_measured() -> None:
    """Each within 16 %, also those that no set of tables was measured with."""
    states, seen, times = [FEATURE_INDEX["weight_states"], FEATURE_INDEX["row_states"]], set(), gpu_prior.measured()
    predicted_and_told = times.predicted_and_told(GPU_KERNELS, {}).tolist()
    for label, (predicted, told) in zip(times.labels(), predicted_and_told, strict=True):
        name, direction = label.rsplit(maxsplit=1)
        if direction == "backward" and "optimizer" in name and "sgd" not in name.strip().removesuffix("lars_sgd"):
            shard = times.shard_S[times.set_S == times.names.index(name.strip())][0]
            seen.add(tuple(times.features_UF[shard, states].tolist()))
            assert predicted == pytest.approx(told, rel=0.16), name
    assert seen == {(1, 0), (1, 1), (2, 0)}


def test_amd_kernels_take_longer_by_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = RooflineCost.of_bandwidths("cuda", 8e9, 64e6)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    amd = RooflineCost.of_bandwidths("cuda", 8e9, 64e6)
    workload = Workload("t", 10**6, 8, 1000, 10.0, 10_000.0, (1.0,) + (0.0,) * 16, optimizer="rowwise_adagrad")
    sets = LabelledSets.of([[workload]], torch.ones(1, 2))
    (forward, backward), (amd_forward, amd_backward) = (predict_ms(one, sets)[0].tolist() for one in (nvidia, amd))
    assert amd_forward == forward
    assert amd_backward - backward == pytest.approx(10_000 * AMD_KERNELS.row_ns * 1e-6)


def uvm(memory: str, load_factor: float = 0.2, prefetched: bool = False) -> Workload:
    """Half of the rows are read, once each."""
    return Workload(
        "t", 1000, 4, 10, 50.0, 500.0, (1.0,) + (0.0,) * 16,
        memory=memory, cache_load_factor=load_factor, prefetched=prefetched,
    )  # fmt: skip


def test_rows_outside_of_device_memory_cross_the_link() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def ms(*workloads: Workload) -> list[float]:
        return predict_ms(roofline, LabelledSets.of([list(workloads)], torch.ones(1, 2)))[0].tolist()

    device, uncached, cached = ms(uvm("device")), ms(uvm("uvm")), ms(uvm("uvm_caching"))
    rows, moved = 500 * 16, 500 * 64  # no read of the link is narrower
    assert uncached[0] - device[0] == pytest.approx(moved / 100 - rows / 1000)
    assert uncached[1] - device[1] == pytest.approx(2 * (moved / 100 - rows / 1000))
    features_SF = feature_matrix([uvm("uvm_caching"), uvm("uvm_caching", 1.0), uvm("uvm"), uvm("device")])
    misses = features_SF[:, FEATURE_INDEX["cache_misses"]].tolist()
    assert 0.6 < misses[0] < 0.85 and misses[1:] == [0.0] * 3
    # What misses is taken in before the forward, and as much put out; every lookup searches a set of the cache, once
    # indices are sorted.
    searched = 500 * (4 * 2 * 8 + 256) / 1000
    assert cached[0] - device[0] == pytest.approx(2 * misses[0] * moved / 100 + searched, rel=1e-5)
    assert cached[1] == pytest.approx(device[1])
    everything = ms(uvm("uvm_caching", 1.0))
    assert everything == pytest.approx([device[0] + searched, device[1]])
    larger = [sum(ms(uvm("uvm_caching", factor))) for factor in (0.05, 0.2, 0.5, 1.0)]
    assert larger == sorted(larger, reverse=True) and larger[0] > 1.5 * larger[-1]


def test_rows_of_unified_memory_come_again_and_optimizer_states_stay_there() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def ms(memory: str, optimizer: str) -> list[float]:
        workload = replace(
            uvm(memory, 1.0), pooling_factor=100.0, optimizer=optimizer, reuse_histogram=(0.0, 1.0) + (0.0,) * 15
        )
        return predict_ms(roofline, LabelledSets.of([[workload]], torch.ones(1, 2)))[0].tolist()

    device, uncached = ms("device", "sgd"), ms("uvm", "sgd")
    # 1000 lookups of 500 rows of 16 bytes: the device's cache serves every second one, the link all.
    rows = 500 * 16
    assert uncached[0] - device[0] == pytest.approx(2 * 500 * 64 / 100 - rows * (1 + 1 / 4) / 1000)
    for memory, bytes_per_ms in (("device", 1000), ("uvm", 100), ("uvm_caching", 100)):
        for optimizer, of_weights, of_rows in (("adagrad", 1, 0), ("partial_rowwise_adam", 1, 1), ("adam", 2, 0)):
            states = ms(memory, optimizer)[1] - ms(memory, "sgd")[1]
            assert states == pytest.approx(2 * (of_weights * rows + of_rows * 500 * 4) / bytes_per_ms)


def test_prefetching_hides_behind_the_kernels_of_its_group() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def total_ms(*workloads: Workload) -> float:
        return float(predict_ms(roofline, LabelledSets.of([list(workloads)], torch.ones(1, 2))).sum())

    ahead, at_once = uvm("uvm_caching", prefetched=True), uvm("uvm_caching")
    all_cached = total_ms(uvm("uvm_caching", 1.0))
    link_ms = total_ms(at_once) - all_cached
    assert total_ms(ahead) == pytest.approx(max(link_ms, all_cached), rel=1e-5)
    busy = [uvm("device")] * 40
    assert total_ms(ahead, *busy) == pytest.approx(total_ms(*busy) + all_cached, rel=1e-5)
    assert total_ms(at_once, *busy) == pytest.approx(total_ms(*busy) + all_cached + link_ms, rel=1e-5)


def test_all_to_all_by_hand() -> None:
    model = CollectiveModel(3, bytes_per_ms=100.0, latency_ms=0.1)
    # Ranks send 10, 20 and 0 to each peer: the second sends 40 in all, the third receives 30.
    assert float(model.all_to_all_ms(torch.tensor([10.0, 20.0, 0.0]))) == pytest.approx(0.1 + 0.4)
    assert float(CollectiveModel(1, 100.0).all_to_all_ms(torch.tensor([5.0]))) == 0
    assert float(model.all_to_all_ms(torch.zeros(3))) == 0
    with pytest.raises(ValueError, match="bandwidth"):
        CollectiveModel(2, 0.0)


def test_shared_bandwidth_counts_what_all_ranks_move() -> None:
    model = CollectiveModel(3, bytes_per_ms=100.0, latency_ms=0.1, shared_bytes_per_ms=50.0)
    assert float(model.all_to_all_ms(torch.tensor([10.0, 20.0, 0.0]))) == pytest.approx(0.1 + 0.4 + 60 / 50)
    assert model.ms_per_byte == pytest.approx(0.03)
    with pytest.raises(ValueError, match="bandwidth"):
        CollectiveModel(2, 1.0, shared_bytes_per_ms=-1.0)


@pytest.mark.parametrize("shared_bytes_per_ms", [4e6, MAX_BYTES_PER_MS])
def test_latency_and_bandwidths_are_found_again(shared_bytes_per_ms: float) -> None:
    slowest_P = torch.tensor([1e3, 1e5, 1e7, 1e5, 1e7], dtype=torch.float64)
    total_P = slowest_P * torch.tensor([2.0, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    times_P = 0.3 + slowest_P / 2e6 + total_P / shared_bytes_per_ms
    fit = CollectiveFit.to_samples(slowest_P, total_P, times_P)
    assert fit.latency_ms == pytest.approx(0.3) and fit.bytes_per_ms == pytest.approx(2e6, rel=1e-4)
    assert fit.shared_bytes_per_ms == pytest.approx(shared_bytes_per_ms, rel=0.5) and fit.relative_error < 1e-6
    assert fit.model(4, "here").source == "here"


def test_what_sorting_adds_to_an_exchange_is_told_apart_from_it() -> None:
    sorted_bytes_P = torch.tensor([0.0, 0.0, 1e3, 1e5, 1e7], dtype=torch.float64)
    fit = CollectiveFit.of_sorting(sorted_bytes_P, 2.0 + 0.1 * (sorted_bytes_P > 0) + sorted_bytes_P / 5e5)
    assert (fit.latency_ms, fit.shared_bytes_per_ms) == pytest.approx((0.1, 5e5)) and fit.relative_error < 1e-6


GPU_KERNEL = replace(NO_FLOOR, lookup_ns=1e3, lookup_lane_ns=10.0, update_lookup_ns=2e3, update_lane_ns=20.0)


def _gpu_ms(*workloads: Workload, kernels: Kernels = GPU_KERNEL, cache_bytes: float = math.inf) -> list[float]:
    roofline = RooflineCost(1e12, 1e12, kernels, cache_bytes)
    return predict_ms(roofline, LabelledSets.of([list(workloads)], torch.ones(1, 2)))[0].tolist()


def test_the_widest_table_of_a_gpus_kernel_sets_the_lanes_of_all() -> None:
    narrow, wide = (Workload(f"{dim}", 100, dim, 10, 2.0, 20.0, (1.0,) + (0.0,) * 16) for dim in (4, 200))
    lookups = 20
    assert _gpu_ms(narrow) == pytest.approx([lookups * (1 + 0.01 * 32) * 1e-3, lookups * (2 + 0.02 * 32) * 1e-3])
    together = [2 * lookups * (1 + 0.01 * 256) * 1e-3, 2 * lookups * (2 + 0.02 * 256) * 1e-3]
    assert _gpu_ms(narrow, wide) == pytest.approx(together) and sum(together) > sum(_gpu_ms(narrow) + _gpu_ms(wide))
    # FBGEMM looks at the tables alone, not at what is read of them.
    unread = replace(wide, pooling_factor=0.0, distinct_rows=0.0)
    assert _gpu_ms(narrow, unread) == pytest.approx([ms / 2 for ms in _gpu_ms(narrow, wide)])
    # Slower multiprocessors take longer for all of it.
    roofline = RooflineCost(1e12, 1e12, GPU_KERNEL, slowness=3.0)
    slower = predict_ms(roofline, LabelledSets.of([[narrow]], torch.ones(1, 2)))[0].tolist()
    assert slower == pytest.approx([3 * ms for ms in _gpu_ms(narrow)])


def test_a_gpus_backward_returns_at_once_where_nothing_was_looked_up() -> None:
    kernels = replace(GPU_KERNEL, forward_launch_ms=0.5, backward_launch_ms=1.0)
    table = Workload("t", 100, 4, 10, 2.0, 20.0, (1.0,) + (0.0,) * 16)
    unread = replace(table, pooling_factor=0.0, distinct_rows=0.0)
    assert _gpu_ms(unread, kernels=kernels) == pytest.approx([0.5, 0.0])
    assert _gpu_ms(table, kernels=kernels)[1] > 1.0


def test_the_longest_bags_of_a_gpus_kernel_and_its_empty_ones() -> None:
    kernels = replace(NO_FLOOR, lookup_ns=1e-3, lookup_lane_ns=1e-9, step_ns=1e3, bag_ns=1.0)
    short = Workload("short", 10**6, 4, 1000, 10.0, 10_000.0, (1.0,) + (0.0,) * 16)
    long = replace(short, name="long", pooling_factor=300.0, distinct_rows=300_000.0)
    alone = _gpu_ms(long, kernels=kernels)[0]
    assert alone == pytest.approx(300 * 1e-3 + 1000 * 1e-6 + long.lookups * 1e-9, rel=1e-3)
    # Tables are computed side by side: only the longest counts, and what is left when it goes.
    both = alone + 1000 * 1e-6 + short.lookups * 1e-9
    assert _gpu_ms(long, short, kernels=kernels)[0] == pytest.approx(both, rel=1e-3)
    roofline = RooflineCost(1e12, 1e12, kernels)
    short_H, long_H = roofline.encode(feature_matrix([short, long]))
    left = roofline.group_cost_ms((short_H + long_H) - long_H)
    torch.testing.assert_close(left, roofline.group_cost_ms(short_H), rtol=1e-6, atol=1e-6)
    # Bags take their time, with lookups or without.
    sparse = replace(short, pooling_factor=0.01, distinct_rows=10.0)
    assert _gpu_ms(sparse, kernels=kernels)[0] == pytest.approx(0.01 * 1e-3 + 1000 * 1e-6, rel=1e-3)


@pytest.mark.parametrize("pooled", [True, False])
def test_a_gpu_takes_as_long_for_features_with_batches_of_their_own(pooled: bool) -> None:
    """As for so many bags of one batch: TorchRec's variable batch, or several poolings of a sample."""
    histogram, gpu = (1.0,) + (0.0,) * 16, RooflineCost.of_gpu("h100")
    plain = Workload("t", 10**6, 64, 1000, 2.0, 1990.0, histogram, pooled=pooled)
    fewer = replace(plain, batch_size=10_000, pooling_factor=0.2, output_share=0.1)
    more = replace(plain, batch_size=100, pooling_factor=20.0, output_share=10.0)
    plain_ms, *own_ms = (predict_ms(gpu, LabelledSets.of([[one]], torch.ones(1, 2))) for one in (plain, fewer, more))
    for ms in own_ms:
        torch.testing.assert_close(ms, plain_ms, rtol=1e-6, atol=0)


def test_a_gpus_cache_holds_the_rows_that_are_read_most() -> None:
    """200 rows are read once, 100 some 700 times each."""
    kernels = replace(NO_FLOOR, cache_speedup=1000.0, lookup_bytes=0.0)
    histogram = (2 / 3,) + (0.0,) * 9 + (1 / 3,) + (0.0,) * 6
    hot = 100 * float(bin_mean_reuse()[10])
    table = Workload("t", 10**6, 32, 1000, (200 + hot) / 1000, 300.0, histogram)

    def read_bytes(cache_bytes: float) -> float:
        roofline = RooflineCost(1.0, 1.0, kernels, cache_bytes)
        return float(roofline.encode(feature_matrix([table]))[0, 1]) - table.output_elements * 4

    first, again = 300 * 128, (hot - 100) * 128
    assert read_bytes(100 * 128) == pytest.approx(first + again / 1000, rel=1e-4)
    assert read_bytes(25 * 128) == pytest.approx(first + again * (0.75 + 0.25 / 1000), rel=1e-4)


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
