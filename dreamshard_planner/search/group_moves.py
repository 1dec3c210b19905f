# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Group moves: many tables change their sharding type together.

The first table of a sharding type opens kernels and collectives, and the last one closes them: what pays for many
tables pays for none of them alone. Sets of tables are the first few in the order of what each gains by itself, of all
tables, and of those that one collective carries (a module's of one type), up to all of them. Smaller parts of the same
type are a target as well: where n equal parts do not divide among the ranks (24 on 16), the rest of that division
costs a whole part more than level, and no change of a single table helps.

Shapes: T tables, O options of the table that has most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Sharding
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.laying import lay
from dreamshard_planner.search.starts import JointOptions

SMALLER = 0.7
"""Largest part of an option that makes a table's parts smaller, of the largest that it has."""
MAX_COUNTS = 8
"""Sizes of sets of tables that are tried, ever larger, and"""
TABLES_MOVED = 2000
"""these times tables."""


def group_moves(cost: Cost, asked: JointOptions, sharding: Sharding, effort: float = 1.0) -> list[Sharding]:
    """Shardings in which sets of tables are sharded another way, and all tables laid down afresh.

    Args:
        cost: the problem and its cost.
        asked: what its options cost.
        sharding: to start from.
        effort: share of the moves to lay down, evenly over all of them; all from 1 on.
    """
    now_T = np.array(sharding.options)
    chosen = list(dict.fromkeys(options for options in _chosen(cost, asked, now_T) if options != sharding.options))
    few = min(len(chosen), portion(len(chosen), effort))
    laid = (lay(cost, chosen[index * len(chosen) // few]) for index in range(few))
    return [moved for moved in laid if moved is not None]


def _chosen(cost: Cost, asked: JointOptions, now_T: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Options of all tables after each move."""
    each_T = np.arange(len(now_T))
    largest_T, total_T = asked.largest_ms_TO[each_T, now_T], asked.total_ms_TO[each_T, now_T]
    smaller_TO = (asked.largest_ms_TO < SMALLER * largest_T[:, None]) & asked.fits_TO
    now_kind_T = asked.kind_TO[each_T, now_T]
    kinds = dict.fromkeys(asked.kind_TO[asked.fits_TO].tolist())
    others = [(asked.kind_TO == kind) & asked.fits_TO & (now_kind_T != kind)[:, None] for kind in kinds]
    collective_T = _collectives(cost, now_T)
    for within_TO in (smaller_TO, *others):
        option_T = np.where(within_TO, asked.total_ms_TO, np.inf).argmin(1)
        added_T = np.where(within_TO.any(1), asked.total_ms_TO[each_T, option_T] - total_T, np.inf)
        spreads = within_TO is smaller_TO  # by what that adds per millisecond of part that it takes away
        rate_T = added_T / np.maximum(largest_T, 1e-30) if spreads else added_T
        order = np.argsort(rate_T, kind="stable")[: int(np.isfinite(added_T).sum())]
        gaining = int((added_T < 0).sum())
        sets = [order[:count] for count in _counts(len(order), () if spreads else (gaining - 1, gaining, gaining + 1))]
        if not spreads:
            sets += [order[collective_T[order] == one] for one in np.unique(collective_T[order])]
        for moved in sets:
            options_T = now_T.copy()
            options_T[moved] = option_T[moved]
            yield tuple(options_T.tolist())


def _counts(tables: int, others: Sequence[int]) -> list[int]:
    """One, two, ... and ever more of so many tables, and other counts that there are."""
    most = max(4, min(MAX_COUNTS, TABLES_MOVED // max(1, tables)))
    growing = {round(tables ** (step / (most - 1))) for step in range(most)}
    return sorted(count for count in {*growing, *others} if 0 < count <= tables)


def _collectives(cost: Cost, now_T: np.ndarray) -> np.ndarray:
    """The first collective that each table takes part in, which tables of its module and type share."""
    parts = [options[option].parts[0] for options, option in zip(cost.problem.tables, now_T, strict=True)]
    return (cost.problem.bytes_PC[parts].numpy() > 0).argmax(-1)
