# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Placement rules of users (together, apart, on certain ranks), and the limits per rank that express them.

Policy, heuristics and search keep limits of any kind. A table for some ranks needs a count that others lack.
Tables that are apart need one each of a count that is one on every rank. Tables that are together get their rank first,
heavy groups before light ones.

Shapes: P parts, D ranks, R rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor
from torchrec.distributed.planner.types import Topology

from dreamshard_planner.plans.plan_file import TableSharding
from dreamshard_planner.search_space.modules import ShardableTable
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.support.formatting import checked, nearest, ranks_in_words


@dataclass(frozen=True)
class PlacementRules:
    """Rules that every plan keeps; for ``DreamShardPlanner(placement_rules=...)``.

    Tables are named by their own names, which means all tables of that name, or by fully qualified ones.

    Args:
        together: groups of tables that lie whole on one rank each. Groups that share a table are one.
        apart: groups of tables of which no rank holds two shards.
        on_ranks: ranks that may hold shards of a table.

    Raises:
        ValueError: a group has fewer than two tables, tables are both together and apart, or a rank is impossible.

    Example::

        PlacementRules(together=[("user", "item")], apart=[("hot_1", "hot_2")], on_ranks={"private": [0, 1]})
    """

    together: Sequence[Sequence[str]] = ()
    apart: Sequence[Sequence[str]] = ()
    on_ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "together", _merged(_groups("together", self.together)))
        object.__setattr__(self, "apart", _groups("apart", self.apart))
        object.__setattr__(self, "on_ranks", {name: _ranks(name, ranks) for name, ranks in self.on_ranks.items()})
        for group in self.together:
            for other in self.apart:
                both = sorted(set(group) & set(other))
                if len(both) > 1:
                    raise ValueError(f"tables {both} are to be together and apart")

    def to_dict(self) -> dict[str, Any]:
        """Return the rules for JSON, in a canonical order."""
        return {
            "together": sorted(map(list, self.together)),
            "apart": sorted(map(list, self.apart)),
            "on_ranks": {name: list(ranks) for name, ranks in sorted(self.on_ranks.items())},
        }


def _groups(what: str, groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    checked = []
    for group in groups:
        names = set() if isinstance(group, str) or not isinstance(group, Iterable) else set(group)
        if len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{what} takes groups of two tables or more, such as [('a', 'b')]; got {group!r}")
        checked.append(tuple(sorted(names)))
    return tuple(checked)


def _merged(groups: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    merged: list[set[str]] = []
    for group in map(set, groups):
        for other in [other for other in merged if other & group]:
            merged.remove(other)
            group |= other
        merged.append(group)
    return tuple(tuple(sorted(group)) for group in merged)


def _ranks(name: str, ranks: Sequence[int]) -> tuple[int, ...]:
    given = {checked(f"on_ranks of table {name!r}", r, 0) for r in (ranks if isinstance(ranks, Iterable) else [ranks])}
    if not given:
        raise ValueError(f"on_ranks of table {name!r} must name at least one rank")
    return tuple(sorted(given))


PLENTY = 2**20
"""Count of a rule on the ranks that it allows, above any number of parts."""


@dataclass(frozen=True)
class LegalRanks:
    """Ranks that rules allow a model's tables, by fully qualified name."""

    world_size: int
    host_size: int
    allowed: Mapping[str, frozenset[int]]
    """Ranks of tables that are not allowed everywhere."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of tables that share one allowed rank."""
    apart: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(
        cls,
        rules: PlacementRules,
        tables: Sequence[ShardableTable],
        topology: Topology,
    ) -> LegalRanks:
        """Apply a user's rules to the tables of a model; PlannerError if a rule names an unknown table or rank, or
        one table by several names, or if no ranks are left."""
        fqns: dict[str, list[str]] = {}
        for table in sorted(tables, key=lambda table: table.fqn):
            for name in {table.name, table.fqn}:
                fqns.setdefault(name, []).append(table.fqn)
        for name in chain(*rules.together, *rules.apart, rules.on_ranks):
            if name not in fqns:
                raise refused(
                    f"placement_rules name table {name!r}, which the model does not have{nearest(name, fqns)}"
                )
        everywhere = frozenset(range(topology.world_size))
        allowed: dict[str, frozenset[int]] = {}
        for name, given in rules.on_ranks.items():
            if given[-1] not in everywhere:
                last = topology.world_size - 1
                raise refused(f"on_ranks of table {name!r} names rank {given[-1]}; there are ranks 0 to {last}")
            for fqn in fqns[name]:
                allowed[fqn] = allowed.get(fqn, everywhere) & frozenset(given)
        together, apart = (tuple(_members(group, fqns) for group in groups) for groups in (rules.together, rules.apart))
        _settle(allowed, together, apart, _shares(tables), topology.world_size)
        legal = cls(topology.world_size, topology.intra_group_size, allowed, together, apart)
        legal._check_apart()
        return legal

    def left_out(self, fqn: str) -> dict[str, str]:
        """Return the sharding types that the rules leave a table no place for, and why."""
        everywhere = frozenset(range(self.world_size))
        ranks = self.allowed.get(fqn, everywhere)
        others = sorted({other for group in self.apart if fqn in group for other in group} - {fqn})
        if ranks != everywhere:
            reason = f"placement_rules leave it {ranks_in_words(ranks)}"
        elif others and self.world_size > 1:
            reason = f"it would lie on every rank, and placement_rules keep it apart from {others[0]!r}"
        else:
            return {}
        firsts = range(0, self.world_size, self.host_size)
        hosts = [host for first in firsts if (host := frozenset(range(first, first + self.host_size))) <= ranks]
        wide = {"world", "host"} if not hosts or (others and len(firsts) == 1 < self.world_size) else {"world"}
        return {kind: reason for kind, spec in SHARDING_TYPES.items() if spec.span in wide}

    def limits(self, fqn_P: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return need of each rule's count by part, int64 [P, R], and room by rank, int64 [D, R]."""
        groups: dict[frozenset[int], set[str]] = {}
        for fqn, ranks in self.allowed.items():
            groups.setdefault(ranks, set()).add(fqn)
        rules = [
            (members, [PLENTY * (rank in ranks) for rank in range(self.world_size)])
            for ranks, members in groups.items()
        ]
        rules += [(set(group), [1] * self.world_size) for group in self.apart]
        need_PR = torch.tensor([[fqn in members for members, _ in rules] for fqn in fqn_P], dtype=torch.int64)
        room_RD = torch.tensor([room_D for _, room_D in rules], dtype=torch.int64)
        return need_PR.view(len(fqn_P), len(rules)), room_RD.view(len(rules), self.world_size).T

    def check(self, shardings: Mapping[str, TableSharding], name: str) -> None:
        """Raise PlannerError, naming rule and tables, for a plan that breaks a rule; groups may share any rank."""
        held = {fqn: {shard.rank for shard in sharding.shards} for fqn, sharding in shardings.items()}
        one_rank = {fqn for group in self.together for fqn in group}
        for fqn, ranks in self.allowed.items():
            if fqn not in one_rank and not held[fqn] <= ranks:
                raise refused(
                    f"{name} has table {fqn!r} on {ranks_in_words(held[fqn])}, and it may be on {ranks_in_words(ranks)}"
                )
        for group in self.together:
            if len(set().union(*(held[fqn] for fqn in group))) > 1:
                raise refused(f"{name} does not have tables {list(group)} together")
        for group in self.apart:
            holders: dict[int, str] = {}
            for fqn in group:
                for shard in shardings[fqn].shards:
                    if (other := holders.get(shard.rank)) is not None:
                        what = f"tables {other!r} and {fqn!r}" if other != fqn else f"two shards of table {fqn!r}"
                        raise refused(f"{name} has {what} on {ranks_in_words([shard.rank])}, not apart")
                    holders[shard.rank] = fqn

    def notes(self) -> tuple[str, ...]:
        """Return notes for the report of a plan."""
        return (
            "the plan keeps placement_rules; rivals that break them count as infeasible",
            *(
                f"placement_rules: {', '.join(group)} are together on {ranks_in_words(self.allowed[group[0]])}"
                for group in self.together
            ),
        )

    def _check_apart(self) -> None:
        """Raise PlannerError if tables that are apart do not all find a rank."""
        for group in self.apart:
            ranks = [self.allowed.get(fqn, range(self.world_size)) for fqn in group]
            possible = [[rank in allowed for rank in range(self.world_size)] for allowed in ranks]
            if (maximum_bipartite_matching(csr_array(np.array(possible, dtype=np.int8)), perm_type="column") < 0).any():
                union = ranks_in_words(set().union(*ranks))
                raise refused(f"the {len(group)} tables {list(group)} cannot be apart: they have {union} to share")


def _shares(tables: Sequence[ShardableTable]) -> dict[str, float]:
    """Return each table's share of all bytes or of all columns read (once per sample by default), the larger one."""

    def lookups(table: ShardableTable) -> float:
        known = table.owner.counted
        return sum(known[name].pooling_factor if name in known else 1.0 for name in table.feature_names)

    size = {table.fqn: float(table.parameter.numel() * table.parameter.element_size()) for table in tables}
    work = {table.fqn: lookups(table) * table.parameter.shape[1] for table in tables}
    all_size, all_work = max(1.0, sum(size.values())), max(1.0, sum(work.values()))
    return {fqn: max(size[fqn] / all_size, work[fqn] / all_work) for fqn in size}


def _settle(
    allowed: dict[str, frozenset[int]],
    together: Sequence[tuple[str, ...]],
    apart: Sequence[Sequence[str]],
    share: Mapping[str, float],
    world_size: int,
) -> None:
    """Give every group that is together a rank, in place: the allowed one with the least share so far."""
    every, loads = frozenset(range(world_size)), [0.0] * world_size
    grouped = {fqn for group in together for fqn in group}
    for fqn, ranks in allowed.items():
        if len(ranks) == 1 and fqn not in grouped:
            loads[min(ranks)] += share[fqn]
    share_of = {group: sum(share[fqn] for fqn in group) for group in together}
    for group in sorted(together, key=lambda group: (-share_of[group], group)):
        ranks = every.intersection(*(allowed.get(fqn, every) for fqn in group))
        rivals = {other for others in apart if set(group) & set(others) for other in others} - set(group)
        free = [rank for rank in ranks if not any(allowed.get(rival) == frozenset({rank}) for rival in rivals)]
        if not free:
            why = "on_ranks" if not ranks else "on_ranks and apart"
            raise refused(f"no rank is left for tables {list(group)} together: {why} leave them none in common")
        rank = min(free, key=lambda rank: (loads[rank], rank))
        loads[rank] += share_of[group]
        allowed.update(dict.fromkeys(group, frozenset({rank})))


def _members(group: Sequence[str], fqns: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the tables of a group, each once."""
    members = tuple(dict.fromkeys(fqn for name in group for fqn in fqns[name]))
    if len(members) < 2:
        raise refused(f"placement_rules have a group {list(group)}, all of which are one table, {members[0]!r}")
    return members
