# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Options beside TorchRec's own: column slices of other widths, of which TorchRec enumerates one per table
(``min_partition``, by default 128 columns), and caches of other sizes for tables in host memory, which TorchRec gives a
fifth of their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from torch import nn
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.kernels import CACHING, in_host_memory, is_known
from dreamshard_planner.search_space.options import EnumeratedOption, OwnOption, by_table, fqn_of, type_of
from dreamshard_planner.workload.tables import CACHE_LOAD_FACTOR

LEAST_HALF = 16
"""Columns: each row that is read costs at least a sector or two of memory, however few of its columns are wanted."""
COLUMNS_APART = 4
"""FBGEMM's kernels want widths that this divides."""
HEAVY = 0.5
"""Of what a rank would take were all level: the share from which a table is worth halving."""


class Halves(OwnOption):
    """A table that TorchRec's default width leaves whole, in two."""


S = TypeVar("S", bound=OwnOption)


def own_slices(option: EnumeratedOption, asked: Collection[str] = ()) -> list[OwnOption]:
    """The option with two, four, ... slices merged into one, as long as at least two are left; a single slice in two,
    where nobody asked for a width. All slices stay equal.

    Narrow slices repeat every lookup for few columns, so splitting in two is often all that a table needs. Slices of an
    EmbeddingCollection, which must all be of one width, are left alone, as are those of an unknown kernel: an
    estimator prices it as it was enumerated.

    Args:
        option: TorchRec's.
        asked: tables, by name, whose constraints give a ``min_partition``.
    """
    spec, module = type_of(option), option.module[1]
    is_free = spec.span == "rank" and not isinstance(module, EmbeddingCollection | nn.EmbeddingBag)
    if not (is_known(option.compute_kernel) and spec.splits_columns and is_free):
        return []
    if option.num_shards == 1:
        width = option.shards[0].size[1]
        return [_sliced(Halves, option, [width // 2] * 2)] if option.name not in asked and _halves_well(width) else []
    wider, merged = [], 2
    while 2 * merged <= option.num_shards:
        if option.num_shards % merged == 0:
            widths = [shard.size[1] for shard in option.shards]
            joined = [sum(widths[start : start + merged]) for start in range(0, len(widths), merged)]
            wider.append(_sliced(OwnOption, option, joined))
        merged *= 2
    return wider


def _halves_well(width: int) -> bool:
    return width % (2 * COLUMNS_APART) == 0 and width // 2 >= LEAST_HALF


def _sliced(kind: type[S], option: EnumeratedOption, widths: Sequence[int]) -> S:
    result, rows = kind.of(option), option.shards[0].size[0]
    starts = accumulate(widths[:-1], initial=0)
    result.shards = [Shard([rows, width], [0, start]) for width, start in zip(widths, starts, strict=True)]
    return result


def without_idle_halves(options: Sequence[ShardingOption], ranks: int) -> list[ShardingOption]:
    """All options but the halves of tables that are no burden to a rank, which level nothing and cost time to search.

    Args:
        options: with estimates.
        ranks: that share the tables.
    """
    least_ms = {table: min(option.total_perf for option in choices) for table, choices in by_table(options).items()}
    # Where tables are all alike, and twice as many as ranks, each is just at the limit, but for rounding.
    heavy_ms = (1 + 1e-9) * HEAVY * sum(least_ms.values()) / ranks
    return [option for option in options if not isinstance(option, Halves) or least_ms[fqn_of(option)] > heavy_ms]


SHARES = (0.01, 0.05, 0.1, 0.4, 0.7)
"""Shares of a table's rows, beside TorchRec's fifth."""


def other_sizes(options: Iterable[ShardingOption], given: Callable[[ShardingOption], float | None]) -> list[OwnOption]:
    """Return each option of a cache whose size no user gave, at other sizes and without estimates. Towers stay as they
    are.

    Args:
        options: of an enumerator.
        given: the load factor that a constraint or the module's ``fused_params`` ask for.
    """
    sized = [
        _with_share(option, share)
        for option in options
        if option.compute_kernel == CACHING and not option.dependency and given(option) is None
        for share in SHARES
    ]
    for option in sized:
        option.forget_estimates()
    return sized


def all_sized(plan: list[ShardingOption], given: Callable[[ShardingOption], float | None]) -> list[ShardingOption]:
    """A plan that names TorchRec's fifth as well, where it names the size of some cache: TorchRec gives a kernel the
    mean of the sizes that its tables name, also for those that name none.

    Args:
        plan: one option for every table; itself where nothing changes.
        given: see :func:`other_sizes`.
    """
    cached = [option for option in plan if option.compute_kernel == CACHING]
    unsized = {fqn_of(option) for option in cached if given(option) is None}
    if len(unsized) in (0, len(cached)):
        return plan
    return [_with_share(option, CACHE_LOAD_FACTOR) if fqn_of(option) in unsized else option for option in plan]


def uses_host_memory(plan: Iterable[ShardingOption]) -> bool:
    """Whether some table lies there, cached or not."""
    return any(in_host_memory(option.compute_kernel) for option in plan)


def _with_share(option: ShardingOption, share: float) -> OwnOption:
    result = OwnOption.of(option)
    result.cache_params = replace(option.cache_params or CacheParams(), load_factor=share)
    return result
