# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How the explanation of a rank is worked out: from the plan's sums, and from the options of its costliest tables.

Shapes: D ranks, G fused groups, H latent channels, M limits, Y parts of one table on the rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption, Topology

from dreamshard_planner.cost.problem import MEMORY_KINDS, Sharding
from dreamshard_planner.planning.beyond import WiderSpace
from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.planning.given_plans import GivenPlans, Rated
from dreamshard_planner.plans.explanation import Change, Explanation, GroupCost, RankMemory, TableCost
from dreamshard_planner.plans.report import ReportEntry, each_collective, memory_entries, skews
from dreamshard_planner.plans.verdict import LEVEL, collectives_dominate, verdict
from dreamshard_planner.problem.read_problem import ReadProblem
from dreamshard_planner.search.laying import best_position
from dreamshard_planner.search.reshards import ShardingState
from dreamshard_planner.search_space.allowed_types import NOT_OFFERED, reasons_in_words
from dreamshard_planner.search_space.input_checks import available_bytes
from dreamshard_planner.search_space.kernels import CACHING, FUSED, sharding_in_words
from dreamshard_planner.search_space.options import by_table, fqn_of, same_option
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.search_space.variants import NarrowSlices, narrower_slices
from dreamshard_planner.support.formatting import ranks_in_words

MAX_TABLES = 5
"""Of the rank, the costliest: those whose changes are worked out."""
NEARLY = 1 - 1e-3
"""Of the slowest rank's compute: ranks that compute as much are slowest as well."""


@torch.no_grad()
def explain(
    context: PlanningContext,
    given: GivenPlans,
    rated: Rated,
    usable: Sequence[ShardingOption],
    wider: WiderSpace | None = None,
    rank: int | None = None,
) -> Explanation:
    """Why a rank takes as long as it does.

    Args:
        context: reads and rates options.
        given: the planned model's.
        rated: the plan.
        usable: options that tables may take instead.
        wider: what exact training leaves out.
        rank: the slowest by default.

    Raises:
        PlannerError: there is no such rank.
    """
    topology = context.topology
    ranks = topology.world_size
    device_ms_D = rated.costs.device_ms_BD[0]
    rank = int(device_ms_D.argmax()) if rank is None else rank
    if isinstance(rank, bool | float) or rank not in range(ranks):
        raise PlannerError(f"there is no rank {rank!r}: the plan has ranks 0 to {ranks - 1}", PlannerErrorType.OTHER)
    here = _Here.of(rated, rank)
    costliest = here.costliest()
    names = {rated.read.problem.names[table] for table in costliest[:MAX_TABLES]}
    others = _alternatives(context, rated.options, usable, names)
    changes = _Changes(context.read([*rated.options, *others], given.left), rated, context, rank)
    tables = tuple(
        TableCost(
            table=rated.read.problem.names[table],
            sharding=_words(rated.read, rated.sharding, table),
            marginal_ms=here.marginal_ms[table],
            alone_ms=here.alone_ms[table],
            bytes=int(rated.read.problem.needs_PM[here.parts[table], : len(MEMORY_KINDS)].sum()),
            **changes.of(rated.read.problem.names[table]),
            why_staying=_why_staying(rated, table),
            why_whole=_why_whole(rated.read.problem.names[table], context, wider, rated.options, others),
        )
        for table in costliest[:MAX_TABLES]
    )
    bottleneck, headline = _verdict(rated, here, rank)
    cost = ReportEntry.of("plan", rated.costs)
    averaging_ms = context.sync_ms_per_byte * context.averaged_bytes(rated.read, rated.sharding)
    of_step = f"{verdict(cost, (), each_collective(rated.cost, rated.sharding), averaging_ms)}."
    if collectives_dominate(cost):
        headline = f"{of_step} {headline}"
    elif bottleneck is not None:
        entry = next((entry for entry in tables if entry.table == bottleneck), None)
        headline = f"{headline} {_remedy(entry, skews(rated.cost, rated.sharding).get(bottleneck))}"
        headline += _elsewhere(tables, bottleneck)
    elif tables and float(device_ms_D[rank]) >= float(device_ms_D.max()) * NEARLY:
        level = float(device_ms_D.max()) <= float(device_ms_D.mean()) * (1 + LEVEL)
        headline = f"{of_step if level else headline} {_best_change(tables)}"
    return Explanation(
        rank=rank,
        headline=headline,
        bottleneck=bottleneck,
        total_ms=cost.total_ms,
        rank_ms=cost.rank_ms,
        collectives_ms=cost.collectives_ms,
        waiting_ms=cost.waiting_ms[rank],
        groups=here.groups(),
        tables=tables,
        other_tables=max(0, len(costliest) - MAX_TABLES),
        memory=_memory(rated, topology, rank),
        cost_source=str(rated.cost.compute.source),
        collectives_source=rated.read.problem.collectives.world.source,
    )


@dataclass(frozen=True)
class _Here:
    """What lies on one rank."""

    rated: Rated
    latent_GH: Tensor
    parts: dict[int, list[int]]
    """Of each table that has some there."""
    alone_ms: dict[int, float]
    marginal_ms: dict[int, float]

    @classmethod
    def of(cls, rated: Rated, rank: int) -> _Here:
        cost, problem, sharding = rated.cost, rated.read.problem, rated.sharding
        latent_GH = cost.group_latents(*problem.laid(sharding))[rank]
        parts: dict[int, list[int]] = {}
        for table, (option, positions) in enumerate(zip(sharding.options, sharding.positions, strict=True)):
            for unit, position in zip(problem.tables[table][option].units, positions, strict=True):
                if rank in (ranks := unit.ranks(position)):
                    parts.setdefault(table, []).append(unit.parts[ranks.index(rank)])
        alone_ms = {table: float(cost.single_ms_P[part_Y].sum()) for table, part_Y in parts.items()}
        marginal_ms = {}
        for table, part_Y in parts.items():
            group_H = latent_GH[problem.group_of(table, sharding.options[table])]
            without_H = group_H - cost.latent_PH[part_Y].sum(0)
            if float(without_H[0]) < 0.5:  # rounding of what was there
                without_H = torch.zeros_like(without_H)
            both_2 = cost.compute.group_cost_ms(torch.stack([group_H, without_H])).sum(-1)
            marginal_ms[table] = float(both_2[0] - both_2[1])
        return cls(rated, latent_GH, parts, alone_ms, marginal_ms)

    def costliest(self) -> list[int]:
        return sorted(self.parts, key=lambda table: (-self.marginal_ms[table], table))

    def groups(self) -> tuple[GroupCost, ...]:
        problem, sharding = self.rated.read.problem, self.rated.sharding
        cost_G2 = self.rated.cost.compute.group_cost_ms(self.latent_GH)
        members: dict[int, list[int]] = {}
        for table in self.parts:
            members.setdefault(problem.group_of(table, sharding.options[table]), []).append(table)
        found = [
            GroupCost(
                label=_group_label(self.rated.read.options[tables[0]][sharding.options[tables[0]]]),
                tables=tuple(problem.names[table] for table in tables),
                forward_ms=float(cost_G2[group, 0]),
                backward_ms=float(cost_G2[group, 1]),
                alone_ms=sum(self.alone_ms[table] for table in tables),
            )
            for group, tables in members.items()
        ]
        return tuple(sorted(found, key=lambda group: -(group.forward_ms + group.backward_ms)))


class _Changes:
    """What changes of one table at a time would gain, by table name."""

    def __init__(self, read: ReadProblem, rated: Rated, context: PlanningContext, rank: int) -> None:
        self._read, self._rank = read, rank
        self._cost = context.cost(read)
        self._sharding = read.sharding(rated.options)
        self._now_ms = self._cost.overall_ms(self._sharding)
        self._state = ShardingState(self._cost, self._sharding, max(1e-9, self._now_ms))

    def of(self, name: str) -> dict[str, Change | None]:
        problem = self._read.problem
        table = problem.names.index(name)
        options, now = problem.tables[table], problem.tables[table][self._sharding.options[table]]
        pieces = len(now.parts)
        smaller = [
            index
            for index, option in enumerate(options)
            if len(option.parts) > (pieces if option.sharding_type == now.sharding_type else 1)
            and option.kernel in (now.kernel, FUSED)
        ]
        cached = [
            index
            for index, option in enumerate(options)
            if (option.kernel, option.sharding_type, len(option.units)) == (CACHING, now.sharding_type, len(now.units))
        ]
        return {
            "leaving": self._leaving(table),
            "splitting": self._best(table, smaller),
            "caching": self._best(table, cached) if now.kernel != CACHING else None,
        }

    def _best(self, table: int, options: Sequence[int]) -> Change | None:
        if not options:
            return None
        tried = self._state.tried([(table, option) for option in options])
        index = int(tried.key_Q.argmin())
        if not math.isfinite(float(tried.key_Q[index])):
            return None
        return self._change(self._sharding.changed(*tried.changes[index][0]), table)

    def _leaving(self, table: int) -> Change | None:
        """Every unit of the table that is on the rank, where the peak is lowest elsewhere."""
        cost, problem, state = self._cost, self._read.problem, self._state
        option = self._sharding.options[table]
        units, positions = problem.tables[table][option].units, list(self._sharding.positions[table])
        group = problem.group_of(table, option)
        latent_DH, free_DM = state.latent_DGH[:, group].clone(), state.free_DM.clone()
        rest_D = state.device_ms_D - cost.compute.group_cost_ms(latent_DH).sum(-1)
        for index, unit in enumerate(units):
            if self._rank not in unit.ranks(positions[index]):
                continue
            added_LH, need_LM = cost.latent_PH[list(unit.parts)], problem.needs_PM[list(unit.parts)]
            after_NL = cost.compute.group_cost_ms(latent_DH.unflatten(0, (-1, unit.span)) + added_LH).sum(-1)
            peak_N = (rest_D.unflatten(0, (-1, unit.span)) + after_NL).amax(-1)
            elsewhere_N = torch.arange(len(peak_N)) != self._rank // unit.span
            free_NLM = free_DM.unflatten(0, (-1, unit.span))
            position, found = best_position(peak_N, need_LM, free_NLM, elsewhere_N)
            if not found:
                return None
            positions[index] = int(position)
            taken = list(unit.ranks(positions[index]))
            latent_DH[taken] += added_LH
            free_DM[taken] -= need_LM
        return self._change(self._sharding.changed(table, option, tuple(positions)), table)

    def _change(self, sharding: Sharding, table: int) -> Change:
        total_ms = self._cost.overall_ms(sharding)
        return Change(_words(self._read, sharding, table), total_ms, self._now_ms - total_ms)


def _alternatives(
    context: PlanningContext, plan: Sequence[ShardingOption], usable: Sequence[ShardingOption], names: set[str]
) -> list[ShardingOption]:
    """Of some tables, by name, all options that they may take but the plan's, and narrower slices than any of these."""
    others: list[ShardingOption] = []
    for name, options in by_table(usable).items():
        if name in names:
            narrower = narrower_slices(options)
            context.complete([*narrower])
            others += [*options, *narrower]
    chosen = {fqn_of(option): option for option in plan}
    return [option for option in others if not same_option(option, chosen[fqn_of(option)])]


def _verdict(rated: Rated, here: _Here, rank: int) -> tuple[str | None, str]:
    """The table that is the bottleneck, if one is, and that in words."""
    device_ms_D, names = rated.costs.device_ms_BD[0], rated.read.problem.names
    own_ms, level_ms = float(device_ms_D[rank]), float(device_ms_D.mean())
    slowest = int(device_ms_D.argmax())
    if not here.parts:
        return None, f"Rank {rank} has nothing to compute."
    heaviest = max(here.alone_ms, key=lambda table: here.alone_ms[table])
    alone_ms = here.alone_ms[heaviest]
    share = f"table {names[heaviest]!r} takes {alone_ms:.3f} ms by itself"
    slowest_ms = float(device_ms_D[slowest])
    if own_ms < slowest_ms * NEARLY:
        return None, f"Rank {rank} is not the slowest: it takes {own_ms:.3f} ms, rank {slowest} {slowest_ms:.3f}."
    if len(device_ms_D) > 1 and alone_ms > level_ms and alone_ms > 0.5 * own_ms:
        return names[heaviest], (
            f"One table is the bottleneck: {share}, more than the {level_ms:.3f} ms that every rank would take if all "
            f"were level, so moving other tables away from rank {rank} cannot make it level."
        )
    return None, (
        f"No single table is the bottleneck: of rank {rank}'s {own_ms:.3f} ms, the heaviest {share}; ranks would take "
        f"{level_ms:.3f} ms each if all were level."
    )


def _remedy(entry: TableCost | None, skew: str | None) -> str:
    """What changing the table itself would gain, or why it can't be split, and that its ids are not read evenly."""
    tried = {} if entry is None else {"splitting": entry.splitting, "caching": entry.caching}
    changes = {what: change for what, change in tried.items() if change is not None}
    uneven = "" if skew is None else f" {skew}."
    best = max(changes.values(), key=lambda change: change.gain_ms, default=None)
    if best is not None and best.gain_ms > 0:
        return f"Sharding it {best.how} would gain {best.gain_ms:.3f} ms.{uneven}"
    gains_nothing = f"{' and '.join(changes).capitalize()} it would gain nothing. " if changes else ""
    whole = "" if entry is None or "splitting" in changes else f"It is not split further: {entry.why_whole}. "
    return f"{gains_nothing}{whole}A smaller table, or fewer lookups, would help.{uneven}"


def _best_change(tables: Sequence[TableCost]) -> str:
    """Of the costliest tables, the one change that gains most."""
    changes = _gains(tables)
    return (
        max(changes)[1] if changes else "Moving, splitting or caching one of its costliest tables would gain nothing."
    )


def _elsewhere(tables: Sequence[TableCost], bottleneck: str) -> str:
    """A change that gains more than splitting or caching the bottleneck; empty where there is none."""
    changes = _gains(tables)
    own = _gains([replace(entry, leaving=None) for entry in tables if entry.table == bottleneck])
    return f" {max(changes)[1]}" if changes and max(changes) > max(own, default=(0.0, "")) else ""


def _gains(tables: Sequence[TableCost]) -> list[tuple[float, str]]:
    """Of all changes that gain something."""
    return [
        (change.gain_ms, f"Of table {entry.table!r}, {change.how} would gain {change.gain_ms:.3f} ms.")
        for entry in tables
        for change in (entry.leaving, entry.splitting, entry.caching)
        if change is not None and change.gain_ms >= 5e-4
    ]


def _why_staying(rated: Rated, table: int) -> str:
    """Why no part of a table can leave its rank, where none can."""
    sharding = rated.sharding
    option = rated.read.problem.tables[table][sharding.options[table]]
    everywhere = len(set(option.ranks(sharding.positions[table]))) == len(rated.costs.device_ms_BD[0])
    return "it is on every rank" if everywhere else "no other rank that may hold it has room"


def _why_whole(
    table: str,
    context: PlanningContext,
    wider: WiderSpace | None,
    plan: Sequence[ShardingOption],
    others: Sequence[ShardingOption],
) -> str:
    """Why a table has no option of more parts that fits."""
    now = next(option for option in plan if fqn_of(option) == table)
    parts, kernels = now.num_shards, (now.compute_kernel, FUSED)
    for option in (option for option in others if fqn_of(option) == table and option.compute_kernel in kernels):
        if option.num_shards > (parts if option.sharding_type == now.sharding_type else 1):
            return "its parts find no room on other ranks"
    if parts > 1:
        return "it has as many parts as it may have"
    left_out = context.splitting_left_out(table)
    splitting = {kind for kind, spec in SHARDING_TYPES.items() if spec.splits_unasked}
    if splitting - left_out.keys():
        return "it has too few rows and columns"
    opened = splitting - wider.context.splitting_left_out(table).keys() if wider is not None else set()
    if wider is not None and opened:
        return f"{wider.opened_by} would allow {' or '.join(sorted(opened))}"
    return reasons_in_words({kind: why for kind, why in left_out.items() if why != NOT_OFFERED} or left_out)


def _memory(rated: Rated, topology: Topology, rank: int) -> tuple[RankMemory, ...]:
    total = dict(zip(MEMORY_KINDS, available_bytes(topology)[rank].tolist(), strict=True))
    return tuple(
        RankMemory(entry.kind, entry.used_bytes[rank], limit := entry.limit_bytes[rank], total[entry.kind] - limit)
        for entry in memory_entries(rated.cost, rated.sharding)
    )


def _words(read: ReadProblem, sharding: Sharding, table: int) -> str:
    option = read.problem.tables[table][sharding.options[table]]
    ranks = ranks_in_words(option.ranks(sharding.positions[table]))
    enumerated = read.options[table][sharding.options[table]]
    asked = f" (min_partition={enumerated.shards[0].size[1]})" if isinstance(enumerated, NarrowSlices) else ""
    return f"{sharding_in_words(option.sharding_type, option.kernel)} on {ranks}{asked}"


def _group_label(option: ShardingOption) -> str:
    data_type = str(option.tensor.dtype).removeprefix("torch.")
    return f"{option.path or 'model'} {option.sharding_type} {data_type}"
