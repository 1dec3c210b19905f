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
from dreamshard_planner.planning.rater import RatedPlan
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
    units, limits_DM = _units(problem), problem.limits_DM

    def all_bytes(unit: _Unit) -> float:
        return float(unit.all_M[: len(MEMORY_KINDS)].double().sum())

    # Units of several ranks find their ranks first.
    largest = max(units, key=lambda unit: (unit.span > 1, all_bytes(unit)))
    need_M, room_M = torch.stack([unit.all_M.double() for unit in units]).sum(0), limits_DM.clamp_min(0).double().sum(0)
    totals = list(zip(MEMORY_KINDS, need_M.tolist(), room_M.tolist(), strict=False))  # rules follow
    homeless: dict[str, _Unit] = {}
    for unit in [unit for unit in units if unit.span > 1] or units:
        if not has_room(unit.rank_M, limits_DM).any():
            homeless.setdefault(unit.table, unit)
    unsplit = list(homeless.values())
    if homeless:
        reason = _without_rank(unsplit, limits_DM)
    elif reason := "; ".join(_missing("all tables together need", f"the {len(limits_DM)} ranks have", totals)):
        reason += f" (largest table: {max(units, key=all_bytes).table!r})"
    elif crowded := _crowded_rules(units, problem):
        return lacks_room(f"placement_rules cannot be kept: {crowded}.")
    else:
        kept, unsplit = " that keeps placement_rules" if problem.num_rules else "", [largest]
        left = [
            f"{memory_in_words(int(room - need))} of {kind} would be left over all ranks"
            for (kind, need, room), own in zip(totals, largest.all_M, strict=False)
            if own > 0
        ]
        own_bytes = int(largest.rank_M[: len(MEMORY_KINDS)].sum())
        reason = (
            f"No placement of their shards{kept} was found, although {' and '.join(left)}; the largest table, "
            f"{largest.table!r}, needs {memory_in_words(own_bytes)} on one rank"
        )
    why = _unsplit([unit.table for unit in unsplit if unit.span == 1][:NAMED], left_out)
    under_rules = " where placement_rules leave them" if problem.num_rules else ""
    return lacks_room(
        f"Tables do not fit{under_rules}: {reason}{why}. More or larger devices, a smaller storage reservation, "
        "smaller tables, or smaller caches (max_l1_cache_size) would help."
    )


def check_room(plan: RatedPlan, name: str) -> None:
    """Raise PlannerError, naming rank and bytes, if a plan takes more of a rank than the storage reservation left."""
    problem = plan.read.problem
    used_DM = problem.taken(*problem.laid(plan.sharding))
    for rank, (used_M, room_M) in enumerate(zip(used_DM.tolist(), problem.limits_DM.tolist(), strict=True)):
        sizes = zip(MEMORY_KINDS, used_M, room_M, strict=False)
        if over := _missing(f"{name} puts", "the storage reservation leaves", sizes, f" on rank {rank}"):
            raise lacks_room(f"Tables do not fit: {over[0]}")


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
        _Unit(name, option.sharding_type, option.span, need_LM.amax(0), need_LM.sum(0))
        for name, (option, *_) in zip(problem.names, problem.tables, strict=True)
        for need_LM in problem.needs_PM[option.part_UL]
    ]


def _unsplit(tables: Iterable[str], left_out: LeftOut) -> str:
    """Return the tables that may not be made smaller, with reasons."""
    named: dict[str, list[str]] = {}
    for table in tables:
        why = {kind: reason for kind, reason in left_out(table).items() if reason != NOT_OFFERED}
        if why:
            named.setdefault(reasons_in_words(why), []).append(repr(table))
    return "".join(f". {', '.join(names)} may not be {why}" for why, names in named.items())


def _missing(who_needs: str, who_has: str, sizes: Iterable[tuple[str, float, float]], where: str = "") -> list[str]:
    """Return the memories of which more is needed than there is, from kinds, needs and rooms."""
    return [
        f"{who_needs} {memory_in_words(int(need))} of {kind}{where}, {who_has} {memory_in_words(max(0, int(room)))}: "
        f"{memory_in_words(int(need - room))} are missing"
        for kind, need, room in sizes
        if need > max(0, room)
    ]


def _without_rank(units: Sequence[_Unit], limits_DM: Tensor) -> str:
    """Return the tables for which no rank is large enough."""
    lines = []
    for unit in units[:NAMED]:
        rank = int(((unit.rank_M - limits_DM).clamp_min(0) * (unit.rank_M > 0)).sum(-1).argmin())
        where = f" on each of {unit.span} ranks ({unit.sharding_type})" if unit.span > 1 else ""
        sizes = zip(MEMORY_KINDS, unit.rank_M.tolist(), limits_DM[rank].tolist(), strict=False)
        lines += _missing(f"table {unit.table!r} needs", f"the roomiest rank ({rank}) has", sizes, where)
    more = [f"and {len(units) - NAMED} more tables fit on no rank"] if len(units) > NAMED else []
    return "; ".join([*lines, *more])


def _crowded_rules(units: Sequence[_Unit], problem: Problem) -> str:
    """Return tables that must lie apart and have more shards than ranks; empty if there are none."""
    for rule in range(len(MEMORY_KINDS), problem.limits_DM.shape[1]):
        room, members = int(problem.limits_DM[:, rule].sum()), [unit for unit in units if unit.all_M[rule] > 0]
        if (shards := sum(int(unit.all_M[rule]) for unit in members)) > room:
            return (
                f"of {', '.join(dict.fromkeys(unit.table for unit in members))}, which are apart, a rank may have one "
                f"shard, and they have {shards} for {room} ranks: table_wise, or a larger min_partition, leaves fewer"
            )
    return ""
