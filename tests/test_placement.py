# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP, the policy, the rules, packing and search, on tiny tasks with known answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.model import PlacementCost, PlacementProblem, Preload
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.errors import TaskError
from dreamshard_planner.placement import changes
from dreamshard_planner.placement.environment import OBSERVATION_INDEX, EstimatedMDP, TaskBatch
from dreamshard_planner.placement.exact import RELATIVE_GAP, solve
from dreamshard_planner.placement.packing import pack, shortage
from dreamshard_planner.placement.paper import PaperPolicy, PaperPolicyConfig
from dreamshard_planner.placement.place import InfeasibleError, place, sampled_rollouts
from dreamshard_planner.placement.policy import (
    AnyPolicy,
    Policy,
    PolicyConfig,
    roll_out,
    score_rollout,
)
from dreamshard_planner.placement.recurrent import RecurrentPolicy, RecurrentPolicyConfig
from dreamshard_planner.placement.reinforce import (
    ReinforceConfig,
    advantages,
    best_rule_ms,
    greedy_standing,
    train_policy,
)
from dreamshard_planner.placement.rules import RULES, greedy_by_score, place_by_rule
from dreamshard_planner.placement.search import SearchConfig, local_search
from dreamshard_planner.placement.states import States
from dreamshard_planner.placement.tasks import TaskConfig, draw_tasks, problem_of
from dreamshard_planner.workload.tables import FeatureStatistics, Table, Workload, workloads_of

ROOFLINE = RooflineCost(memory_bytes_per_ms=1e6, uvm_bytes_per_ms=1e5, forward_launch_ms=0.02, backward_launch_ms=0.06)
SEARCH = SearchConfig(samples=4, candidates=2000)


POLICIES = [(lambda seed=0: Policy(PolicyConfig(), seed), "score")]
POLICIES += [(lambda seed=0: PaperPolicy(PaperPolicyConfig(), seed), "score")]
POLICIES += [(lambda seed=0: RecurrentPolicy(RecurrentPolicyConfig(), seed), "score.6")]
"""Every policy network, and its last layer."""


def tables(count: int, seed: int = 0) -> list[Table]:
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(count, 3, generator=generator).tolist()
    return [
        Table(f"t{i}", int(10 ** (2 + 3 * a)), 2 ** int(2 + 5 * b), (FeatureStatistics(10 ** (1.5 * c)),))
        for i, (a, b, c) in enumerate(draws)
    ]


def make_cost(count: int, devices: int, memory_bytes: int | None = None, groups: int = 1, seed: int = 0):
    workloads = workloads_of(tables(count, seed), 256)
    problem = problem_of(workloads, devices, memory_bytes, [i % groups for i in range(count)])
    return PlacementCost(problem, ROOFLINE, CollectiveModel(devices, 1e6))


def storage_problem(sizes: list[int], capacities: list[int]) -> PlacementProblem:
    base = make_cost(len(sizes), len(capacities)).problem
    return PlacementProblem(
        **{
            **{name: getattr(base, name) for name in base.__dataclass_fields__},
            "storage_SM": torch.tensor(sizes)[:, None],
            "capacity_DM": torch.tensor(capacities)[:, None],
        }
    )


def brute_force_ms(cost: PlacementCost, assignment: list[int]) -> float:
    """The formula, spelled out with loops."""
    problem, device_ms = cost.problem, []
    for device in range(problem.num_devices):
        total = 0.0
        for group in range(problem.num_groups):
            here = [
                s for s in range(problem.num_shards) if assignment[s] == device and int(problem.group_S[s]) == group
            ]
            if here:
                latents = ROOFLINE.encode(problem.features_SF[here])
                total += float(latents[:, 1:].sum()) + ROOFLINE.forward_launch_ms + ROOFLINE.backward_launch_ms
        device_ms.append(total)
    sent = [0.0] * problem.num_devices
    for shard, device in enumerate(assignment):
        sent[device] += float(problem.output_bytes_S[shard])
    world = problem.num_devices
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
    latent_DGH = torch.zeros(3, 2, whole.latent_SH.shape[1], dtype=torch.float64)
    latent_DGH.index_put_((assignment_S[laid], problem.group_S[laid]), whole.latent_SH[laid], accumulate=True)
    rest = replace(
        problem,
        **{name: getattr(problem, name)[~laid] for name in ("features_SF", "group_S", "output_bytes_S", "storage_SM")},
    )
    cost = PlacementCost(rest, ROOFLINE, CollectiveModel(3, 1e6), Preload(latent_DGH, 0.0, 0.0))
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


def test_rules_place_as_by_hand() -> None:
    problem = storage_problem([1] * 5, [5, 5])
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    # 5 -> 0; 4 -> 1; 3 -> 1 (4 < 5); 2 -> 0 (5 < 7); 1 -> 0 (tie of 7 and 7 goes to the lowest rank)
    assert greedy_by_score(problem, scores).tolist() == [0, 1, 1, 0, 0]
    tight = storage_problem([1] * 5, [2, 5])
    assert greedy_by_score(tight, scores).tolist() == [0, 1, 1, 0, 1]
    assert greedy_by_score(storage_problem([1] * 5, [2, 2]), scores) is None
    with pytest.raises(ValueError, match="size_greedy"):
        place_by_rule(problem, "sizegreedy")


def test_environment_matches_the_rating() -> None:
    costs = [make_cost(7, 3, groups=2), make_cost(4, 2), make_cost(5, 4, seed=3)]
    rollout = roll_out(Policy(PolicyConfig()), TaskBatch.collate(costs), 3, torch.Generator().manual_seed(0))
    environment = rollout.environment
    for task, cost in enumerate(costs):
        assignment_ES = environment.assignments(task)
        rated = cost.rate(assignment_ES)
        episodes = slice(3 * task, 3 * task + 3)
        devices = cost.problem.num_devices
        predicted_ED = environment.device_ms_ED2[episodes, :devices].sum(-1)
        torch.testing.assert_close(predicted_ED, rated.device_ms_BD.float(), rtol=1e-4, atol=1e-5)
        assert environment.action_ES[episodes].max() < devices
        torch.testing.assert_close(environment.overall_ms()[episodes], rated.overall_ms_B.float())


def test_shards_come_hardest_first() -> None:
    cost = make_cost(8, 2)
    order = TaskBatch.collate([cost]).order_TS[0]
    placed = cost.single_ms_S[order]
    assert (placed.diff() <= 0).all()


def test_memory_is_masked_when_acting_and_in_the_gradient() -> None:
    cost = PlacementCost(storage_problem([4, 4, 4, 4], [8, 8]), ROOFLINE, CollectiveModel(2, 1e6))
    policy = Policy(PolicyConfig())
    rollout = roll_out(policy, TaskBatch.collate([cost]), 16, torch.Generator().manual_seed(0), record=True)
    assert cost.problem.fits(rollout.environment.assignments(0)).all()
    log_probability_SE, entropy_SE = score_rollout(policy, rollout)
    forced_SE = rollout.legal_SED.sum(-1) == 1
    assert forced_SE.any()
    assert log_probability_SE[forced_SE].abs().max() == 0 and entropy_SE[forced_SE].abs().max() == 0


@pytest.mark.parametrize(("make", "last_layer"), POLICIES)
def test_sampling_and_scoring_agree(make: Callable[..., AnyPolicy], last_layer: str) -> None:
    """Scoring all steps at once gives the very distributions that actions were drawn from."""
    policy = make(seed=1)
    torch.nn.init.normal_(policy.get_submodule(last_layer).weight, generator=torch.Generator().manual_seed(0))
    tasks = TaskBatch.collate([make_cost(6, 3), make_cost(4, 2)])
    rollout = roll_out(policy, tasks, 2, torch.Generator().manual_seed(0), record=True)
    log_probability_SE, _ = score_rollout(policy, rollout)
    environment = EstimatedMDP(tasks, 2)
    representation = policy.represent(tasks.features_TSF)
    load = torch.zeros(4, 3, representation.shape[-1])
    scale = (tasks.device_mask_TD.sum(-1) / tasks.step_mask_TS.sum(-1))[environment.task_E][:, None, None]
    for step in range(tasks.num_steps):
        observation = environment.observe()
        shard = representation[:, step][environment.task_E]
        logits = policy.logits(observation.channels_EDO, observation.legal_ED, load * scale, shard)
        action = rollout.environment.action_ES[:, step]
        expected = logits.log_softmax(-1).gather(-1, action[:, None])[:, 0]
        torch.testing.assert_close(log_probability_SE[step], expected, rtol=1e-4, atol=1e-5)
        load[torch.arange(4), action] += shard * tasks.step_mask_TS[:, step][environment.task_E][:, None]
        environment.step(action)


def test_dead_ends_are_infeasible_not_crashes() -> None:
    cost = PlacementCost(storage_problem([3, 3, 3], [4, 4]), ROOFLINE, CollectiveModel(2, 1e6))
    environment = roll_out(Policy(PolicyConfig()), TaskBatch.collate([cost]), 4, torch.Generator()).environment
    assert not environment.alive_E.any()
    assert environment.overall_ms().isinf().all()
    with pytest.raises(InfeasibleError) as caught:
        place(cost, Policy(PolicyConfig()), SEARCH)
    assert caught.value.proven


def test_advantages_by_hand() -> None:
    cost_E = torch.tensor([1.0, 3.0, 2.0, math.inf])
    advantage_E = advantages(cost_E, 2, infeasible_factor=1.5)
    # Second task: the infeasible episode counts 1.5 x 2 = 3; standardised pairs are +-1/sqrt(2).
    expected = [2**-0.5, -(2**-0.5), 2**-0.5, -(2**-0.5)]
    assert advantage_E.tolist() == pytest.approx(expected, rel=1e-4)
    assert advantages(torch.tensor([math.inf, math.inf]), 2, 1.5).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("make", [make for make, _ in POLICIES])
def test_reinforce_lowers_the_cost(make) -> None:
    costs = [make_cost(6 + task % 5, 2 + task % 2, seed=task) for task in range(8)]
    policy = make()
    if isinstance(policy, Policy):
        torch.nn.init.zeros_(policy.greediness)  # from a uniform policy
    policy.initialize(torch.cat([cost.problem.features_SF for cost in costs]))
    config = ReinforceConfig(updates=80, tasks_per_update=4, episodes_per_task=16, learning_rate=5e-3)
    statistics = train_policy(policy, costs, config)
    first = sum(update.relative_cost for update in statistics[:10]) / 10
    last = sum(update.relative_cost for update in statistics[-10:]) / 10
    assert last < 0.97 * first
    assert all(update.infeasible_share == 0 and update.gradient_norm > 0 for update in statistics)
    assert statistics[-1].over_best_rule < statistics[0].over_best_rule


def test_the_policy_that_did_best_stays() -> None:
    """Steps so large that every update spoils the start, which is greedy on cost: greedy roll-outs end where they
    began, unless nobody looked."""
    costs = [make_cost(8 + task, 3, seed=task) for task in range(6)]
    harmful = ReinforceConfig(updates=12, tasks_per_update=2, episodes_per_task=4, learning_rate=10.0, looks=4)
    standings = {}
    for looks in (0, 4):
        policy = Policy(PolicyConfig())
        before = greedy_standing(policy, costs)
        train_policy(policy, costs, replace(harmful, looks=looks))
        standings[looks] = greedy_standing(policy, costs)
    assert standings[4] <= before < standings[0]


def test_standing_by_hand() -> None:
    cost = make_cost(4, 4)  # a device each: the heaviest table is the bottleneck
    policy = Policy(PolicyConfig())
    ideal_ms = float(cost.single_ms_S.sum()) / 4
    total_ms = float(cost.rate(torch.arange(4)[None]).overall_ms_B[0])
    infeasible, mean_log = greedy_standing(policy, [cost, make_cost(4, 4, memory_bytes=1)])
    assert infeasible == 1 and mean_log == pytest.approx(math.log(total_ms / ideal_ms))


def test_gap_to_the_best_rule_by_hand() -> None:
    cost = make_cost(6, 2)
    rated = [float(cost.rate(place_by_rule(cost.problem, rule)[None]).overall_ms_B[0]) for rule in RULES]
    assert best_rule_ms(cost) == pytest.approx(min(rated), rel=1e-6)
    assert best_rule_ms(PlacementCost(storage_problem([3, 3, 3], [4, 4]), ROOFLINE, cost.collectives)) == math.inf
    only = PlacementCost(storage_problem([3, 3], [6, 1]), ROOFLINE, cost.collectives)  # one placement alone fits
    told = train_policy(Policy(PolicyConfig()), [only], ReinforceConfig(updates=1, episodes_per_task=3))
    assert told[0].over_best_rule == pytest.approx(1.0)


def test_training_is_deterministic() -> None:
    costs = [make_cost(6, 2), make_cost(7, 3)]
    runs = []
    for _ in range(2):
        policy = Policy(PolicyConfig())
        train_policy(policy, costs, ReinforceConfig(updates=3, tasks_per_update=2, episodes_per_task=4))
        runs.append(torch.cat([parameter.flatten() for parameter in policy.parameters()]))
    assert torch.equal(runs[0], runs[1])


def test_padding_does_not_change_a_task() -> None:
    small, large = make_cost(5, 2), make_cost(12, 6, seed=4)
    policy = Policy(PolicyConfig(), seed=2)
    torch.nn.init.normal_(policy.score.weight, generator=torch.Generator().manual_seed(0))
    alone = roll_out(policy, TaskBatch.collate([small]), 1).environment.assignments(0)
    beside = roll_out(policy, TaskBatch.collate([small, large]), 1).environment.assignments(0)
    assert torch.equal(alone, beside)


def test_search_finds_the_optimum_of_a_small_task() -> None:
    cost = make_cost(7, 2, seed=5)
    every = torch.tensor([[(code >> shard) & 1 for shard in range(7)] for code in range(2**7)])
    best_ms = float(cost.rate(every).overall_ms_B.min())
    start = torch.zeros(7, dtype=torch.int64)
    result = local_search(cost, [start], SEARCH, torch.Generator().manual_seed(0))
    assert result.overall_ms == pytest.approx(best_ms, rel=1e-4)
    assert not result.cut_short


def preloaded(cost: PlacementCost, collectives: int) -> PlacementCost:
    """The same shards, their outputs carried by several all-to-alls, on devices that hold something already."""
    problem = replace(
        cost.problem, num_collectives=collectives, collective_S=torch.arange(cost.problem.num_shards) % collectives
    )
    latent_DGH = cost.group_latents(torch.arange(problem.num_shards)[None] % 3)[0] / 2
    return PlacementCost(problem, cost.compute, cost.collectives, Preload(latent_DGH, 0.3, 0.4))


@pytest.mark.parametrize("groups, collectives", [(1, 0), (3, 0), (1, 1), (2, 2), (3, 4)])
def test_search_keeps_its_sums(groups: int, collectives: int) -> None:
    """The incremental costs of candidates are those of a rating from scratch, in each of several placements."""
    cost = make_cost(12, 4, groups=groups)
    cost = preloaded(cost, collectives) if collectives else cost
    assignment_BS = torch.stack([torch.arange(12) % 4, torch.arange(12) // 3, torch.arange(12) % 2])
    states = States(cost, assignment_BS)
    row_B, bottleneck_B = torch.tensor([0, 2]), torch.tensor([1, 0])
    bottlenecks = changes.Bottlenecks.of(states, row_B, bottleneck_B)
    every = [
        [
            (leaving, home if arrival >= 0 else device, arrival)
            for leaving in (assignment_S == bottleneck).nonzero()[:, 0].tolist()
            for arrival, home in [(-1, -1), *enumerate(assignment_S.tolist())]
            for device in range(4)
            if home != bottleneck and bottleneck != device and (arrival < 0 or device == home)
        ]
        for assignment_S, bottleneck in zip(assignment_BS[row_B], bottleneck_B.tolist(), strict=True)
    ]
    count = min(map(len, every))
    assert count >= 3 * 3 + 3 * 9  # moves and swaps
    leaving_BC, device_BC, arrival_BC = torch.tensor([change[:count] for change in every]).unbind(-1)
    candidates = changes.Candidates(leaving_BC, device_BC, arrival_BC, torch.ones_like(device_BC, dtype=torch.bool))
    rated = changes._rate(states, bottlenecks, candidates)
    overall_BC, _ = changes._scores(states, bottlenecks, device_BC, leaving_BC, arrival_BC, *rated, 1.0)
    for index, row in enumerate(row_B.tolist()):
        for candidate in range(count):
            changed_S = assignment_BS[row].clone()
            changed_S[leaving_BC[index, candidate]] = device_BC[index, candidate]
            if arrival_BC[index, candidate] >= 0:
                changed_S[arrival_BC[index, candidate]] = bottleneck_B[index]
            expected = float(cost.rate(changed_S[None]).overall_ms_B)
            assert float(overall_BC[index, candidate]) == pytest.approx(expected, abs=2e-5)


def test_search_from_a_crowded_device_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All shards on one device: only the heaviest may leave in one step, and still all devices end up in use."""
    monkeypatch.setattr(changes, "MAX_PAIRS", 600)
    cost = make_cost(60, 4)
    start_S = torch.zeros(60, dtype=torch.int64)
    result = local_search(cost, [start_S], SEARCH, torch.Generator().manual_seed(0))
    assert result.assignment_S.unique().tolist() == [0, 1, 2, 3]
    assert result.overall_ms < 0.5 * float(cost.rate(start_S[None]).overall_ms_B)


@pytest.mark.parametrize("collectives", [0, 2])
def test_a_step_improves_every_placement_and_keeps_its_sums(collectives: int) -> None:
    cost = make_cost(24, 4, groups=2)
    cost = preloaded(cost, collectives) if collectives else cost
    states = States(cost, torch.stack([torch.zeros(24, dtype=torch.int64), torch.arange(24) % 4 // 2]))
    before_B, row_B = states.overall_ms_B(), torch.arange(2)
    rated = [changes.improve(states, row_B, states.device_ms_BD.argmax(-1), 16, 1.0)[1] for _ in range(5)]
    afresh = States(cost, states.assignment_BS)
    assert (states.overall_ms_B() < 0.8 * before_B).all() and all(rated)
    for name in ("latent_BDGH", "group_ms_BDG", "glance_ms_BDG", "bytes_BCD", "free_BDM"):
        assert torch.allclose(getattr(states, name).double(), getattr(afresh, name).double(), rtol=1e-9, atol=1e-9), (
            name
        )


@pytest.mark.parametrize("make", [lambda: Policy(PolicyConfig()), lambda: PaperPolicy(PaperPolicyConfig())])
@pytest.mark.parametrize("config", [SEARCH, None])
@pytest.mark.parametrize(
    "count, devices, memory", [(1, 1, None), (1, 4, None), (20, 1, None), (17, 4, None), (17, 4, 1.15), (3, 8, None)]
)
def test_every_placer_keeps_the_contract(make, config, count: int, devices: int, memory: float | None) -> None:
    """Valid ranks, memory kept, the same under the same seed, never worse than a rival, input untouched."""
    sizes = make_cost(count, devices).problem.storage_SM[:, 0]
    limit = None if memory is None else int(max(float(sizes.sum()) / devices * memory, float(sizes.max())))
    cost = make_cost(count, devices, limit)
    before = cost.latent_SH.clone(), cost.problem.capacity_DM.clone()
    policy = make()
    result = place(cost, policy, config, seed=3)
    assignment_S = result.chosen.assignment_S
    assert assignment_S.shape == (count,) and 0 <= assignment_S.min() and assignment_S.max() < devices
    assert cost.problem.fits(assignment_S[None]).all()
    assert torch.equal(place(cost, policy, config, seed=3).chosen.assignment_S, assignment_S)
    if config is not None:
        assert all(result.chosen.total_ms <= rival.total_ms * (1 + 1e-5) for rival in result.rivals)
        assert {rival.name for rival in result.rivals} >= {"policy", "cost_greedy", *RULES}
    assert torch.equal(cost.latent_SH, before[0]) and torch.equal(cost.problem.capacity_DM, before[1])


def test_given_placements_are_never_beaten_by_the_choice() -> None:
    cost = make_cost(16, 4)
    best = place(cost, Policy(PolicyConfig()), SearchConfig(candidates=20_000)).chosen
    again = place(
        cost, Policy(PolicyConfig()), SearchConfig(samples=0, candidates=1), given={"given": best.assignment_S}
    )
    assert again.chosen.total_ms <= best.total_ms * (1 + 1e-9)


def test_packing_where_greedy_dead_ends() -> None:
    # Best fit decreasing puts 6 beside nothing that fills 10; only {6,4} {5,5} works.
    problem = storage_problem([6, 5, 5, 4], [10, 10])
    assert problem.fits(pack(problem).assignment_S[None]).all()
    # Three-partition: best fit fails, the exact solver does not.
    hard = storage_problem([7, 6, 5, 5, 4, 3], [15, 15])
    assert hard.fits(pack(hard).assignment_S[None]).all()
    packing = pack(storage_problem([6, 6, 6], [10, 10]))
    assert packing.assignment_S is None and packing.proven


def test_sampled_rollouts_are_as_many_as_pay() -> None:
    assert [sampled_rollouts(15, devices) for devices in (1, 2, 8, 9, 64, 65, 1024)] == [0, 15, 15, 13, 1, 0, 0]
    assert sampled_rollouts(3, 8) == 3


def test_tight_memory_is_feasible_wherever_the_exact_solver_packs() -> None:
    """95 % of all memory filled by few large and many small tables: where greedy rules dead-end."""
    generator, dead_ends, packed, hopeless = torch.Generator().manual_seed(0), 0, 0, 0
    for _ in range(24):
        devices = int(torch.randint(2, 9, (1,), generator=generator))
        shards = int(torch.randint(2, 6, (1,), generator=generator)) * devices
        sizes = (torch.randn(shards, generator=generator).exp() * 1000).int() + 1
        capacity = max(int(sizes.sum() / devices / 0.95), int(sizes.max()))
        cost = make_cost(shards, devices)
        problem = storage_problem(sizes.tolist(), [capacity] * devices)
        cost = PlacementCost(problem, cost.compute, cost.collectives)
        dead_ends += all(place_by_rule(problem, rule) is None for rule in RULES)
        exact = solve(problem, 5.0)
        if math.isinf(exact.bound_ms):  # proven, not a matter of time
            hopeless += 1
            with pytest.raises(InfeasibleError):
                place(cost, Policy(PolicyConfig()), SearchConfig(candidates=200))
            continue
        packed += exact.assignment_S is not None
        chosen = place(cost, Policy(PolicyConfig()), SearchConfig(candidates=200)).chosen
        assert problem.fits(chosen.assignment_S[None]).all()
    assert dead_ends > 5 and packed > 12 and hopeless > 0, (dead_ends, packed, hopeless)


def test_shortage_names_table_and_bytes() -> None:
    text = shortage(storage_problem([3, 12, 3], [10, 9]), ("HBM",))
    assert "'t1' needs 12 bytes of HBM" in text and "2 bytes are missing" in text
    text = shortage(storage_problem([6, 6, 6], [8, 8]), ("HBM",))
    assert "need 18 bytes" in text and "2 bytes are missing" in text
    assert shortage(storage_problem([6, 6, 6], [10, 10]), ("HBM",)) == ""


def test_excess_is_zero_on_the_best_device() -> None:
    environment = EstimatedMDP(TaskBatch.collate([make_cost(5, 3)]), 1)
    excess = environment.observe().channels_EDO[..., OBSERVATION_INDEX["excess"]]
    assert excess.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("spare", [100, 2])
@pytest.mark.parametrize("seed", range(3))
def test_exact_plan_is_the_cheapest_and_its_bound_holds(seed: int, spare: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (8,), generator=generator).tolist()
    cost_S = torch.rand(8, generator=generator, dtype=torch.float64)
    problem = storage_problem(sizes, [(sum(sizes) + spare) // 2] * 2)
    plans = torch.tensor(list(itertools.product(range(2), repeat=8)))
    load_B = torch.stack([((plans == device) * cost_S).sum(-1) for device in range(2)]).amax(0)
    best = float(load_B[problem.fits(plans)].min())
    exact = solve(problem, 60.0, cost_S)
    assert bool(problem.fits(exact.assignment_S[None]))
    assert exact.bound_ms <= best * (1 + 1e-9) and exact.cost_ms <= best * (1 + 2 * RELATIVE_GAP)


def test_exact_plan_of_what_does_not_fit() -> None:
    exact = solve(storage_problem([6, 6, 6], [10, 10]), 60.0, torch.ones(3))
    assert exact.assignment_S is None and exact.cost_ms == exact.bound_ms == math.inf
    heavy = solve(storage_problem([1, 1, 1], [10, 10]), 60.0, torch.tensor([5.0, 1.0, 1.0]))
    assert heavy.cost_ms == heavy.bound_ms == 5.0


def test_memory_that_nobody_needs_binds_nobody() -> None:
    problem = make_cost(4, 2, memory_bytes=10**9).problem
    with_unused = replace(
        problem,
        storage_SM=torch.cat([torch.zeros_like(problem.storage_SM), problem.storage_SM], dim=-1),
        capacity_DM=torch.cat([torch.zeros_like(problem.capacity_DM), problem.capacity_DM], dim=-1),
    )
    free = []
    for variant in (problem, with_unused):
        mdp = EstimatedMDP(TaskBatch.collate([PlacementCost(variant, ROOFLINE, CollectiveModel(2, 1e6))]), 1)
        free.append(mdp.observe().channels_EDO[..., OBSERVATION_INDEX["free_memory"]])
    assert torch.equal(*free) and free[0].min() > 0.9


def test_drawn_tasks_leave_room_for_placement() -> None:
    """No table takes more than its share where others can replace it, and what was drawn stays reproducible."""

    def single_ms(workloads: Sequence[Workload]) -> torch.Tensor:
        return PlacementCost(problem_of(workloads, 1), ROOFLINE, CollectiveModel(1, 1e6)).single_ms_S

    config = TaskConfig(min_tables=4, max_tables=40, devices=(2, 4, 8), heaviest=0.6)
    drawn = draw_tasks(tables(400), 30, config, 0, single_ms)
    for task in drawn:
        single_ms_S = single_ms(task.workloads)
        assert len(task.workloads) >= 2 * task.problem.num_devices
        assert float(single_ms_S.max()) <= 0.6 * float(single_ms_S.sum()) / task.problem.num_devices
        assert len({workload.name for workload in task.workloads}) == len(task.workloads)
    assert [task.workloads for task in draw_tasks(tables(400), 30, config, 0, single_ms)] == [
        t.workloads for t in drawn
    ]
    few = draw_tasks(tables(5), 3, replace(config, min_tables=5), 0, single_ms)  # nothing to replace a table with
    assert all(len(task.workloads) == 5 for task in few)
    with pytest.raises(TaskError, match="heaviest must be positive.*-1"):
        replace(config, heaviest=-1)
