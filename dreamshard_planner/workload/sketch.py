# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Where in a table's range of ids its lookups fall, and its distinct rows: what a block of rows has of them.

Row-wise sharding cuts a table into contiguous blocks. Where ids are sorted by frequency, as many pipelines make them,
the first block has every hot row.

Shapes: T sketches, J sketches that are merged, E = 257 edges, 2 (lookups, distinct rows), X points, B blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamshard_planner.errors import StatisticsError

PIECES = 256
"""Quantiles that a sketch holds."""
MAX_ID = 2**53
"""Ids above are hashes, which managed collisions map to rows that nobody knows beforehand."""


@dataclass(frozen=True, slots=True)
class IdSketch:
    """Quantiles of the ids of one feature or table: 257 whole numbers each, of which entry k is the id below which
    k/256 lie; the first is the lowest id, the last the highest plus one. An id with more than 1/256 repeats its upper
    end. Between two entries the ids are taken to be alike."""

    lookups: tuple[int, ...]
    """Of the lookups."""
    distinct: tuple[int, ...]
    """Of the distinct rows of a batch."""

    def __post_init__(self) -> None:
        for name in ("lookups", "distinct"):
            edges = getattr(self, name)
            if not isinstance(edges, Sequence) or isinstance(edges, str) or len(edges) != PIECES + 1:
                raise StatisticsError(f"a sketch of ids has {PIECES + 1} {name} quantiles, got {_shown(edges)}")
            if not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in edges):
                raise StatisticsError(f"ids of a sketch must be whole numbers, got {name} {_shown(edges)}")
            object.__setattr__(self, name, tuple(edges))
            ascending = all(low <= high for low, high in zip(edges, edges[1:], strict=False))
            if not ascending or edges[0] < 0 or edges[-1] <= edges[0] or edges[-1] > MAX_ID:
                raise StatisticsError(
                    f"ids of a sketch must ascend from 0 or more to less than 2^53, got {name} {_shown(edges)}"
                )

    @classmethod
    def of_counts(cls, id_R: Tensor, count_R: Tensor) -> IdSketch | None:
        """Of one batch: its distinct ids, ascending, and how often each is read, both int64 [R]. None where there are
        none, or some are no rows of any table."""
        if not len(id_R) or int(id_R[0]) < 0 or int(id_R[-1]) >= MAX_ID:
            return None
        both = torch.stack([count_R, torch.ones_like(count_R)]).double().cumsum(-1)
        share = torch.arange(1, PIECES + 1, dtype=torch.float64) / PIECES * (1 - 1e-12)
        at = torch.searchsorted(both, both[:, -1:] * share).clamp_max(len(id_R) - 1)
        edge_2E = torch.cat([id_R[:1].expand(2, 1), id_R[at] + 1], dim=-1)
        return cls(*map(tuple, edge_2E.tolist()))

    @classmethod
    def even(cls, rows: int) -> IdSketch:
        """Of a table whose rows are all alike."""
        edges = tuple(-(-rows * k // PIECES) for k in range(PIECES + 1))
        return cls(edges, edges)

    @property
    def end(self) -> int:
        """All ids are below."""
        return max(self.lookups[-1], self.distinct[-1])

    @property
    def edge_2E(self) -> Tensor:
        """The quantiles, float64."""
        return torch.tensor([self.lookups, self.distinct], dtype=torch.float64)

    def shares(self, first: int, end: int) -> tuple[float, float]:
        """Shares of the lookups and of the distinct rows that ids from ``first`` to ``end`` - 1 have."""
        lookups, distinct = (_share(edges, end) - _share(edges, first) for edges in (self.lookups, self.distinct))
        return lookups, distinct


def merge(sketches: Sequence[IdSketch], lookups: Sequence[float], distinct: Sequence[float]) -> IdSketch:
    """One of several, which count by their lookups and distinct rows."""
    edge_2JE = torch.stack([sketch.edge_2E for sketch in sketches], dim=1)
    weight_2J = torch.tensor([list(lookups), list(distinct)], dtype=torch.float64)
    end_2JK = edge_2JE[..., 1:]
    start_2JK = torch.minimum(edge_2JE[..., :-1], end_2JK - 1)  # between equal entries lies the single id below
    slope_2JK = weight_2J[..., None] / (end_2JK - start_2JK)
    # Every piece opens and closes a constant density.
    point_2X, order_2X = torch.cat([start_2JK, end_2JK], dim=-1).flatten(1).sort(dim=-1)
    density_2X = torch.cat([slope_2JK, -slope_2JK], dim=-1).flatten(1).gather(1, order_2X).cumsum(-1).clamp_min(0)
    below_2X = torch.nn.functional.pad((density_2X[:, :-1] * point_2X.diff(dim=-1)).cumsum(-1), (1, 0))
    return IdSketch(*map(tuple, _quantiles(point_2X, below_2X).tolist()))


def rescale(sketches: Sequence[IdSketch], lookups: Sequence[float], factor: Sequence[float]) -> list[IdSketch]:
    """Sketches at another batch size. Lookups fall where they did. Of the distinct rows, those read in any batch stay
    as many, and those read now and then grow with the batch: rows of a short range of ids are taken to be read alike,
    so that of r rows with n lookups a batch reads r (1 - exp(-n / r)).

    Args:
        sketches: [T].
        lookups: of the batches that they were taken at, [T].
        factor: new batch size over old, [T].
    """
    edge_T2E = torch.stack([sketch.edge_2E for sketch in sketches])
    point_TX = edge_T2E.flatten(1).sort(dim=-1).values
    below_T2X = _shares(edge_T2E, point_TX[:, None].expand(-1, 2, -1).contiguous())
    share_T2X = below_T2X.diff(dim=-1)
    rate_TX = share_T2X[:, 0] * torch.tensor(lookups, dtype=torch.float64)[:, None] / point_TX.diff(dim=-1)
    factor_T1 = torch.tensor(factor, dtype=torch.float64)[:, None]
    growth_TX = torch.expm1(-rate_TX * factor_T1) / torch.expm1(-rate_TX)
    growth_TX = torch.where(rate_TX > 1e-9, growth_TX, factor_T1)  # also where no id lies between
    distinct_TX = torch.nn.functional.pad((share_T2X[:, 1] * growth_TX).cumsum(-1), (1, 0))
    edge_TE = _quantiles(point_TX, distinct_TX)
    return [IdSketch(sketch.lookups, tuple(edges)) for sketch, edges in zip(sketches, edge_TE.tolist(), strict=True)]


def _share(edges: Sequence[int], point: int) -> float:
    """Share below one id."""
    piece = bisect_right(edges, point) - 1
    if piece in (-1, PIECES):
        return float(piece > 0)
    return (piece + (point - edges[piece]) / (edges[piece + 1] - edges[piece])) / PIECES


def _shares(edge_YE: Tensor, point_YX: Tensor) -> Tensor:
    """Shares below ids, which are whole numbers, [..., X]; as :func:`_share`."""
    piece_YX = torch.searchsorted(edge_YE, point_YX, right=True) - 1
    low_YX = edge_YE.gather(-1, piece_YX.clamp(0, PIECES - 1))
    high_YX = edge_YE.gather(-1, (piece_YX + 1).clamp_max(PIECES))
    way_YX = ((point_YX - low_YX) / (high_YX - low_YX).clamp_min(1)).clamp(0, 1)
    return ((piece_YX + way_YX) / PIECES).clamp(0, 1)


def _quantiles(point_YX: Tensor, below_YX: Tensor) -> Tensor:
    """Ids below which k/256 lie, int64 [..., E], from a piecewise linear rise over ascending points."""
    total_Y1 = below_YX[..., -1:]
    target_YE = torch.arange(PIECES + 1, dtype=torch.float64) / PIECES * total_Y1 * (1 - 1e-9)  # rounding
    upper_YE = torch.searchsorted(below_YX, target_YE).clamp(1, point_YX.shape[-1] - 1)
    low_YE, high_YE = below_YX.gather(-1, upper_YE - 1), below_YX.gather(-1, upper_YE)
    start_YE, end_YE = point_YX.gather(-1, upper_YE - 1), point_YX.gather(-1, upper_YE)
    way_YE = ((target_YE - low_YE) / (high_YE - low_YE).clamp_min(1e-300)).clamp(0, 1)
    edge_YE = (start_YE + way_YE * (end_YE - start_YE) - 1e-3).ceil()
    edge_YE[..., 0] = edge_YE[..., 0].clamp_max(point_YX[..., 0])
    return edge_YE.long()


def _shown(edges: object) -> str:
    if not isinstance(edges, Iterable) or isinstance(edges, str):
        return repr(edges)
    listed = list(edges)
    return f"{len(listed)} of {listed[:3]} ... {listed[-1:]}"
