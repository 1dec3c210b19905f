# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Differences between the inputs of a plan and those of its use.

Other tables, ranks, memory, batch size or constraints make a plan stale: it may not run, not fit, or break what was
asked for. What it was merely chosen by (statistics, bandwidths, cost source, seed) may differ when a job starts again,
and is told beside its cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from dreamshard_planner.plans.plan_file import PlanInputs, TableInputs, TopologyInputs
from dreamshard_planner.support.formatting import memory_in_words

MEMORY_TOLERANCE = 0.01
"""Share by which memories may differ: machines of one kind do, by a few megabytes, from boot to boot."""
NAMED = 5
"""Tables, and ranks, named in one difference."""


def differences(made_from: PlanInputs, now: PlanInputs) -> list[str]:
    """Between what a plan was made from and what there is now, each as what was, ``->``, what is; those that make it
    stale first."""
    return [*stale_differences(made_from, now), *_chosen_by(made_from, now)]


def machine_differences(one: TopologyInputs, other: TopologyInputs) -> list[str]:
    """Between the ranks of two plans, their memories and what connects them."""
    return [*_ranks(one, other), *_surroundings(one, other)]


def stale_differences(made_from: PlanInputs, now: PlanInputs) -> Iterator[str]:
    """Yield the differences with which a plan must not be used."""
    yield from _ranks(made_from.topology, now.topology)
    if made_from.batch_size != now.batch_size:
        yield f"batch size {made_from.batch_size} -> {now.batch_size}"
    yield from _tables(made_from.tables, now.tables)
    yield from _entries("constraint of table", made_from.constraints, now.constraints)
    yield from _entries("", {"placement_rules": made_from.placement_rules}, {"placement_rules": now.placement_rules})


def _ranks(one: TopologyInputs, other: TopologyInputs) -> Iterator[str]:
    for what, name in (
        ("compute_device", "device"),
        ("world_size", "number of ranks"),
        ("local_world_size", "ranks of a host"),
        ("pod_size", "hosts of a pod"),
    ):
        if getattr(one, what) != getattr(other, what):
            yield f"{name} {getattr(one, what)} -> {getattr(other, what)}"
    if one.world_size == other.world_size:
        yield from _memory(one, other)


def _memory(one: TopologyInputs, other: TopologyInputs) -> Iterator[str]:
    for kind in sorted(one.memory_bytes):
        before, after = one.memory_bytes[kind], other.memory_bytes[kind]
        changed = [
            rank
            for rank, (was, has) in enumerate(zip(before, after, strict=True))
            if abs(was - has) > MEMORY_TOLERANCE * max(was, has)
        ]
        if changed:
            rank = changed[0]
            others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield f"{kind} of rank {rank}{others} {memory_in_words(before[rank])} -> {memory_in_words(after[rank])}"


def _surroundings(one: TopologyInputs, other: TopologyInputs) -> Iterator[str]:
    """Yield differences in sharding groups, cards and bandwidths."""
    if one.num_groups != other.num_groups:
        yield f"sharding groups of so many ranks {one.num_groups} -> {other.num_groups}"
    if one.cards != other.cards:
        yield f"cards {' and '.join(one.cards) or 'unnamed'} -> {' and '.join(other.cards) or 'unnamed'}"
    for name in sorted(one.bandwidths):
        was, has = one.bandwidths[name] / 1e6, other.bandwidths[name] / 1e6
        if was != has:
            yield f"bandwidth of {name} {was:,.6g} -> {has:,.6g} GB/s"
    for name in ("multipliers", "collective_bandwidths"):
        yield from _entries("", {name: getattr(one, name)}, {name: getattr(other, name)})


def _tables(one: Mapping[str, TableInputs], other: Mapping[str, TableInputs]) -> Iterator[str]:
    for names, what in ((one.keys() - other.keys(), "is gone"), (other.keys() - one.keys(), "is new")):
        named = sorted(names)
        yield from (f"table {name!r} {what}" for name in named[:NAMED])
        if len(named) > NAMED:
            yield f"{len(named) - NAMED} more tables, each {what}"
    changed = [(name, field.name) for name in sorted(one.keys() & other.keys()) for field in fields(TableInputs)
               if getattr(one[name], field.name) != getattr(other[name], field.name)]  # fmt: skip
    for name, what in changed[:NAMED]:
        yield f"{what} of table {name!r} {_shown(getattr(one[name], what))} -> {_shown(getattr(other[name], what))}"
    if len(changed) > NAMED:
        yield f"{len(changed) - NAMED} more changes of tables"


def _chosen_by(made_from: PlanInputs, now: PlanInputs) -> Iterator[str]:
    if made_from.statistics != now.statistics:
        was, has = ("none" if value is None else value[:12] for value in (made_from.statistics, now.statistics))
        yield f"statistics {was} -> {has}"
    yield from _surroundings(made_from.topology, now.topology)
    yield from _entries("", {"setting": made_from.settings}, {"setting": now.settings})


def _entries(what: str, one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield every entry that differs between two mappings of mappings; missing ones are None."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        before, after = one.get(name, {}), other.get(name, {})
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                where = f"{what} {name!r}" if what else name
                found.append(f"{where}, {key}: {_shown(before.get(key))} -> {_shown(after.get(key))}")
    yield from found[:NAMED]
    if len(found) > NAMED:
        yield f"{len(found) - NAMED} more differences of this kind"


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)
