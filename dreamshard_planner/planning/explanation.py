# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Explanation of one rank's time: fused kernels, costliest tables, and the gain of moving or splitting each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption

from dreamshard_planner.cost.problem import MEMORY_KINDS, Sharding
from dreamshard_planner.planning.model_problem import AnyPlan, ModelProblem
from dreamshard_planner.planning.notes import report_on
from dreamshard_planner.planning.rater import RatedPlan
from dreamshard_planner.planning.result import assumptions
from dreamshard_planner.problem.parts import ReadProblem
from dreamshard_planner.search.reshards import ShardingState
from dreamshard_planner.search_space.options import by_table, fqn_of, hot_rows_of, same_option
from dreamshard_planner.search_space.sharding_types import FUSED, sharding_in_words
from dreamshard_planner.support.formatting import first_of, ranks_in_words, short, short_words, size_in_words

MAX_TABLES = 5
"""Costliest tables of the rank whose changes are rated."""
MAX_NAMED = 4
"""Tables of a fused kernel named in the text."""
LEAST_SHOWN_MS = 0.0005
"""Change of a step that the text's three decimals show."""


@dataclass(frozen=True)
class GroupCost:
    """One fused kernel of the rank."""

    label: str
    """Module, sharding type, data type."""
    tables: tuple[str, ...]
    forward_ms: float
    backward_ms: float
    alone_ms: float
    """Sum of its shards' costs in a kernel each; fusion makes the difference."""


@dataclass(frozen=True)
class Change:
    """One table sharded another way, all others as they are."""

    how: str
    """In words, such as ``row_wise on ranks 0-3``."""
    gain_ms: float
    """Milliseconds that a step becomes faster; below zero if it becomes slower."""


@dataclass(frozen=True)
class TableCost:
    """One table's cost on the rank."""

    table: str
    sharding: str
    """In words."""
    alone_ms: float
    """Milliseconds that its shards on the rank would take alone."""
    bytes: int
    """Memory on the rank, all kinds."""
    moved: Change | None
    """The shards on the ranks where they cost least; None if they have no room."""
    split: Change | None
    """The best way to shard it in more parts, or in parts of another type; None if none is allowed and has room."""


@dataclass(frozen=True)
class Explanation:
    """Return value of ``DreamShardPlanner.explain``."""

    rank: int
    headline: str
    """The verdict of the report: the bottleneck of the step."""
    total_ms: float
    """Cost of the plan: the slowest rank's compute and all collectives."""
    rank_ms: tuple[float, ...]
    """Compute of every rank."""
    collectives_ms: float
    waiting_ms: float
    """Time that the rank waits for the slowest one."""
    groups: tuple[GroupCost, ...]
    """Fused kernels of the rank, the longest first."""
    tables: tuple[TableCost, ...]
    """The costliest tables of the rank."""
    other_tables: int
    """Number of further tables on the rank."""
    cost_source: str
    """Source of compute costs."""
    collectives_source: str
    assumptions: tuple[str, ...]
    """Guesses that the figures rest on, since the inputs left them open."""

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        own_ms, mean_ms = self.rank_ms[self.rank], sum(self.rank_ms) / len(self.rank_ms)
        lines = [
            f"{self.headline}.",
            *(f"Note: {assumption}." for assumption in self.assumptions),
            f"Rank {self.rank} of {len(self.rank_ms)}: {own_ms:.3f} ms of compute (slowest {max(self.rank_ms):.3f}, "
            f"mean {mean_ms:.3f}, fastest {min(self.rank_ms):.3f}), {self.waiting_ms:.3f} ms of waiting; collectives "
            f"{self.collectives_ms:.3f} ms, in all {self.total_ms:.3f}.",
        ]
        labels = [short_words(group.label) for group in self.groups]
        wide = max([20, *map(len, labels)])
        lines.append(f"{'fused kernels, in ms':<{wide}}{'tables':>8}{'forward':>9}{'backward':>10}{'unfused':>9}")
        lines += [
            f"{label:<{wide}}{len(group.tables):>8}{group.forward_ms:>9.3f}{group.backward_ms:>10.3f}"
            f"{group.alone_ms:>9.3f}  {first_of([short(name.rpartition('.')[2]) for name in group.tables], MAX_NAMED)}"
            for label, group in zip(labels, self.groups, strict=True)
        ]
        width = max([20, *(len(short(table.table)) for table in self.tables)])
        lines.append(f"{'costliest tables':<{width}}{'ms by itself':>14}{'memory':>12}  sharded")
        for table in self.tables:
            lines += [
                f"{short(table.table):<{width}}{table.alone_ms:>14.3f}{size_in_words(table.bytes):>12}"
                f"  {table.sharding}",
                f"    moved: {_gain(table.moved)}",
                f"    split further: {_gain(table.split)}",
            ]
        lines += [f"... and {self.other_tables} more tables on this rank"] if self.other_tables else []
        return short_words("\n".join([*lines, f"Compute: {self.cost_source}. Collectives: {self.collectives_source}."]))


def _gain(change: Change | None) -> str:
    if change is None:
        return "not possible, no other way is allowed and has room"
    if abs(change.gain_ms) < LEAST_SHOWN_MS:
        return "no gain"
    return f"{change.how}, {abs(change.gain_ms):.3f} ms {'faster' if change.gain_ms >= 0 else 'slower'}"


@torch.no_grad()
def explain(model: ModelProblem, plan: AnyPlan, rank: int | None = None) -> Explanation:
    """Explain one rank's part of a step, see :meth:`~dreamshard_planner.planner.DreamShardPlanner.explain`."""
    rated = model.rated(plan)
    report = report_on(model.rater, rated, assumptions(model, rated.options))
    chosen = report.chosen
    rank = chosen.slowest if rank is None else rank
    if isinstance(rank, bool | float) or rank not in range(len(chosen.rank_ms)):
        last = len(chosen.rank_ms) - 1
        raise PlannerError(f"there is no rank {rank!r}: the plan has ranks 0 to {last}", PlannerErrorType.OTHER)
    rank = int(rank)  # perhaps NumPy's
    alone_ms = {entry.name: entry.on_rank_ms(rank) for entry in report.tables if rank in entry.ranks}
    alone_ms = dict(sorted(alone_ms.items(), key=lambda known: -known[1]))
    return Explanation(
        rank=rank,
        headline=report.verdict,
        total_ms=chosen.total_ms,
        rank_ms=chosen.rank_ms,
        collectives_ms=chosen.collectives_ms,
        waiting_ms=chosen.waiting_ms[rank],
        groups=_groups(rated, rank, alone_ms),
        tables=_tables(model, rated, rank, dict(islice(alone_ms.items(), MAX_TABLES))),
        other_tables=max(0, len(alone_ms) - MAX_TABLES),
        cost_source=report.cost_source,
        collectives_source=report.collectives_source,
        assumptions=tuple(note.text for note in report.notes if note.code == "assumption"),
    )


def _groups(rated: RatedPlan, rank: int, alone_ms: Mapping[str, float]) -> tuple[GroupCost, ...]:
    """Return the fused kernels of a rank; ``alone_ms`` has its tables."""
    problem, options = rated.read.problem, {fqn_of(option): option for option in rated.options}
    latent_GH = rated.cost.group_latents(*problem.laid(rated.sharding))[rank]
    cost_G2 = rated.cost.compute.group_cost_ms(latent_GH)
    group_of = {name: int(problem.group_P[option.parts[0]]) for name, option, _ in rated.placed}
    members: dict[int, list[str]] = {}
    for name in alone_ms:
        members.setdefault(group_of[name], []).append(name)
    found = [
        GroupCost(
            label=_group_label(options[names[0]]),
            tables=tuple(names),
            forward_ms=float(cost_G2[group, 0]),
            backward_ms=float(cost_G2[group, 1]),
            alone_ms=sum(alone_ms[name] for name in names),
        )
        for group, names in members.items()
    ]
    return tuple(sorted(found, key=lambda group: -(group.forward_ms + group.backward_ms)))


def _tables(model: ModelProblem, rated: RatedPlan, rank: int, alone_ms: Mapping[str, float]) -> tuple[TableCost, ...]:
    """Return the costs of some tables, with the best move and the best split of each by the search's re-shards."""
    rater, chosen = model.rater, {fqn_of(option): option for option in rated.options}
    others = [
        option
        for name, options in by_table(rater.usable_options(model.search_space)).items()
        for option in options
        if name in alone_ms and not same_option(option, chosen[name])
    ]
    read = rater.read([*rated.options, *others], model.room)
    cost, sharding = rater.cost(read), read.sharding(rated.options)
    now_ms = cost.overall_ms(sharding)
    state = ShardingState(cost, sharding, max(1e-9, now_ms))

    def best(table: int, options: Iterable[int]) -> Change | None:
        if not (ways := [(table, option) for option in options]):
            return None
        tried = state.tried(ways)
        index = int(tried.key_Q.argmin())
        if not math.isfinite(float(tried.key_Q[index])):
            return None
        changed = sharding.changed(*tried.changes[index][0])
        return Change(_words(read, changed, table), now_ms - cost.overall_ms(changed))

    def cost_of(name: str) -> TableCost:
        table = read.problem.names.index(name)
        index, options = sharding.options[table], read.problem.tables[table]
        now = options[index]
        finer = [
            other
            for other, option in enumerate(options)
            if len(option.parts) > (len(now.parts) if option.sharding_type == now.sharding_type else 1)
            and option.kernel in (now.kernel, FUSED)
        ]
        parts = now.parts[np.equal(now.ranks(sharding.positions[table]), rank)]
        return TableCost(
            table=name,
            sharding=_words(read, sharding, table),
            alone_ms=alone_ms[name],
            bytes=int(read.problem.needs_PM[parts, : len(MEMORY_KINDS)].sum()),
            moved=best(table, [index]),
            split=best(table, finer),
        )

    return tuple(map(cost_of, alone_ms))


def _words(read: ReadProblem, sharding: Sharding, table: int) -> str:
    option = read.problem.tables[table][sharding.options[table]]
    ranks = ranks_in_words(option.ranks(sharding.positions[table]))
    hot = hot_rows_of(read.options[table][sharding.options[table]])
    more = f" with {len(hot):,} hot rows" if hot else ""
    return f"{sharding_in_words(option.sharding_type, option.kernel)} on {ranks}{more}"


def _group_label(option: ShardingOption) -> str:
    data_type = str(option.tensor.dtype).removeprefix("torch.")
    return f"{option.path or 'model'} {option.sharding_type} {data_type}"
