# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""REINFORCE on the estimated MDP: a batch baseline per task, an entropy term, no hardware.

Shapes: T tasks, E episodes, K episodes per task, S steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from dreamshard_planner.cost.problem import Cost
from dreamshard_planner.search.placing import HEURISTICS, place_by_heuristic
from paper.placement_mdp import TaskBatch
from paper.placement_policy import AnyPolicy, greedy_plan, roll_out, score_rollout


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig:
    """Settings of a policy's training."""

    updates: int = 500
    """Gradient steps."""
    tasks_per_update: int = 6
    """Tasks drawn for one step; they are played side by side."""
    episodes_per_task: int = 12
    """Sampled episodes per task; their mean is the baseline."""
    learning_rate: float = 3e-3
    """Initial rate of Adam; falls linearly to zero."""
    entropy_weight: float = 0.003
    """Weight of the entropy bonus; falls linearly to zero."""
    infeasible_factor: float = 1.5
    """An infeasible episode counts as this many times the task's worst feasible one."""
    looks: int = 10
    """Times that greedy roll-outs on some of the training tasks are looked at, besides the start: the policy that did
    best stays. 0: the last one stays."""
    look_tasks: int = 36
    """Training tasks, spread over all sizes, that a look rolls out."""
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.updates, self.tasks_per_update) < 1 or self.episodes_per_task < 2 or self.learning_rate <= 0:
            raise ValueError(f"updates, tasks and rate must be positive, episodes at least 2, got {asdict(self)}")


@dataclass(frozen=True)
class UpdateStatistics:
    """Statistics of one update."""

    overall_ms: float
    """Mean predicted overall cost of the feasible episodes."""
    relative_cost: float
    """Mean cost over the task's ideally balanced compute: comparable between tasks."""
    over_best_heuristic: float
    """Geometric mean of the feasible episodes' cost over that of the cheapest greedy heuristic on the same task; NaN
    where no heuristic places any of the tasks."""
    entropy: float
    """Mean over the choices, nats."""
    gradient_norm: float
    """Before clipping."""
    infeasible_share: float


def advantages(cost_E: Tensor, episodes_per_task: int, infeasible_factor: float) -> Tensor:
    """Standardised advantages [E] of episodes: how much cheaper than the other episodes of the same task.

    Infeasible episodes (infinite cost) count as ``infeasible_factor`` times the worst feasible one; a task
    without any feasible episode teaches nothing.
    """
    cost_TK = cost_E.view(-1, episodes_per_task)
    finite_TK = cost_TK.isfinite()
    worst_T1 = cost_TK.masked_fill(~finite_TK, 0.0).amax(-1, keepdim=True)
    cost_TK = torch.where(finite_TK, cost_TK, worst_T1 * infeasible_factor)
    centred_TK = cost_TK.mean(-1, keepdim=True) - cost_TK
    return (centred_TK / (cost_TK.std(-1, keepdim=True) + 1e-6 * worst_T1 + 1e-12)).flatten()


def train_policy(
    policy: AnyPolicy,
    costs: Sequence[Cost],
    config: ReinforceConfig,
    on_update: Callable[[int, UpdateStatistics], None] | None = None,
) -> list[UpdateStatistics]:
    """Train ``policy`` in place on tasks drawn from ``costs``; returns statistics per update.

    Sampled episodes may get cheaper while greedy ones, from which planning starts, get dearer: hence the looks.
    """
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate)
    statistics = []
    heuristic_ms_T = torch.tensor([best_heuristic_ms(cost) for cost in costs])
    # Tasks of similar size share an update, so that padding stays cheap.
    by_size = sorted(range(len(costs)), key=lambda task: costs[task].problem.num_parts)
    tasks_per_update = min(config.tasks_per_update, len(costs))
    every = -(-config.updates // config.looks) if config.looks else config.updates + 1
    looked_at = [costs[task] for task in by_size[:: -(-len(costs) // config.look_tasks)]]
    best = (greedy_standing(policy, looked_at), copied(policy)) if config.looks else None
    for update in range(config.updates):
        remaining = 1 - update / config.updates
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * remaining
        start = int(torch.randint(len(costs) - tasks_per_update + 1, (1,), generator=generator))
        chosen = by_size[start : start + tasks_per_update]
        batch, entropy_weight = TaskBatch.collate([costs[task] for task in chosen]), config.entropy_weight * remaining
        statistics.append(
            reinforce_update(policy, optimizer, batch, config, entropy_weight, generator, heuristic_ms_T[chosen])
        )
        if best and ((update + 1) % every == 0 or update + 1 == config.updates):
            standing = greedy_standing(policy, looked_at)
            best = (standing, copied(policy)) if standing < best[0] else best
        if on_update is not None:
            on_update(update, statistics[-1])
    if best:
        policy.load_state_dict(best[1])
    return statistics


def copied(policy: nn.Module) -> dict[str, Tensor]:
    """Its state, which training then leaves alone."""
    return {name: value.clone() for name, value in policy.state_dict().items()}


@torch.no_grad()
def greedy_standing(policy: AnyPolicy, costs: Sequence[Cost]) -> tuple[int, float]:
    """Infeasible tasks, and the mean logarithm of the cost of greedy roll-outs over ideally balanced compute elsewhere:
    less is better."""
    logs = []
    for cost in costs:
        plan = greedy_plan(policy, cost)
        ideal_ms = float(cost.single_ms_P.sum()) / cost.problem.num_ranks
        logs.append(math.inf if plan is None else math.log(float(cost.reward_ms(plan[None])) / ideal_ms))
    feasible = [value for value in logs if math.isfinite(value)]
    return len(logs) - len(feasible), sum(feasible) / max(1, len(feasible))


@torch.no_grad()
def best_heuristic_ms(cost: Cost) -> float:
    """Predicted overall cost of the cheapest greedy heuristic; infinite where all dead-end."""
    plans = [plan for name in HEURISTICS if (plan := place_by_heuristic(cost.problem, name)) is not None]
    return float(cost.reward_ms(torch.stack(plans)).min()) if plans else float("inf")


def reinforce_update(
    policy: AnyPolicy,
    optimizer: torch.optim.Optimizer,
    tasks: TaskBatch,
    config: ReinforceConfig,
    entropy_weight: float,
    generator: torch.Generator,
    heuristic_ms_T: Tensor,
) -> UpdateStatistics:
    """One REINFORCE step on all steps of all episodes of ``tasks``; ``heuristic_ms_T`` [T] is what the best heuristic
    costs."""
    rollout = roll_out(policy, tasks, config.episodes_per_task, generator, record=True)
    environment = rollout.environment
    cost_E = environment.overall_ms()
    advantage_E = advantages(cost_E, config.episodes_per_task, config.infeasible_factor)
    log_probability_SE, entropy_SE = score_rollout(policy, rollout)
    step_mask_SE = tasks.step_mask_TS.T[:, environment.task_E]
    # Each episode weighs the same, whatever the number of its shards.
    weight_SE = step_mask_SE / step_mask_SE.sum(0).clamp_min(1)
    loss_E = -((log_probability_SE * advantage_E + entropy_weight * entropy_SE) * weight_SE).sum(0)
    optimizer.zero_grad()
    loss_E.mean().backward()
    gradient_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()

    feasible_E = cost_E.isfinite()
    total_E = tasks.single_ms_TS.sum(-1)[environment.task_E]
    ideal_E = total_E / tasks.device_mask_TD.sum(-1)[environment.task_E]
    over_heuristic_E = cost_E / heuristic_ms_T[environment.task_E]
    both_E = feasible_E & over_heuristic_E.isfinite() & (over_heuristic_E > 0)
    return UpdateStatistics(
        overall_ms=float(cost_E[feasible_E].mean()) if feasible_E.any() else float("inf"),
        relative_cost=float((cost_E / ideal_E)[feasible_E].mean()) if feasible_E.any() else float("inf"),
        over_best_heuristic=float(over_heuristic_E[both_E].log().mean().exp()),
        entropy=float((entropy_SE.detach() * weight_SE).sum(0).mean()),
        gradient_norm=float(gradient_norm),
        infeasible_share=float((~feasible_E).float().mean()),
    )
