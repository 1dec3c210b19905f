# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column slices wider than the narrowest: TorchRec enumerates one width per table, that of ``min_partition``."""

from __future__ import annotations

from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner.search_space.enumeration import EnumeratedOption
from dreamshard_planner.search_space.options import type_of


class WiderSlices(EnumeratedOption):
    """A column-wise option of the planner's own, whose slices are several of TorchRec's side by side."""


def wider_slices(option: EnumeratedOption) -> list[WiderSlices]:
    """The option with two, four, ... slices merged into one, as long as at least two are left; all slices stay equal.

    Narrow slices repeat every lookup for few columns, so splitting in two is often all that a table needs. Slices of an
    EmbeddingCollection, which must all be of one width, are left alone.
    """
    spec = type_of(option)
    if spec.span != "rank" or not spec.splits_columns or isinstance(option.module[1], EmbeddingCollection):
        return []
    wider, merged = [], 2
    while 2 * merged <= option.num_shards:
        if option.num_shards % merged == 0:
            wider.append(_merged(option, merged))
        merged *= 2
    return wider


def _merged(option: EnumeratedOption, count: int) -> WiderSlices:
    result = WiderSlices.of(option)
    result.shards = [
        Shard([first.size[0], sum(shard.size[1] for shard in option.shards[start : start + count])], [*first.offset])
        for start, first in ((i, option.shards[i]) for i in range(0, option.num_shards, count))
    ]
    return result


def is_torchrecs(option: ShardingOption) -> bool:
    """Whether TorchRec's enumerator offers the option."""
    return not isinstance(option, WiderSlices)
