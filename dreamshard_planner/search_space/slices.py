# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column slices of other widths: TorchRec enumerates one per table, ``min_partition``, by default 128 columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate

from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.enumeration import EnumeratedOption
from dreamshard_planner.search_space.options import by_table, fqn_of, type_of

LEAST_HALF = 16
"""Columns: each row that is read costs at least a sector or two of memory, however few of its columns are wanted."""
COLUMNS_APART = 4
"""FBGEMM's kernels want widths that this divides."""
HEAVY = 0.5
"""Of what a rank would take were all level: the share from which a table is worth halving."""


class OwnSlices(EnumeratedOption):
    """A column-wise option of the planner's own, in slices of a width that TorchRec's enumerator does not offer."""


class Halves(OwnSlices):
    """A table that TorchRec's default width leaves whole, in two."""


def own_slices(option: EnumeratedOption, asked: Collection[str] = ()) -> list[OwnSlices]:
    """The option with two, four, ... slices merged into one, as long as at least two are left; a single slice in two,
    where nobody asked for a width. All slices stay equal.

    Narrow slices repeat every lookup for few columns, so splitting in two is often all that a table needs. Slices of an
    EmbeddingCollection, which must all be of one width, are left alone.

    Args:
        option: TorchRec's.
        asked: tables, by name, whose constraints give a ``min_partition``.
    """
    spec = type_of(option)
    if spec.span != "rank" or not spec.splits_columns or isinstance(option.module[1], EmbeddingCollection):
        return []
    if option.num_shards == 1:
        half, rest = divmod(option.shards[0].size[1], 2)
        whole = option.name in asked or rest or half < LEAST_HALF or half % COLUMNS_APART
        return [] if whole else [_sliced(Halves, option, [half, half])]
    wider, merged = [], 2
    while 2 * merged <= option.num_shards:
        if option.num_shards % merged == 0:
            widths = [shard.size[1] for shard in option.shards]
            joined = [sum(widths[start : start + merged]) for start in range(0, len(widths), merged)]
            wider.append(_sliced(OwnSlices, option, joined))
        merged *= 2
    return wider


def _sliced(kind: type[OwnSlices], option: EnumeratedOption, widths: Sequence[int]) -> OwnSlices:
    result = kind.of(option)
    rows = option.shards[0].size[0]
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
    heavy_ms = HEAVY * sum(least_ms.values()) / ranks
    return [option for option in options if not isinstance(option, Halves) or least_ms[fqn_of(option)] > heavy_ms]


def is_torchrecs(option: ShardingOption) -> bool:
    """Whether TorchRec's enumerator offers the option."""
    return not isinstance(option, OwnSlices)
