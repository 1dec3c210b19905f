# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Errors for tables that do not fit: the tables, the missing bytes of each memory, and what would help.

Shapes: S shards, P parts, T tables, X either, D ranks, M limits, R rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
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


def infeasible(problem: Problem, proven: bool, left_out: LeftOut) -> PlannerError:
    """Return TorchRec's error for shards that find no ranks.

    Args:
        problem: of the shards.
        proven: whether a proof shows that no placement fits; else none was found.
        left_out: reasons why a table may not be split.
    """
    homeless, short, crowded = _homeless(problem), shortage(problem), _crowded_rules(problem)
    if crowded and not short:
        return lacks_room(f"placement_rules cannot be kept: {crowded}.")
    unsplit = [problem.names[shard] for shard in homeless or ([] if short else [_largest(problem)])]
    return _refusal(problem, (short or _packing_reason(problem, proven)) + _unsplit(unsplit[:NAMED], left_out))


def infeasible_wide(problem: Problem) -> PlannerError:
    """Return TorchRec's error for units that span hosts or the world, of the first option of each table."""
    need_TM = torch.stack([problem.needs_PM[options[0].parts].sum(0) for options in problem.tables])
    reason = "; ".join(_wide_shortages(problem)[:NAMED]) or _totals(problem, need_TM)
    return _refusal(problem, reason or _wide_reason(problem))


def _unsplit(tables: Iterable[str], left_out: LeftOut) -> str:
    """Return the tables that may not be made smaller, with reasons."""
    named: dict[str, list[str]] = {}
    for table in tables:
        why = {kind: reason for kind, reason in left_out(table).items() if reason != NOT_OFFERED}
        if why:
            named.setdefault(reasons_in_words(why), []).append(repr(table))
    return "".join(f". {', '.join(names)} may not be {why}" for why, names in named.items())


def _refusal(problem: Problem, reason: str) -> PlannerError:
    under_rules = " where placement_rules leave them" if problem.num_rules else ""
    return lacks_room(
        f"Tables do not fit{under_rules}: {reason}. More or larger devices, a smaller storage reservation, or smaller "
        "tables would help."
    )


def _missing(who_needs: str, need: int, memory: str, who_has: str, room: int) -> str:
    return (
        f"{who_needs} {memory_in_words(need)} of {memory}, {who_has} {memory_in_words(max(0, room))}: "
        f"{memory_in_words(need - room)} are missing"
    )


def _homeless(problem: Problem) -> list[int]:
    """Return the shards that no rank is large enough for; of the slices of one table, the first."""
    fits_SD = has_room(problem.needs_PM[:, None], problem.limits_DM)
    return sorted({problem.names[s]: s for s in reversed((~fits_SD.any(-1)).nonzero()[:, 0].tolist())}.values())


def shortage(problem: Problem) -> str:
    """Return the tables for which no rank is large enough, else the memories that all tables together exceed."""
    homeless, lines = _homeless(problem), []
    for shard in homeless[:NAMED]:
        need_M, limits_DM = problem.needs_PM[shard], problem.limits_DM
        device = int(((need_M - limits_DM).clamp_min(0) * (need_M > 0)).sum(-1).argmin())
        sizes = zip(MEMORY_KINDS, need_M.tolist(), limits_DM[device].tolist(), strict=False)  # rules follow
        who, where = f"table {problem.names[shard]!r} needs", f"the roomiest rank ({device}) has"
        lines += [_missing(who, need, memory, where, room) for memory, need, room in sizes if need > max(0, room)]
    if len(homeless) > NAMED:
        lines.append(f"and {len(homeless) - NAMED} more tables fit on no rank")
    return "; ".join(lines) or _totals(problem, problem.needs_PM)


def _largest(problem: Problem) -> int:
    return int(problem.needs_PM[:, : len(MEMORY_KINDS)].double().sum(-1).argmax())


def _totals(problem: Problem, need_XM: torch.Tensor) -> str:
    """Return the memories of which all shards, or tables, together need more than there is."""
    needs = zip(need_XM.sum(0).tolist(), _total_room(problem), MEMORY_KINDS, strict=False)
    ranks = f"the {len(problem.limits_DM)} ranks have"
    lines = [
        _missing("all tables together need", need, memory, ranks, room) for need, room, memory in needs if need > room
    ]
    largest = problem.names[int(need_XM.double().sum(-1).argmax())]
    return "; ".join(lines) + (f" (largest table: {largest!r})" if lines else "")


def _crowded_rules(problem: Problem) -> str:
    """Return tables that must lie apart and have more shards than ranks; empty if there are none."""
    rules = slice(len(MEMORY_KINDS), None)
    need_PR, room_R = problem.needs_PM[:, rules], problem.limits_DM[:, rules].sum(0)
    for need_P, room in zip(need_PR.T, room_R.tolist(), strict=True):
        if (shards := int(need_P.sum())) > room:
            named = ", ".join(dict.fromkeys(problem.names[part] for part in need_P.nonzero()[:, 0].tolist()))
            return (
                f"of {named}, which are apart, a rank may have one shard, and they have {shards} for {room} ranks: "
                "table_wise, or a larger min_partition, leaves fewer"
            )
    return ""


def _packing_reason(problem: Problem, proven: bool) -> str:
    """Return the reason if all memories suffice, but not for shards of these sizes."""
    largest = _largest(problem)
    need_M, used_M = problem.needs_PM[largest, : len(MEMORY_KINDS)], problem.needs_PM.sum(0).tolist()
    kinds = [
        f"{memory_in_words(room - used)} of {name} would be left over all ranks"
        for room, used, name, need in zip(_total_room(problem), used_M, MEMORY_KINDS, need_M, strict=False)  # rules
        if need > 0
    ]
    kept = " that keeps placement_rules" if problem.num_rules else ""
    return (
        f"No placement of their shards{kept} {'fits (proven)' if proven else 'was found'}, although "
        f"{' and '.join(kinds)}; the largest table, {problem.names[largest]!r}, needs "
        f"{memory_in_words(int(need_M.sum()))} on one rank"
    )


def _wide_shortages(problem: Problem) -> list[str]:
    """Return units for which no rank is large enough."""
    room_M = problem.limits_DM.amax(0).clamp_min(0).tolist()
    return [
        _missing(
            f"table {name!r} needs",
            need,
            f"{memory} on each of {unit.span} ranks ({options[0].sharding_type})",
            "the roomiest rank has",
            room,
        )
        for name, options in zip(problem.names, problem.tables, strict=True)
        for unit in options[0].units
        if unit.span > 1
        for need, room, memory in zip(
            problem.needs_PM[list(unit.parts)].amax(0).tolist(), room_M, MEMORY_KINDS, strict=False
        )
        if need > room
    ]


def _wide_reason(problem: Problem) -> str:
    """Return the reason if each unit has room for itself, but not all together."""
    wide = {
        name: sum(int(problem.needs_PM[list(unit.parts)].sum()) for unit in options[0].units if unit.span > 1)
        for name, options in zip(problem.names, problem.tables, strict=True)
    }
    largest = max(wide, key=lambda name: wide[name])
    return (
        "those that span a host or all ranks leave too little on some rank; the largest is "
        f"{largest!r}, with {memory_in_words(wide[largest])}"
    )


def _total_room(problem: Problem) -> list[int]:
    """Return the bytes of all ranks together, by kind of memory; sums may exceed int64."""
    return [sum(max(0, capacity) for capacity in device_D) for device_D in problem.limits_DM.T.tolist()]
