# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP (DreamShard, section 3): shards are placed one by one, costs come from the cost model.

State: the summed latents and predicted costs of every device. Action: a device for the next shard; shards
come in descending order of predicted single-shard cost, and devices that would overflow are masked. Reward:
minus the overall cost of the finished placement, rated by the one formula of :mod:`dreamshard_planner.cost.problem`.
A shard that no device can take ends its episode as infeasible.

Many episodes of many tasks advance together; the only Python loop is over shards. Adding a shard to a device
changes one sum, so a step costs O(devices).

Shapes: T tasks, E episodes = T x episodes per task, S shards (padded), D devices (padded), G fused groups,
H latent channels (those that approximate costs read), M limits, O observation channels, F features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dreamshard_planner.cost.problem import Cost, Problem, has_room

OBSERVATIONS = (
    "load",  # cost of the device / ideal
    "load_after",  # the same with the shard added
    "excess",  # load after, above the best legal device's, in units of the shard's own cost
    "increment",  # what the shard adds, in units of its own cost alone: below one where fusion pays
    "makespan_excess",  # the largest load after, above the smallest such of all choices, / ideal
    "communication",  # output bytes of the device / ideal
    "communication_after",
    "free_memory",  # share of the device's memory that stays free, of the scarcest kind that shards need
    "remaining",  # share of the task's cost still to be placed
    "shard",  # cost of the shard alone / ideal
    "devices",  # log2 of the device count / 10
    "forward",  # forward cost of the device / ideal
    "backward",
)
"""Features of a device for the next shard. Costs are relative to an ideally balanced device
(sum of single-shard costs over the number of devices), so that tasks of any size look alike."""

OBSERVATION_INDEX = {name: channel for channel, name in enumerate(OBSERVATIONS)}
CLIP = 20.0


def output_bytes_P(problem: Problem) -> Tensor:
    """Return the bytes that each part adds to the exchanges of outputs and gradients, [P]."""
    outputs_C = [not collective.of_lookups for collective in problem.collectives.collectives]
    return problem.bytes_PC[:, outputs_C].sum(-1)


@dataclass(frozen=True)
class TaskBatch:
    """Tasks padded to one shape, their shards in the order in which they are placed."""

    costs: tuple[Cost, ...]
    order_TS: Tensor
    """Original index of the shard placed at each step; -1 where padded."""
    latent_TSH: Tensor
    group_TS: Tensor
    features_TSF: Tensor
    single_ms_TS: Tensor
    output_bytes_TS: Tensor
    needs_TSM: Tensor
    limits_TDM: Tensor
    device_mask_TD: Tensor
    num_groups: int

    @classmethod
    def collate(cls, costs: Sequence[Cost]) -> TaskBatch:
        """Pad the problems of ``costs``, which all share one compute cost."""
        orders = [torch.argsort(-cost.single_ms_P.float(), stable=True) for cost in costs]

        def pad(values: list[Tensor], padding: float = 0) -> Tensor:
            return pad_sequence(values, batch_first=True, padding_value=padding)

        def in_order(values: Iterable[Tensor]) -> Tensor:
            return pad([value_P[order] for value_P, order in zip(values, orders, strict=True)])

        seen = costs[0].compute.approximate_channels
        problems = [cost.problem for cost in costs]
        return cls(
            costs=tuple(costs),
            order_TS=pad(orders, -1),
            latent_TSH=in_order(cost.latent_PH[:, :seen].float() for cost in costs),
            group_TS=in_order(problem.group_P for problem in problems),
            features_TSF=in_order(problem.features_PF for problem in problems),
            single_ms_TS=in_order(cost.single_ms_P.float() for cost in costs),
            output_bytes_TS=in_order(output_bytes_P(problem).float() for problem in problems),
            needs_TSM=in_order(problem.needs_PM for problem in problems),
            limits_TDM=pad([problem.limits_DM for problem in problems], -1),
            device_mask_TD=pad([torch.ones(problem.num_ranks, dtype=torch.bool) for problem in problems]),
            num_groups=max(problem.num_groups for problem in problems),
        )

    @property
    def num_steps(self) -> int:
        return self.order_TS.shape[1]

    @property
    def step_mask_TS(self) -> Tensor:
        return self.order_TS >= 0


@dataclass(frozen=True)
class Observation:
    """State of one step, or, with a leading step dimension, of all steps."""

    channels_EDO: Tensor
    legal_ED: Tensor


class EstimatedMDP:
    """Episodes of a :class:`TaskBatch`, ``episodes_per_task`` of each task side by side."""

    def __init__(self, tasks: TaskBatch, episodes_per_task: int) -> None:
        self.tasks = tasks
        self.episodes_per_task = episodes_per_task
        num_tasks, num_devices = tasks.device_mask_TD.shape
        self.num_episodes = num_tasks * episodes_per_task
        self.task_E = torch.arange(num_tasks).repeat_interleave(episodes_per_task)
        episodes = self.num_episodes
        self.bytes_ED = torch.zeros(episodes, num_devices)
        self.free_EDM = tasks.limits_TDM[self.task_E].clone()
        self.alive_E = torch.ones(episodes, dtype=torch.bool)
        self.placed_ms_E = torch.zeros(episodes)
        self.action_ES = torch.zeros(episodes, tasks.num_steps, dtype=torch.int64)
        self.step_index = 0
        self._by_step: dict[str, tuple[Tensor, ...]] = {}
        self._device_mask_ED = tasks.device_mask_TD[self.task_E]
        channels = tasks.latent_TSH.shape[-1]
        self.latent_EDGH = torch.zeros(episodes, num_devices, tasks.num_groups, channels)
        self.group_ms_EDG2 = torch.zeros(episodes, num_devices, tasks.num_groups, 2)
        self.device_ms_ED2 = torch.zeros(episodes, num_devices, 2)
        self._devices_E = self._device_mask_ED.sum(-1).float()
        self._total_ms_E = tasks.single_ms_TS.sum(-1)[self.task_E].clamp_min(1e-9)
        self._ideal_ms_E = self._total_ms_E / self._devices_E
        self._ideal_bytes_E = (tasks.output_bytes_TS.sum(-1)[self.task_E] / self._devices_E).clamp_min(1e-9)
        self._limits_EDM = self.free_EDM.clamp_min(1).float()
        # Memory that no shard asks for binds nobody, however little of it there is.
        self._needed_EDM = (tasks.needs_TSM.sum(1) > 0)[self.task_E][:, None]

    def _current(self, name: str) -> Tensor:
        """Values of the shard at hand, per episode; spread over episodes once for all steps."""
        if name not in self._by_step:
            self._by_step[name] = getattr(self.tasks, name).transpose(0, 1)[:, self.task_E].unbind(0)
        return self._by_step[name][self.step_index]

    def observe(self) -> Observation:
        """The next shard on every device, and which devices may take it."""
        tasks = self.tasks
        group_E = self._current("group_TS")
        episode_E = torch.arange(self.num_episodes)
        group_latent_EDH = self.latent_EDGH[episode_E, :, group_E] + self._current("latent_TSH")[:, None]
        self._group_after_ED2 = tasks.costs[0].compute.approximate_ms(group_latent_EDH)
        group_before_ED2 = self.group_ms_EDG2[episode_E, :, group_E]
        self._after_ED2 = self.device_ms_ED2 + self._group_after_ED2 - group_before_ED2

        need_EM = self._current("needs_TSM")
        left_EDM = self.free_EDM - need_EM[:, None]
        legal_ED = has_room(need_EM[:, None], self.free_EDM) & self._device_mask_ED
        # Padded steps and dead episodes keep one legal device, so that a softmax stays defined.
        active_E = self._current("step_mask_TS")
        self.alive_E = self.alive_E & (legal_ED.any(-1) | ~active_E)
        legal_ED = torch.where((active_E & self.alive_E)[:, None], legal_ED, self._device_mask_ED)
        return Observation(self._channels(legal_ED, left_EDM), legal_ED)

    def _channels(self, legal_ED: Tensor, left_EDM: Tensor) -> Tensor:
        ideal_E1 = self._ideal_ms_E[:, None]
        before_ED, after_ED = self.device_ms_ED2.sum(-1), self._after_ED2.sum(-1)
        shard_E1 = self._current("single_ms_TS")[:, None]
        unit_E1 = shard_E1.clamp_min(1e-9)
        best_E1 = after_ED.masked_fill(~legal_ED, torch.inf).amin(-1, keepdim=True)
        makespan_ED = torch.maximum(after_ED, before_ED.amax(-1, keepdim=True))
        best_makespan_E1 = makespan_ED.masked_fill(~legal_ED, torch.inf).amin(-1, keepdim=True)
        bytes_E1, ideal_bytes_E1 = self._current("output_bytes_TS")[:, None], self._ideal_bytes_E[:, None]
        per_episode = torch.stack(
            [1 - self.placed_ms_E / self._total_ms_E, (shard_E1 / ideal_E1)[:, 0], self._devices_E.log2() / 10], -1
        )
        per_device = [
            before_ED / ideal_E1,
            after_ED / ideal_E1,
            (after_ED - best_E1) / unit_E1,
            (after_ED - before_ED) / unit_E1,
            (makespan_ED - best_makespan_E1) / ideal_E1,
            self.bytes_ED / ideal_bytes_E1,
            (self.bytes_ED + bytes_E1) / ideal_bytes_E1,
            (left_EDM / self._limits_EDM).masked_fill(~self._needed_EDM, 1.0).amin(-1),
        ]
        channels_EDO = torch.cat(
            [
                torch.stack(per_device, -1),
                per_episode[:, None].expand(-1, before_ED.shape[1], -1),
                self.device_ms_ED2 / ideal_E1[..., None],
            ],
            dim=-1,
        )
        return channels_EDO.clamp(-CLIP, CLIP)

    def step(self, action_E: Tensor) -> None:
        """Place the current shard of every episode; call :meth:`observe` first."""
        episode_E = torch.arange(self.num_episodes)
        group_E = self._current("group_TS")
        self.latent_EDGH[episode_E, action_E, group_E] += self._current("latent_TSH")
        self.group_ms_EDG2[episode_E, action_E, group_E] = self._group_after_ED2[episode_E, action_E]
        self.device_ms_ED2[episode_E, action_E] = self._after_ED2[episode_E, action_E]
        self.bytes_ED[episode_E, action_E] += self._current("output_bytes_TS")
        self.free_EDM[episode_E, action_E] -= self._current("needs_TSM")
        self.placed_ms_E += self._current("single_ms_TS")
        self.action_ES[:, self.step_index] = action_E
        self.step_index += 1

    def assignments(self, task: int) -> Tensor:
        """Placements of one task's episodes, [episodes per task, S]: device of each shard in its own order."""
        start = task * self.episodes_per_task
        action_ES = self.action_ES[start : start + self.episodes_per_task]
        order_S = self.tasks.order_TS[task]
        steps = int((order_S >= 0).sum())
        assignment_ES = torch.empty(self.episodes_per_task, steps, dtype=torch.int64)
        assignment_ES[:, order_S[:steps]] = action_ES[:, :steps]
        return assignment_ES

    def plans(self, task: int) -> list[Tensor | None]:
        """Return the placements one by one; None for those that do not fit."""
        start = task * self.episodes_per_task
        alive_E = self.alive_E[start : start + self.episodes_per_task].tolist()
        return [plan if alive else None for plan, alive in zip(self.assignments(task), alive_E, strict=True)]

    @torch.no_grad()
    def overall_ms(self) -> Tensor:
        """Predicted overall cost of the finished episodes, [E]; infinite where infeasible."""
        rated = [cost.reward_ms(self.assignments(task)) for task, cost in enumerate(self.tasks.costs)]
        return torch.cat(rated).float().masked_fill(~self.alive_E, torch.inf)
