# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Compute costs of sets of shards, the one formula, a planning problem as tensors, and the cost of its plans.

A rank's compute is the sum over its fused groups; within a group a :class:`ComputeCost` (network, roofline, estimates
that come with the shards) says what the *set* costs.

An option of a table is a list of units. A *unit* is what is placed together, one *part* on each of ``span``
consecutive ranks. A whole table or a column slice is a unit of span 1; the row blocks of one host (table-row-wise, each
column block of a grid) a unit as wide as a host; row-wise and data-parallel are units as wide as the world. A unit at
position p occupies the ranks p x span ... p x span + span - 1.

What a part needs of its rank keeps within that rank's *limits*: bytes of each kind of memory first, and then a count
for each rule of placement.

Once options are chosen and wide units are placed, units of span 1 are left, one part each. A placement is the rank of
each part. Problems of the paper have such parts alone.

The formula is :func:`~dreamshard_planner.cost.problem.overall_ms`. TorchRec never fuses shards of different sharding
types, so units wider than a rank are an exact :class:`Preload` under the placement of those of span 1.

Shapes: P parts, D ranks, C collectives, M limits, F features, X parts laid down, Y of them beforehand, U units, L
span or ranks of a host, O options, S shards or units of span 1, B placements side by side, G fused groups, H latent
channels, X also groups or placements of any leading dimensions, N hosts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dreamshard_planner.cost.collectives import Collectives


def overall_ms(compute_X: Tensor, collectives_X: Tensor) -> Tensor:
    """Cost of placements, [...]: the one formula for labels, search, benchmarks and reports,

        max over ranks of (forward + backward)  +  collectives of both passes

    because between two all-to-all barriers of steady training a rank runs the backward of one step and the forward of
    the next. Where ranks share cores, :func:`compute_ms` takes the place of the maximum.

    Args:
        compute_X: milliseconds of compute, by :func:`compute_ms`.
        collectives_X: milliseconds of all collectives.
    """
    return compute_X + collectives_X


@dataclass(frozen=True)
class SharedCores:
    """Cores of a host that its CPU ranks share."""

    at_once: float
    """Ranks of a host that can compute at once, fewer than all."""
    on_host: int
    """Ranks of a host."""

    @cached_property
    def waits_L(self) -> Tensor:
        """Milliseconds that one of work adds to the whole, from the quickest rank of a host to the slowest, [L]."""
        computing_L = torch.arange(self.on_host, 0, -1, dtype=torch.float64)
        return (computing_L / self.at_once).clamp_min(1).diff(append=torch.zeros(1, dtype=torch.float64)).neg()


def compute_ms(device_ms_XD: Tensor, shared_cores: SharedCores | None = None) -> Tensor:
    """Milliseconds [...] until every rank has computed: those of the slowest one, unless ranks share cores. Then all
    of a host that still compute go on equally fast, as processes of one system do.

    Args:
        device_ms_XD: milliseconds of each rank, if it has a core of its own.
        shared_cores: of each host; None if all ranks can compute at once.
    """
    if shared_cores is None:
        return device_ms_XD.amax(-1)
    missing = -device_ms_XD.shape[-1] % shared_cores.on_host  # of the last host
    host_ms_XNL = pad(device_ms_XD, (0, missing)).unflatten(-1, (-1, shared_cores.on_host))
    return (host_ms_XNL.sort(-1).values @ shared_cores.waits_L.to(device_ms_XD.dtype)).amax(-1)


def both_passes(ms_X2: Tensor) -> Tensor:
    """Forward + backward, [...]; torch's sum over so short a dimension takes several times as long."""
    return ms_X2[..., 0] + ms_X2[..., 1]


NOT_MEASURED = "nothing measured"
"""End of a guessed source's detail."""


@dataclass(frozen=True)
class CostSource:
    """Origin of a cost, shown beside it."""

    kind: str
    """``network`` or ``roofline``; rivals have kinds of their own."""
    detail: str
    """Checkpoint and hardware, or the bandwidths used."""

    def __str__(self) -> str:
        return f"{self.kind} ({self.detail})"


class ComputeCost(ABC):
    """Cost of fused groups. Shards are encoded once; a group is the *sum* of its shards' latents."""

    source: CostSource
    approximates: bool = False
    """True if :meth:`approximate_ms` differs from :meth:`group_cost_ms`, so that the best by it must be rated."""

    @abstractmethod
    def encode(self, features_SF: Tensor) -> Tensor:
        """Additive latents [S, H] of shards; channel 0 is 1 for each, so that it counts a group's shards."""

    @abstractmethod
    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2] of groups from their summed latents [..., H].
        A group without shards costs exactly nothing."""

    def approximate_ms(self, latent_XH: Tensor) -> Tensor:
        """Estimate :meth:`group_cost_ms` more cheaply, to choose the moves and swaps that are rated."""
        return self.group_cost_ms(latent_XH)

    def notes(self, features_SF: Tensor, latent_XH: Tensor) -> tuple[str, ...]:
        """Return notes for readers of these costs, such as tables outside the measured range."""
        return ()


class GivenCost(ComputeCost):
    """Costs that parts come with, such as TorchRec's estimates: they add up, fused or not. Latents are a count, forward
    and backward milliseconds."""

    def __init__(self, source: CostSource) -> None:
        self.source = source

    def encode(self, features_SF: Tensor) -> Tensor:
        """Not from features: give latents."""
        raise TypeError("these costs come with the parts: give latent_PH")

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Forward and backward milliseconds [..., 2]; nothing for an empty group."""
        return torch.where(latent_XH[..., :1] > 0.5, latent_XH[..., 1:3], 0.0)


MEMORY_KINDS = ("HBM", "DDR", "SSD")
"""Kinds of TorchRec's storage, in the order of the limits."""

Array = TypeVar("Array", Tensor, "np.ndarray[Any, Any]")


def has_room(need_XM: Array, room_XM: Array) -> Array:
    """Return whether needs keep within every limit, bool [...]. A need of nothing always fits, even if a reservation
    left less than nothing."""
    return ((need_XM <= room_XM) | (need_XM == 0)).all(-1)


def summed(values_XY: Tensor, slot_BX: Tensor, slots: int) -> Tensor:
    """Sums [B, slots, Y] of the rows that share a slot, int64 [B, X]; leading dimensions B are free."""
    slot_NX = slot_BX[None].flatten(0, -2)
    rows, width = len(slot_NX), values_XY.shape[1]
    if rows > 1:
        slot_NX = slot_NX + slots * torch.arange(rows)[:, None]
    sums_ZY = values_XY.new_zeros(rows * slots, width)
    sums_ZY.index_add_(0, slot_NX.flatten(), values_XY.expand(rows, -1, -1).flatten(0, 1))
    return sums_ZY.view(*slot_BX.shape[:-1], slots, width)


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One way to shard a table."""

    part_UL: np.ndarray
    """Rows of the parts of each unit among the problem's parts, int64; one column for each rank of the span."""
    sharding_type: str
    """TorchRec's name of it."""
    kernel: str = "fused"
    """TorchRec's compute kernel."""

    @property
    def units(self) -> int:
        return len(self.part_UL)

    @property
    def span(self) -> int:
        return self.part_UL.shape[1]

    @property
    def parts(self) -> np.ndarray:
        """Parts of all units, in order."""
        return self.part_UL.ravel()

    def ranks(self, positions: Sequence[int]) -> list[int]:
        """The rank of each of :attr:`parts`, with the units at these positions."""
        ranks: list[int] = (np.multiply(positions, self.span)[:, None] + np.arange(self.span)).ravel().tolist()
        return ranks


Change = tuple[int, int, tuple[int, ...]]
"""Table, option, and positions of the option's units."""


@dataclass(frozen=True)
class Sharding:
    """An option for every table, and a position for every unit of it."""

    options: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]

    def changed(self, table: int, option: int, positions: tuple[int, ...]) -> Sharding:
        """Return the sharding with one table sharded another way."""
        options, places = list(self.options), list(self.positions)
        options[table], places[table] = option, positions
        return Sharding(tuple(options), tuple(places))

    def now(self, table: int) -> Change:
        """Return how a table is sharded, as a change that changes nothing."""
        return table, self.options[table], self.positions[table]

    def move(self, table: int, unit: int, position: int) -> Change:
        """Return the change that moves one unit of a table."""
        positions = list(self.positions[table])
        positions[unit] = position
        return table, self.options[table], tuple(positions)


class OptionRows:
    """All options of all tables in arrays, one row each, for fast look-ups."""

    def __init__(self, problem: Problem) -> None:
        options = [*chain.from_iterable(problem.tables)]
        self._first_T = np.cumsum([0, *map(len, problem.tables)])[:-1]
        self.span_O, self.units_O = (np.array([*map(attrgetter(of), options)]) for of in ("span", "units"))
        self.parts_O = self.span_O * self.units_O
        """Number of parts."""
        self._part_F = np.concatenate([option.parts for option in options])
        self._first_O = self.parts_O.cumsum() - self.parts_O
        self.group_O = problem.group_P.numpy()[self._part_F[self._first_O]]

    def rows(self, tables: Sequence[int], options: Sequence[int]) -> np.ndarray:
        """Return the rows of one option of each of some tables."""
        return self._first_T[np.asarray(tables, dtype=np.int64)] + np.asarray(options, dtype=np.int64)

    def parts(self, row_K: np.ndarray) -> np.ndarray:
        """Return the parts of some options, one after the other."""
        return self._part_F[counted_up(self._first_O[row_K], self.parts_O[row_K])]

    def reduced(self, function: np.ufunc, values_PX: np.ndarray) -> np.ndarray:
        """Return sums, or other reductions, over the parts of each option, [O, ...]."""
        reduced_OX: np.ndarray = function.reduceat(values_PX[self._part_F], self._first_O)
        return reduced_OX


def counted_up(first_K: np.ndarray, count_K: np.ndarray) -> np.ndarray:
    """So many whole numbers from each first one on, one run after the other."""
    return np.repeat(first_K - (count_K.cumsum() - count_K), count_K) + np.arange(count_K.sum())


@dataclass(frozen=True)
class Problem:
    """Parts, the ranks that they may lie on, and the options that tables may take."""

    num_ranks: int
    features_PF: Tensor
    group_P: Tensor
    """Fused group of each part, int64 in [0, num_groups). All parts of an option share one, and options of different
    sharding types never do."""
    num_groups: int
    needs_PM: Tensor
    """Needs of each part, int64: bytes by kind of memory (:data:`MEMORY_KINDS`), and one of each rule it is under."""
    limits_DM: Tensor
    """Limits of each rank for parts, int64."""
    bytes_PC: Tensor
    """Bytes that a part adds to what its rank sends to each peer in each collective, or gets of it, float64."""
    collectives: Collectives
    names: tuple[str, ...] = ()
    """Names of the tables; of the parts if there are no options."""
    tables: tuple[tuple[Option, ...], ...] = ()
    """The options of each table, at least one; empty where each part is placed once, on any rank."""
    num_rules: int = 0
    """Number of limits, at the end, that are rules of placement."""
    shared_cores: SharedCores | None = None
    """Cores that the ranks of a host share; None if all ranks can compute at once."""

    @property
    def num_parts(self) -> int:
        return len(self.group_P)

    @property
    def num_tables(self) -> int:
        return len(self.tables)

    @cached_property
    def exchange_ms_P(self) -> Tensor:
        """Milliseconds of exchange that each part adds, summed over all ranks, which it holds up alike, [P]."""
        return self.bytes_PC @ self.collectives.level_ms_per_byte(self.num_ranks)

    @cached_property
    def option_rows(self) -> OptionRows:
        """The options in arrays."""
        return OptionRows(self)

    def laid(self, sharding: Sharding) -> tuple[Tensor, Tensor]:
        """Return rank and part of all that a sharding lays down, both int64 [X]."""
        return self.laid_by([sharding.now(table) for table in range(self.num_tables)])[:2]

    def laid_by(self, changes: Sequence[Change]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rank and part of all that changes lay down, and the number of the change, all int64 [X]."""
        every = self.option_rows
        row_K = every.rows([table for table, *_ in changes], [option for _, option, _ in changes])
        span_U = every.span_O[row_K].repeat(every.units_O[row_K])
        position_U = np.fromiter(chain.from_iterable(positions for *_, positions in changes), np.int64, len(span_U))
        rank_X, number_X = counted_up(position_U * span_U, span_U), np.arange(len(row_K)).repeat(every.parts_O[row_K])
        return torch.from_numpy(rank_X), torch.from_numpy(every.parts(row_K)), torch.from_numpy(number_X)

    def taken(self, rank_BX: Tensor, part_X: Tensor | None = None) -> Tensor:
        """Return what parts (default: all) on these ranks take of every rank, int64 [B, D, M]."""
        return summed(self.needs_PM if part_X is None else self.needs_PM[part_X], rank_BX, self.num_ranks)

    def fits(self, plan: Sharding | Tensor) -> Tensor:
        """Return whether placements [B, P], or a sharding, keep every rank within its limits, bool [B] or []."""
        laid = (plan,) if isinstance(plan, Tensor) else self.laid(plan)
        return has_room(self.taken(*laid), self.limits_DM).all(-1)


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
    collectives_ms_B: Tensor
    shared_cores: SharedCores | None = None
    """Cores that the ranks of a host share."""

    @cached_property
    def device_ms_BD(self) -> Tensor:
        """Compute of each rank, forward + backward."""
        return self.forward_ms_BD + self.backward_ms_BD

    @cached_property
    def overall_ms_B(self) -> Tensor:
        """By the formula."""
        return overall_ms(compute_ms(self.device_ms_BD, self.shared_cores), self.collectives_ms_B)


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
        rank_BX, part_X = (plan, None) if isinstance(plan, Tensor) else self.problem.laid(plan)
        laid = torch.atleast_2d(rank_BX), part_X
        cost_BD2 = self.compute.group_cost_ms(self.group_latents(*laid)).sum(-2)
        collectives_ms_B = self.problem.collectives.ms(self.bytes_sent(*laid))
        return PlacementCosts(cost_BD2[..., 0], cost_BD2[..., 1], collectives_ms_B, self.problem.shared_cores)

    def overall_ms(self, sharding: Sharding) -> float:
        """The formula, of one sharding."""
        return float(self.rate(sharding).overall_ms_B[0])

    def chosen(self, sharding: Sharding) -> Chosen:
        """The placement of units of span 1 under what the sharding has chosen."""
        problem = self.problem
        every = problem.option_rows
        row_T = every.rows(range(problem.num_tables), sharding.options)
        is_free_T = every.span_O[row_T] == 1
        free, laid = is_free_T.nonzero()[0], (~is_free_T).nonzero()[0]
        (rank_S, part_S, _), (rank_Y, part_Y, _) = (
            problem.laid_by([sharding.now(table) for table in tables.tolist()]) for tables in (free, laid)
        )
        rest = replace(
            problem,
            features_PF=problem.features_PF[part_S],
            group_P=problem.group_P[part_S],
            needs_PM=problem.needs_PM[part_S],
            limits_DM=problem.limits_DM - problem.taken(rank_Y, part_Y),
            bytes_PC=problem.bytes_PC[part_S],
            names=tuple([problem.names[table] for table in free.repeat(every.units_O[row_T[free]]).tolist()]),
            tables=(),
        )
        preload = Preload(self.group_latents(rank_Y, part_Y), self.bytes_sent(rank_Y, part_Y)) if len(part_Y) else None
        cost = Cost(rest, self.compute, self.latent_PH[part_S], preload)
        cost.single_ms_P = self.single_ms_P[part_S]  # rated once, however often something is chosen
        return Chosen(cost, rank_S, free.tolist(), sharding)

    def notes(self, sharding: Sharding) -> tuple[str, ...]:
        """Return notes for readers of this sharding's cost."""
        rank_X, part_X = self.problem.laid(sharding)
        latent_ZH = self.group_latents(rank_X, part_X).flatten(0, 1)
        part_Y = part_X[self.latent_PH[part_X, 0] > 0].unique()  # the others' cost is an estimate that they come with
        return self.compute.notes(self.problem.features_PF[part_Y], latent_ZH[latent_ZH[:, 0] > 0])


@dataclass(frozen=True)
class Chosen:
    """A problem with chosen options and placed wide units: a placement is left to find."""

    cost: Cost
    """Cost of the units of span 1, one part each."""
    assignment_S: Tensor
    """Rank of each of them, as the sharding has it."""
    tables: Sequence[int]
    """Tables that they are of, in order."""
    sharding: Sharding

    def placed(self, assignment_S: Tensor) -> Sharding:
        """The sharding with the units of span 1 on other ranks."""
        positions, ranks = list(self.sharding.positions), iter(assignment_S.tolist())
        for table in self.tables:
            positions[table] = tuple(islice(ranks, len(positions[table])))
        return Sharding(self.sharding.options, tuple(positions))
