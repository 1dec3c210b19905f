# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables that TorchRec wants on one host together, those of an embedding tower: pinned before the search, which places
all others around them.

Pins are ranks of the shards of these tables, set before options are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption, Topology
from torchrec.distributed.planner.utils import reset_shard_rank

from dreamshard_planner.search_space.options import by_table, fqn_of, same_option


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
        largest = max(dependent, key=lambda option: sum(map(_bytes, option.shards)))
        raise PlannerError(
            f"Tables do not fit: no host has room for all tables of one of "
            f"{sorted({option.dependency for option in dependent})}, of which the largest, "
            f"{fqn_of(largest)!r}, needs {sum(map(_bytes, largest.shards)):,} bytes. Larger devices, a "
            "smaller storage reservation, or fewer tables per tower would help.",
            PlannerErrorType.INSUFFICIENT_STORAGE,
        ) from error


def pinned_options(
    options: Sequence[ShardingOption], topology: Topology, given: Sequence[ShardingOption] | None
) -> Iterator[list[ShardingOption]]:
    """The options, of dependent tables only one each with its ranks set, for every way to pin these that is worth a
    search: as a given plan has them, and by the least perf, or the least memory, of each table that a host has room
    for. Once, and as they are, where no table depends on others."""
    dependent = by_table(option for option in options if option.dependency)
    if not dependent:
        yield list(options)
        return
    free = [option for option in options if not option.dependency]
    if given is not None:
        yield [*free, *_as_given(dependent, given)]
    for key in (lambda option: option.total_perf, lambda option: sum(map(_bytes, option.shards))):
        chosen = _chosen(dependent.values(), key)
        try:
            pin(chosen, topology)
        except PlannerError:
            continue
        yield [*free, *chosen]
        return


def _chosen(tables: Iterable[Sequence[ShardingOption]], key: Callable[[ShardingOption], float]) -> list[ShardingOption]:
    return [min(choices, key=key) for choices in tables]


def _as_given(dependent: dict[str, list[ShardingOption]], given: Sequence[ShardingOption]) -> list[ShardingOption]:
    pinned = []
    for option in given:
        for choice in dependent.get(fqn_of(option), ()):
            if same_option(choice, option):
                for shard, other in zip(choice.shards, option.shards, strict=True):
                    shard.rank = other.rank
                pinned.append(choice)
    return pinned


def _bytes(shard) -> int:
    return shard.storage.hbm + shard.storage.ddr + shard.storage.ssd
