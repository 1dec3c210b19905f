# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The cost of shardings and placements of one problem, and what they sum to on every rank.

The formula is :func:`~dreamshard_planner.cost.compute.overall_ms`. TorchRec never fuses shards of different sharding
types, so units wider than a rank are an exact :class:`Preload` under the placement of those of span 1.

Shapes: B placements side by side, P parts, X parts laid down, Y of them beforehand, S units of span 1, D ranks,
G fused groups, C collectives, H latent channels, M limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.compute import ComputeCost, overall_ms
from dreamshard_planner.cost.problem import Problem, Sharding, counted_up, summed


@dataclass(frozen=True)
class Preload:
    """Load of the ranks before any part is placed; its memory is already off the limits."""

    latent_DGH: Tensor
    bytes_CD: Tensor


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of B placements in milliseconds, compute and communication apart."""

    forward_ms_BD: Tensor
    backward_ms_BD: Tensor
    forward_collective_ms_B: Tensor
    backward_collective_ms_B: Tensor

    @cached_property
    def device_ms_BD(self) -> Tensor:
        """Compute of each rank, forward + backward."""
        return self.forward_ms_BD + self.backward_ms_BD

    @cached_property
    def overall_ms_B(self) -> Tensor:
        """By the formula."""
        collective_ms = self.forward_collective_ms_B, self.backward_collective_ms_B
        return overall_ms(self.device_ms_BD.amax(-1), collective_ms)


class Cost:
    """The cost of one problem: encodes its parts once, then rates any number of placements and shardings.

    A plan is a sharding, or a placement: the rank of each part, int64 [P]. Methods that take ``rank_BX`` and ``part_X``
    serve both, with what :meth:`Problem.laid <dreamshard_planner.cost.problem.Problem.laid>` gives.

    Args:
        problem: parts and ranks.
        compute: what sets of parts cost.
        latent_PH: the parts' latents, where they don't come from the problem's features.
        preload: what lies on the ranks already.
    """

    def __init__(
        self, problem: Problem, compute: ComputeCost, latent_PH: Tensor | None = None, preload: Preload | None = None
    ) -> None:
        self.problem, self.compute, self.preload = problem, compute, preload
        # Sums are kept in double precision: search subtracts parts again, and a small rest of a large sum must not
        # drown in rounding.
        self.latent_PH = (compute.encode(problem.features_PF) if latent_PH is None else latent_PH).double()

    @cached_property
    def single_ms_P(self) -> Tensor:
        """Forward + backward of each part alone on a rank, [P]."""
        return self.compute.group_cost_ms(self.latent_PH).sum(-1)

    @cached_property
    def preload_ms_D(self) -> Tensor | None:
        """Forward + backward of what lies on each rank already, [D]; None for nothing."""
        return None if self.preload is None else self.compute.group_cost_ms(self.preload.latent_DGH).sum((-2, -1))

    def group_latents(self, rank_BX: Tensor, part_X: Tensor | None = None) -> Tensor:
        """Summed latents of every fused group of every rank, [B, D, G, H]."""
        groups, group_X, latent_XH = self.problem.num_groups, self.problem.group_P, self.latent_PH
        if part_X is not None:
            group_X, latent_XH = group_X[part_X], latent_XH[part_X]
        sums = summed(latent_XH, rank_BX * groups + group_X, self.problem.num_ranks * groups)
        sums = sums.unflatten(-2, (self.problem.num_ranks, groups))
        return sums if self.preload is None else sums + self.preload.latent_DGH

    def bytes_sent(self, rank_BX: Tensor, part_X: Tensor | None = None) -> Tensor:
        """Bytes that each rank sends to each peer in each collective, [B, C, D]."""
        bytes_XC = self.problem.bytes_PC if part_X is None else self.problem.bytes_PC[part_X]
        bytes_BCD = summed(bytes_XC, rank_BX, self.problem.num_ranks).transpose(-1, -2).contiguous()
        return bytes_BCD if self.preload is None else bytes_BCD + self.preload.bytes_CD

    def rate(self, plan: Sharding | Tensor) -> PlacementCosts:
        """Rate placements, int64 [B, P], or one sharding (B = 1)."""
        rank_BX, part_X = self.problem.laid(plan)
        laid = torch.atleast_2d(rank_BX), part_X
        cost_BD2 = self.compute.group_cost_ms(self.group_latents(*laid)).sum(-2)
        collective_ms = self.problem.collectives.ms(self.bytes_sent(*laid))
        return PlacementCosts(cost_BD2[..., 0], cost_BD2[..., 1], *collective_ms)

    def overall_ms(self, sharding: Sharding) -> float:
        """The formula, of one sharding."""
        return float(self.rate(sharding).overall_ms_B[0])

    def reward_ms(self, rank_BP: Tensor) -> Tensor:
        """Return the estimated MDP's overall cost of placements, [B]."""
        collective_ms = self.problem.collectives.ms(self.bytes_sent(rank_BP))
        return self.compute.reward_ms(self.group_latents(rank_BP), collective_ms)

    def chosen(self, sharding: Sharding) -> Chosen:
        """The placement of units of span 1 under what the sharding has chosen."""
        problem = self.problem
        every = problem.option_rows
        row_T = every.rows(range(problem.num_tables), sharding.options)
        is_free_T = (every.span_O[row_T] == 1) & every.is_free_O[row_T]
        free, laid = is_free_T.nonzero()[0], (~is_free_T).nonzero()[0]
        rank_S, part_S = problem.laid(sharding, free.tolist())
        rank_Y, part_Y = problem.laid(sharding, laid.tolist())
        units_K = every.parts_O[row_T[free]]
        table_S, unit_S = free.repeat(units_K).tolist(), counted_up(np.zeros_like(units_K), units_K).tolist()
        rest = replace(
            problem,
            features_PF=problem.features_PF[part_S],
            group_P=problem.group_P[part_S],
            needs_PM=problem.needs_PM[part_S],
            limits_DM=problem.limits_DM - problem.taken(rank_Y, part_Y),
            bytes_PC=problem.bytes_PC[part_S],
            names=tuple([problem.names[table] for table in table_S]),
            tables=(),
        )
        preload = Preload(self.group_latents(rank_Y, part_Y), self.bytes_sent(rank_Y, part_Y)) if len(part_Y) else None
        cost = Cost(rest, self.compute, self.latent_PH[part_S], preload)
        cost.single_ms_P = self.single_ms_P[part_S]  # rated once, however often something is chosen
        units = tuple(zip(table_S, unit_S, strict=True))
        return Chosen(cost, rank_S, units, sharding, part_S, rank_Y, part_Y)

    def notes(self, sharding: Sharding) -> tuple[str, ...]:
        """Return notes for readers of this sharding's cost."""
        rank_X, part_X = self.problem.laid(sharding)
        latent_ZH = self.group_latents(rank_X, part_X).flatten(0, 1)
        part_Y = part_X[self.latent_PH[part_X, 0] > 0].unique()  # the others' cost is an estimate that they come with
        return self.compute.notes(self.problem.features_PF[part_Y], latent_ZH[latent_ZH[:, 0] > 0])


@dataclass(frozen=True)
class Chosen:
    """A problem with chosen options and placed wide and pinned units: a placement is left to find."""

    cost: Cost
    """Cost of the units of span 1, one part each."""
    assignment_S: Tensor
    """Rank of each of them, as the sharding has it."""
    units: tuple[tuple[int, int], ...]
    """Table of each of them, and which unit of its option it is."""
    sharding: Sharding
    part_S: Tensor
    """Part of each of them in the whole problem."""
    rank_Y: Tensor
    part_Y: Tensor
    """Ranks and parts of all that is laid down under them."""

    def placed(self, assignment_S: Tensor) -> Sharding:
        """The sharding with the units of span 1 on other ranks."""
        positions, ranks = list(self.sharding.positions), assignment_S.tolist()
        for table, units in groupby(zip(self.units, ranks, strict=True), key=lambda unit: unit[0][0]):
            positions[table] = tuple([rank for _, rank in units])
        return Sharding(self.sharding.options, tuple(positions))
