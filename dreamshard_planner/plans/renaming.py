# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A plan with its ranks named as another plan has them: what merely trades places between like ranks need not move.

Shapes: N shards before, P shards after, D ranks, H hosts, L ranks of a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment

from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableSharding
from dreamshard_planner.plans.report import ReportEntry
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES

Number = TypeVar("Number", bound=float)
FORBIDDEN = -1e18
"""Bytes that stay between ranks of other memory: worse than any."""


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
    """The same, where ranks hold these shards of tables by fully qualified name."""
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
    """Whether a table with a block of rows on each rank has statistics that the file lacks: histograms of ids."""
    of_blocks = [fqn for fqn, table in plan.tables()
                 if (spec := SHARDING_TYPES.get(table.sharding_type)) is None or spec.splits_rows]  # fmt: skip
    read = {name for fqn in of_blocks for name in plan.inputs.tables[fqn].features}
    return plan.inputs.statistics is not None and not read <= plan.inputs.features.keys()


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
