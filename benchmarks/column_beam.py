# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Beam search over column splits with a capped greedy placement inside, after NeuroShard (arXiv 2305.01868), on any
cost source.

The outer beam cuts one piece of a table into halves per step: what is tried are the largest and the costliest pieces.
The inner search places all pieces greedily, the costliest first, each where the rank ends cheapest, under caps on the
columns of a rank; all caps run side by side.

Shapes: K caps, D ranks, G fused groups, C collectives, H latent channels, M kinds of memory, P parts, S pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.types import Shard, ShardingOption, Topology

from dreamshard_planner.cost.sharding import ShardingCost
from dreamshard_planner.plugin.context import PlanningContext
from dreamshard_planner.plugin.estimates import EnumeratedOption
from dreamshard_planner.plugin.legal import CW, TW

BEAM, CANDIDATES, DEPTH = 3, 10, 10
CAPS_K = torch.linspace(1.0, 1.5, 11, dtype=torch.float64)
"""Columns of a rank over their mean."""
SMALLEST_WIDTH = 4
"""Columns of a slice: FBGEMM's kernels read four at once."""

Piece = tuple[int, int]
"""Table, and how often its width was halved."""


@dataclass(frozen=True)
class Placed:
    """Pieces of tables with ranks."""

    overall_ms: float
    """Infinite where no cap leaves room."""
    pieces: tuple[Piece, ...]
    ranks: tuple[int, ...]
    finished: bool = True
    """Whether the search came to its end."""


@dataclass
class ColumnBeam:
    """The search.

    Args:
        cost: of a problem in which option k of each table is 2^k equal column slices; option 0 the whole table.
        left: whether there is time left.
    """

    cost: ShardingCost
    left: Callable[[], bool] = lambda: True
    _known: dict[tuple[Piece, ...], Placed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.cost.problem
        self._part = [[option.units[0].parts[0] for option in options] for options in problem.tables]
        self._size_P = problem.storage_PM.sum(-1).tolist()
        self._single_P = self.cost.single_ms_P.tolist()

    @torch.no_grad()
    def search(self) -> Placed | None:
        """The cheapest that was seen; None where nothing fits."""
        beam = [self._placed(tuple((table, 0) for table in range(self.cost.problem.num_tables)))]
        best, finished = beam[0], True
        for _ in range(DEPTH):
            children = dict.fromkeys(child for node in beam for child in self._children(node.pieces))
            placed = []
            for child in children:
                finished = self.left()
                if not finished:
                    break
                placed.append(self._placed(child))
            beam = sorted(placed, key=lambda node: node.overall_ms)[:BEAM]
            best = min([best, *beam], key=lambda node: node.overall_ms)
            if not finished or not beam:
                break
        if best.overall_ms == math.inf:
            return None
        return Placed(best.overall_ms, best.pieces, best.ranks, finished)

    def _children(self, pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
        """One of the largest, or of the costliest pieces in halves."""
        distinct = [piece for piece in dict.fromkeys(pieces) if piece[1] + 1 < len(self._part[piece[0]])]
        chosen = dict.fromkeys(
            piece
            for score in (self._size_P, self._single_P)
            for piece in sorted(distinct, key=lambda piece, s=score: -s[self._part_of(piece)])[:CANDIDATES]
        )
        children = []
        for piece in chosen:
            rest = list(pieces)
            rest.remove(piece)
            half = (piece[0], piece[1] + 1)
            children.append(tuple(sorted([*rest, half, half])))
        return children

    def _part_of(self, piece: Piece) -> int:
        return self._part[piece[0]][piece[1]]

    def _placed(self, pieces: tuple[Piece, ...]) -> Placed:
        if pieces not in self._known:
            part_S = torch.tensor([self._part_of(piece) for piece in pieces])
            overall_ms, ranks = capped_greedy(self.cost, part_S)
            self._known[pieces] = Placed(overall_ms, pieces, ranks)
        return self._known[pieces]


def capped_greedy(cost: ShardingCost, part_S: Tensor) -> tuple[float, tuple[int, ...]]:
    """The best greedy placement of parts of span 1 among all caps: overall milliseconds, infinite where none fits, and
    the rank of each."""
    problem, compute, caps = cost.problem, cost.compute, len(CAPS_K)
    columns_P = problem.bytes_PC.sum(-1)
    cap_K1 = (CAPS_K * columns_P[part_S].sum() / problem.num_ranks)[:, None] * (1 + 1e-9)
    latent_KDGH = torch.zeros(caps, problem.num_ranks, problem.num_groups, cost.latent_PH.shape[1]).double()
    group_ms_KDG = torch.zeros(latent_KDGH.shape[:-1]).double()
    columns_KD = torch.zeros(caps, problem.num_ranks).double()
    bytes_KCD = torch.zeros(caps, problem.bytes_PC.shape[1], problem.num_ranks).double()
    free_KDM = problem.capacity_DM.expand(caps, -1, -1).clone()
    alive_K, each_K = torch.ones(caps, dtype=torch.bool), torch.arange(caps)
    rank_KS = torch.zeros(caps, len(part_S), dtype=torch.int64)
    for slot in cost.single_ms_P[part_S].argsort(descending=True, stable=True).tolist():
        part = int(part_S[slot])
        group, need_M = int(problem.group_P[part]), problem.storage_PM[part]
        with_KDH = latent_KDGH[:, :, group] + cost.latent_PH[part]
        with_ms_KD = compute.group_cost_ms(with_KDH).sum(-1).double()
        after_KD = group_ms_KDG.sum(-1) - group_ms_KDG[:, :, group] + with_ms_KD
        fits_KD = (free_KDM >= need_M).all(-1) & (columns_KD + columns_P[part] <= cap_K1)
        alive_K &= fits_KD.any(-1)
        if not alive_K.any():
            return math.inf, ()
        rank_K = after_KD.masked_fill(~fits_KD, torch.inf).argmin(-1)
        rank_KS[:, slot] = rank_K
        latent_KDGH[each_K, rank_K, group] = with_KDH[each_K, rank_K]
        group_ms_KDG[each_K, rank_K, group] = with_ms_KD[each_K, rank_K]
        columns_KD[each_K, rank_K] += columns_P[part]
        bytes_KCD[each_K, :, rank_K] += problem.bytes_PC[part]
        free_KDM[each_K, rank_K] -= need_M
    forward_K, backward_K = problem.collectives.ms(bytes_KCD)
    overall_K = group_ms_KDG.sum(-1).amax(-1) + forward_K + backward_K
    best = int(overall_K.masked_fill(~alive_K, torch.inf).argmin())
    return float(overall_K[best]), tuple(rank_KS[best].tolist())


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
    placed = ColumnBeam(context.cost(read), left).search()
    if placed is None:
        return None, left()
    plan = []
    for table, option in enumerate(whole):
        mine = [(depth, rank) for (t, depth), rank in zip(placed.pieces, placed.ranks, strict=True) if t == table]
        width = option.tensor.shape[1]
        sharded = _sliced(option, [width >> depth for depth, _ in sorted(mine)])
        for shard, (_, rank) in zip(sharded.shards, sorted(mine), strict=True):
            shard.rank = rank
        plan.append(sharded)
    return plan, placed.finished


def _halvings(option: ShardingOption) -> list[ShardingOption]:
    """A table whole, in halves, in quarters and so on."""
    width, options = option.tensor.shape[1], [_sliced(option, [option.tensor.shape[1]])]
    for depth in range(1, DEPTH + 1):
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
