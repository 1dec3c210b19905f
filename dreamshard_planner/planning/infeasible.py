# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a user reads where tables do not fit: which, how many bytes of which memory are missing, what would help.

Shapes: S shards, P parts, D ranks, M limits.
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
"""The sharding types in parts that a table may not take, and why, by its name."""


def reason_first(error: PlannerError, proposers: Iterable[object], timeout_seconds: float | None) -> str:
    """What TorchRec says where no proposal fits, with the reason before its own advice and figures, which are of
    memory; without them where no proposal failed."""
    advice, reason = last_planner_error(error)
    if reason is None:
        names = ", ".join(type(proposer).__name__ for proposer in proposers)
        more = " or more timeout_seconds" if timeout_seconds else ""
        return (
            f"{names} proposed nothing that got a cost: other proposers (by default the planner's own){more} would help"
        )
    return f"{reason}\nTorchRec: {advice}" if reason else str(error)


def infeasible(problem: Problem, proven: bool, left_out: LeftOut) -> PlannerError:
    """TorchRec's error for shards that find no ranks.

    Args:
        problem: theirs.
        proven: whether no placement fits; else none was found.
        left_out: ways to split a table.
    """
    short, crowded = shortage(problem), _crowded_rules(problem)
    if crowded and not short:
        return lacks_room(f"placement_rules cannot be kept: {crowded}.")
    too_large = _homeless(problem) or ([] if short else [_largest(problem)])
    unsplit = _unsplit([problem.names[shard] for shard in too_large[:NAMED]], left_out)
    return _refusal(problem, (short or _packing_reason(problem, proven)) + unsplit)


def infeasible_wide(problem: Problem) -> PlannerError:
    """The same for units that span hosts or the world, of the first option of each table."""
    need_TM = torch.stack([problem.needs_PM[options[0].parts].sum(0) for options in problem.tables])
    reason = "; ".join(_wide_shortages(problem)[:NAMED]) or _total_shortages(problem, need_TM)
    return _refusal(problem, reason or _wide_reason(problem))


def _unsplit(tables: Iterable[str], left_out: LeftOut) -> str:
    """Which of these could be smaller and may not, and why, in words."""
    together: dict[str, list[str]] = {}
    for table in tables:
        why = {kind: reason for kind, reason in left_out(table).items() if reason != NOT_OFFERED}
        if why:
            together.setdefault(reasons_in_words(why), []).append(repr(table))
    return "".join(f". {', '.join(named)} may not be {why}" for why, named in together.items())


def _refusal(problem: Problem, reason: str) -> PlannerError:
    under_rules = " where placement_rules leave them" if problem.num_rules else ""
    return lacks_room(
        f"Tables do not fit{under_rules}: {reason}. More or larger devices, a smaller storage reservation, or smaller "
        "tables would help."
    )


def shortage(problem: Problem) -> str:
    """Tables for which no rank is large enough, or else how much all of them need together; empty where neither is the
    reason."""
    need_SM, limits_DM = problem.needs_PM, problem.limits_DM
    homeless_S, lines = _homeless(problem), []
    for shard in homeless_S[:NAMED]:
        missing_DM = (need_SM[shard] - limits_DM).clamp_min(0) * (need_SM[shard] > 0)
        device = int(missing_DM.sum(-1).argmin())
        for kind, name in enumerate(MEMORY_KINDS):
            if missing_DM[device, kind] > 0:
                lines.append(
                    f"table {problem.names[shard]!r} needs {memory_in_words(int(need_SM[shard, kind]))} of {name}, the "
                    f"roomiest rank ({device}) has {memory_in_words(max(0, int(limits_DM[device, kind])))}: "
                    f"{memory_in_words(int(missing_DM[device, kind]))} are missing"
                )
    if len(homeless_S) > NAMED:
        lines.append(f"and {len(homeless_S) - NAMED} more tables fit on no rank")
    if lines:
        return "; ".join(lines)
    return _total_shortages(problem, need_SM)


def _homeless(problem: Problem) -> list[int]:
    """Shards that no rank is large enough for; of the slices of one table, the first."""
    fits_SD = has_room(problem.needs_PM[:, None], problem.limits_DM)
    return sorted({problem.names[s]: s for s in reversed((~fits_SD.any(-1)).nonzero()[:, 0].tolist())}.values())


def _largest(problem: Problem) -> int:
    """The shard that needs most memory."""
    return int(problem.needs_PM[:, : len(MEMORY_KINDS)].double().sum(-1).argmax())


def _total_shortages(problem: Problem, need_XM: torch.Tensor) -> str:
    """Memories of which all shards, or tables, together need more than there is."""
    needs = zip(need_XM.sum(0).tolist(), _total_room(problem), MEMORY_KINDS, strict=False)  # rules follow
    lines = [
        f"all tables together need {memory_in_words(need)} of {name}, the {len(problem.limits_DM)} ranks have "
        f"{memory_in_words(room)}: {memory_in_words(need - room)} are missing"
        for need, room, name in needs
        if need > room
    ]
    largest = problem.names[int(need_XM.double().sum(-1).argmax())]
    return "; ".join(lines) + (f" (largest table: {largest!r})" if lines else "")


def _crowded_rules(problem: Problem) -> str:
    """Tables that are to be apart and have more shards than ranks; empty where none have."""
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
    """There is enough of all memories, but not for shards of these sizes, or not that anybody found."""
    largest = _largest(problem)
    need_M = problem.needs_PM[largest, : len(MEMORY_KINDS)]
    used_M = problem.needs_PM.sum(0).tolist()
    kinds = [
        f"{memory_in_words(room - used)} of {name} would be left over all ranks"
        for room, used, name, need in zip(_total_room(problem), used_M, MEMORY_KINDS, need_M, strict=False)  # rules
        if need > 0
    ]
    kept = " that keeps placement_rules" if problem.num_rules else ""
    how = f"No placement of their shards{kept} {'fits (proven)' if proven else 'was found'}"
    return (
        f"{how}, although {' and '.join(kinds)}; the largest table, {problem.names[largest]!r}, needs "
        f"{memory_in_words(int(need_M.sum()))} on one rank"
    )


def _wide_shortages(problem: Problem) -> list[str]:
    """Units for which no rank is large enough."""
    room_M, reasons = problem.limits_DM.amax(0).clamp_min(0).tolist(), []
    for name, options in zip(problem.names, problem.tables, strict=True):
        for unit in options[0].units:
            need_M = problem.needs_PM[list(unit.parts)].amax(0).tolist()
            for need, room, memory in zip(need_M, room_M, MEMORY_KINDS, strict=False):  # rules follow
                if unit.span > 1 and need > room:
                    reasons.append(
                        f"table {name!r} needs {memory_in_words(need)} of {memory} on each of {unit.span} ranks "
                        f"({options[0].sharding_type}), the roomiest rank has {memory_in_words(room)}: "
                        f"{memory_in_words(need - room)} are missing"
                    )
    return reasons


def _wide_reason(problem: Problem) -> str:
    """Each unit has room for itself, but not all together."""
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
    """Bytes that all ranks have together, by kind of memory; sums that int64 need not hold."""
    return [sum(max(0, capacity) for capacity in device_D) for device_D in problem.limits_DM.T.tolist()]
