# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs of placements and exchanges, against the formula spelled out."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from placement_tasks import ROOFLINE, make_cost
from sharding_tasks import RANKS, sharding_cost
from torch import Tensor

from common.linear_cost import LinearCost
from dreamshard_planner.cost.collectives import MAX_BYTES_PER_MS, CollectiveFit, CollectiveModel
from dreamshard_planner.cost.compute import AdjustedCost
from dreamshard_planner.cost.network import CostNetwork, CostNetworkConfig
from dreamshard_planner.cost.problem import Cost, Preload, Sharding
from dreamshard_planner.workload.features import WORK
from paper.networks import PaperCostNetwork


def shardings(cost: Cost) -> list[Sharding]:
    """Every sharding that there is."""
    per_table = []
    for options in cost.problem.tables:
        choices = []
        for index, option in enumerate(options):
            positions = [range(RANKS // unit.span) for unit in option.units]
            choices += [(index, places) for places in itertools.product(*positions)]
        per_table.append(choices)
    return [
        Sharding(tuple(option for option, _ in chosen), tuple(places for _, places in chosen))
        for chosen in itertools.product(*per_table)
    ]


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
    total = before = 0.0
    for done, ms in enumerate(sorted(device_ms)):  # ranks that still compute share the cores
        total += (ms - before) * max(1, (len(device_ms) - done) / problem.cores)
        before = ms
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
    for sharding in shardings(cost):
        laid = [
            (part, place * unit.span + offset)
            for options, option, places in zip(cost.problem.tables, sharding.options, sharding.positions, strict=True)
            for unit, place in zip(options[option].units, places, strict=True)
            for offset, part in enumerate(unit.parts)
        ]
        assert cost.overall_ms(sharding) == pytest.approx(formula_ms(cost, laid), rel=1e-9)


@pytest.mark.parametrize("devices, groups, cores", [(1, 1, 1), (2, 1, 1), (3, 2, 8), (5, 3, 2)])
def test_rating_of_placements_is_the_formula(devices: int, groups: int, cores: float) -> None:
    cost = make_cost(9, devices, groups=groups)
    cost = Cost(replace(cost.problem, cores=cores), cost.compute)
    assignment_BS = torch.randint(devices, (6, 9), generator=torch.Generator().manual_seed(1))
    expected = [formula_ms(cost, enumerate(row)) for row in assignment_BS.tolist()]
    assert cost.rate(assignment_BS).overall_ms_B.tolist() == pytest.approx(expected, rel=1e-5)


def test_what_spans_one_rank_is_placed_under_the_rest() -> None:
    """The placement problem of a sharding rates it as the sharding's own cost does, wherever its free units go."""
    cost, rng = sharding_cost(4, latency_ms=0.05), random.Random(3)
    for sharding in rng.sample(shardings(sharding_cost(2)), 40):
        doubled = Sharding(sharding.options * 2, sharding.positions * 2)
        chosen = cost.chosen(doubled)
        assert chosen.placed(chosen.assignment_S) == doubled
        rated = float(chosen.cost.rate(chosen.assignment_S[None]).overall_ms_B)
        assert rated == pytest.approx(cost.overall_ms(doubled), rel=1e-9)
        moved = torch.randint(RANKS, chosen.assignment_S.shape, generator=torch.Generator().manual_seed(1))
        rated = float(chosen.cost.rate(moved[None]).overall_ms_B)
        assert rated == pytest.approx(cost.overall_ms(chosen.placed(moved)), rel=1e-9)


def test_a_preload_costs_what_its_shards_would() -> None:
    """Some shards laid down beforehand, the others placed beside them: rated as one."""
    whole = make_cost(9, 3, groups=2)
    assignment_S = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0, 0])
    problem, laid = whole.problem, torch.arange(9) < 4
    latent_DGH = torch.zeros(3, 2, whole.latent_PH.shape[1], dtype=torch.float64)
    latent_DGH.index_put_((assignment_S[laid], problem.group_P[laid]), whole.latent_PH[laid], accumulate=True)
    rest = replace(
        problem, **{name: getattr(problem, name)[~laid] for name in ("features_PF", "group_P", "bytes_PC", "needs_PM")}
    )
    cost = Cost(rest, ROOFLINE, preload=Preload(latent_DGH, torch.zeros(1, 3)))
    expected_D = whole.rate(assignment_S[None]).device_ms_BD[0]
    assert torch.allclose(cost.rate(assignment_S[None, ~laid]).device_ms_BD[0], expected_D)


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
    """Latents count shards, nothing costs nothing, and approximate costs and rewards are of the same shape."""
    compute, problem = COMPUTE[name], make_cost(6, 2).problem
    cost = Cost(problem, compute)
    latent_BDGH = cost.group_latents(torch.tensor([[0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1]]))
    assert latent_BDGH[..., 0, 0].tolist() == [[6, 0], [3, 3]]
    cost_BDG2 = compute.group_cost_ms(latent_BDGH)
    approximate_BDG2 = compute.approximate_ms(latent_BDGH[..., : compute.approximate_channels])
    for ms_BDG2 in (cost_BDG2, approximate_BDG2):
        assert ms_BDG2.shape == (2, 2, 1, 2) and (ms_BDG2[0, 1] == 0).all() and (ms_BDG2[1] > 0).all()
    assert compute.approximates or torch.equal(cost_BDG2, approximate_BDG2)
    assert str(compute.source)
    collective_ms = torch.zeros(2), torch.ones(2)
    if name != "paper":  # whose overall head has learned something else
        expected_B = cost_BDG2.sum((-1, -2)).amax(-1) + 1
        assert torch.allclose(compute.reward_ms(latent_BDGH, collective_ms), expected_B)


def test_milliseconds_beside_a_kernel_add_up_and_are_not_corrected() -> None:
    adjusted, features_PF = (
        AdjustedCost(ROOFLINE, {"sgd": [[2.0, 0, 0, 0, 0]] * 2}),
        make_cost(3, 1).problem.features_PF,
    )
    latent_PH = adjusted.encode(features_PF).double()
    latent_PH[:, adjusted.EXTRA_MS] = 3.0
    latent_PH[2] = 0.0  # a part that comes with its price has no kernel
    latent_PH[2, adjusted.EXTRA_MS] = 5.0
    kernel_ms_P2 = ROOFLINE.group_cost_ms(ROOFLINE.encode(features_PF))
    expected_P2 = torch.cat([2 * kernel_ms_P2[:2] + 3, torch.full((1, 2), 5.0)])
    assert torch.allclose(adjusted.group_cost_ms(latent_PH), expected_P2)


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
