# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's sharding options by table: what a table is called, which options are its own, and which shard it alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption

from dreamshard_planner.search_space.kernels import is_known
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, ShardingTypeSpec


def refused(reason: str) -> PlannerError:
    """The error of constraints, options or rules that leave no plan, or cannot be meant."""
    return PlannerError(reason, PlannerErrorType.STRICT_CONSTRAINTS)


def lacks_room(reason: str) -> PlannerError:
    """The error of tables that memory, or rules of placement, leave no ranks."""
    return PlannerError(reason, PlannerErrorType.INSUFFICIENT_STORAGE)


def cannot_lie_so(reason: str) -> PlannerError:
    """The error of shards on ranks where TorchRec would not run them."""
    return PlannerError(reason, PlannerErrorType.PARTITION)


def fqn_of(option: ShardingOption) -> str:
    """Fully qualified name of the option's table, without the dot that TorchRec's begins with where the module that is
    sharded is the whole model."""
    return option.fqn.removeprefix(".")


def type_of(option: ShardingOption) -> ShardingTypeSpec:
    """What TorchRec does with the option's table.

    Raises:
        PlannerError: the type is none that is known.
    """
    if option.sharding_type not in SHARDING_TYPES:
        raise refused(
            f"table {fqn_of(option)!r}: unknown sharding type {option.sharding_type!r}; known are "
            f"{', '.join(SHARDING_TYPES)}"
        )
    return SHARDING_TYPES[option.sharding_type]


def by_table(options: Iterable[ShardingOption]) -> dict[str, list[ShardingOption]]:
    """The options of each table, by its fully qualified name; tables and options in the order in which they come."""
    tables: dict[str, list[ShardingOption]] = {}
    for option in options:
        tables.setdefault(fqn_of(option), []).append(option)
    return tables


def same_option(one: ShardingOption, other: ShardingOption) -> bool:
    """Whether two options of one table shard it alike. Options of an unknown kernel may differ in estimates alone."""
    one_way, other_way = (
        (option.sharding_type, option.compute_kernel, option.cache_load_factor, option.num_shards)
        for option in (one, other)
    )
    if one_way != other_way or is_known(one.compute_kernel):
        return one_way == other_way
    return [(shard.perf, shard.storage) for shard in one.shards] == [
        (shard.perf, shard.storage) for shard in other.shards
    ]


def same_options(plan: Sequence[ShardingOption], other: Sequence[ShardingOption]) -> bool:
    """Whether two plans shard the same tables in the same way, on whatever ranks."""
    mine, theirs = ({fqn_of(option): option for option in options} for options in (plan, other))
    return mine.keys() == theirs.keys() and all(same_option(mine[fqn], theirs[fqn]) for fqn in mine)
