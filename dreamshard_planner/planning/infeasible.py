# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Errors for tables that do not fit: the tables, the missing bytes of each memory, and what would help.

Shapes: P parts, U units, D ranks, M limits, R rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner.cost.problem import MEMORY_KINDS, Problem, has_room
from dreamshard_planner.search_space.constraints import NOT_OFFERED, reasons_in_words
from dreamshard_planner.search_space.options import lacks_room
from dreamshard_planner.support.formatting import NAMED, memory_in_words
from dreamshard_planner.torchrec_components.compat import last_planner_error

LeftOut = Callable[[str], Mapping[str, str]]
"""Returns the types in several parts that a table may not take, with reasons."""


def reason_first(error: PlannerError, proposers: Iterable[object], timeout_seconds: float | None) -> str:
    """Return the text of TorchRec's error with the reason before TorchRec's advice."""
    advice, reason = last_planner_error(error)
    if reason is None:
        names = ", ".join(type(proposer).__name__ for proposer in proposers)
        more = " or more timeout_seconds" if timeout_seconds else ""
        return (
            f"{names} proposed nothing that got a cost: other proposers (by default the planner's own){more} would help"
        )
    return f"{reason}\nTorchRec: {advice}" if reason else str(error)


def infeasible(problem: Problem, left_out: LeftOut) -> PlannerError:
    """Return TorchRec's error for units that find no ranks.

    Args:
        problem: of the units: with one option of each table, or without options.
        left_out: reasons why a table may not be split.
    """
    units = _units(problem)
    homeless, short, crowded = _homeless(units, problem), shortage(problem), _crowded_rules(units, problem)
    if crowded and not short:
        return lacks_room(f"placement_rules cannot be kept: {crowded}.")
    unsplit = homeless or ([] if short else [_largest(_widest(units))])
    why = _unsplit([unit.table for unit in unsplit if unit.span == 1][:NAMED], left_out)
    under_rules = " where placement_rules leave them" if problem.num_rules else ""
    return lacks_room(
        f"Tables do not fit{under_rules}: {short or _packing_reason(units, problem)}{why}. More or larger "
        "devices, a smaller storage reservation, smaller tables, or smaller caches (max_l1_cache_size) would help."
    )


@dataclass(frozen=True)
class _Unit:
    """Shards that are placed together."""

    table: str
    sharding_type: str
    span: int
    """Number of ranks."""
    rank_M: Tensor
    """Needs of one rank, the largest."""
    all_M: Tensor
    """Needs of all ranks together."""


def _units(problem: Problem) -> list[_Unit]:
    if not problem.tables:
        return [
            _Unit(name, "", 1, need_M, need_M) for name, need_M in zip(problem.names, problem.needs_PM, strict=True)
        ]
    return [
        _Unit(name, option.sharding_type, unit.span, need_LM.amax(0), need_LM.sum(0))
        for name, (option, *_) in zip(problem.names, problem.tables, strict=True)
        for unit in option.units
        for need_LM in [problem.needs_PM[list(unit.parts)]]
    ]


def _unsplit(tables: Iterable[str], left_out: LeftOut) -> str:
    """Return the tables that may not be made smaller, with reasons."""
    named: dict[str, list[str]] = {}
    for table in tables:
        why = {kind: reason for kind, reason in left_out(table).items() if reason != NOT_OFFERED}
        if why:
            named.setdefault(reasons_in_words(why), []).append(repr(table))
    return "".join(f". {', '.join(names)} may not be {why}" for why, names in named.items())


def _missing(who_needs: str, need: int, memory: str, who_has: str, room: int) -> str:
    return (
        f"{who_needs} {memory_in_words(need)} of {memory}, {who_has} {memory_in_words(max(0, room))}: "
        f"{memory_in_words(need - room)} are missing"
    )


def _homeless(units: Sequence[_Unit], problem: Problem) -> list[_Unit]:
    """Return the units that no rank is large enough for; of one table, the first."""
    first: dict[str, _Unit] = {}
    for unit in _widest(units):
        if unit.table not in first and not has_room(unit.rank_M, problem.limits_DM).any():
            first[unit.table] = unit
    return list(first.values())


def shortage(problem: Problem) -> str:
    """Return the tables for which no rank is large enough, else the memories that all tables together exceed."""
    units = _units(problem)
    homeless, limits_DM = _homeless(units, problem), problem.limits_DM
    lines = []
    for unit in homeless[:NAMED]:
        rank = int(((unit.rank_M - limits_DM).clamp_min(0) * (unit.rank_M > 0)).sum(-1).argmin())
        where = f" on each of {unit.span} ranks ({unit.sharding_type})" if unit.span > 1 else ""
        sizes = zip(MEMORY_KINDS, unit.rank_M.tolist(), limits_DM[rank].tolist(), strict=False)  # rules follow
        lines += [
            _missing(f"table {unit.table!r} needs", need, memory + where, f"the roomiest rank ({rank}) has", room)
            for memory, need, room in sizes
            if need > max(0, room)
        ]
    if len(homeless) > NAMED:
        lines.append(f"and {len(homeless) - NAMED} more tables fit on no rank")
    return "; ".join(lines) or _totals(units, problem)


def _widest(units: Sequence[_Unit]) -> list[_Unit]:
    """Return the units of several ranks, which find their ranks first; all units if there are none."""
    return [unit for unit in units if unit.span > 1] or list(units)


def _largest(units: Iterable[_Unit]) -> _Unit:
    return max(units, key=lambda unit: float(unit.all_M[: len(MEMORY_KINDS)].double().sum()))


def _totals(units: list[_Unit], problem: Problem) -> str:
    """Return the memories of which all units together need more than there is."""
    need_M = torch.stack([unit.all_M for unit in units]).sum(0)
    ranks = f"the {len(problem.limits_DM)} ranks have"
    lines = [
        _missing("all tables together need", need, memory, ranks, room)
        for need, room, memory in zip(need_M.tolist(), _total_room(problem), MEMORY_KINDS, strict=False)
        if need > room
    ]
    return "; ".join(lines) + (f" (largest table: {_largest(units).table!r})" if lines else "")


def _crowded_rules(units: list[_Unit], problem: Problem) -> str:
    """Return tables that must lie apart and have more shards than ranks; empty if there are none."""
    for rule in range(len(MEMORY_KINDS), problem.limits_DM.shape[1]):
        room, members = int(problem.limits_DM[:, rule].sum()), [unit for unit in units if unit.all_M[rule] > 0]
        if (shards := sum(int(unit.all_M[rule]) for unit in members)) > room:
            return (
                f"of {', '.join(dict.fromkeys(unit.table for unit in members))}, which are apart, a rank may have one "
                f"shard, and they have {shards} for {room} ranks: table_wise, or a larger min_partition, leaves fewer"
            )
    return ""


def _packing_reason(units: list[_Unit], problem: Problem) -> str:
    """Return the reason if all memories suffice, but not for shards of these sizes."""
    largest, used_M = _largest(_widest(units)), torch.stack([unit.all_M for unit in units]).sum(0).tolist()
    kinds = [
        f"{memory_in_words(room - used)} of {name} would be left over all ranks"
        for room, used, name, need in zip(_total_room(problem), used_M, MEMORY_KINDS, largest.all_M, strict=False)
        if need > 0
    ]
    kept = " that keeps placement_rules" if problem.num_rules else ""
    return (
        f"No placement of their shards{kept} was found, although "
        f"{' and '.join(kinds)}; the largest table, {largest.table!r}, needs "
        f"{memory_in_words(int(largest.rank_M[: len(MEMORY_KINDS)].sum()))} on one rank"
    )


def _total_room(problem: Problem) -> list[int]:
    """Return the bytes of all ranks together, by kind of memory; sums may exceed int64."""
    return [sum(max(0, capacity) for capacity in device_D) for device_D in problem.limits_DM.T.tolist()]
