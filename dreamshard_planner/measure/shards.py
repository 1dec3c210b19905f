# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Draw sets of shards as TorchRec fuses them where it splits tables: column slices, blocks of rows, and both.

Whole tables are drawn by :func:`~dreamshard_planner.measure.collect.draw_sets`; here each is cut as its sharding
type would cut it, and one device's share of it kept. TorchRec computes each sharding type by a kernel of its own, so
that all shards of a set are of one type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dreamshard_planner.errors import TaskError
from dreamshard_planner.measure.collect import MAX_SET_WORK, draw_sets, set_work, work_limits
from dreamshard_planner.workload.tables import Table, Workload

KINDS = ("column", "row", "grid")
MAX_ROW_BLOCKS = 128
MAX_SLICES = 4
"""Of one table on one device."""
_ROOM = 8
"""How much heavier whole tables are drawn than their shards may be."""
SHARD_SHARE = 0.2
"""Of the sets to measure. What ships learned from 16 % of shards, and errs on them by more than on whole tables."""
_SEED_APART = 10_000
"""Whole tables and shards are of other draws."""


def draw_mixed_sets(
    tables: Sequence[Table],
    num_sets: int,
    seed: int,
    batch_sizes: Sequence[int] | None = None,
    max_tables: int = 40,
    device: str = "cpu",
    shard_share: float = SHARD_SHARE,
) -> list[list[Workload]]:
    """Random groups to measure, as planning meets them: whole tables, and spread evenly among them a share of shards.
    More sets begin with the same ones; the other arguments as in ``draw_sets``."""
    if not 0 <= shard_share <= 1:
        raise TaskError(f"share of shards must be between 0 and 1, got {shard_share}")
    cut = [int((place + 1) * shard_share) > int(place * shard_share) for place in range(num_sets)]
    whole = iter(draw_sets(tables, cut.count(False), seed, batch_sizes, max_tables, device=device))
    other = seed + _SEED_APART
    shards = iter(draw_shard_sets(tables, cut.count(True), other, batch_sizes, max_tables, device=device))
    return [next(shards if of_shards else whole) for of_shards in cut]


def draw_shard_sets(
    tables: Sequence[Table],
    num_sets: int,
    seed: int,
    batch_sizes: Sequence[int] | None = None,
    max_tables: int = 40,
    kinds: Sequence[str] = KINDS,
    max_work: float | None = None,
    device: str = "cpu",
) -> list[list[Workload]]:
    """Random groups of shards to measure, each of one of ``kinds``; the other arguments as in ``draw_sets``.

    Slices are log-uniformly wide, from 4 columns to half the table, and a device has one to four of a table. Rows are
    cut into 2 to 128 blocks, log-uniform, as many for all tables of a set; in a third of the sets blocks get more or
    less than their even share of the lookups, as where frequent ids lie together.
    """
    most = _ROOM * (MAX_SET_WORK[device] if max_work is None else max_work)
    whole = draw_sets(tables, num_sets, seed, batch_sizes, max_tables, max_work=most, device=device)
    limits = work_limits(max_work, device, seed)
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for group in whole:
        kind_share, blocks_share, skewed = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        kind = kinds[int(kind_share * len(kinds))]
        blocks = round(math.exp(blocks_share * math.log(MAX_ROW_BLOCKS / 2)) * 2) if kind != "column" else 1
        # Sequences of one kernel have one dim, hence one width.
        width_shares = torch.rand(len(group), generator=generator, dtype=torch.float64).tolist()
        shards: list[Workload] = []
        for workload, width_share in zip(group, width_shares, strict=True):
            if kind != "row":
                share = width_share if workload.pooled else width_shares[0]
                shards += _slices(workload, share, generator)
            else:
                shards.append(workload)
        if blocks > 1:
            shards = _blocks(shards, blocks, skewed < 1 / 3, generator)
        sets.append(_within(shards, next(limits)))
    return sets


def _slices(workload: Workload, width_share: float, generator: torch.Generator) -> list[Workload]:
    """One device's column slices of a table; all of it where it can't be cut."""
    widest = workload.dim // 8 * 4
    if widest < 4:
        return [workload]
    width = 4 * max(1, round(math.exp(width_share * math.log(widest / 4))))
    held = min(int(2 ** (torch.rand(1, generator=generator).item() * math.log2(MAX_SLICES + 1))), workload.dim // width)
    return [workload.part(workload.rows, width)] * max(1, held)


def _blocks(shards: Sequence[Workload], blocks: int, skewed: bool, generator: torch.Generator) -> list[Workload]:
    """One of so many blocks of rows of each shard."""
    uniform_S2 = torch.rand(len(shards), 2, generator=generator, dtype=torch.float64).tolist()
    result = []
    for shard, (heat, spread) in zip(shards, uniform_S2, strict=True):
        rows, even = max(1, shard.rows // blocks), 1 / blocks
        if skewed:
            # From nearly all lookups to less than the even share; distinct rows lie between that and the even share.
            power = 0.2 + heat
            result.append(shard.block(rows, shard.dim, even**power, even ** (1 + (power - 1) * spread)))
        else:
            result.append(shard.part(rows, shard.dim))
    return result


def _within(shards: Sequence[Workload], max_work: float) -> list[Workload]:
    """Those shards, in order, that are together within the limit; the lightest one where none is."""
    held: list[Workload] = []
    total = 0.0
    works = [set_work([shard]) for shard in shards]
    for shard, work in zip(shards, works, strict=True):
        if total + work <= max_work:
            held.append(shard)
            total += work
    return held or [shards[works.index(min(works))]]
