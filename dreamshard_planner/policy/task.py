# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A problem as a task of the estimated MDP: the order of its tables, and what each of their options is as an action.

Heights are milliseconds relative to the level height, which ranks would have if every table took its cheapest option
and all of it spread evenly, so that tasks of any size look alike.

Shapes: E episodes, T tables, O options of the table at hand, which are the actions, U units of an option, Q parts of
all options, P parts of the problem, N positions, C collectives, J of them that an option sends in (padded), R = 1 + J
heights that it raises, M limits, V values of a part, Y channels of actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from dreamshard_planner.cost.problem import Cost, counted_up
from dreamshard_planner.search.starts import OptionTotals
from dreamshard_planner.search_space.sharding_types import (
    CW,
    DP,
    GRID,
    RW,
    SHARDING_TYPES,
    TW,
    TWCW,
    TWRW,
    in_host_memory,
)

TYPES = (TW, CW, TWCW, RW, TWRW, GRID, DP)
"""That actions know, in the order of the network's channels; a type that is added later is no action."""
WHOLE_TYPES = tuple(kind for kind in TYPES if SHARDING_TYPES[kind].is_whole)
"""That leave a table whole."""
AMPLE = 0.25
"""Share of the device memory that all tables may need at least before options in host memory become actions."""
DESCRIBED = len(TYPES) + 7
"""Channels that say what an option is."""


@dataclass(frozen=True)
class TableActions:
    """The options of one table, as actions take them, in ascending order of span.

    Rises are estimated as if all parts of an option were its largest.
    """

    table: int
    ranks: int
    option_O: np.ndarray
    span_O: np.ndarray
    units_O: np.ndarray
    option_Q: np.ndarray
    """Option, unit and place in the unit of each part of all options, and its number in the problem."""
    unit_Q: np.ndarray
    place_Q: np.ndarray
    part_Q: np.ndarray
    added_OR: np.ndarray
    """Heights that a part adds: compute alone on a rank, and what it sends in each collective."""
    need_OM: np.ndarray
    """Needs of a part, of the limits that may bind."""
    group_O: np.ndarray
    raised_OR: np.ndarray
    """Rows of :attr:`EstimatedMDP.height_ERD` that an option raises; the last one, which stays 0, where padded."""
    start_up_OJ: np.ndarray
    """Heights that the collectives of an option take to start."""
    type_O: np.ndarray
    level: float
    """Height that the cheapest option adds to the level height."""
    described_OY: np.ndarray
    """Facts on each option, [O, DESCRIBED]."""

    @cached_property
    def exists_OU(self) -> np.ndarray:
        """True for units, false for padding."""
        return np.arange(self.units_O.max()) < self.units_O[:, None]

    @cached_property
    def exists_ON(self) -> np.ndarray:
        """True for positions, false for padding."""
        return np.arange(self.ranks) < self.ranks // self.span_O[:, None]

    @cached_property
    def wide(self) -> tuple[tuple[int, slice], ...]:
        """Spans of more than one rank, and the options that have them."""
        spans = [span for span in np.unique(self.span_O).tolist() if span > 1]
        return tuple(
            (span, slice(*(int(np.searchsorted(self.span_O, span, side)) for side in ("left", "right"))))
            for span in spans
        )

    @cached_property
    def first_O(self) -> np.ndarray:
        """Place of each option's first part among the parts of all options."""
        return np.searchsorted(self.option_Q, np.arange(len(self.option_O)))

    def ranks_at(self, position_EOU: np.ndarray) -> np.ndarray:
        """Return the rank of each part of all options, with their units at these positions, [E, Q]."""
        return position_EOU[:, self.option_Q, self.unit_Q] * self.span_O[self.option_Q] + self.place_Q


class ShardingTask:
    """A problem whose tables are sharded one after the other.

    Args:
        cost: the problem and its cost.
        asked: what its options ask of all ranks together.
        types: sharding types that are actions, where a table has any of them.
    """

    def __init__(self, cost: Cost, asked: OptionTotals, types: Sequence[str] = TYPES) -> None:
        problem = cost.problem
        self.cost, self.problem, self._asked = cost, problem, asked
        self.level_ms = max(1e-9, asked.least_ms / problem.num_ranks)
        collectives = problem.collectives.collectives
        per_byte_C = problem.collectives.alone_ms_per_byte().sum(0).numpy() / self.level_ms
        start_up = [sum(model.latency_ms for model in each.passes if model.world_size > 1) for each in collectives]
        self.start_up_C = np.array([*start_up, 0.0]) / self.level_ms
        """Height that each collective takes to start; 0 for padding."""
        self.sent_PC = np.pad(problem.bytes_PC.numpy() * per_byte_C, ((0, 0), (0, 1)))
        """Height that each part adds to its rank in each collective; 0 for padding."""
        self.alone_P = cost.single_ms_P.numpy() / self.level_ms
        """Height that each part adds to a rank where it is alone."""
        self._kept_TO = self._kept(types)
        total_TO = np.where(self._kept_TO, asked.total_ms_TO, np.inf)
        self._order_T = np.argsort(-total_TO.min(1), kind="stable")
        cheapest_T = total_TO.min(1)[self._order_T]
        self.share_T = cheapest_T / max(1e-30, cheapest_T.sum())
        """Share of the cost of all tables, in the order in which they are sharded."""
        self.left_T = 1 - np.concatenate([[0.0], self.share_T.cumsum()[:-1]])
        """Share of each table and all that follow."""
        self._ahead_TNY = self._ahead(total_TO[self._order_T])
        most_M = np.where(self._kept_TO[..., None], asked.needs_TOM, 0.0).max(1).sum(0)
        self.scarce_M = np.flatnonzero(most_M > problem.limits_DM.numpy().min(0))
        """Limits that may bind: all tables together might exceed them on one rank."""
        self.need_PM = problem.needs_PM.numpy()[:, self.scarce_M]
        values_PV = np.column_stack([self.alone_P, self.sent_PC, self.need_PM])
        self._largest_OV = problem.option_rows.reduced(np.maximum, values_PV)
        """Height alone, heights sent and needs of the largest part of each option."""
        self._actions: dict[int, TableActions] = {}

    @property
    def num_tables(self) -> int:
        return self.problem.num_tables

    def _kept(self, types: Sequence[str]) -> np.ndarray:
        """Options that are actions, bool [T, O]: of some types; and where tables in device memory would fill little of
        it, none in host memory, unless a table has no others."""
        problem, asked = self.problem, self._asked
        finite_TO, named_TO = np.isfinite(asked.total_ms_TO), np.isin(asked.kind_TO, types)
        kept_TO = finite_TO & np.isin(asked.kind_TO, TYPES)
        kept_TO &= asked.by_table(problem.option_rows.parts_O <= problem.num_ranks, False)
        kept_TO = np.where((kept_TO & named_TO).any(1, keepdims=True), kept_TO & named_TO, kept_TO)
        is_host = [in_host_memory(option.kernel) for option in chain.from_iterable(problem.tables)]
        fast_TO = kept_TO & ~asked.by_table(is_host, False)
        least_T = np.where(fast_TO, asked.needs_TOM[..., 0], np.inf).min(1)
        if least_T[np.isfinite(least_T)].sum() <= AMPLE * asked.limits_M[0]:
            kept_TO = np.where(fast_TO.any(1, keepdims=True), fast_TO, kept_TO)
        self.may_be_played = bool(kept_TO.any(1).all())
        """True if every table has an option of these whose units find ranks of their own."""
        return np.where(kept_TO.any(1, keepdims=True), kept_TO, finite_TO)

    def _ahead(self, total_TO: np.ndarray) -> np.ndarray:
        """If a table and all that follow took one type, as far as they may: the logarithm of what they would cost over
        their cheapest options, and of the largest part over what is left for a rank, [T, N, 2]."""
        kind_TO, largest_TO = self._asked.kind_TO[self._order_T], self._asked.largest_ms_TO[self._order_T]
        each_T, ahead = np.arange(len(total_TO)), []
        rest_T = total_TO.min(1)[::-1].cumsum()[::-1].clip(1e-30)
        for kind in TYPES:
            own_TO = np.where(kind_TO == kind, total_TO, np.inf)
            choice_T = np.where(np.isfinite(own_TO.min(1)), own_TO.argmin(1), total_TO.argmin(1))
            cost_T = total_TO[each_T, choice_T][::-1].cumsum()[::-1]
            largest_T = np.maximum.accumulate(largest_TO[each_T, choice_T][::-1])[::-1]
            lumps_T = np.log10(largest_T.clip(1e-30) * self.problem.num_ranks / rest_T).clip(-3, 3)
            ahead.append(np.stack([np.log(cost_T.clip(1e-30) / rest_T).clip(0, 5), lumps_T], -1))
        return np.stack(ahead, 1)

    def actions(self, step: int) -> TableActions:
        """Return the actions of the table that comes at a step."""
        if step not in self._actions:
            self._actions[step] = self._read_actions(step)
        return self._actions[step]

    def _read_actions(self, step: int) -> TableActions:
        problem, table = self.problem, int(self._order_T[step])
        all_options, ranks = problem.tables[table], problem.num_ranks
        chosen = sorted(np.flatnonzero(self._kept_TO[table]).tolist(), key=lambda o: all_options[o].span)
        options, every = [all_options[index] for index in chosen], problem.option_rows
        row_O = every.rows([table], chosen)
        span_O, parts_O = every.span_O[row_O], every.parts_O[row_O]
        option_Q, within_Q = np.repeat(np.arange(len(row_O)), parts_O), counted_up(np.zeros_like(parts_O), parts_O)
        largest_OV, none = self._largest_OV[row_O], len(self.start_up_C) - 1
        alone_O1, sent_OC, need_OM = np.split(largest_OV, [1, 2 + none], 1)
        sends = [np.flatnonzero(sent_C).tolist() for sent_C in sent_OC]
        width = max(1, *map(len, sends))
        type_O = np.array([TYPES.index(option.sharding_type) for option in options])
        total_O = self._asked.total_ms_TO[table, chosen] / ranks / self.level_ms
        collective_OJ = np.array([columns + [none] * (width - len(columns)) for columns in sends])
        return TableActions(
            table=table,
            ranks=ranks,
            option_O=np.array(chosen),
            span_O=span_O,
            units_O=every.units_O[row_O],
            option_Q=option_Q,
            unit_Q=within_Q // span_O[option_Q],
            place_Q=within_Q % span_O[option_Q],
            part_Q=every.parts(row_O),
            added_OR=np.hstack([alone_O1, np.take_along_axis(sent_OC, collective_OJ, 1)]),
            need_OM=need_OM,
            group_O=every.group_O[row_O],
            raised_OR=np.pad(collective_OJ + 1, ((0, 0), (1, 0))),
            start_up_OJ=self.start_up_C[collective_OJ],
            type_O=type_O,
            level=max(1e-9, float(total_O.min())),
            described_OY=self._described(step, chosen, type_O, total_O),
        )

    def _described(self, step: int, chosen: Sequence[int], type_O: np.ndarray, total_O: np.ndarray) -> np.ndarray:
        """Type; whether in host memory; units and their span; how the tables that follow would do with this type; and
        what it costs over the cheapest option, [O, DESCRIBED]."""
        options = [self.problem.tables[int(self._order_T[step])][index] for index in chosen]
        is_host_O = np.array([in_host_memory(option.kernel) for option in options], dtype=np.float64)
        sizes_O2 = np.log2([[option.units, option.span] for option in options])
        times_O = total_O / max(1e-30, total_O.min())
        columns = [
            np.eye(len(TYPES))[type_O],
            is_host_O[:, None],
            sizes_O2 / (3.0, 8.0),
            self._ahead_TNY[step][type_O],
            (times_O - 1).clip(0, 10)[:, None],
            np.log(times_O.clip(1e-30)).clip(0, 5)[:, None],
        ]
        return np.concatenate(columns, -1)
