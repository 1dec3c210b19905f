# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Two plans beside each other: which tables moved, what has to be sent, what each rank costs before and after.

The names of like ranks are chosen so that shards that merely trade places need not move.

Shapes: N shards before, P shards after, D ranks, H hosts, L ranks of a host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableInputs, TableSharding, TopologyInputs
from dreamshard_planner.plans.report import Predicted, ReportEntry
from dreamshard_planner.plans.stale import differences, machine_differences
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.documents import document_of
from dreamshard_planner.support.formatting import short, short_words, size_in_words

Number = TypeVar("Number", bound=float)
FORBIDDEN = -1e18
"""Bytes that stay between ranks of other memory: worse than any."""
MAX_SHOWN = 20
"""Tables, and ranks, in the text; :meth:`Comparison.to_dict` has all."""


@dataclass(frozen=True)
class TableChange:
    """A table that both plans shard, each another way."""

    table: str
    before: str
    """In words: sharding type, kernel and ranks."""
    after: str
    retyped: bool
    """True if sharding type or kernel changed; else only ranks or sizes of shards did."""
    bytes_received: int
    """Bytes of weights and optimizer states that ranks hold after and did not hold before."""


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare`."""

    before: str
    """Name of the plan."""
    after: str
    changes: tuple[TableChange, ...]
    """Changed tables, those with most bytes to move first."""
    unchanged: int
    """Tables sharded alike."""
    only_before: tuple[str, ...]
    """Tables that the other plan lacks, or that have another shape or data type there."""
    only_after: tuple[str, ...]
    bytes_received: tuple[int, ...]
    """That each rank, of all sharding groups, must get from others: what :attr:`changes` add up to."""
    cost_before: Predicted
    cost_after: Predicted
    machine: tuple[str, ...]
    """Differences between their ranks, memories and links, in words."""
    inputs: tuple[str, ...]
    """All else that the plans were made from and that differs, in words."""
    names: tuple[int, ...]
    """New name of each rank of the plan after, so that most bytes stay in place."""
    bytes_as_named: int
    """To move, all ranks together, if its ranks kept their names."""
    samples: tuple[int, int]
    """Samples of all ranks in one step, before and after."""

    @property
    def total_bytes(self) -> int:
        """To move, all ranks together: weights, and their optimizers' states."""
        return sum(self.bytes_received)

    @property
    def one_cost_source(self) -> bool:
        """True if the same costs rated both plans, also at other bandwidths."""
        one, other = (
            [re.sub(r"[\d.,]+ GB/s", "", source) for source in (cost.cost_source, cost.collectives_source)]
            for cost in (self.cost_before, self.cost_after)
        )
        return one == other

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**document_of(self), "total_bytes": self.total_bytes, "one_cost_source": self.one_cost_source}

    def __str__(self) -> str:
        retyped = sum(change.retyped for change in self.changes)
        lines = [
            self._headline(),
            *([f"Machine: {'; '.join(self.machine)}."] if self.machine else []),
            f"{self.before} -> {self.after}: {len(self.changes)} table(s) change, {retyped} of them their "
            f"sharding type or kernel, {self.unchanged} stay; {size_in_words(self.total_bytes)} to move, "
            f"{size_in_words(max(self.bytes_received, default=0))} at most to one rank.",
        ]
        if moved := [f"{rank} -> {name}" for rank, name in enumerate(self.names) if rank != name]:
            more = ", ..." if len(moved) > MAX_SHOWN else ""
            lines.append(
                f"Ranks of {self.after} are named anew for that ({', '.join(moved[:MAX_SHOWN])}{more}); as they are, "
                f"{size_in_words(self.bytes_as_named)} would move."
            )
        lines += [f"Only in {self.before}: {_named(self.only_before)}."] if self.only_before else []
        lines += [f"Only in {self.after}: {_named(self.only_after)}."] if self.only_after else []
        if self.changes:
            names = [short(change.table) for change in self.changes[:MAX_SHOWN]]
            width = max(map(len, names))
            lines.append(f"{'table':<{width}}{'to move':>12}  change")
            lines += [
                f"{name:<{width}}{size_in_words(change.bytes_received):>12}  {change.before} -> {change.after}"
                for name, change in zip(names, self.changes, strict=False)
            ]
            lines += _more(len(self.changes), "tables")
        lines += self._costs()
        lines += [f"Note: made from other inputs: {difference}." for difference in self.inputs]
        return short_words("\n".join(lines))

    def _headline(self) -> str:
        """Which is cheaper, by how much, and in what."""
        if not self.one_cost_source:
            return f"Costs of {self.before} and {self.after} are of different sources, and do not compare."
        before, after = self.cost_before.chosen, self.cost_after.chosen
        times = after.total_ms / before.total_ms if before.total_ms > 0 else 1.0
        one, other = self.samples
        each = f", for {other:,} samples instead of {one:,} ({times * one / other:.3f} for each)" * (one != other)
        return (
            f"A step takes {after.total_ms:.3f} ms with {self.after}, {before.total_ms:.3f} with {self.before} "
            f"({times:.3f} times){each}: compute of the slowest rank {_ms(max(after.rank_ms))} instead of "
            f"{_ms(max(before.rank_ms))} ms, "
            f"collectives {_ms(after.collectives_ms)} instead of {_ms(before.collectives_ms)} ms."
        )

    def _costs(self) -> list[str]:
        before, after = self.cost_before.chosen, self.cost_after.chosen
        rows: list[tuple[str, ...]] = [("predicted ms", "before", "after")]
        rows.append(("total", _ms(before.total_ms), _ms(after.total_ms)))
        rows.append(("collectives", _ms(before.collectives_ms), _ms(after.collectives_ms)))
        ranks = max(len(before.rank_ms), len(after.rank_ms))
        for rank in range(min(ranks, MAX_SHOWN)):
            shown = [_ms(costs[rank] if rank < len(costs) else None) for costs in (before.rank_ms, after.rank_ms)]
            rows.append((f"rank {rank}", *shown))
        more, chosen_from = [(line, "", "") for line in _more(ranks, "ranks")], self._rivals()
        width = max([14, *(len(name) + 1 for name, *_ in chosen_from)])
        lines = [f"{row[0]:<{width}}{row[1]:>12}{row[2]:>12}".rstrip() for row in (*rows, *more, *chosen_from)]
        one, other = self.cost_before, self.cost_after
        if (one.cost_source, one.collectives_source) == (other.cost_source, other.collectives_source):
            return [*lines, f"Compute: {other.cost_source}. Collectives: {other.collectives_source}."]
        return [
            *lines,
            f"Before: compute {one.cost_source}, collectives {one.collectives_source}.",
            f"After: compute {other.cost_source}, collectives {other.collectives_source}.",
        ]

    def _rivals(self) -> list[tuple[str, str, str]]:
        """Totals of the plans that each was chosen from, where it was."""
        each = (self.cost_before, self.cost_after)
        one, other = ({rival.name: rival.total_ms for rival in costs.rivals} for costs in each)
        rows = [(name, _ms(one.get(name)), _ms(other.get(name))) for name in dict.fromkeys([*one, *other])]
        return [("chosen from, total", "", ""), *rows] if rows else []


def compare(before: SavedPlan | str | Path, after: SavedPlan | str | Path) -> Comparison:
    """Compare two plans, of which nothing is rated anew: costs are those that their files hold. Where they differ by
    the names of like ranks, those of the second one are changed first
    (:func:`names_that_keep_most`).

    ``DreamShardPlanner.saved_plan`` makes a :class:`SavedPlan` of any plan of its model, so that a planner's plan
    compares with a file: ``compare("plan.json", planner.saved_plan())``.

    Args:
        before: a plan, or the file of one.
        after: another one.

    Raises:
        PlanError: a file can't be read; names it.
    """
    labels = _labels(before, after)
    before, as_named = (
        plan if isinstance(plan, SavedPlan) else replace(SavedPlan.load(plan), name=label)
        for plan, label in zip((before, after), labels, strict=True)
    )
    names = names_that_keep_most(before, as_named)
    after = renamed(as_named, names)
    one, other = dict(before.tables()), dict(after.tables())
    alike = sorted(fqn for fqn in one if before.inputs.tables[fqn] == after.inputs.tables.get(fqn))
    changes, received = _changes(before, after, alike)
    return Comparison(
        before=before.name,
        after=after.name,
        changes=changes,
        unchanged=len(alike) - len(changes),
        only_before=tuple(sorted(one.keys() - set(alike))),
        only_after=tuple(sorted(other.keys() - set(alike))),
        bytes_received=received,
        cost_before=before.predicted,
        cost_after=after.predicted,
        machine=tuple(machine := machine_differences(before.inputs.topology, after.inputs.topology)),
        inputs=tuple(text for text in differences(before.inputs, after.inputs) if text not in machine),
        names=names,
        bytes_as_named=sum(_changes(before, as_named, alike)[1]),
        samples=(_samples(before), _samples(after)),
    )


def _labels(before: SavedPlan | str | Path, after: SavedPlan | str | Path) -> tuple[str, str]:
    """Names of the two, of files with as many folders as tell them apart."""
    if isinstance(before, SavedPlan) or isinstance(after, SavedPlan):
        one, other = (plan.name if isinstance(plan, SavedPlan) else Path(plan).name for plan in (before, after))
        return one, other
    paths = [Path(plan).resolve().parts for plan in (before, after)]
    length = next((n for n in range(1, max(map(len, paths))) if paths[0][-n:] != paths[1][-n:]), 1)
    first, second = (str(Path(*parts[-length:])) for parts in paths)
    return first, second


def _samples(plan: SavedPlan) -> int:
    return plan.inputs.batch_size * plan.inputs.topology.all_ranks


def _changes(
    before: SavedPlan, after: SavedPlan, alike: Sequence[str]
) -> tuple[tuple[TableChange, ...], tuple[int, ...]]:
    """Return changes of common tables, most bytes first, and the bytes that each rank receives."""
    one, other = dict(before.tables()), dict(after.tables())
    was, now = before.inputs.topology, after.inputs.topology
    received = [0] * max(was.all_ranks, now.all_ranks)
    changes = []
    for fqn in alike:
        if one[fqn] == other[fqn] and was.groups == now.groups:
            continue
        held = _of_all_ranks(one[fqn], was), _of_all_ranks(other[fqn], now)
        bytes_of = _received(*held, before.inputs.tables[fqn])
        for rank, count in bytes_of.items():
            received[rank] += count
        retyped = (one[fqn].sharding_type, one[fqn].kernel) != (other[fqn].sharding_type, other[fqn].kernel)
        labels = _label(one[fqn], was), _label(other[fqn], now)
        changes.append(TableChange(fqn, *labels, retyped, sum(bytes_of.values())))
    return tuple(sorted(changes, key=lambda change: -change.bytes_received)), tuple(received)


def _label(table: TableSharding, topology: TopologyInputs) -> str:
    return f"{table.label} of each of {topology.num_groups} groups" if topology.groups else table.label


def _of_all_ranks(table: TableSharding, topology: TopologyInputs) -> dict[int, list[ShardPlace]]:
    """Return the shards of a table on each rank of all sharding groups."""
    held: dict[int, list[ShardPlace]] = {}
    for shard in table.shards:
        for rank in topology.replicas(shard.rank):
            held.setdefault(rank, []).append(shard)
    return held


def _received(
    before: dict[int, list[ShardPlace]], after: dict[int, list[ShardPlace]], table: TableInputs
) -> dict[int, int]:
    """Bytes of a table, optimizer states with them, that each rank holds after and did not hold before."""
    received = dict.fromkeys(after, 0)
    for rank, shards in after.items():
        for shard in shards:
            known = sum(shard.common(other) for other in before.get(rank, ()))
            new = shard.size[0] * shard.size[1] - known
            received[rank] += table.trained_bytes(new, max(1, shard.size[1]))
    return received


def _ms(value: float | None) -> str:
    """Return milliseconds in words."""
    return "-" if value is None else "infeasible" if math.isinf(value) else f"{value:.3f}"


def _named(tables: tuple[str, ...]) -> str:
    rest = f" and {len(tables) - MAX_SHOWN} more" if len(tables) > MAX_SHOWN else ""
    return ", ".join(map(short, tables[:MAX_SHOWN])) + rest


def _more(count: int, what: str) -> list[str]:
    return [f"... and {count - MAX_SHOWN} more {what}"] if count > MAX_SHOWN else []


def names_that_keep_most(before: SavedPlan, after: SavedPlan) -> tuple[int, ...]:
    """Name each rank of ``after`` so that most bytes of weights and optimizer states stay where they are.

    Ranks of one pod (by default of one host) remain in one pod. Ranks of other memory, and ranks that placement rules
    name, keep their names. All ranks do if blocks of rows may be read unevenly: blocks lie in the order of ranks.
    """
    one, other = before.inputs.topology, after.inputs.topology
    shape = [
        (each.compute_device, each.world_size, each.local_world_size, each.pod_size, each.groups)
        for each in (one, other)
    ]
    if shape[0] != shape[1] or _reads_blocks_unevenly(after):
        return tuple(range(other.world_size))
    held = {
        fqn: table.shards for fqn, table in before.tables() if before.inputs.tables[fqn] == after.inputs.tables.get(fqn)
    }
    return names_that_keep_most_of(held, after)


def names_that_keep_most_of(held: Mapping[str, Sequence[ShardPlace]], after: SavedPlan) -> tuple[int, ...]:
    """Name ranks as :func:`names_that_keep_most`, from the shards that they hold, by fully qualified name."""
    other = after.inputs.topology
    ranks, per_pod = other.world_size, other.pod_ranks
    if ranks % per_pod or after.inputs.placement_rules.get("on_ranks"):
        return tuple(range(ranks))
    rank_DD, host_HH = _bytes_that_stay(held, after, per_pod)
    memory_D = list(zip(*(sizes for _, sizes in sorted(other.memory_bytes.items())), strict=True))
    rank_DD[np.array([[mine != its for its in memory_D] for mine in memory_D])] = FORBIDDEN
    blocks_HHLL = rank_DD.reshape(len(host_HH), per_pod, len(host_HH), per_pod).swapaxes(1, 2)
    pairs = [[_assigned(block_LL) for block_LL in row_HLL] for row_HLL in blocks_HHLL]
    host_HH += [[kept for _, kept in row] for row in pairs]
    host_names, _ = _assigned(host_HH)
    return tuple(name * per_pod + place for host, name in enumerate(host_names) for place in pairs[host][name][0])


def renamed(plan: SavedPlan, names: Sequence[int]) -> SavedPlan:
    """The plan with each rank under another name, and its predicted costs with it. Tables that lie on all ranks, or on
    all of a host, have their shards in the order of ranks still, as TorchRec needs them, and read evenly: see
    :func:`names_that_keep_most`.
    """
    if list(names) == list(range(len(names))):
        return plan
    topology, predicted = plan.inputs.topology, plan.predicted
    sharding = {
        path: {name: _table(table, names, topology.pod_ranks) for name, table in module.items()}
        for path, module in plan.sharding.items()
    }
    memory = tuple(
        replace(entry, used_bytes=_ordered(entry.used_bytes, names), limit_bytes=_ordered(entry.limit_bytes, names))
        for entry in predicted.memory
    )
    predicted = replace(predicted, chosen=_cost(predicted.chosen, names), memory=memory)
    return replace(plan, sharding=sharding, predicted=predicted)


def _reads_blocks_unevenly(plan: SavedPlan) -> bool:
    """Return whether a histogram of ids may tell that a table's blocks of rows, one on each rank, are read unevenly."""
    if plan.inputs.statistics is None:
        return False
    of_blocks = [fqn for fqn, table in plan.tables()
                 if (spec := SHARDING_TYPES.get(table.sharding_type)) is None or spec.splits_rows]  # fmt: skip
    known = [plan.inputs.features.get(name) for fqn in of_blocks for name in plan.inputs.tables[fqn].features]
    return any(feature is None or feature.ids is not None for feature in known)


def _bytes_that_stay(
    held: Mapping[str, Sequence[ShardPlace]], after: SavedPlan, per_host: int
) -> tuple[np.ndarray, np.ndarray]:
    """If a rank [D, D], or a host [H, H], of ``after`` had the name of the other; half a byte more for its own."""
    ranks = after.inputs.topology.world_size
    rank_DD, host_HH = np.eye(ranks) / 2, np.eye(ranks // per_host) / 2
    for fqn, table in after.tables():
        declared, span = after.inputs.tables[fqn], _span(table)
        if span == "world" or not held.get(fqn):
            continue
        was_N2, start_N2, end_N2 = _places(held[fqn])
        is_P, start_P2, end_P2 = _places(table.shards)
        sides_PN2 = np.minimum(end_P2[:, None], end_N2) - np.maximum(start_P2[:, None], start_N2)
        width_P1 = (end_P2 - start_P2)[:, 1:].clip(1)
        bytes_PN = declared.trained_bytes(sides_PN2.clip(0).prod(-1), width_P1)
        if span == "rank":
            np.add.at(rank_DD, (is_P[:, None], was_N2), bytes_PN)
        else:
            bytes_PN[is_P[:, None] % per_host != was_N2 % per_host] = 0
            np.add.at(host_HH, (is_P[:, None] // per_host, was_N2 // per_host), bytes_PN)
    return rank_DD, host_HH


def _places(shards: Sequence[ShardPlace]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks, first row and column, last ones plus one."""
    start = np.array([shard.offset for shard in shards])
    return np.array([shard.rank for shard in shards]), start, start + np.array([shard.size for shard in shards])


def _assigned(kept: np.ndarray) -> tuple[list[int], float]:
    """The column of each row for the most in all, and that."""
    rows, columns = linear_sum_assignment(kept, maximize=True)
    return columns.tolist(), float(kept[rows, columns].sum())


def _span(table: TableSharding) -> str:
    known = SHARDING_TYPES.get(table.sharding_type)
    return "world" if known is None else known.span


def _table(table: TableSharding, names: Sequence[int], per_host: int) -> TableSharding:
    def name(rank: int) -> int:
        place = rank % per_host
        return names[rank] if span == "rank" else names[rank - place] // per_host * per_host + place

    span = _span(table)
    if span == "world":
        return table
    return replace(table, shards=tuple(replace(shard, rank=name(shard.rank)) for shard in table.shards))


def _cost(cost: ReportEntry, names: Sequence[int]) -> ReportEntry:
    return replace(cost, forward_ms=_ordered(cost.forward_ms, names), backward_ms=_ordered(cost.backward_ms, names))


def _ordered(values: Sequence[Number], names: Sequence[int]) -> tuple[Number, ...]:
    """Values of ranks, in the order of their new names."""
    return tuple(value for _, value in sorted(zip(names, values, strict=True)))
