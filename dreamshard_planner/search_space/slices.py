# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column slices of other widths: TorchRec enumerates one per table, ``min_partition``, by default 128 columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TypeVar

from torch import nn
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.alike_shards import EnumeratedOption, OwnOption
from dreamshard_planner.search_space.kernels import is_known
from dreamshard_planner.search_space.options import by_table, fqn_of, type_of

LEAST_HALF = 16
"""Columns: each row that is read costs at least a sector or two of memory, however few of its columns are wanted."""
COLUMNS_APART = 4
"""FBGEMM's kernels want widths that this divides."""
HEAVY = 0.5
"""Of what a rank would take were all level: the share from which a table is worth halving."""


class OwnSlices(OwnOption):
    """Column-wise, in slices of another width."""


class Halves(OwnSlices):
    """A table that TorchRec's default width leaves whole, in two."""


class NarrowSlices(OwnSlices):
    """Slices that only another ``min_partition`` allows."""


S = TypeVar("S", bound=OwnSlices)


def own_slices(option: EnumeratedOption, asked: Collection[str] = ()) -> list[OwnSlices]:
    """The option with two, four, ... slices merged into one, as long as at least two are left; a single slice in two,
    where nobody asked for a width. All slices stay equal.

    Narrow slices repeat every lookup for few columns, so splitting in two is often all that a table needs. Slices of an
    EmbeddingCollection, which must all be of one width, are left alone.

    Args:
        option: TorchRec's.
        asked: tables, by name, whose constraints give a ``min_partition``.
    """
    if not may_be_sliced(option):
        return []
    if option.num_shards == 1:
        width = option.shards[0].size[1]
        return [_sliced(Halves, option, [width // 2] * 2)] if option.name not in asked and _halves_well(width) else []
    wider, merged = [], 2
    while 2 * merged <= option.num_shards:
        if option.num_shards % merged == 0:
            widths = [shard.size[1] for shard in option.shards]
            joined = [sum(widths[start : start + merged]) for start in range(0, len(widths), merged)]
            wider.append(_sliced(OwnSlices, option, joined))
        merged *= 2
    return wider


def narrower_slices(options: Sequence[ShardingOption]) -> list[NarrowSlices]:
    """Slices of half the width, a quarter, ... of the narrowest that a table may have: what another ``min_partition``
    would allow. Without estimates.

    Args:
        options: of one table.
    """
    sliced = [option for option in options if isinstance(option, EnumeratedOption) and may_be_sliced(option)]
    if not sliced:
        return []
    narrowest = min(sliced, key=lambda option: option.shards[0].size[1])
    columns, width = narrowest.tensor.shape[1], narrowest.shards[0].size[1]
    made = []
    while _halves_well(width):
        width //= 2
        made.append(_sliced(NarrowSlices, narrowest, [width] * (columns // width)))
    return made


def may_be_sliced(option: ShardingOption) -> bool:
    """Whether slices of the option's table may have any width, and lie on any rank. An estimator prices an unknown
    kernel as it was enumerated, so that keeps its width."""
    spec, module = type_of(option), option.module[1]
    if not is_known(option.compute_kernel):
        return False
    return spec.span == "rank" and spec.splits_columns and not isinstance(module, EmbeddingCollection | nn.EmbeddingBag)


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
