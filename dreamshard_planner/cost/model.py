# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a placement costs: one formula for labels, search, benchmarks and reports.

A device's compute is the sum over its fused groups; within a group a :class:`ComputeCost` (network or
roofline) says what the *set* of shards costs. The overall cost of a placement is

    max over devices of (forward + backward)  +  forward collective  +  backward collective

because between two all-to-all barriers of steady training a device runs the backward of one step and the
forward of the next.

Shapes: B placements, S shards, D devices, G fused groups, C all-to-alls, H latent channels, M kinds of memory,
F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel

MEMORY_KINDS = ("HBM", "DDR", "SSD")
"""Of TorchRec's storage, in the order in which problems have them."""


@dataclass(frozen=True)
class CostSource:
    """Where a cost came from; shown wherever a cost is shown."""

    kind: str
    """``network`` or ``roofline``; rivals have kinds of their own."""
    detail: str
    """Checkpoint and hardware, or the bandwidths used."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


class ComputeCost(Protocol):
    """Cost of fused groups. Shards are encoded once; a group is the *sum* of its shards' latents."""

    source: CostSource
    glance_channels: int | None
    """How many leading latent channels :meth:`glance_ms` reads; None: all. Who only glances need not sum the rest."""

    def encode(self, features_SF: Tensor) -> Tensor:
        """Additive latents [S, H] of shards; channel 0 is 1 for each, so that it counts a group's shards."""
        ...

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2] of groups from their summed latents [..., H].
        A group without shards costs exactly nothing."""
        ...

    def glance_ms(self, latent_XH: Tensor) -> Tensor:
        """A cheaper estimate of :meth:`group_cost_ms`, for what a policy observes at every step."""
        ...

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """What a reader of the costs of these shards and groups should know, e.g. that they lie outside of what was
        measured."""
        ...


def has_room(need_XM: Tensor, room_XM: Tensor) -> Tensor:
    """Whether needs of every kind of memory keep within what there is, bool [...]; arrays of numpy will do as well.
    Nothing always fits, even where a reservation left less than nothing."""
    return ((need_XM <= room_XM) | (need_XM == 0)).all(-1)


@dataclass(frozen=True)
class PlacementProblem:
    """A task as tensors: which shards, on how many devices, with how much memory."""

    num_devices: int
    features_SF: Tensor
    group_S: Tensor
    """Fused group of each shard, int64 in [0, num_groups)."""
    num_groups: int
    output_bytes_S: Tensor
    """Bytes of the shard's output for one rank's local batch: what it sends to each peer."""
    storage_SM: Tensor
    """Bytes that each shard needs, int64, by kind of memory (:data:`MEMORY_KINDS`, then rules)."""
    capacity_DM: Tensor
    """Bytes that each device has left for shards, int64."""
    names: tuple[str, ...] = ()
    collective_S: Tensor | None = None
    """Which all-to-all carries the shard's output, int64 in [0, num_collectives): TorchRec makes one for each module
    and sharding type, one after the other. None: all share one."""
    num_collectives: int = 1
    rule_kinds: int = 0
    """How many of the last kinds of memory are rules of placement, and no memory."""

    @property
    def num_shards(self) -> int:
        return self.features_SF.shape[0]

    def used_bytes(self, assignment_BS: Tensor) -> Tensor:
        """Memory that placements [B, S] take on every device, [B, D, M]."""
        num_placements, kinds = assignment_BS.shape[0], self.storage_SM.shape[1]
        used_BDM = torch.zeros(num_placements, self.num_devices, kinds, dtype=torch.int64)
        index_BSM = assignment_BS[:, :, None].expand(-1, -1, kinds)
        return used_BDM.scatter_add_(1, index_BSM, self.storage_SM.expand(num_placements, -1, -1))

    def fits(self, assignment_BS: Tensor) -> Tensor:
        """Whether placements [B, S] keep every device within its memory, bool [B]."""
        return has_room(self.used_bytes(assignment_BS), self.capacity_DM).all(-1)


@dataclass(frozen=True)
class Preload:
    """What lies on the devices before any shard of the problem is placed; its memory is off the capacity already."""

    latent_DGH: Tensor
    forward_collective_ms: float
    backward_collective_ms: float
    """Of collectives that no shard of the problem takes part in."""


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of B placements in milliseconds, compute and communication apart."""

    forward_ms_BD: Tensor
    backward_ms_BD: Tensor
    forward_collective_ms_B: Tensor
    backward_collective_ms_B: Tensor

    @cached_property
    def device_ms_BD(self) -> Tensor:
        """Compute of each device, forward + backward."""
        return self.forward_ms_BD + self.backward_ms_BD

    @cached_property
    def overall_ms_B(self) -> Tensor:
        """The formula of this module."""
        compute_ms_B = self.device_ms_BD.amax(-1)
        return compute_ms_B + self.forward_collective_ms_B + self.backward_collective_ms_B


class PlacementCost:
    """The cost of placements of one problem: encodes its shards once, then rates any number of placements.

    Args:
        problem: the task.
        compute: what sets of shards cost.
        collectives: what the all-to-alls of their outputs cost.
        preload: what lies on the devices already.
        latent_SH: the shards' latents where they are known; encoded from the problem's features by default.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        compute: ComputeCost,
        collectives: CollectiveModel,
        preload: Preload | None = None,
        latent_SH: Tensor | None = None,
    ) -> None:
        self.problem = problem
        self.compute = compute
        self.collectives = collectives
        self.preload = preload
        # Sums are kept in double precision: search subtracts shards again, and a small rest of a large
        # sum must not drown in rounding.
        self.latent_SH = compute.encode(problem.features_SF).double() if latent_SH is None else latent_SH

    @cached_property
    def single_ms_S(self) -> Tensor:
        """Forward + backward of each shard alone on a device, [S]."""
        return self.compute.group_cost_ms(self.latent_SH).sum(-1)

    @cached_property
    def preload_ms_D(self) -> Tensor | None:
        """Forward + backward of what lies on each device already, [D]; None for nothing."""
        return None if self.preload is None else self.compute.group_cost_ms(self.preload.latent_DGH).sum((-2, -1))

    def group_latents(self, assignment_BS: Tensor) -> Tensor:
        """Summed latents of every fused group of every device, [B, D, G, H]."""
        problem, num_placements = self.problem, assignment_BS.shape[0]
        slots = problem.num_devices * problem.num_groups
        slot_BS = assignment_BS * problem.num_groups + problem.group_S
        flat_X = (slot_BS + slots * torch.arange(num_placements)[:, None]).flatten()
        sums_XH = torch.zeros(num_placements * slots, self.latent_SH.shape[1], dtype=self.latent_SH.dtype)
        sums_XH.index_add_(0, flat_X, self.latent_SH.repeat(num_placements, 1))
        sums_BDGH = sums_XH.view(num_placements, problem.num_devices, problem.num_groups, -1)
        return sums_BDGH if self.preload is None else sums_BDGH + self.preload.latent_DGH

    def output_bytes(self, assignment_BS: Tensor) -> Tensor:
        """Output bytes that each device sends to each peer in each all-to-all, [B, C, D]."""
        problem = self.problem
        num_placements, slots = assignment_BS.shape[0], problem.num_collectives * problem.num_devices
        first_S = 0 if problem.collective_S is None else problem.collective_S * problem.num_devices
        bytes_BX = torch.zeros(num_placements, slots, dtype=torch.float64)
        bytes_BX.scatter_add_(1, assignment_BS + first_S, problem.output_bytes_S.expand_as(assignment_BS))
        return bytes_BX.view(num_placements, problem.num_collectives, problem.num_devices)

    def collectives_ms(self, bytes_BCD: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward milliseconds [B] of all collectives, one after the other."""
        forward_B, backward_B = (ms_BC.sum(-1) for ms_BC in self.collectives.all_to_all_ms(bytes_BCD))
        if self.preload is None:
            return forward_B, backward_B
        return forward_B + self.preload.forward_collective_ms, backward_B + self.preload.backward_collective_ms

    def rate(self, assignment_BS: Tensor) -> PlacementCosts:
        """Costs of placements [B, S] (device of each shard, int64)."""
        cost_BD2 = self.compute.group_cost_ms(self.group_latents(assignment_BS)).sum(-2)
        forward_B, backward_B = self.collectives_ms(self.output_bytes(assignment_BS))
        return PlacementCosts(cost_BD2[..., 0], cost_BD2[..., 1], forward_B, backward_B)

    def reward_ms(self, assignment_BS: Tensor) -> Tensor:
        """What the estimated MDP counts as the overall cost of placements, [B]: the formula, or the network's
        own overall head where it has one (recipe ``paper``)."""
        if hasattr(self.compute, "overall_ms"):
            return self.compute.overall_ms(self.group_latents(assignment_BS))
        return self.rate(assignment_BS).overall_ms_B

    def notes(self, assignment_S: Tensor) -> tuple[str, ...]:
        """What a reader of the cost of this placement should know."""
        latent_XH = self.group_latents(assignment_S[None]).flatten(0, 2)
        return self.compute.notes(self.problem.features_SF, latent_XH[latent_XH[:, 0] > 0])
