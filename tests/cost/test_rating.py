# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs of placements and exchanges against the formula spelled out; the roofline by hand and against kernels."""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from small_problems import ROOFLINE, choices, make_cost, sharding_cost
from torch import Tensor

import gpu_prior
from common.linear_cost import LinearCost
from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS, CollectiveFit, CollectiveModel
from dreamshard_planner.cost.correction import AdjustedCost
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig, predict_ms
from dreamshard_planner.cost.problem import Cost, Sharding, SharedCores
from dreamshard_planner.cost.roofline import AMD_KERNELS, Kernels, RooflineCost
from dreamshard_planner.workload.tables import FEATURE_INDEX, WORK, Workload, feature_matrix
from paper.networks import PaperCostNetwork


def formula_ms(cost: Cost, laid: Iterable[tuple[int, int]]) -> float:
    """The formula, spelled out with loops, of parts on ranks."""
    problem = cost.problem
    groups: list[dict[int, Tensor]] = [{} for _ in range(problem.num_ranks)]
    sent = [[0.0] * problem.num_ranks for _ in problem.collectives.collectives]
    for part, rank in laid:
        group = int(problem.group_P[part])
        groups[rank][group] = groups[rank].get(group, 0) + cost.latent_PH[part]
        for column, count in enumerate(problem.bytes_PC[part].tolist()):
            sent[column][rank] += count
    device_ms = [sum(float(cost.compute.group_cost_ms(latent).sum()) for latent in one.values()) for one in groups]
    shared = problem.shared_cores or SharedCores(problem.num_ranks, problem.num_ranks)
    total = 0.0
    for first in range(0, problem.num_ranks, shared.on_host):
        host_ms = before = 0.0
        of_host = sorted(device_ms[first : first + shared.on_host])
        for done, ms in enumerate(of_host):  # ranks that still compute share the cores
            host_ms += (ms - before) * max(1, (len(of_host) - done) / shared.at_once)
            before = ms
        total = max(total, host_ms)
    for collective, bytes_D in zip(problem.collectives.collectives, sent, strict=True):
        if collective.over == "world":
            exchanges = [bytes_D]
        elif collective.over == "host":
            exchanges = [bytes_D[:2], bytes_D[2:]]
        else:
            exchanges = [bytes_D[0::2], bytes_D[1::2]]
        slowest = max(max(max(b * (len(group) - 1), sum(group) - b) for b in group) for group in exchanges)
        if slowest > 0:
            total += sum(model.latency_ms + slowest / model.bytes_per_ms for model in collective.passes)
    return total


def test_rating_of_shardings_is_the_formula() -> None:
    cost = sharding_cost(2, latency_ms=0.05)
    per_table = (choices(cost.problem, table) for table in range(cost.problem.num_tables))
    for sharding in (Sharding(*zip(*chosen, strict=True)) for chosen in itertools.product(*per_table)):
        laid = [
            (part, place * options[option].span + offset)
            for options, option, places in zip(cost.problem.tables, sharding.options, sharding.positions, strict=True)
            for part_L, place in zip(options[option].part_UL, places, strict=True)
            for offset, part in enumerate(part_L)
        ]
        assert cost.overall_ms(sharding) == pytest.approx(formula_ms(cost, laid), rel=1e-9)


@pytest.mark.parametrize(
    "devices, groups, cores",
    [(1, 1, None), (2, 1, SharedCores(1, 2)), (3, 2, None), (5, 3, SharedCores(2, 5)), (5, 1, SharedCores(1.5, 2))],
)
def test_rating_of_placements_is_the_formula(devices: int, groups: int, cores: SharedCores | None) -> None:
    cost = make_cost(9, devices, groups=groups)
    cost = Cost(replace(cost.problem, shared_cores=cores), cost.compute)
    assignment_BS = torch.randint(devices, (6, 9), generator=torch.Generator().manual_seed(1))
    expected = [formula_ms(cost, enumerate(row)) for row in assignment_BS.tolist()]
    assert cost.rate(assignment_BS).overall_ms_B.tolist() == pytest.approx(expected, rel=1e-5)


COMPUTE = {
    "roofline": ROOFLINE,
    "network": CostNetwork(CostNetworkConfig(members=2, table_hidden=8, head_hidden=8)),
    "paper": PaperCostNetwork(),
    "linear": LinearCost(torch.ones(len(WORK), 2).double() * 1e-6, torch.ones(2).double(), "by hand"),
    "adjusted": AdjustedCost(ROOFLINE, {"sgd": [[2.0, 1e-6, 0, 0, 0], [1.0, 0, 1e-6, 0, 0]]}),
}


@torch.no_grad()
@pytest.mark.parametrize("name", COMPUTE)
def test_every_compute_cost_keeps_the_contract(name: str) -> None:
    """Latents count shards, nothing costs nothing, and approximate costs are of the same shape."""
    compute, problem = COMPUTE[name], make_cost(6, 2).problem
    cost = Cost(problem, compute)
    latent_BDGH = cost.group_latents(torch.tensor([[0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1]]))
    assert latent_BDGH[..., 0, 0].tolist() == [[6, 0], [3, 3]]
    cost_BDG2 = compute.group_cost_ms(latent_BDGH)
    approximate_BDG2 = compute.approximate_ms(latent_BDGH)
    for ms_BDG2 in (cost_BDG2, approximate_BDG2):
        assert ms_BDG2.shape == (2, 2, 1, 2) and (ms_BDG2[0, 1] == 0).all() and (ms_BDG2[1] > 0).all()
    assert compute.approximates or torch.equal(cost_BDG2, approximate_BDG2)
    assert str(compute.source)


def test_all_to_all_by_hand() -> None:
    model = CollectiveModel(3, bytes_per_ms=100.0, latency_ms=0.1)
    # Ranks send 10, 20 and 0 to each peer: the second sends 40 in all, the third receives 30.
    sent_D = torch.tensor([10.0, 20.0, 0.0])
    assert float(model.all_to_all_ms(sent_D)) == pytest.approx(0.1 + 0.4)
    assert float(CollectiveModel(1, 100.0).all_to_all_ms(torch.tensor([5.0]))) == 0
    assert float(model.all_to_all_ms(torch.zeros(3))) == 0
    shared = replace(model, shared_bytes_per_ms=50.0)  # counts what all ranks move
    assert float(shared.all_to_all_ms(sent_D)) == pytest.approx(0.1 + 0.4 + 60 / 50)
    for wrong in ({"bytes_per_ms": 0.0}, {"shared_bytes_per_ms": -1.0}):
        with pytest.raises(ValueError, match="bandwidth"):
            replace(model, **wrong)


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


NO_FLOOR = Kernels(forward_launch_ms=0.0, backward_launch_ms=0.0)
ONCE = (1.0,) + (0.0,) * 16
"""Reuse of rows that are read once."""


def cost_ms(roofline: RooflineCost, *workloads: Workload) -> list[float]:
    """Forward and backward of one fused group."""
    return predict_ms(roofline, LabelledSets.of([list(workloads)], torch.ones(1, 2)))[0].tolist()


def test_roofline_by_hand() -> None:
    roofline = RooflineCost(
        memory_bytes_per_ms=1000.0,
        uvm_bytes_per_ms=100.0,
        kernels=Kernels(forward_launch_ms=0.5, backward_launch_ms=1.0),
    )
    workload = Workload("t", 100, 4, 10, 2.0, 20.0, ONCE)
    # 20 rows of 16 bytes, 40 outputs of 4 bytes, 20 indices of 8 bytes.
    forward, backward = cost_ms(roofline, workload)
    assert forward == pytest.approx(0.5 + (20 * 16 + 160 + 160) / 1000)
    # Rows are read and written; gradients read once per lookup, of which 160 bytes are the outputs'; indices sorted.
    assert backward == pytest.approx(1.0 + (2 * 320 + 160 + 4 * 2 * 160) / 1000 + (320 - 160) / 4000)


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


def uvm(memory: str, load_factor: float = 0.2, prefetched: bool = False) -> Workload:
    """Half of the rows are read, once each."""
    return Workload(
        "t", 1000, 4, 10, 50.0, 500.0, ONCE,
        memory=memory, cache_load_factor=load_factor, prefetched=prefetched,
    )  # fmt: skip


def test_rows_outside_of_device_memory_cross_the_link() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def ms(*workloads: Workload) -> list[float]:
        return cost_ms(roofline, *workloads)

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


def test_prefetching_hides_behind_the_kernels_of_its_group() -> None:
    roofline = RooflineCost(1000.0, 100.0, NO_FLOOR)

    def total_ms(*workloads: Workload) -> float:
        return sum(cost_ms(roofline, *workloads))

    ahead, at_once = uvm("uvm_caching", prefetched=True), uvm("uvm_caching")
    all_cached = total_ms(uvm("uvm_caching", 1.0))
    link_ms = total_ms(at_once) - all_cached
    assert total_ms(ahead) == pytest.approx(max(link_ms, all_cached), rel=1e-5)
    busy = [uvm("device")] * 40
    assert total_ms(ahead, *busy) == pytest.approx(total_ms(*busy) + all_cached, rel=1e-5)
    assert total_ms(at_once, *busy) == pytest.approx(total_ms(*busy) + all_cached + link_ms, rel=1e-5)
