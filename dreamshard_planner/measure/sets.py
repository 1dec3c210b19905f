# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Draw sets to measure as fused kernels: whole tables, and shards as TorchRec fuses them where it splits tables.

Shards are drawn as whole tables, each cut as its sharding type would cut it: column slices, blocks of rows, or both.
TorchRec computes each sharding type by a kernel of its own, so that all shards of a set are of one type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from dreamshard_planner.errors import TaskError
from dreamshard_planner.workload.tables import Table, Workload, workloads_of

BATCH_SIZES = {
    "cpu": (256, 512, 1024, 2048, 4096),
    "cuda": (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
}
"""Samples that a kernel sees, by device, where minutes have to do: a large batch takes as long as many small ones."""

MAX_SET_WORK = {"cpu": 180e6, "cuda": 5e9}
"""Largest :func:`set_work` of a drawn set: about 180 ms, forward and backward, on one 2.6 GHz Zen 4 core; on CUDA, some
60 tables of dim 64 with 16 lookups in each of 65,536 samples, which any card holds."""

WORK_SPREAD = 40.0
"""Largest over smallest limit of drawn sets, log-uniform between. With one limit for all, of 60e6, most of the time
went into sets near it, and kernels of twice the work had to be extrapolated."""

_LIMITS_SEED_APART = 20_000
"""Added to the seed of sets for that of their limits: sets are the same without."""

_SEQUENCE_WORK, _WEIGHTED_WORK, _FP16_WORK = 10.0, 2.0, 1.6
"""How much longer a lookup takes there, median over sets measured on that core: FBGEMM's CPU backward pass of
sequences is slow."""

KINDS = ("column", "row", "grid")
MAX_ROW_BLOCKS = 128
MAX_SLICES = 4
"""Of one table on one device."""
_ROOM = 8
"""How much heavier whole tables are drawn than their shards may be."""
SHARD_SHARE = 0.2
"""Of the sets to measure. What ships learned from 16 % of shards, and errs on them by more than on whole tables."""
_SHARDS_SEED_APART = 10_000
"""Added to the seed of whole tables for that of shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMix:
    """What share of the drawn sets has each attribute; the rest is pooled, unweighted, fp32, SGD, of mixed dims."""

    sequence: float = 0.08
    weighted: float = 0.08
    """Of the pooled sets; sequence lookups take no weights."""
    fp16: float = 0.10
    rowwise_adagrad: float = 0.30
    adagrad: float = 0.30
    one_dim: float = 0.25
    """Of the pooled sets, as many models have it: on GPUs the widest table of a kernel counts for all of them."""

    def __post_init__(self) -> None:
        for name, share in asdict(self).items():
            if not 0 <= share <= 1:
                raise TaskError(f"share of {name} sets must be between 0 and 1, got {share}")
        if self.rowwise_adagrad + self.adagrad > 1:
            raise TaskError(f"shares of optimizers exceed 1: {self.rowwise_adagrad} and {self.adagrad}")

    def draw(self, generator: torch.Generator) -> dict[str, int | bool | str]:
        """Attributes of one set."""
        sequence, weighted, fp16, optimizer = torch.rand(4, generator=generator).tolist()
        pooled = sequence >= self.sequence
        return {
            "pooled": pooled,
            "weighted": pooled and weighted < self.weighted,
            "weight_bytes": 2 if fp16 < self.fp16 else 4,
            "optimizer": self.optimizer(optimizer),
            "memory": "device",
        }

    def optimizer(self, share: float) -> str:
        """By a random share of all sets."""
        if share < self.rowwise_adagrad:
            return "rowwise_adagrad"
        return "adagrad" if share < self.rowwise_adagrad + self.adagrad else "sgd"


@lru_cache(maxsize=16)
def _workloads(tables: tuple[Table, ...], batch_size: int) -> list[Workload]:
    """Of tables that sets are drawn from again: calibration does so for each optimizer."""
    return workloads_of(tables, batch_size)


def draw_sets(
    tables: Sequence[Table],
    num_sets: int,
    seed: int,
    batch_sizes: Sequence[int] | None = None,
    max_tables: int = 40,
    mix: GroupMix | None = None,
    max_work: float | None = None,
    device: str = "cpu",
) -> list[list[Workload]]:
    """Random groups to measure.

    Set sizes are log-uniform from 1 to ``max_tables``; batch sizes come from a ladder, each as likely as the
    others; tables of a set are distinct, and of one dim in a share of the sets and where sequences are looked up.
    Tables that would carry a set past its limit are left out of it; where none fits, another that does is its only
    one, else the lightest.

    Args:
        tables: the pool; its own pooling, weighting, precision, optimizer and memory are replaced by drawn ones.
        num_sets: how many.
        seed: of everything.
        batch_sizes: samples that a kernel sees. Default: ``BATCH_SIZES`` of the device.
        max_tables: largest set.
        mix: shares of the attributes.
        max_work: limit of all sets. Default: one of its own for each, up to ``MAX_SET_WORK`` of the device.
        device: ``cpu`` or ``cuda``: what is to measure the sets.
    """
    batch_sizes = BATCH_SIZES[device] if batch_sizes is None else batch_sizes
    if not tables or not batch_sizes or max_tables < 1:
        raise TaskError(f"no sets to draw: {len(tables)} tables, batch sizes {batch_sizes}, {max_tables} tables a set")
    mix = mix or GroupMix()
    generator, limits = torch.Generator().manual_seed(seed), work_limits(max_work, device, seed)
    pools = {batch: _workloads(tuple(tables), batch) for batch in batch_sizes}
    of_dim: dict[int, list[int]] = {}
    for t, table in enumerate(tables):
        of_dim.setdefault(table.dim, []).append(t)
    variants: dict[tuple[object, ...], tuple[Workload, float]] = {}
    sets = []
    for _ in range(num_sets):
        size_share, batch_share, dim_share = torch.rand(3, generator=generator, dtype=torch.float64).tolist()
        size = int(math.exp(size_share * math.log(max_tables + 1)))
        batch = batch_sizes[int(batch_share * len(batch_sizes))]
        attributes, limit = mix.draw(generator), next(limits)
        # What choosing a dim leaves of the number is random as well: sets of mixed dims are the same without others.
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
            key = (i, batch, *attributes.values())
            if key not in variants:
                workload = replace(pools[batch][i], **attributes)
                variants[key] = workload, set_work([workload])
            workload, work = variants[key]
            if total + work <= limit:
                group.append(workload)
                total += work
            if work < least_work:
                lightest, least_work = [workload], work
        sets.append(group or lightest)
    return sets


def work_limits(max_work: float | None, device: str, seed: int) -> Iterator[float]:
    """The most :func:`set_work` of one drawn set after the other: ``max_work``, or up to that of the device."""
    generator = torch.Generator().manual_seed(seed + _LIMITS_SEED_APART)
    while True:
        share = torch.rand(1, generator=generator, dtype=torch.float64).item()
        yield MAX_SET_WORK[device] / WORK_SPREAD**share if max_work is None else max_work


def set_work(workloads: Iterable[Workload]) -> float:
    """What a set costs by rule of thumb, in nanoseconds of the core that :data:`MAX_SET_WORK` names.

    An element of a lookup takes about 1 ns, a lookup as long as 16 elements more.
    """
    total = 0.0
    for w in workloads:
        slower = 1.0 if w.pooled else _SEQUENCE_WORK
        slower *= _WEIGHTED_WORK if w.weighted else 1.0
        slower *= _FP16_WORK if w.weight_bytes == 2 else 1.0
        total += w.lookups * (w.dim + 16) * slower
    return total


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
    other = seed + _SHARDS_SEED_APART
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
