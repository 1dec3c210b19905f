# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sharding problems: how each table may be split, and what a choice of splits and ranks costs.

Every sharding type is an *option* of a table, made of *units*: what is placed together, one *part* on each of ``span``
consecutive ranks. A whole table or a column slice is a unit of span 1; the row blocks of one host (table-row-wise, each
column block of a grid) a unit as wide as a host; row-wise and data-parallel are units as wide as the world. A unit at
position p occupies the ranks p x span ... p x span + span - 1.

The cost is the one formula of :mod:`dreamshard_planner.cost.model`. TorchRec never fuses shards of different sharding
types, so units wider than a rank are an exact :class:`~dreamshard_planner.cost.model.Preload` under the placement of
those of span 1.

Shapes: T tables, P parts, D ranks, G fused groups, C collectives, H latent channels, M kinds of memory, F features,
S units of span 1, Y parts laid down under them, X parts laid down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import Collectives
from dreamshard_planner.cost.model import (
    ComputeCost,
    PlacementCost,
    PlacementCosts,
    PlacementProblem,
    Preload,
    has_room,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """What is placed together."""

    parts: tuple[int, ...]
    """Row of the part, among the problem's parts, that each rank of the span gets."""

    @property
    def span(self) -> int:
        return len(self.parts)

    def ranks(self, position: int) -> range:
        """The ranks that it occupies at a position, one for each part."""
        return range(position * self.span, (position + 1) * self.span)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to shard a table."""

    units: tuple[Unit, ...]
    sharding_type: str
    """TorchRec's name of it."""
    kernel: str = "fused"
    """TorchRec's compute kernel."""
    pinned: tuple[int, ...] | None = None
    """Where its units must be; None where they may go anywhere."""

    @property
    def parts(self) -> list[int]:
        """Those of all units, in order."""
        return [part for unit in self.units for part in unit.parts]

    def ranks(self, positions: Sequence[int]) -> list[int]:
        """The rank of each of :attr:`parts`, with the units at these positions."""
        return [rank for unit, at in zip(self.units, positions, strict=True) for rank in unit.ranks(at)]


@dataclass(frozen=True)
class ShardingProblem:
    """Tables x options x units, and the parts that these are made of."""

    num_ranks: int
    tables: tuple[tuple[Option, ...], ...]
    """The options of each table, at least one."""
    names: tuple[str, ...]
    features_PF: Tensor
    group_P: Tensor
    """Fused group of each part, int64 in [0, num_groups). All parts of an option share one, and options of different
    sharding types never do."""
    num_groups: int
    storage_PM: Tensor
    """Bytes that each part needs, int64, by kind of memory (HBM, DDR, ...)."""
    capacity_DM: Tensor
    """Bytes that each rank has left for parts, int64."""
    bytes_PC: Tensor
    """Bytes that a part adds to what its rank sends to each peer in each collective, float64."""
    collectives: Collectives
    rule_kinds: int = 0
    """How many of the last kinds of memory are rules of placement, and no memory."""

    @property
    def num_tables(self) -> int:
        return len(self.tables)

    @cached_property
    def exchange_ms_P(self) -> Tensor:
        """Milliseconds of exchange that each part adds, summed over all ranks, which it holds up alike, [P]."""
        return self.bytes_PC @ self.collectives.level_ms_per_byte(self.num_ranks)

    @cached_property
    def _group_of(self) -> list[list[int]]:
        group = self.group_P.tolist()
        return [[group[option.units[0].parts[0]] for option in options] for options in self.tables]

    def group_of(self, table: int, option: int) -> int:
        """Fused group of an option's parts."""
        return self._group_of[table][option]


@dataclass(frozen=True)
class Sharding:
    """An option for every table, and a position for every unit of it."""

    options: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]

    def changed(self, table: int, option: int, positions: tuple[int, ...]) -> Sharding:
        """The same with one table sharded another way."""
        options, places = list(self.options), list(self.positions)
        options[table], places[table] = option, positions
        return Sharding(tuple(options), tuple(places))

    def moved(self, table: int, unit: int, position: int) -> Sharding:
        """The same with one unit of a table somewhere else."""
        positions = list(self.positions[table])
        positions[unit] = position
        return self.changed(table, self.options[table], tuple(positions))


@dataclass(frozen=True)
class Chosen:
    """A sharding problem whose options are chosen, wide and pinned units laid down: a placement problem."""

    cost: PlacementCost
    assignment_S: Tensor
    """Rank of each unit of span 1, as the sharding has it."""
    units: tuple[tuple[int, int], ...]
    """Table of each of them, and which unit of its option it is."""
    sharding: Sharding
    part_S: Tensor
    """Part of each unit of span 1."""
    rank_Y: Tensor
    part_Y: Tensor
    """Ranks and parts of all that is laid down under them."""

    def placed(self, assignment_S: Tensor) -> Sharding:
        """The sharding with the units of span 1 on other ranks."""
        positions = [list(places) for places in self.sharding.positions]
        for (table, unit), rank in zip(self.units, assignment_S.tolist(), strict=True):
            positions[table][unit] = rank
        return Sharding(self.sharding.options, tuple(tuple(places) for places in positions))


class ShardingCost:
    """The cost of shardings of one problem: encodes its parts once, then rates any number of shardings.

    Args:
        problem: tables, options and parts.
        compute: what sets of parts cost.
        latent_PH: the parts' latents, where they don't come from the problem's features.
    """

    def __init__(self, problem: ShardingProblem, compute: ComputeCost, latent_PH: Tensor | None = None) -> None:
        self.problem = problem
        self.compute = compute
        self.latent_PH = compute.encode(problem.features_PF).double() if latent_PH is None else latent_PH.double()

    @cached_property
    def single_ms_P(self) -> Tensor:
        """Forward + backward of each part alone on a rank, [P]."""
        return self.compute.group_cost_ms(self.latent_PH).sum(-1)

    def laid(self, sharding: Sharding) -> tuple[Tensor, Tensor]:
        """Rank and part of all that a sharding lays down, both int64 [X]."""
        return self.laid_by(sharding, range(self.problem.num_tables))

    def laid_by(self, sharding: Sharding, tables: Iterable[int]) -> tuple[Tensor, Tensor]:
        """The same of some tables alone."""
        ranks: list[int] = []
        parts: list[int] = []
        for table in tables:
            option = self.problem.tables[table][sharding.options[table]]
            ranks += option.ranks(sharding.positions[table])
            parts += option.parts
        return torch.tensor(ranks, dtype=torch.int64), torch.tensor(parts, dtype=torch.int64)

    def group_latents(self, rank_X: Tensor, part_X: Tensor) -> Tensor:
        """Summed latents of every fused group of every rank, [D, G, H]."""
        problem = self.problem
        sums_YH = torch.zeros(problem.num_ranks * problem.num_groups, self.latent_PH.shape[1], dtype=torch.float64)
        sums_YH.index_add_(0, rank_X * problem.num_groups + problem.group_P[part_X], self.latent_PH[part_X])
        return sums_YH.view(problem.num_ranks, problem.num_groups, -1)

    def bytes_sent(self, rank_X: Tensor, part_X: Tensor) -> Tensor:
        """Bytes that each rank sends to each peer in each collective, [C, D]."""
        bytes_DC = torch.zeros(self.problem.num_ranks, self.problem.bytes_PC.shape[1], dtype=torch.float64)
        return bytes_DC.index_add_(0, rank_X, self.problem.bytes_PC[part_X]).T.contiguous()

    def used_bytes(self, rank_X: Tensor, part_X: Tensor) -> Tensor:
        """Memory taken on every rank, int64 [D, M]."""
        used_DM = torch.zeros_like(self.problem.capacity_DM)
        return used_DM.index_add_(0, rank_X, self.problem.storage_PM[part_X])

    def fits(self, sharding: Sharding) -> bool:
        """Whether every rank keeps within its memory."""
        return bool(has_room(self.used_bytes(*self.laid(sharding)), self.problem.capacity_DM).all())

    def rate(self, sharding: Sharding) -> PlacementCosts:
        """Costs of one sharding (B = 1)."""
        laid = self.laid(sharding)
        cost_D2 = self.compute.group_cost_ms(self.group_latents(*laid)).sum(-2)
        forward, backward = self.problem.collectives.ms(self.bytes_sent(*laid)[None])
        return PlacementCosts(cost_D2[None, :, 0], cost_D2[None, :, 1], forward, backward)

    def overall_ms(self, sharding: Sharding) -> float:
        """The formula, of one sharding."""
        return float(self.rate(sharding).overall_ms_B[0])

    def chosen(self, sharding: Sharding) -> Chosen:
        """The placement of units of span 1 under what the sharding has chosen."""
        problem = self.problem
        free: list[tuple[int, int, int, int]] = []
        wide = ([], [])
        for table, (options, option, positions) in enumerate(
            zip(problem.tables, sharding.options, sharding.positions, strict=True)
        ):
            for index, (unit, position) in enumerate(zip(options[option].units, positions, strict=True)):
                if unit.span == 1 and options[option].pinned is None:
                    free.append((table, index, unit.parts[0], position))
                else:
                    wide[0].extend(unit.ranks(position))
                    wide[1].extend(unit.parts)
        part_S = torch.tensor([part for _, _, part, _ in free], dtype=torch.int64)
        bytes_SC = problem.bytes_PC[part_S]
        # What spans one rank sends in exactly one collective, an all-to-all over the world.
        used = sorted(set(bytes_SC.argmax(-1).tolist())) if len(free) else []
        column = torch.zeros(bytes_SC.shape[1], dtype=torch.int64)
        column[used] = torch.arange(len(used))
        collective_S = column[bytes_SC.argmax(-1)] if len(free) else part_S
        preload, capacity_DM = None, problem.capacity_DM
        if wide[0]:
            laid = torch.tensor(wide[0]), torch.tensor(wide[1])
            forward, backward = problem.collectives.ms(self.bytes_sent(*laid)[None])
            preload = Preload(self.group_latents(*laid), float(forward), float(backward))
            capacity_DM = capacity_DM - self.used_bytes(*laid)
        rank_problem = PlacementProblem(
            num_devices=problem.num_ranks,
            features_SF=problem.features_PF[part_S],
            group_S=problem.group_P[part_S],
            num_groups=problem.num_groups,
            output_bytes_S=bytes_SC.amax(-1),
            storage_SM=problem.storage_PM[part_S],
            capacity_DM=capacity_DM,
            names=tuple(problem.names[table] for table, _, _, _ in free),
            collective_S=collective_S,
            num_collectives=max(1, len(used)),
            rule_kinds=problem.rule_kinds,
        )
        cost = PlacementCost(rank_problem, self.compute, problem.collectives.world, preload, self.latent_PH[part_S])
        assignment_S = torch.tensor([position for _, _, _, position in free], dtype=torch.int64)
        units = tuple((table, unit) for table, unit, _, _ in free)
        rank_Y, part_Y = (torch.tensor(column, dtype=torch.int64) for column in wide)
        return Chosen(cost, assignment_S, units, sharding, part_S, rank_Y, part_Y)

    def notes(self, sharding: Sharding) -> tuple[str, ...]:
        """What a reader of the cost of this sharding should know."""
        rank_X, part_X = self.laid(sharding)
        latent_YH = self.group_latents(rank_X, part_X).flatten(0, 1)
        return self.compute.notes(self.problem.features_PF[part_X.unique()], latent_YH[latent_YH[:, 0] > 0])


class GivenCost:
    """Costs that parts come with, such as TorchRec's estimates: they add up, fused or not. A
    :class:`~dreamshard_planner.cost.model.ComputeCost`; latents are a count, forward and backward milliseconds."""

    glance_channels: int | None = None

    def __init__(self, source) -> None:
        self.source = source

    def encode(self, features_SF: Tensor) -> Tensor:
        """Not from features: give latents."""
        raise TypeError("these costs come with the parts: give latent_PH")

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2]; nothing for an empty group."""
        return torch.where(latent_XH[..., :1] > 0.5, latent_XH[..., 1:3], 0.0)

    def glance_ms(self, latent_XH: Tensor) -> Tensor:
        """As :meth:`group_cost_ms`."""
        return self.group_cost_ms(latent_XH)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """None."""
        return ()


class WithExtras:
    """A compute cost, and milliseconds that some parts add outside of their fused kernel, such as the table-sized
    gradient of data-parallel. A :class:`~dreamshard_planner.cost.model.ComputeCost`; latents have two channels more."""

    glance_channels: int | None = None

    def __init__(self, compute: ComputeCost) -> None:
        self.source = compute.source
        self._compute = compute

    def encode(self, features_SF: Tensor) -> Tensor:
        """Latents of parts that add nothing."""
        return self.latents(features_SF, torch.zeros(len(features_SF), 2, dtype=torch.float64))

    def latents(self, features_SF: Tensor, extra_ms_S2: Tensor) -> Tensor:
        """The compute cost's latents, and forward and backward milliseconds beside them."""
        return torch.cat([self._compute.encode(features_SF).double(), extra_ms_S2], dim=-1)

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2]."""
        return self._compute.group_cost_ms(latent_XH[..., :-2]) + latent_XH[..., -2:].clamp_min(0)

    def glance_ms(self, latent_XH: Tensor) -> Tensor:
        """As :meth:`group_cost_ms`, with the compute cost's glance."""
        return self._compute.glance_ms(latent_XH[..., :-2]) + latent_XH[..., -2:].clamp_min(0).float()

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """The compute cost's."""
        return self._compute.notes(features_SF, latent_XH[..., :-2])


def extra_ms(compute: ComputeCost, latent_XH: Tensor) -> Tensor:
    """Milliseconds [..., 2] that sets take outside of their fused kernels, by their latents."""
    return latent_XH[..., -2:].clamp_min(0) if isinstance(compute, WithExtras) else torch.zeros(2, dtype=torch.float64)
