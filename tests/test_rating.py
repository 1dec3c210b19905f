# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a placement costs, against the formula spelled out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from placement_tasks import ROOFLINE, make_cost

from dreamshard_planner.cost.model import Cost, Preload
from dreamshard_planner.policy.environment import EstimatedMDP, TaskBatch


def brute_force_ms(cost: Cost, assignment: list[int]) -> float:
    """The formula, spelled out with loops."""
    problem, device_ms = cost.problem, []
    for device in range(problem.num_ranks):
        total = 0.0
        for group in range(problem.num_groups):
            here = [s for s in range(problem.num_parts) if assignment[s] == device and int(problem.group_P[s]) == group]
            if here:
                latents = ROOFLINE.encode(problem.features_PF[here])
                total += float(latents[:, 1:].sum()) + ROOFLINE.forward_launch_ms + ROOFLINE.backward_launch_ms
        device_ms.append(total)
    sent = [0.0] * problem.num_ranks
    for shard, device in enumerate(assignment):
        sent[device] += float(problem.bytes_PC[shard])
    world = problem.num_ranks
    slowest = max(max(b * (world - 1), sum(sent) - b) for b in sent)
    collective = 0.0 if world == 1 or slowest == 0 else 0.02 + slowest / 1e6
    return max(device_ms) + 2 * collective


@pytest.mark.parametrize("devices, groups", [(1, 1), (2, 1), (3, 2), (5, 3)])
def test_rating_is_the_formula(devices: int, groups: int) -> None:
    cost = make_cost(9, devices, groups=groups)
    assignment_BS = torch.randint(devices, (6, 9), generator=torch.Generator().manual_seed(1))
    expected = [brute_force_ms(cost, row) for row in assignment_BS.tolist()]
    assert cost.rate(assignment_BS).overall_ms_B.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_preload_costs_what_its_shards_would() -> None:
    """Some shards laid down beforehand, the others placed beside them: rated and seen by the policy as one."""
    whole = make_cost(9, 3, groups=2)
    assignment_S = torch.tensor([0, 1, 2, 0, 1, 1, 2, 0, 0])
    problem, laid = whole.problem, torch.arange(9) < 4
    latent_DGH = torch.zeros(3, 2, whole.latent_PH.shape[1], dtype=torch.float64)
    latent_DGH.index_put_((assignment_S[laid], problem.group_P[laid]), whole.latent_PH[laid], accumulate=True)
    rest = replace(
        problem,
        **{name: getattr(problem, name)[~laid] for name in ("features_PF", "group_P", "bytes_PC", "storage_PM")},
    )
    cost = Cost(rest, ROOFLINE, preload=Preload(latent_DGH, torch.zeros(1, 3)))
    expected_D = whole.rate(assignment_S[None]).device_ms_BD[0]
    assert torch.allclose(cost.rate(assignment_S[None, ~laid]).device_ms_BD[0], expected_D)
    environment = EstimatedMDP(TaskBatch.collate([cost]), 1)
    for shard in environment.tasks.order_TS[0].tolist():
        environment.observe()
        environment.step(assignment_S[~laid][[shard]])
    assert torch.allclose(environment.device_ms_ED2[0].sum(-1).double(), expected_D, rtol=1e-4)


def test_empty_devices_cost_nothing() -> None:
    costs = make_cost(4, 3).rate(torch.zeros(1, 4, dtype=torch.int64))
    assert costs.device_ms_BD[0, 1:].tolist() == [0.0, 0.0]
