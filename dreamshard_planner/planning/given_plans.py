# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans from elsewhere as options of the planned model: TorchRec's ``ShardingPlan``, files, lists of options. Errors
name the table."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, Shard, ShardingOption, Storage
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan

from dreamshard_planner.plans.plan_file import SavedPlan, ShardPlace, TableSharding, check_shards
from dreamshard_planner.search_space.options import (
    cannot_lie_so,
    counted,
    fqn_of,
    hot_rows_of,
    places_of,
    ranks_of,
    refused,
    set_ranks,
    spec_of,
    type_of,
    unestimated,
    with_hot_rows,
)
from dreamshard_planner.search_space.sharding_types import CACHING, FUSED, MISSED_ROWS, is_known
from dreamshard_planner.search_space.variants import misses_rows
from dreamshard_planner.support.formatting import NAMED, some_of
from dreamshard_planner.workload.lookups import HotRows

GivenPlan: TypeAlias = ShardingPlan | SavedPlan | Sequence[ShardingOption]
"""A plan of TorchRec's, one from a file, or one option with ranks for each table."""


def tables_of_model(plan: GivenPlan, known: Collection[str]) -> dict[str, Any]:
    """Return a plan's sharding of each known table; PlannerError if it has others, or lacks one."""
    given, name = tables_of(plan), plan.name if isinstance(plan, SavedPlan) else "the plan"
    unknown = [fqn for fqn in given if fqn not in known]
    if unknown:
        raise refused(
            f"{name} shards {len(unknown)} table(s) that the planned model does not have, or not on this kind of "
            f"device: {some_of(unknown, known)}"
        )
    missing = [fqn for fqn in known if fqn not in given]
    if missing:
        raise refused(
            f"{name} has no sharding of {len(missing)} table(s) that the planned model has: {some_of(missing, ())}"
        )
    return given


def as_option(
    fqn: str,
    given: ShardingOption | ParameterSharding | TableSharding,
    choices: Sequence[ShardingOption],
    world_size: int,
) -> ShardingOption:
    """Return a table's sharding as an option with ranks.

    Args:
        fqn: fully qualified name of the table.
        given: its sharding. A given option is returned as it is, others become copies of enumerated options.
        choices: its enumerated options.
        world_size: number of ranks.

    Raises:
        PlannerError: shards leave the table or do not cover it; ranks are missing or impossible; the sharding type is
            unknown.
    """
    sharding = sharding_of(fqn, given, tuple(choices[0].tensor.shape))
    spec_of(sharding.sharding_type, fqn)
    rows, dim = choices[0].tensor.shape
    try:
        check_shards(fqn, sharding, rows, dim, world_size)
    except ValueError as error:
        raise PlannerError(str(error), PlannerErrorType.INVALID_RANK_ASSIGNMENT) from error
    known = _known(choices, sharding)
    if isinstance(given, ShardingOption):
        return unestimated(given) if _is_stale(given, known) else given
    option = copy.deepcopy(known or choices[0])
    if known is None:
        option.sharding_type, option.compute_kernel = sharding.sharding_type, sharding.kernel
        option.partition_by = get_partition_by_type(sharding.sharding_type)
        option.shards = [Shard([*place.size], [*place.offset]) for place in sharding.shards]
    if isinstance(given, ParameterSharding):
        for name in ("cache_params", "enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype"):
            setattr(option, name, getattr(given, name))
    elif known is None or sharding.cache_load_factor is not None:
        params = option.cache_params or CacheParams()
        option.cache_params = replace(params, load_factor=sharding.cache_load_factor)
    if sharding.hot_rows:
        option = with_hot_rows(option, HotRows(torch.tensor(sharding.hot_rows), rows))
    set_ranks(option, [place.rank for place in sharding.shards])
    return unestimated(option) if _is_stale(option, known) else option


def enumerated_as(choices: Sequence[ShardingOption], sharding: TableSharding) -> ShardingOption | None:
    """Return the enumerated option that shards a table so, if there is one.

    A cached table may have been promoted to device memory, as by TorchRec's ``EmbeddingOffloadScaleupProposer``.
    """
    kernels = (sharding.kernel, *([CACHING] if sharding.kernel == FUSED else []))
    found = (_known(choices, replace(sharding, kernel=kernel)) for kernel in kernels)
    return next(filter(None, found), None)


def _known(choices: Iterable[ShardingOption], sharding: TableSharding) -> ShardingOption | None:
    """Return the option that shards a table so, if it was enumerated; with its cache size if possible."""
    places = [(shard.offset, shard.size) for shard in sharding.shards]
    way = sharding.sharding_type, sharding.kernel, len(places)
    known = [
        choice
        for choice in choices
        if (choice.sharding_type, choice.compute_kernel, choice.num_shards) == way and places_of(choice) == places
    ]
    sized = (choice for choice in known if choice.cache_load_factor == sharding.cache_load_factor)
    return next(sized, known[0] if known else None)


def check_rows(option: ShardingOption) -> None:
    """Raise PlannerError, naming table and rows, if TorchRec would look rows up elsewhere than they lie."""
    if MISSED_ROWS not in type_of(option).broken_cuts or not misses_rows(option):
        return
    rows = [size[0] for (_, column), size in places_of(option) if column == 0]
    named = ", ".join(map(str, rows[:NAMED])) + (", ..." if len(rows) > NAMED else "")
    equal = -(-option.tensor.shape[0] // len(rows))
    raise cannot_lie_so(
        f"table {fqn_of(option)!r} is {option.sharding_type} in blocks of {named} rows: {MISSED_ROWS.text}. Plan it "
        f"again: blocks of {equal} rows, the last one of what is left, are right"
    )


def _is_stale(option: ShardingOption, known: ShardingOption | None) -> bool:
    """Return whether an option still has the storage of another kernel or cache size than the enumerated option.

    Options of an unknown kernel may differ in storage alone.
    """
    if known is None:
        return False
    same_storage, same_size = _storage(option) == _storage(known), option.cache_load_factor == known.cache_load_factor
    return same_storage != same_size and (same_storage or is_known(option.compute_kernel))


def _storage(option: ShardingOption) -> list[Storage | None]:
    return [shard.storage for shard, count in counted(option) for _ in range(count)]


def shardings(options: Iterable[ShardingOption]) -> dict[str, dict[str, TableSharding]]:
    """Return the sharding of each option with ranks, by module and table."""
    result: dict[str, dict[str, TableSharding]] = {}
    for option in sorted(options, key=fqn_of):
        result.setdefault(option.path, {})[option.name] = sharding_of(
            fqn_of(option), option, tuple(option.tensor.shape)
        )
    return result


def tables_of(plan: GivenPlan) -> dict[str, Any]:
    """Return a plan's sharding of each table, in the plan's own type, by fully qualified name."""
    if isinstance(plan, SavedPlan):
        return dict(plan.tables())
    if isinstance(plan, ShardingPlan):
        return {
            f"{path}.{name}".removeprefix("."): sharding
            for path, module in plan.plan.items()
            for name, sharding in module.items()
        }
    if isinstance(plan, str | bytes | Mapping) or not isinstance(plan, Iterable):
        raise TypeError(f"a plan is a ShardingPlan, the file of one, or a list of options; got {type(plan).__name__}")
    given: dict[str, ShardingOption] = {}
    for option in plan:
        if not isinstance(option, ShardingOption):
            raise TypeError(f"a list of a plan holds ShardingOption, got {type(option).__name__}")
        if given.setdefault(fqn_of(option), option) is not option:
            raise refused(f"the plan shards table {fqn_of(option)!r} twice")
    return given


def sharding_of(
    fqn: str, given: ShardingOption | ParameterSharding | TableSharding, shape: tuple[int, int]
) -> TableSharding:
    """Return a table's sharding; raises PlannerError if shards have no ranks."""
    if isinstance(given, TableSharding):
        return given
    ranks: Sequence[Any]
    places: Sequence[Any]
    if isinstance(given, ShardingOption):
        load_factor, ranks, places = given.cache_load_factor, ranks_of(given), places_of(given)
        hot = hot_rows_of(given)
    else:
        hot = getattr(given, "hot_rows", None)
        load_factor, ranks = given.cache_params and given.cache_params.load_factor, given.ranks or []
        parts = getattr(given.sharding_spec, "shards", None)
        # TorchRec keeps no shards of data-parallel tables.
        replicas = [((0, 0), shape)] * len(ranks)
        places = replicas if parts is None else [(part.shard_offsets, part.shard_sizes) for part in parts]
    without = [rank for rank in ranks if isinstance(rank, bool) or not isinstance(rank, int)]
    if without or len(ranks) != len(places):
        raise PlannerError(
            f"table {fqn!r} has {len(places)} shard(s) and ranks {list(ranks)}: it has not been placed",
            PlannerErrorType.INVALID_RANK_ASSIGNMENT,
        )
    shards = tuple(
        ShardPlace(rank, tuple(offset), tuple(size)) for rank, (offset, size) in zip(ranks, places, strict=True)
    )
    ids = () if hot is None else tuple(hot.ids.tolist())
    return TableSharding(given.sharding_type, given.compute_kernel, shards, load_factor, ids)
