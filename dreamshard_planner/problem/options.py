# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options by table: what a table is called, which options are its own, and which shard it alike."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec.distributed.planner.types import ShardingOption


def fqn_of(option: ShardingOption) -> str:
    """Fully qualified name of the option's table, without the dot that TorchRec's begins with where the module that is
    sharded is the whole model."""
    return option.fqn.removeprefix(".")


def by_table(options: Iterable[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of each table, by its fully qualified name; tables and options in the order in which they come."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in options:
        tables.setdefault(fqn_of(option), []).append(option)
    return tables


def same_option(one: ShardingOption, other: ShardingOption) -> bool:
    """Whether two options of one table shard it alike."""
    one_way, other_way = (
        (option.sharding_type, option.compute_kernel, option.cache_load_factor, option.num_shards)
        for option in (one, other)
    )
    return one_way == other_way
