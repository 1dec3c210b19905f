# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The estimated MDP (DreamShard, section 3): tables are placed one by one, costs come from the cost model.

State: the summed latents and predicted costs of every device. Action: a device for the next table; tables
come in descending order of predicted cost alone, and devices that would overflow are masked. Reward: minus the
overall cost of the finished placement, rated by the one formula of :mod:`dreamshard_planner.cost.problem`.
A table that no device can take ends its episode as infeasible.

Episodes of a task advance together; the only Python loop is over tables.

Shapes: E episodes, S tables, D devices, H latent channels (those that approximate costs read), M limits, O observation
channels, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dreamshard_planner.cost.problem import Cost, has_room

OBSERVATIONS = (
    "forward",  # forward cost of the device / ideal
    "backward",
    "communication",  # output bytes of the device / ideal
    "free_memory",  # share of the device's memory that the next table leaves free, of the scarcest kind that is needed
)
"""Features of a device. Costs and bytes are relative to an ideally balanced device (sum of single-table costs over the
number of devices), so that tasks of any size look alike."""

OBSERVATION_INDEX = {name: channel for channel, name in enumerate(OBSERVATIONS)}
CLIP = 20.0


class PlacementCost(Cost):
    """The cost of a task's placements."""

    def reward_ms(self, rank_BP: Tensor) -> Tensor:
        """Return the overall cost of placements, [B]: by the network's own overall head, or else by the formula."""
        head = getattr(self.compute, "reward_ms", None)
        return self.rate(rank_BP).overall_ms_B if head is None else head(self.group_latents(rank_BP))


class EstimatedMDP:
    """Episodes of a task whose tables are all in one fused group."""

    def __init__(self, cost: PlacementCost, episodes: int) -> None:
        problem = cost.problem
        order_S = torch.argsort(-cost.single_ms_P.float(), stable=True)
        self._cost, self._place_S = cost, order_S.argsort()
        self.features_SF = problem.features_PF[order_S]
        self._latent_SH = cost.latent_PH[order_S].float()
        self._bytes_S = problem.bytes_PC.sum(-1).float()[order_S]
        self._need_SM = problem.needs_PM[order_S]
        self._ideal_ms = cost.single_ms_P.float().sum().clamp_min(1e-9) / problem.num_ranks
        self._ideal_bytes = (self._bytes_S.sum() / problem.num_ranks).clamp_min(1e-9)
        self._free_EDM = problem.limits_DM.repeat(episodes, 1, 1)
        self._latent_EDH = torch.zeros(episodes, problem.num_ranks, self._latent_SH.shape[-1])
        self._ms_ED2 = torch.zeros(episodes, problem.num_ranks, 2)
        self._bytes_ED = torch.zeros(episodes, problem.num_ranks)
        self.alive_E = torch.ones(episodes, dtype=torch.bool)
        self.actions: list[Tensor] = []
        """Device of the table placed at each step, [E]."""

    def observe(self) -> tuple[Tensor, Tensor]:
        """Return channels of every device for the next table, [E, D, O], and the devices that may take it, [E, D]."""
        need_M = self._need_SM[len(self.actions)]
        legal_ED = has_room(need_M, self._free_EDM)
        self.alive_E = self.alive_E & legal_ED.any(-1)
        # Dead episodes may do anything, so that a softmax stays defined.
        legal_ED = legal_ED | ~self.alive_E[:, None]
        left_EDM = (self._free_EDM - need_M) / self._cost.problem.limits_DM.clamp_min(1).float()
        # Memory that no table asks for binds nobody, however little of it there is.
        free_ED = left_EDM.masked_fill(self._need_SM.sum(0) == 0, 1.0).amin(-1)
        channels = (*(self._ms_ED2 / self._ideal_ms).unbind(-1), self._bytes_ED / self._ideal_bytes, free_ED)
        return torch.stack(channels, -1).clamp(-CLIP, CLIP), legal_ED

    def step(self, action_E: Tensor) -> None:
        """Place the current table of every episode; call :meth:`observe` first."""
        at, step = (torch.arange(len(action_E)), action_E), len(self.actions)
        self._latent_EDH[at] += self._latent_SH[step]
        self._ms_ED2[at] = self._cost.compute.approximate_ms(self._latent_EDH[at])
        self._bytes_ED[at] += self._bytes_S[step]
        self._free_EDM[at] -= self._need_SM[step]
        self.actions.append(action_E)

    def assignments(self) -> Tensor:
        """Return the device of each table in its own order, [E, S]."""
        return torch.stack(self.actions, -1)[:, self._place_S]

    @torch.no_grad()
    def overall_ms(self) -> Tensor:
        """Predicted overall cost of the finished episodes, [E]; infinite where infeasible."""
        return self._cost.reward_ms(self.assignments()).float().masked_fill(~self.alive_E, torch.inf)
