# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Units of TorchRec's options: which shards lie on consecutive ranks together, and which ranks a position means."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology

from dreamshard_planner.cost.problem import Unit
from dreamshard_planner.search_space.options import cannot_lie_so, fqn_of, ranks_of, type_of
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, Ranks


def impossible_types(topology: Topology) -> dict[str, str]:
    """Sharding types that the topology rules out, and why: TorchRec forms groups of whole hosts only."""
    ranks, host = topology.world_size, topology.intra_group_size
    of_hosts = [kind for kind, spec in SHARDING_TYPES.items() if spec.span == "host"]
    return dict.fromkeys(of_hosts, f"{ranks} ranks are no whole number of hosts of {host}") if ranks % host else {}


def num_ranks(ranks: Ranks, topology: Topology) -> int:
    """How many ranks of the topology these are."""
    return {"rank": 1, "host": topology.intra_group_size, "world": topology.world_size}[ranks]


def units_of(option: ShardingOption, parts: Sequence[int], topology: Topology) -> tuple[Unit, ...]:
    """The option's shards, by their parts, in units.

    Raises:
        PlannerError: they do not fill units, or lie on hosts of which some are not whole.
    """
    span, impossible = num_ranks(type_of(option).span, topology), impossible_types(topology)
    if impossible and (option.dependency or option.sharding_type in impossible):
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} belongs on one host, and {next(iter(impossible.values()))}: give Topology "
            "a local_world_size (and pod_size) that divides its world_size"
        )
    if not parts or len(parts) % span:
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} is to be sharded {option.sharding_type} in {len(parts)} shards, "
            f"which do not fill units of {span} ranks"
        )
    return tuple(Unit(tuple(parts[first : first + span])) for first in range(0, len(parts), span))


def positions_of(option: ShardingOption, units: Sequence[Unit]) -> tuple[int, ...]:
    """The position of each of an option's units, from the ranks of its shards.

    Raises:
        PlannerError: TorchRec would not run the shards on these ranks.
    """
    positions, ranks = [], iter(ranks_of(option))
    for unit in units:
        here = [next(ranks) for _ in range(unit.span)]
        position = (here[0] or 0) // unit.span
        if here != list(unit.ranks(position)):
            raise cannot_lie_so(
                f"table {fqn_of(option)!r} is sharded {option.sharding_type} on ranks {here}, which "
                "TorchRec would not run so"
            )
        positions.append(position)
    return tuple(positions)


def pinned_positions(option: ShardingOption, units: Sequence[Unit]) -> tuple[int, ...] | None:
    """Positions of the units of a dependent table whose shards have ranks, see
    :mod:`~dreamshard_planner.search_space.towers`; None for others."""
    if not option.dependency or None in ranks_of(option):
        return None
    return positions_of(option, units)


def check_hosts(options: Iterable[ShardingOption], topology: Topology) -> None:
    """PlannerError where pinned tables that depend on each other are on several hosts."""
    hosts: dict[str, dict[int, str]] = {}
    for option in options:
        for rank in ranks_of(option) if option.dependency else []:
            if rank is not None:
                host = rank // topology.intra_group_size
                hosts.setdefault(option.dependency, {})[host] = fqn_of(option)
    for dependency, tables in hosts.items():
        if len(tables) > 1:
            raise cannot_lie_so(
                f"tables {sorted(tables.values())} of {dependency!r} are on hosts {sorted(tables)}; TorchRec wants "
                "them on one"
            )
