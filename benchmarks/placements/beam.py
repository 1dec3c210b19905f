# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Column splits by beam search around capped greedy placement, as NeuroShard does it (arXiv 2305.01868, section 4), on
any cost source.

The outer search starts from whole tables. Each level cuts one piece of a table, of those that are largest and those
that cost most alone; of all that come out of it, the cheapest few go on. The inner search places pieces from dear to
cheap, each where its rank then costs least, under a cap on what a rank sends, for a grid of caps; the cheapest
placement is the price of the pieces.

Shapes: K caps, Q lanes (choices of pieces x caps), X lanes that place a piece, S pieces of the longest lane, D ranks,
G fused groups, C collectives, H latent channels, M limits, P parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dreamshard_planner.cost.model import Cost
from dreamshard_planner.cost.problem import Option, Sharding, has_room

Piece = tuple[int, int]
"""Table, and step of its ladder."""


@dataclass(frozen=True, kw_only=True)
class BeamConfig:
    """NeuroShard's own settings."""

    candidates: int = 10
    """Pieces to cut next: so many of the largest, and so many of the dearest."""
    width: int = 3
    """Of the beam."""
    levels: int = 10
    """Cuts at most."""
    caps: int = 11
    """From the mean to :attr:`widest_cap` times the mean."""
    widest_cap: float = 1.5
    alone: bool = False
    """Whether a piece is cut alone; else all of its table are, so that slices stay equal."""

    @property
    def caps_K(self) -> Tensor:
        """What a rank sends at most, over the mean of the ranks."""
        return torch.linspace(1.0, self.widest_cap, self.caps, dtype=torch.float64)


@dataclass(frozen=True)
class Placed:
    """Pieces of all tables, in order, with ranks."""

    pieces: tuple[Piece, ...]
    overall_ms: float
    """Infinite where no cap leaves room."""
    ranks: tuple[int, ...]


@torch.no_grad()
def beam_sharding(cost: Cost, config: BeamConfig | None = None) -> Sharding | None:
    """The cheapest sharding that the beam meets, of options with equal slices; None where none fits."""
    beam = Beam(cost, config or BeamConfig())
    best, _ = beam.search()
    return None if best is None else beam.sharding(best)


class Beam:
    """The search.

    Args:
        cost: of a problem. The options of a table that are equal column slices are its ladder: the fewest slices first,
            one option of each number; to cut pieces alone, each number a multiple of the one before.
        config: its settings.

    Raises:
        ValueError: a table has no such option.
    """

    def __init__(self, cost: Cost, config: BeamConfig) -> None:
        self._cost, self._config = cost, config
        problem = cost.problem
        self._ladders = [_ladder(options) for options in problem.tables]
        if lacking := [name for name, ladder in zip(problem.names, self._ladders, strict=True) if not ladder]:
            raise ValueError(f"tables {lacking} have neither a whole option nor one of equal column slices")
        rungs = [
            [options[step].units for step in ladder]
            for options, ladder in zip(problem.tables, self._ladders, strict=True)
        ]
        self._part = [[units[0].parts[0] for units in of_table] for of_table in rungs]
        self._count = [[len(units) for units in of_table] for of_table in rungs]
        self._scores_P = problem.needs_PM.sum(-1).tolist(), cost.single_ms_P.tolist()

    @torch.no_grad()
    def search(self, left: Callable[[], bool] = lambda: True) -> tuple[Placed | None, bool]:
        """The cheapest that was seen, None where nothing fits; and whether there was time to end.

        Args:
            left: whether there is time left.
        """
        beam = self._placed([tuple((table, 0) for table, counts in enumerate(self._count) for _ in range(counts[0]))])
        best, finished = beam[0], True
        for _ in range(self._config.levels):
            placed: dict[tuple[Piece, ...], Placed] = {}
            for node in beam:
                finished = left()
                if not finished:
                    break
                children = dict.fromkeys(child for child in self._children(node.pieces) if child not in placed)
                placed |= {one.pieces: one for one in self._placed(list(children))}
            beam = sorted(placed.values(), key=lambda node: node.overall_ms)[: self._config.width]
            best = min([best, *beam], key=lambda node: node.overall_ms)
            if not finished or not beam:
                break
        return (None if best.overall_ms == math.inf else best), finished

    def sharding(self, placed: Placed) -> Sharding:
        """In terms of the problem: where all pieces of a table are alike."""
        step = dict(placed.pieces)
        options = tuple(ladder[step[table]] for table, ladder in enumerate(self._ladders))
        positions: list[list[int]] = [[] for _ in options]
        for (table, _), rank in zip(placed.pieces, placed.ranks, strict=True):
            positions[table].append(rank)
        return Sharding(options, tuple(tuple(ranks) for ranks in positions))

    def _children(self, pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
        """With one of the largest, or of the dearest pieces cut."""
        distinct = [piece for piece in dict.fromkeys(pieces) if piece[1] + 1 < len(self._ladders[piece[0]])]
        chosen = dict.fromkeys(
            piece
            for score_P in self._scores_P
            for piece in sorted(distinct, key=lambda piece, s=score_P: -s[self._part_of(piece)])[
                : self._config.candidates
            ]
        )
        return [self._cut(pieces, piece) for piece in chosen]

    def _cut(self, pieces: tuple[Piece, ...], piece: Piece) -> tuple[Piece, ...]:
        table, step = piece
        rest, count = [other for other in pieces if other[0] != table], self._count[table][step + 1]
        if self._config.alone:
            rest, count = list(pieces), count // self._count[table][step]
            rest.remove(piece)
        return tuple(sorted([*rest, *[(table, step + 1)] * count]))

    def _part_of(self, piece: Piece) -> int:
        return self._part[piece[0]][piece[1]]

    def _placed(self, choices: Sequence[tuple[Piece, ...]]) -> list[Placed]:
        if not choices:
            return []
        parts = [torch.tensor([self._part_of(piece) for piece in pieces]) for pieces in choices]
        found = capped_greedy(self._cost, parts, self._config.caps_K)
        return [Placed(pieces, *one) for pieces, one in zip(choices, found, strict=True)]


def _ladder(options: Sequence[Option]) -> list[int]:
    """Options of one table by their number of slices, the first of each number."""
    first: dict[int, int] = {}
    for index, option in enumerate(options):
        if option.units[0].span == 1 and len(set(option.units)) == 1:
            first.setdefault(len(option.units), index)
    return [first[count] for count in sorted(first)]


def capped_greedy(cost: Cost, parts: Sequence[Tensor], caps_K: Tensor) -> list[tuple[float, tuple[int, ...]]]:
    """The best greedy placement under any cap of each choice of parts of span 1: overall milliseconds, infinite where
    none fits, and the rank of each part."""
    problem, compute, (ranks, caps) = cost.problem, cost.compute, (cost.problem.num_ranks, len(caps_K))
    sent_P = problem.output_bytes_P
    orders = [cost.single_ms_P[part_S].argsort(descending=True, stable=True) for part_S in parts]
    ordered = [part_S[order_S] for part_S, order_S in zip(parts, orders, strict=True)]
    part_QS = pad_sequence(ordered, batch_first=True, padding_value=-1).repeat_interleave(caps, 0)
    cap_Q = torch.cat([caps_K * sent_P[part_S].sum() / ranks for part_S in parts]) * (1 + 1e-9)
    lanes = len(part_QS)
    latent_QDGH = torch.zeros(lanes, ranks, problem.num_groups, cost.latent_PH.shape[1]).double()
    group_ms_QDG = torch.zeros(latent_QDGH.shape[:-1]).double()
    bytes_QCD = torch.zeros(lanes, problem.bytes_PC.shape[1], ranks).double()
    sent_QD = torch.zeros(lanes, ranks).double()
    free_QDM = problem.limits_DM.expand(lanes, -1, -1).clone()
    alive_Q, rank_QS = torch.ones(lanes, dtype=torch.bool), torch.zeros_like(part_QS)
    for step in range(part_QS.shape[1]):
        lane_X = (alive_Q & (part_QS[:, step] >= 0)).nonzero()[:, 0]
        if not len(lane_X):
            break
        each, part_X = torch.arange(len(lane_X)), part_QS[lane_X, step]
        group_X, need_X1M = problem.group_P[part_X], problem.needs_PM[part_X, None]
        with_XDH = latent_QDGH[lane_X, :, group_X] + cost.latent_PH[part_X, None]
        with_ms_XD = compute.group_cost_ms(with_XDH).sum(-1).double()
        after_XD = group_ms_QDG[lane_X].sum(-1) - group_ms_QDG[lane_X, :, group_X] + with_ms_XD
        fits_XD = has_room(need_X1M, free_QDM[lane_X])
        fits_XD &= sent_QD[lane_X] + sent_P[part_X, None] <= cap_Q[lane_X, None]
        alive_Q[lane_X] &= fits_XD.any(-1)
        rank_X = after_XD.masked_fill(~fits_XD, torch.inf).argmin(-1)
        rank_QS[lane_X, step] = rank_X
        latent_QDGH[lane_X, rank_X, group_X] = with_XDH[each, rank_X]
        group_ms_QDG[lane_X, rank_X, group_X] = with_ms_XD[each, rank_X]
        bytes_QCD[lane_X, :, rank_X] += problem.bytes_PC[part_X]
        sent_QD[lane_X, rank_X] += sent_P[part_X]
        free_QDM[lane_X, rank_X] -= need_X1M[:, 0]
    forward_Q, backward_Q = problem.collectives.ms(bytes_QCD)
    overall_Q = group_ms_QDG.sum(-1).amax(-1) + forward_Q + backward_Q
    best_ms, best_cap = overall_Q.masked_fill(~alive_Q, torch.inf).view(-1, caps).min(-1)
    found = []
    for index, (overall_ms, cap, order_S) in enumerate(zip(best_ms.tolist(), best_cap.tolist(), orders, strict=True)):
        rank_S = torch.empty_like(order_S)
        rank_S[order_S] = rank_QS[index * caps + cap, : len(order_S)]
        found.append((overall_ms, tuple(rank_S.tolist())))
    return found
