# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Starts for few tables on many ranks, where options and places must be chosen together.

Below a target height, each table in turn takes the option that costs all ranks together least and still fits. A table
that fits nowhere goes first in the next attempt (Joslin & Clements, "Squeaky Wheel" Optimization, JAIR 1999). Each
success lowers the target. Milliseconds of compute and exchange add up here.

Shapes: P parts, U units of an option, L span, N positions, D ranks, M limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dreamshard_planner.cost.problem import Cost, Sharding, has_room
from dreamshard_planner.search.effort import portion
from dreamshard_planner.search.starts import OptionTotals

ATTEMPTS = 100
"""Attempts of each way to choose positions."""
TABLES_STACKED = 4000
"""Upper bound on attempts x tables."""
LEAST_ATTEMPTS = 12
"""Fewer attempts find no height worth having."""
LOWERED = 0.99
"""Target after a success, over the height that was reached."""


@dataclass(frozen=True)
class _Option:
    index: int
    largest_ms: float
    ms_UL: np.ndarray
    needs_ULM: np.ndarray


def stacked_starts(cost: Cost, asked: OptionTotals, effort: float = 1.0) -> list[Sharding]:
    """Return up to two shardings within memory; none of many tables, whose level starts are good.

    Args:
        cost: the problem and its cost.
        asked: totals of its options.
        effort: share of the attempts to make; all from 1 on.
    """
    tables = cost.problem.num_tables
    attempts = portion(min(ATTEMPTS, TABLES_STACKED // tables), min(1.0, effort))
    if attempts < LEAST_ATTEMPTS:
        return []
    stack = _Stack(cost, asked)
    found = [_lowest(cost, stack, asked.total_ms_TO.min(1), attempts, fullest) for fullest in (True, False)]
    return [sharding for sharding in found if sharding is not None]


def _lowest(cost: Cost, stack: _Stack, least_ms_T: np.ndarray, attempts: int, fullest: bool) -> Sharding | None:
    """Lower the target from success to success; return the cheapest sharding found."""
    low, high = float(least_ms_T.sum()) / cost.problem.num_ranks, float(least_ms_T.sum())
    order = np.argsort(-least_ms_T, kind="stable").tolist()
    found: dict[Sharding, float] = {}
    for _ in range(attempts):
        height = min((low + high) / 2, LOWERED * high)
        sharding, misfit = stack.fill(height, order, fullest)
        if sharding is not None:
            high, found[sharding] = height, cost.overall_ms(sharding)
        else:
            low = height
            order.remove(misfit)
            order.insert(0, misfit)
    return min(found, key=found.__getitem__, default=None)


class _Stack:
    """Options of each table, the cheapest in all first."""

    def __init__(self, cost: Cost, asked: OptionTotals) -> None:
        self._problem = problem = cost.problem
        ms_P, needs_PM = (cost.single_ms_P + problem.exchange_ms_P).numpy(), problem.needs_PM.numpy()
        self._tables: list[list[_Option]] = []
        for table, options in enumerate(problem.tables):
            made = []
            for index in np.argsort(asked.total_ms_TO[table, : len(options)], kind="stable").tolist():
                part_UL = options[index].part_UL
                made.append(_Option(index, ms_P[part_UL].max(), ms_P[part_UL], needs_PM[part_UL]))
            self._tables.append(made)

    def fill(self, height: float, order: list[int], fullest: bool) -> tuple[Sharding | None, int]:
        """Place tables in this order, no rank above the height.

        Args:
            height: milliseconds.
            order: tables.
            fullest: whether units go where the rank ends fullest, or emptiest.

        Returns:
            The sharding, or None and the first table that fits nowhere.
        """
        load_D, free_DM = np.zeros(self._problem.num_ranks), self._problem.limits_DM.numpy().copy()
        options = [0] * len(order)
        positions: list[tuple[int, ...]] = [()] * len(order)
        for table in order:
            for option in self._tables[table]:
                if option.largest_ms <= height and (places := _placed(option, load_D, free_DM, height, fullest)):
                    options[table], positions[table] = option.index, places
                    break
            else:
                return None, table
        return Sharding(tuple(options), tuple(positions)), -1


def _placed(option: _Option, load_D: np.ndarray, free_DM: np.ndarray, height: float, fullest: bool) -> tuple[int, ...]:
    """Add an option to loads and take its memory; return its positions, or nothing if a unit fits nowhere."""
    span = option.ms_UL.shape[1]
    load_NL, free_NLM = load_D.reshape(-1, span), free_DM.reshape(-1, span, free_DM.shape[1])  # views
    places: list[int] = []
    for ms_L, need_LM in zip(option.ms_UL, option.needs_ULM, strict=True):
        peak_N = (load_NL + ms_L).max(1)
        key_N = np.where(peak_N <= height, -peak_N if fullest else peak_N, np.inf)
        place = int(key_N.argmin())
        if not has_room(need_LM, free_NLM[place]).all():  # the quicker question first
            key_N = np.where(has_room(need_LM, free_NLM).all(-1), key_N, np.inf)
            place = int(key_N.argmin())
        if key_N[place] == np.inf:
            for place, placed_L, taken_LM in zip(places, option.ms_UL, option.needs_ULM, strict=False):
                load_NL[place] -= placed_L
                free_NLM[place] += taken_LM
            return ()
        load_NL[place] += ms_L
        free_NLM[place] -= need_LM
        places.append(place)
    return tuple(places)
