# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placers on tiny tasks: rules, and the contract of them all."""

from __future__ import annotations

import pytest
import torch
from placement_tasks import SEARCH, make_cost, storage_problem

from dreamshard_planner.policy.network import Policy, PolicyConfig
from dreamshard_planner.policy.place import place, sampled_rollouts
from dreamshard_planner.search.heuristics import HEURISTICS, greedy_by_score, place_by_heuristic
from dreamshard_planner.search.local_search import SearchConfig
from paper.published import PaperPolicy, PaperPolicyConfig


def test_rules_place_as_by_hand() -> None:
    problem = storage_problem([1] * 5, [5, 5])
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    # 5 -> 0; 4 -> 1; 3 -> 1 (4 < 5); 2 -> 0 (5 < 7); 1 -> 0 (tie of 7 and 7 goes to the lowest rank)
    assert greedy_by_score(problem, scores).tolist() == [0, 1, 1, 0, 0]
    tight = storage_problem([1] * 5, [2, 5])
    assert greedy_by_score(tight, scores).tolist() == [0, 1, 1, 0, 1]
    assert greedy_by_score(storage_problem([1] * 5, [2, 2]), scores) is None
    with pytest.raises(ValueError, match="size_greedy"):
        place_by_heuristic(problem, "sizegreedy")


@pytest.mark.parametrize("make", [lambda: Policy(PolicyConfig()), lambda: PaperPolicy(PaperPolicyConfig())])
@pytest.mark.parametrize("config", [SEARCH, None])
@pytest.mark.parametrize(
    "count, devices, memory", [(1, 1, None), (1, 4, None), (20, 1, None), (17, 4, None), (17, 4, 1.15), (3, 8, None)]
)
def test_every_placer_keeps_the_contract(make, config, count: int, devices: int, memory: float | None) -> None:
    """Valid ranks, memory kept, the same under the same seed, never worse than a rival, input untouched."""
    sizes = make_cost(count, devices).problem.needs_PM[:, 0]
    limit = None if memory is None else int(max(float(sizes.sum()) / devices * memory, float(sizes.max())))
    cost = make_cost(count, devices, limit)
    before = cost.latent_PH.clone(), cost.problem.limits_DM.clone()
    policy = make()
    result = place(cost, policy, config, seed=3)
    assignment_S = result.chosen.assignment_S
    assert assignment_S.shape == (count,) and 0 <= assignment_S.min() and assignment_S.max() < devices
    assert cost.problem.fits(assignment_S[None]).all()
    assert torch.equal(place(cost, policy, config, seed=3).chosen.assignment_S, assignment_S)
    if config is not None:
        assert all(result.chosen.total_ms <= rival.total_ms * (1 + 1e-5) for rival in result.rivals)
        assert {rival.name for rival in result.rivals} >= {"policy", "cost_greedy", *HEURISTICS}
    assert torch.equal(cost.latent_PH, before[0]) and torch.equal(cost.problem.limits_DM, before[1])


def test_given_placements_are_never_beaten_by_the_choice() -> None:
    cost = make_cost(16, 4)
    best = place(cost, Policy(PolicyConfig()), SearchConfig(candidates=20_000)).chosen
    again = place(
        cost, Policy(PolicyConfig()), SearchConfig(samples=0, candidates=1), given={"given": best.assignment_S}
    )
    assert again.chosen.total_ms <= best.total_ms * (1 + 1e-9)


def test_sampled_rollouts_are_as_many_as_pay() -> None:
    assert [sampled_rollouts(15, devices) for devices in (1, 2, 8, 9, 64, 65, 1024)] == [0, 15, 15, 13, 1, 0, 0]
    assert sampled_rollouts(3, 8) == 3
