# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans of TorchRec's options by the beam over column splits, each slice cut alone into halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Shard, ShardingOption, Topology

from dreamshard_planner.planning.context import PlanningContext
from dreamshard_planner.search_space.alike_shards import EnumeratedOption
from dreamshard_planner.search_space.sharding_types import CW, TW
from placements.beam import Beam, BeamConfig

HALVES = BeamConfig(alone=True)
SMALLEST_WIDTH = 4
"""Columns of a slice: FBGEMM's kernels read four at once."""


def column_beam_plan(
    context: PlanningContext,
    whole: Sequence[ShardingOption],
    topology: Topology,
    estimate: Callable[[list[ShardingOption]], None],
    left: Callable[[], bool] = lambda: True,
) -> tuple[list[ShardingOption] | None, bool]:
    """A plan, None where none fits, and whether the search came to its end.

    Args:
        context: cost source and reader.
        whole: the table-wise option of each table.
        topology: what the storage reservation left.
        estimate: sets perf and storage of options.
        left: whether there is time left.
    """
    options = [option for table in whole for option in _halvings(table)]
    estimate(options)
    read = context.read(options, topology)
    placed, finished = Beam(context.cost(read), HALVES).search(left)
    if placed is None:
        return None, finished
    plan = []
    for table, option in enumerate(whole):
        mine = [(depth, rank) for (t, depth), rank in zip(placed.pieces, placed.ranks, strict=True) if t == table]
        width = option.tensor.shape[1]
        sharded = _sliced(option, [width >> depth for depth, _ in sorted(mine)])
        for shard, (_, rank) in zip(sharded.shards, sorted(mine), strict=True):
            shard.rank = rank
        plan.append(sharded)
    return plan, finished


def _halvings(option: ShardingOption) -> list[ShardingOption]:
    """A table whole, in halves, in quarters and so on."""
    width, options = option.tensor.shape[1], [_sliced(option, [option.tensor.shape[1]])]
    for depth in range(1, HALVES.levels + 1):
        if width % (SMALLEST_WIDTH << depth):
            break
        options.append(_sliced(option, [width >> depth] * (1 << depth)))
    return options


def _sliced(option: ShardingOption, widths: Sequence[int]) -> ShardingOption:
    """The table in column slices of these widths."""
    sliced, offset = EnumeratedOption.of(option), 0
    sliced.sharding_type = TW if len(widths) == 1 else CW
    sliced.partition_by = get_partition_by_type(sliced.sharding_type)
    sliced.shards = []
    for width in widths:
        sliced.shards.append(Shard([option.tensor.shape[0], width], [0, offset]))
        offset += width
    return sliced
