# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables of one embedding tower, which TorchRec wants on one host: they are pinned before the search, which places all
other tables around them.

A table is pinned where its shards have ranks before a problem is made of its options.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Topology
from torchrec.distributed.planner.utils import reset_shard_rank

from dreamshard_planner.search_space.options import by_table, fqn_of, lacks_room, ranks_of, same_option, set_ranks


def pin(proposal: Sequence[ShardingOption], topology: Topology) -> None:
    """Set the ranks of the proposal's dependent tables, heaviest first on the host with least to do, by the perf of
    their shards.

    Raises:
        PlannerError: no host has room for some of them.
    """
    dependent = [option for option in proposal if option.dependency]
    try:
        GreedyPerfPartitioner().partition(dependent, topology)
    except PlannerError as error:
        reset_shard_rank(dependent)
        largest = max(dependent, key=_bytes)
        raise lacks_room(
            f"Tables do not fit: no host has room for all tables of one of "
            f"{sorted({option.dependency for option in dependent})}, of which the largest, "
            f"{fqn_of(largest)!r}, needs {_bytes(largest):,} bytes. Larger devices, a "
            "smaller storage reservation, or fewer tables per tower would help."
        ) from error


def pinned_options(
    options: Sequence[ShardingOption], topology: Topology, given: Sequence[ShardingOption] | None
) -> list[ShardingOption]:
    """Return the options, of which every dependent table keeps one, with ranks.

    Args:
        options: of all tables.
        topology: what the storage reservation leaves.
        given: a plan that fits, whose dependent tables stay as they are; None to pin each table's option of least perf
            or, if no host has room for these, of least memory.

    Raises:
        PlannerError: no host has room for some dependent tables.
    """
    dependent = by_table(option for option in options if option.dependency)
    if not dependent:
        return list(options)
    free = [option for option in options if not option.dependency]
    if given is None:
        pinned = [min(choices, key=lambda option: option.total_perf) for choices in dependent.values()]
        try:
            pin(pinned, topology)
        except PlannerError:
            pinned = [min(choices, key=_bytes) for choices in dependent.values()]
            pin(pinned, topology)
        return [*free, *pinned]
    pinned = []
    for option in given:
        for choice in dependent.get(fqn_of(option), ()):
            if same_option(choice, option):
                set_ranks(choice, ranks_of(option))
                pinned.append(choice)
    return [*free, *pinned]


def _bytes(option: ShardingOption) -> int:
    storage = option.total_storage
    return storage.hbm + storage.ddr + storage.ssd
