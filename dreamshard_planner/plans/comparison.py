# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Two plans beside each other: which tables moved, what has to be sent, under which names of ranks least has to be, and
what each rank costs before and after; and differences between the inputs of a plan and those of its use.

Other tables, ranks, batch size or constraints make a plan stale: it may not run, or break what was asked for. Its other
inputs (memory, lookups, statistics, bandwidths, cost source, seed) may differ when a job starts again, and are told
beside its cost.

Shapes: S shards of a table, D ranks, H pods, L ranks of a pod, X pairs of shards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from dreamshard_planner.plans.plan_file import (
    PlanInputs,
    SavedPlan,
    ShardPlace,
    TableInputs,
    TableSharding,
    TopologyInputs,
)
from dreamshard_planner.plans.report import Predicted
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.documents import document_of
from dreamshard_planner.support.formatting import first_of, memory_in_words, short, short_words, size_in_words

FORBIDDEN = 1e18
"""Bytes for the name of a rank with other memory: more than any."""
MAX_SHOWN = 20
"""Tables, and ranks, in the text; :meth:`Comparison.to_dict` has all."""
MEMORY_TOLERANCE = 0.01
"""Share by which memories may differ: machines of one kind do, by a few megabytes, from boot to boot."""
COSTS_ALONE = ("pooling_factors", "num_poolings")
"""Constraints that change the costs of a table, and not how it may be sharded."""
NAMED = 5
"""Tables, and ranks, named in one difference."""


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
        only = (self.before, self.only_before), (self.after, self.only_after)
        lines += [f"Only in {plan}: {first_of(tables, MAX_SHOWN)}." for plan, tables in only if tables]
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
            return (
                f"Costs of {self.before} and {self.after} come from different sources and cannot be compared. Rate "
                "both by one source: dreamshard compare --costs auto."
            )
        before, after = self.cost_before.chosen, self.cost_after.chosen
        times, (one, other) = after.times(before), self.samples
        each = f", for {other:,} samples instead of {one:,} ({times * one / other:.3f} for each)" * (one != other)
        return (
            f"A step takes {after.total_ms:.3f} ms with {self.after}, {before.total_ms:.3f} with {self.before} "
            f"({times:.3f} times){each}: compute of the slowest rank {max(after.rank_ms):.3f} instead of "
            f"{max(before.rank_ms):.3f} ms, collectives {after.collectives_ms:.3f} instead of "
            f"{before.collectives_ms:.3f} ms."
        )

    def _costs(self) -> list[str]:
        one, other = self.cost_before, self.cost_after
        before, after = one.chosen, other.chosen
        rows: list[tuple[str, float | None, float | None]] = [
            ("total", before.total_ms, after.total_ms),
            ("collectives", before.collectives_ms, after.collectives_ms),
            *((f"rank {rank}", *ms) for rank, ms in enumerate(zip_longest(before.rank_ms, after.rank_ms))),
        ]
        lines = [f"{'predicted ms':<14}{'before':>12}{'after':>12}"]
        for name, *each_ms in rows[: MAX_SHOWN + 2]:
            was, now = ("-" if ms is None else f"{ms:.3f}" for ms in each_ms)
            lines.append(f"{name:<14}{was:>12}{now:>12}")
        lines += _more(len(rows) - 2, "ranks")
        was, now = (f"compute {cost.cost_source}, collectives {cost.collectives_source}." for cost in (one, other))
        return [*lines, *([f"Both: {now}"] if was == now else [f"Before: {was}", f"After: {now}"])]


def compare(before: SavedPlan | str | Path, after: SavedPlan | str | Path) -> Comparison:
    """Compare two plans by the costs that their files hold.

    ``DreamShardPlanner.saved_plan`` makes a :class:`SavedPlan` of any plan of its model, so that a planner's plan
    compares with a file: ``compare("plan.json", planner.saved_plan())``.

    Args:
        before: a plan, or the file of one, which gives it its path for a name.
        after: another one.

    Raises:
        PlanError: a file can't be read; names it.
        TypeError: a plan is neither a saved one nor a file.
    """
    before, after = map(_loaded, (before, after))
    one, other = dict(before.tables()), dict(after.tables())
    was, now = ({fqn: table.weights for fqn, table in plan.inputs.tables.items()} for plan in (before, after))
    alike = sorted(fqn for fqn in one if was[fqn] == now.get(fqn))
    changes, received = _changes(before, after, alike)
    samples = [plan.inputs.batch_size * plan.inputs.topology.all_ranks for plan in (before, after)]
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
        machine=tuple(machine := machine_differences(before.inputs, after.inputs)),
        inputs=tuple(text for text in differences(before.inputs, after.inputs) if text not in machine),
        samples=(samples[0], samples[1]),
    )


def _loaded(plan: SavedPlan | str | Path) -> SavedPlan:
    if not isinstance(plan, SavedPlan | str | Path):
        raise TypeError(f"compare takes files, or plans of DreamShardPlanner.saved_plan, got {type(plan).__name__}")
    return plan if isinstance(plan, SavedPlan) else replace(SavedPlan.load(plan), name=str(plan))


def _changes(
    before: SavedPlan, after: SavedPlan, alike: Sequence[str]
) -> tuple[tuple[TableChange, ...], tuple[int, ...]]:
    """Return changes of common tables, most bytes first, and the bytes that each rank receives."""
    one, other = dict(before.tables()), dict(after.tables())
    was, now = before.inputs.topology, after.inputs.topology
    received_D = np.zeros(max(was.all_ranks, now.all_ranks), dtype=np.int64)
    changes = []
    for fqn in alike:
        if one[fqn] == other[fqn] and was.groups == now.groups:
            continue
        shards = _on_all_ranks(other[fqn], now)
        bytes_S = _received_S(before.inputs.tables[fqn], _on_all_ranks(one[fqn], was), shards)
        np.add.at(received_D, [shard.rank for shard in shards], bytes_S)
        retyped = (one[fqn].sharding_type, one[fqn].kernel) != (other[fqn].sharding_type, other[fqn].kernel)
        labels = _label(one[fqn], was), _label(other[fqn], now)
        changes.append(TableChange(fqn, *labels, retyped, int(bytes_S.sum())))
    return tuple(sorted(changes, key=lambda change: -change.bytes_received)), tuple(received_D.tolist())


def _label(table: TableSharding, topology: TopologyInputs) -> str:
    return f"{table.label} of each of {topology.num_groups} groups" if topology.groups else table.label


def _on_all_ranks(table: TableSharding, topology: TopologyInputs) -> list[ShardPlace]:
    """Return the shards of a table on the ranks of all sharding groups."""
    return [replace(shard, rank=rank) for shard in table.shards for rank in topology.replicas(shard.rank)]


def _received_S(table: TableInputs, held: Sequence[ShardPlace], shards: Sequence[ShardPlace]) -> np.ndarray:
    """Return the bytes of each shard, optimizer states with them, that its own rank does not hold, in time linear in
    shards."""
    of_rank: dict[int, list[ShardPlace]] = {}
    for shard in held:
        of_rank.setdefault(shard.rank, []).append(shard)
    start_S2, size_S2 = np.array([(shard.offset, shard.size) for shard in shards], dtype=np.int64).swapaxes(0, 1)
    new_S = size_S2.prod(-1)
    pairs = [(index, old) for index, shard in enumerate(shards) for old in of_rank.get(shard.rank, ())]
    if pairs:
        index_X = [index for index, _ in pairs]
        old_start_X2, old_size_X2 = np.array([(old.offset, old.size) for _, old in pairs]).swapaxes(0, 1)
        kept_X = _common_elements(start_S2[index_X], size_S2[index_X], old_start_X2, old_size_X2)
        np.subtract.at(new_S, index_X, kept_X)
    return table.trained_bytes(new_S, size_S2[:, 1].clip(1))


def _common_elements(
    start_2: np.ndarray, size_2: np.ndarray, other_start_2: np.ndarray, other_size_2: np.ndarray
) -> np.ndarray:
    """Return the number of elements that lie in both of two places, for any leading dimensions."""
    sides_2 = np.minimum(start_2 + size_2, other_start_2 + other_size_2) - np.maximum(start_2, other_start_2)
    return sides_2.clip(0).prod(-1)


def received_SD(
    table: TableInputs,
    places: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    held: Sequence[ShardPlace] | None,
    ranks: int,
) -> np.ndarray:
    """Return the bytes of each shard, optimizer states with them, that each rank does not hold, were the shard there.

    Args:
        table: of the shards.
        places: offset and size of each.
        held: shards that ranks have; None for a new table, which gets no bytes.
        ranks: number of ranks.
    """
    start_S2, size_S2 = np.array(places, dtype=np.int64).swapaxes(0, 1)
    if held is None:
        return np.zeros((len(places), ranks), dtype=np.int64)
    new_SD = size_S2.prod(-1, keepdims=True).repeat(ranks, 1)
    for shard in held:
        new_SD[:, shard.rank] -= _common_elements(start_S2, size_S2, np.array(shard.offset), np.array(shard.size))
    return table.trained_bytes(new_SD, size_S2[:, 1:].clip(1))


def names_that_keep_most(held: Mapping[str, Sequence[ShardPlace]], after: SavedPlan) -> tuple[int, ...]:
    """Name each rank of ``after`` so that most bytes of weights and optimizer states stay where they are.

    Ranks of one pod (by default of one host) remain in one pod. Ranks of other memory, and all ranks if placement rules
    name some, keep their names.

    Args:
        held: shards that ranks hold, by fully qualified name of the table.
        after: the other plan.
    """
    other = after.inputs.topology
    ranks, per_pod = other.world_size, other.pod_ranks
    if ranks % per_pod or after.inputs.placement_rules.get("on_ranks"):
        return tuple(range(ranks))
    # Bytes to receive under each name; half a byte less under the own one.
    rank_DD, pod_HH = -np.eye(ranks) / 2, -np.eye(ranks // per_pod) / 2
    for fqn, table in after.tables():
        span = _span(table)
        if span == "world" or not held.get(fqn):
            continue
        places = [(shard.offset, shard.size) for shard in table.shards]
        bytes_SD = received_SD(after.inputs.tables[fqn], places, held[fqn], ranks)
        for shard, bytes_D in zip(table.shards, bytes_SD, strict=True):
            if span == "rank":
                rank_DD[shard.rank] += bytes_D
            else:  # its place within the pod stays
                pod_HH[shard.rank // per_pod] += bytes_D[shard.rank % per_pod :: per_pod]
    memory_D = list(zip(*(sizes for _, sizes in sorted(other.memory_bytes.items())), strict=True))
    rank_DD[np.array([[mine != its for its in memory_D] for mine in memory_D])] = FORBIDDEN
    blocks_HHLL = rank_DD.reshape(len(pod_HH), per_pod, len(pod_HH), per_pod).swapaxes(1, 2)
    pairs = [[_assigned(block_LL) for block_LL in row_HLL] for row_HLL in blocks_HHLL]
    pod_HH += [[received for _, received in row] for row in pairs]
    pod_names, _ = _assigned(pod_HH)
    return tuple(name * per_pod + place for pod, name in enumerate(pod_names) for place in pairs[pod][name][0])


def _assigned(received: np.ndarray) -> tuple[list[int], float]:
    """The column of each row for the least in all, and that."""
    rows, columns = linear_sum_assignment(received)
    return columns.tolist(), float(received[rows, columns].sum())


def renamed(plan: SavedPlan, names: Sequence[int]) -> SavedPlan:
    """Return the plan with its shards on ranks of other names; its predicted costs stay as they are.

    Tables on all ranks, or on all ranks of a pod, keep the order of ranks, which TorchRec needs.
    """
    if list(names) == list(range(len(names))):
        return plan
    per_pod = plan.inputs.topology.pod_ranks
    # Ranks of a pod get names in one pod.
    in_order = [names[rank - rank % per_pod] // per_pod * per_pod + rank % per_pod for rank in range(len(names))]
    new = {"rank": names, "host": in_order, "world": range(len(names))}

    def moved(table: TableSharding) -> TableSharding:
        ranks = new[_span(table)]
        return replace(table, shards=tuple(replace(shard, rank=ranks[shard.rank]) for shard in table.shards))

    sharding = {path: {name: moved(table) for name, table in of.items()} for path, of in plan.sharding.items()}
    return replace(plan, sharding=sharding)


def _span(table: TableSharding) -> str:
    known = SHARDING_TYPES.get(table.sharding_type)
    return "world" if known is None else known.span


def _more(count: int, what: str) -> list[str]:
    return [f"... and {count - MAX_SHOWN} more {what}"] if count > MAX_SHOWN else []


def differences(made_from: PlanInputs, now: PlanInputs) -> Iterator[str]:
    """Yield the differences of a plan's inputs to those of now, as what was, ``->``, what is; stale ones first."""
    yield from stale_differences(made_from, now)
    yield from _memory(made_from.topology, now.topology)
    yield from _differing(made_from, now, "lookups", "links", "settings")


def machine_differences(one: PlanInputs, other: PlanInputs) -> list[str]:
    """Between the ranks of two plans, their memories and what connects them."""
    memory = _memory(one.topology, other.topology)
    return [*_differing(one, other, "ranks"), *memory, *_differing(one, other, "links")]


def stale_differences(made_from: PlanInputs, now: PlanInputs) -> Iterator[str]:
    """Yield the differences with which a plan must not be used. Its room in other memory is for the caller to check."""
    yield from _differing(made_from, now, "ranks", "batch")
    was, has = made_from.tables.keys(), now.tables.keys()
    for names, what in ((was - has, "is gone"), (has - was, "is new")):
        yield from _few([f"table {name!r} {what}" for name in sorted(names)])
    one, other = (replace(each, tables={name: each.tables[name] for name in was & has}) for each in (made_from, now))
    yield from _differing(one, other, "tables", "constraints", "rules")


def _facts(inputs: PlanInputs) -> dict[str, dict[str, Any]]:
    """Return a plan's inputs but memory, by kind and by name in words."""
    topology = inputs.topology
    constraints: dict[bool, dict[str, Any]] = {False: {}, True: {}}
    for table, constraint in inputs.constraints.items():
        for key, value in constraint.items():
            constraints[key in COSTS_ALONE][f"constraint of table {table!r}, {key}:"] = value
    return {
        "ranks": {
            "device": topology.compute_device,
            "number of ranks": topology.world_size,
            "ranks of a host": topology.local_world_size,
            "hosts of a pod": topology.pod_size,
        },
        "batch": {"batch size": inputs.batch_size},
        "tables": {
            f"{entry.name} of table {name!r}": getattr(table, entry.name)
            for name, table in sorted(inputs.tables.items())
            for entry in fields(table)
        },
        "constraints": constraints[False],
        "rules": {f"placement_rules, {name}:": rule for name, rule in inputs.placement_rules.items()},
        "lookups": {"statistics": inputs.statistics and inputs.statistics[:12], **constraints[True]},
        "links": {
            "sharding groups of so many ranks": topology.num_groups,
            "cards": " and ".join(topology.cards) or "unnamed",
            "ranks of a host that compute at once": topology.cores or "all",
            **{f"bandwidth of {name}": f"{rate / 1e6:,.6g} GB/s" for name, rate in topology.bandwidths.items()},
            **{f"multipliers, {name}:": factor for name, factor in topology.multipliers.items()},
            **{f"collective_bandwidths, {name}:": rate for name, rate in topology.collective_bandwidths.items()},
        },
        "settings": {f"setting, {name}:": value for name, value in inputs.settings.items()},
    }


def _differing(one: PlanInputs, other: PlanInputs, *kinds: str) -> Iterator[str]:
    """Yield the differences of some kinds; missing entries are None."""
    was, now = _facts(one), _facts(other)
    for kind in kinds:
        pairs = [(name, was[kind].get(name), now[kind].get(name)) for name in {**was[kind], **now[kind]}]
        yield from _few([f"{name} {_shown(one)} -> {_shown(other)}" for name, one, other in pairs if one != other])


def _few(found: Sequence[str]) -> Iterator[str]:
    yield from found[:NAMED]
    if len(found) > NAMED:
        yield f"{len(found) - NAMED} more differences of this kind"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) or "''"


def _memory(one: TopologyInputs, other: TopologyInputs) -> Iterator[str]:
    """Yield differences in the memory of each rank, if both have as many."""
    for kind in sorted(one.memory_bytes) if one.world_size == other.world_size else ():
        pairs = enumerate(zip(one.memory_bytes[kind], other.memory_bytes[kind], strict=True))
        changed = [(rank, pair) for rank, pair in pairs if max(pair) - min(pair) > MEMORY_TOLERANCE * max(pair)]
        for rank, (was, has) in changed[:1]:
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield f"{kind} of rank {rank}{others} {memory_in_words(was)} -> {memory_in_words(has)}"
