# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A planning problem as tensors: tables, their options, and the needs of the options' parts.

An option of a table is a list of units. A *unit* is what is placed together, one *part* on each of ``span``
consecutive ranks. A whole table or a column slice is a unit of span 1; the row blocks of one host (table-row-wise, each
column block of a grid) a unit as wide as a host; row-wise and data-parallel are units as wide as the world. A unit at
position p occupies the ranks p x span ... p x span + span - 1.

What a part needs of its rank keeps within that rank's *limits*: bytes of each kind of memory first, and then a count
for each rule of placement.

Where every table has one part and one way to lie (training tasks, and the units of span 1 that are left once options
are chosen), a placement is simply the rank of each part.

Shapes: P parts, D ranks, C collectives, M limits, F features, X parts laid down, B placements side by side,
Y values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.cost.collectives import CollectiveModel, Collectives

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


@dataclass(frozen=True, slots=True)
class Unit:
    """Parts that are placed together."""

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
    """Units, all of one span."""
    sharding_type: str
    """TorchRec's name of it."""
    kernel: str = "fused"
    """TorchRec's compute kernel."""
    pinned: tuple[int, ...] | None = None
    """Fixed positions of the units; None if they are free."""

    @property
    def parts(self) -> list[int]:
        """Parts of all units, in order."""
        return [part for unit in self.units for part in unit.parts]

    def ranks(self, positions: Sequence[int]) -> list[int]:
        """The rank of each of :attr:`parts`, with the units at these positions."""
        return [rank for unit, at in zip(self.units, positions, strict=True) for rank in unit.ranks(at)]


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

    def move(self, table: int, unit: int, position: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the arguments of :meth:`changed` that move one unit of a table."""
        positions = list(self.positions[table])
        positions[unit] = position
        return table, self.options[table], tuple(positions)


class OptionRows:
    """All options of all tables in arrays, one row each, for fast look-ups.

    Args:
        tables: the options of each table.
    """

    def __init__(self, tables: Sequence[Sequence[Option]]) -> None:
        options = [*chain.from_iterable(tables)]
        self._first_T = np.cumsum([0, *map(len, tables)])[:-1]
        self.span_O = np.array([option.units[0].span for option in options], dtype=np.int64)
        self.parts_O = self.span_O * np.array([len(option.units) for option in options], dtype=np.int64)
        """Parts of each option."""
        self.is_free_O = np.array([option.pinned is None for option in options], dtype=bool)
        """True for options that are not pinned."""
        units = chain.from_iterable(option.units for option in options)
        self._part_F = np.fromiter(chain.from_iterable(unit.parts for unit in units), np.int64, self.parts_O.sum())
        self._first_O = self.parts_O.cumsum() - self.parts_O

    def rows(self, tables: Sequence[int], options: Sequence[int]) -> np.ndarray:
        """Return the rows of one option of each of some tables."""
        return self._first_T[np.asarray(tables, dtype=np.int64)] + np.asarray(options, dtype=np.int64)

    def parts(self, table: int, option: int) -> np.ndarray:
        """Parts of an option's units, in order, int64 [X]."""
        row = self._first_T[table] + option
        return self._part_F[self._first_O[row] : self._first_O[row] + self.parts_O[row]]

    def all_parts(self, row_K: np.ndarray) -> np.ndarray:
        """Parts of several, one after the other."""
        return self._part_F[counted_up(self._first_O[row_K], self.parts_O[row_K])]


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
    def output_bytes_P(self) -> Tensor:
        """Bytes that each part adds to the exchanges of outputs and gradients, [P]."""
        outputs_C = [not collective.of_lookups for collective in self.collectives.collectives]
        return self.bytes_PC[:, outputs_C].sum(-1)

    @cached_property
    def _group_of(self) -> list[list[int]]:
        group = self.group_P.tolist()
        return [[group[option.units[0].parts[0]] for option in options] for options in self.tables]

    @cached_property
    def option_rows(self) -> OptionRows:
        """The options in arrays."""
        return OptionRows(self.tables)

    def parts_of(self, table: int, option: int) -> np.ndarray:
        """Parts of an option's units, in order, int64 [X]."""
        return self.option_rows.parts(table, option)

    def group_of(self, table: int, option: int) -> int:
        """Fused group of an option's parts."""
        return self._group_of[table][option]

    def over(self, link: CollectiveModel) -> Problem:
        """Return the problem with all that is sent in one all-to-all between all ranks, over this link."""
        return replace(self, bytes_PC=self.bytes_PC.sum(-1, keepdim=True), collectives=Collectives.all_to_all(link))

    @overload
    def laid(self, plan: Sharding, tables: Iterable[int] | None = None) -> tuple[Tensor, Tensor]: ...
    @overload
    def laid(self, plan: Tensor, tables: Iterable[int] | None = None) -> tuple[Tensor, None]: ...
    def laid(self, plan: Sharding | Tensor, tables: Iterable[int] | None = None) -> tuple[Tensor, Tensor | None]:
        """Rank and part of all that a sharding lays down, of all tables or some, both int64 [X]; of placements [B, P]
        themselves, and None for all parts in order."""
        if isinstance(plan, Tensor):
            return plan, None
        laid = range(self.num_tables) if tables is None else list(tables)
        every = self.option_rows
        row_T = every.rows(laid, [plan.options[table] for table in laid])
        span_T, parts_T = every.span_O[row_T], every.parts_O[row_T]
        span_U = span_T.repeat(parts_T // span_T)
        position_U = np.fromiter(chain.from_iterable(plan.positions[table] for table in laid), np.int64, len(span_U))
        rank_X = counted_up(position_U * span_U, span_U)
        return torch.from_numpy(rank_X), torch.from_numpy(every.all_parts(row_T))

    def taken(self, rank_BX: Tensor, part_X: Tensor | None = None) -> Tensor:
        """Return what parts (default: all) on these ranks take of every rank, int64 [B, D, M]."""
        return summed(self.needs_PM if part_X is None else self.needs_PM[part_X], rank_BX, self.num_ranks)

    def fits(self, plan: Sharding | Tensor) -> Tensor:
        """Return whether placements [B, P], or a sharding, keep every rank within its limits, bool [B] or []."""
        return has_room(self.taken(*self.laid(plan)), self.limits_DM).all(-1)
