# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Draw sets to measure as fused kernels: whole tables, and shards as TorchRec fuses them.

TorchRec computes each sharding type by a kernel of its own, so all shards of a set are cut alike: column slices, blocks
of rows, or both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from dreamshard_planner.errors import TaskError
from dreamshard_planner.workload.tables import Table, Workload, workloads_of

BATCH_SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)}
"""Default samples of a kernel by device; one large batch takes as long as many small ones."""
MAX_SET_WORK = {"cpu": 180e6, "cuda": 5e9}
"""Largest :func:`set_work` of a drawn set. On one 2.6 GHz Zen 4 core it takes about 180 ms. On CUDA it is some 60
tables of dim 64 with 16 lookups in each of 65,536 samples, which any card holds."""
WORK_SPREAD = 40.0
"""Ratio of the largest to the smallest limit of drawn sets, log-uniform between. One limit for all would put most of
the time into sets near it."""
SHARD_SHARE = 0.2
"""Share of shards among the sets to measure, as TorchRec fuses them where it splits tables."""
MAX_TABLES = 100
"""Tables of the largest set to measure."""
KINDS = ("column", "row", "grid")
MAX_ROW_BLOCKS = 128
MAX_SLICES = 4  # of one table on one device
_SEQUENCE_WORK, _WEIGHTED_WORK, _FP16_WORK = 10.0, 2.0, 1.6
"""Factors on the time of a lookup, medians on that core; FBGEMM's CPU backward pass of sequences is slow."""
_ROOM = 8  # ratio of the limits of whole tables and of the shards cut from them
_LIMITS_SEED_APART = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMix:
    """Shares of drawn sets with an attribute; the others are pooled, unweighted, fp32, SGD, and of mixed dims."""

    sequence: float = 0.08
    weighted: float = 0.08
    """Share of the pooled sets; sequences take no weights."""
    fp16: float = 0.10
    rowwise_adagrad: float = 0.30
    adagrad: float = 0.30
    one_dim: float = 0.25
    """Share of the pooled sets. On GPUs the widest table of a kernel counts for all."""

    def draw(self, generator: torch.Generator) -> dict[str, int | bool | str]:
        """Return attributes of one set."""
        sequence, weighted, fp16, optimizer = torch.rand(4, generator=generator).tolist()
        pooled = sequence >= self.sequence
        return {
            "pooled": pooled,
            "weighted": pooled and weighted < self.weighted,
            "weight_bytes": 2 if fp16 < self.fp16 else 4,
            "optimizer": self.optimizer(optimizer),
            "memory": "device",
        }

    def optimizer(self, uniform: float) -> str:
        """Return the optimizer for a uniform random number."""
        if uniform < self.rowwise_adagrad:
            return "rowwise_adagrad"
        return "adagrad" if uniform < self.rowwise_adagrad + self.adagrad else "sgd"


_workloads = lru_cache(maxsize=16)(workloads_of)  # calibration draws from the same tables for each optimizer


def draw_sets(
    tables: Sequence[Table],
    num_sets: int,
    seed: int,
    batch_sizes: Sequence[int] | None = None,
    max_tables: int = 40,
    mix: GroupMix | None = None,
    max_work: float | None = None,
    device: str = "cpu",
    shard_share: float = 0.0,
) -> list[list[Workload]]:
    """Draw groups of tables to measure, a share of them cut into shards.

    Set sizes are log-uniform from 1 to ``max_tables``. Tables of a set are distinct. A table that would carry a set
    past its limit is left out; if none fits, the set is another one that does, else the lightest.

    Slices are log-uniformly wide, from 4 columns to half the table; a device has one to four of a table. Rows are cut
    into 2 to 128 blocks, log-uniform, equally many for all tables of a set. In a third of the sets blocks get more or
    less than an even share of the lookups, as if frequent ids lay together.

    Args:
        tables: the pool; drawn attributes replace its pooling, weighting, precision, optimizer and memory.
        num_sets: sets to draw; more sets begin with the same ones.
        seed: of everything.
        batch_sizes: samples of a kernel. Default: ``BATCH_SIZES`` of the device.
        max_tables: largest set.
        mix: shares of the attributes.
        max_work: limit of all sets. Default: a random one for each, up to ``MAX_SET_WORK`` of the device.
        device: ``cpu`` or ``cuda``.
        shard_share: share of the sets that are cut, evenly among the others.
    """
    batch_sizes = BATCH_SIZES[device] if batch_sizes is None else batch_sizes
    if not tables or not batch_sizes or max_tables < 1:
        raise TaskError(f"no sets to draw: {len(tables)} tables, batch sizes {batch_sizes}, {max_tables} tables a set")
    if not 0 <= shard_share <= 1:
        raise TaskError(f"share of shards must be between 0 and 1, got {shard_share}")
    mix = mix or GroupMix()
    generator, limits = torch.Generator().manual_seed(seed), work_limits(max_work, device, seed)
    pools = {batch: _workloads(tuple(tables), batch) for batch in batch_sizes}
    of_dim: dict[int, list[int]] = {}
    for t, table in enumerate(tables):
        of_dim.setdefault(table.dim, []).append(t)
    sets = []
    for place in range(num_sets):
        is_cut = int((place + 1) * shard_share) > int(place * shard_share)
        size_share, batch_share, dim_share = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        size = int(math.exp(size_share * math.log(max_tables + 1)))
        batch = batch_sizes[int(batch_share * len(batch_sizes))]
        attributes, limit = mix.draw(generator), next(limits)
        # The fraction left by choosing a dim decides whether the set has only that one.
        one_dim_share, chosen = math.modf(dim_share * len(tables))
        dim = tables[int(chosen)].dim
        candidates = range(len(tables)) if attributes["pooled"] else of_dim[dim]
        order = [candidates[i] for i in torch.randperm(len(candidates), generator=generator).tolist()]
        if one_dim_share < mix.one_dim:
            order = [i for i in order if tables[i].dim == dim]
        group: list[Workload] = []
        lightest: list[Workload] = []
        total, least_work = 0.0, math.inf
        for position, i in enumerate(order):
            if position >= size and group:
                break
            workload = replace(pools[batch][i], **attributes)
            work = set_work([workload])
            if total + work <= limit * (_ROOM if is_cut else 1):
                group.append(workload)
                total += work
            if work < least_work:
                lightest, least_work = [workload], work
        drawn = group or lightest
        sets.append(_cut(drawn, limit, generator) if is_cut else drawn)
    return sets


def most_sets(seconds: float) -> int:
    """Return more sets than any machine can measure in some seconds."""
    return int(seconds * 30) + 1


def work_limits(max_work: float | None, device: str, seed: int) -> Iterator[float]:
    """Yield the limit of :func:`set_work` for one drawn set after the other."""
    generator = torch.Generator().manual_seed(seed + _LIMITS_SEED_APART)
    while True:
        share = torch.rand(1, generator=generator, dtype=torch.float64).item()
        yield MAX_SET_WORK[device] / WORK_SPREAD**share if max_work is None else max_work


def set_work(workloads: Iterable[Workload]) -> float:
    """Estimate a set's nanoseconds on the core that :data:`MAX_SET_WORK` names: 1 for each element of a lookup, and 16
    for each lookup."""
    total = 0.0
    for w in workloads:
        slower = 1.0 if w.pooled else _SEQUENCE_WORK
        slower *= _WEIGHTED_WORK if w.weighted else 1.0
        slower *= _FP16_WORK if w.weight_bytes == 2 else 1.0
        total += w.lookups * (w.dim + 16) * slower
    return total


def _cut(group: Sequence[Workload], limit: float, generator: torch.Generator) -> list[Workload]:
    """Return shards of the tables of a set, as many as the limit of :func:`set_work` allows."""
    kind_share, blocks_share, skewed = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
    kind = KINDS[int(kind_share * len(KINDS))]
    width_shares = torch.rand(len(group), generator=generator, dtype=torch.float64).tolist()
    shards = list(group)
    if kind != "row":
        # Sequences of one kernel have one dim, hence one width.
        widths = [share if w.pooled else width_shares[0] for w, share in zip(group, width_shares, strict=True)]
        shards = [part for w, share in zip(group, widths, strict=True) for part in _slices(w, share, generator)]
    if kind != "column":
        blocks = round(math.exp(blocks_share * math.log(MAX_ROW_BLOCKS / 2)) * 2)
        shards = _blocks(shards, blocks, skewed < 1 / 3, generator)
    held, total = [], 0.0
    for shard in shards:
        if total + (work := set_work([shard])) <= limit:
            held.append(shard)
            total += work
    return held or [min(shards, key=lambda shard: set_work([shard]))]


def _slices(workload: Workload, width_share: float, generator: torch.Generator) -> list[Workload]:
    """Return one device's column slices of a table; the whole table if it is too narrow."""
    widest = workload.dim // 8 * 4
    if widest < 4:
        return [workload]
    width = 4 * max(1, round(math.exp(width_share * math.log(widest / 4))))
    held = min(int(2 ** (torch.rand(1, generator=generator).item() * math.log2(MAX_SLICES + 1))), workload.dim // width)
    return [workload.part(workload.rows, width)] * max(1, held)


def _blocks(shards: Sequence[Workload], blocks: int, skewed: bool, generator: torch.Generator) -> list[Workload]:
    """Return one of so many blocks of rows of each shard."""
    uniform_S2 = torch.rand(len(shards), 2, generator=generator, dtype=torch.float64).tolist()
    result = []
    for shard, (heat, spread) in zip(shards, uniform_S2, strict=True):
        rows, even = max(1, shard.rows // blocks), 1 / blocks
        if skewed:
            # Lookups from nearly all down to less than the even share, distinct rows between that and the even share.
            power = 0.2 + heat
            result.append(shard.block(rows, shard.dim, even**power, even ** (1 + (power - 1) * spread)))
        else:
            result.append(shard.part(rows, shard.dim))
    return result
