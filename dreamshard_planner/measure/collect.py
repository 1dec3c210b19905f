# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Draw sets of tables, measure them as fused kernels, and keep the result through any interruption.

Sets are measured in blocks: the repeats of one block are interleaved, so that the repeats of one set lie apart in
time, each right behind a run of one fixed reference set. A block's records are written when it is done. Several ranks,
each with a device or cores of its own, share the sets.

Shape letters: R repeats, 2 (forward, backward).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from dreamshard_planner.cost.dataset import CostDataset, as_measured
from dreamshard_planner.errors import TaskError
from dreamshard_planner.measure.blocks import MeasuredBlocks
from dreamshard_planner.measure.hardware import check_kernels, describe_hardware
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.measure.timing import Samples, pinned, time_groups
from dreamshard_planner.support.progress import progress_bar
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

_SEED_APART = 20_000
"""Added to the seed of sets for that of their limits: sets are the same without."""

_SEQUENCE_WORK, _WEIGHTED_WORK, _FP16_WORK = 10.0, 2.0, 1.6
"""How much longer a lookup takes there, median over sets measured on that core: FBGEMM's CPU backward pass of
sequences is slow."""

_REFERENCE_SET = tuple(
    Workload(
        name=f"reference {dim}",
        rows=200_000,
        dim=dim,
        batch_size=512,
        pooling_factor=16.0,
        distinct_rows=2048.0,
        reuse_histogram=(0.45, 0.20, 0.14, 0.10, 0.07, 0.04) + (0.0,) * 11,
    )
    for dim in (16, 32, 64, 128)
)
REFERENCE_SETS = {
    "cpu": _REFERENCE_SET,
    "cuda": tuple(replace(w, batch_size=65_536, rows=2_000_000, distinct_rows=262_144.0) for w in _REFERENCE_SET),
}
"""By device, timed beside every set of every collection: its time tells how fast the machine is just then. On CUDA it
moves gigabytes, so that it takes about a millisecond there as well."""


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
    generator = torch.Generator().manual_seed(seed + _SEED_APART)
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


def collect(
    sets: Sequence[Sequence[Workload]],
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    threads: int = 1,
    repeats: int = 3,
    seed: int = 0,
    seconds: float | None = None,
    progress: bool = True,
    block: int = 8,
    arena: Arena | None = None,
    ranks: Ranks | None = None,
) -> CostDataset:
    """Measure ``sets`` in order, continuing an interrupted collection.

    Several ranks share the sets that are not measured yet, and each writes blocks of its own. A rank that dies loses
    the block that it was measuring. The same call continues, with any number of ranks.

    Args:
        sets: groups, each of which fits one fused kernel.
        folder: of the measured blocks; made if missing. All its sets must be among ``sets``.
        device: where kernels run.
        threads: intra-op threads.
        repeats: timed runs of each set.
        seed: of indices, lengths and order.
        seconds: of measuring: one block at least, and the last one as small as what is left of them. 0: only read what
            was measured.
        progress: a bar on the first rank's stderr, of the seconds where these are given, else of the sets.
        block: sets whose repeats are interleaved; as many are measured again after an interruption.
        arena: weights to use. Default: one of default size.
        ranks: the processes that measure, each of which makes this call. Default: this one alone.

    Returns:
        All measured sets, in the order of ``sets``; on every rank the same.

    Raises:
        DatasetError: a block is damaged, or of other sets, repeats, seed or hardware.
        TaskError: a set does not fit one kernel.
        DreamShardError: FBGEMM runs its reference kernels; another rank failed, or has ended.
    """
    if seconds != 0:
        check_kernels(device)
    if block < 1 or repeats < 1:
        raise TaskError(f"block and repeats must be at least 1, got {block} and {repeats}")
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    sets = [[as_measured(workload) for workload in group] for group in sets]  # as files have them
    ranks = ranks or Ranks()
    hardware = describe_hardware(device, threads)
    cores = ranks.cores() if hardware["device"] == "cpu" else None
    with MeasuredBlocks(folder, sets, repeats, hardware, seed, ranks) as blocks, pinned(threads, cores):
        todo = ranks.share(blocks.missing)
        done = len(sets) - len(blocks.missing)
        if progress and ranks.leads and done:
            print(f"{folder}: continues after {done} sets", file=sys.stderr)

        def measure() -> None:
            own_arena = arena or Arena(device, seed=seed)
            reference = FusedKernel(REFERENCE_SETS[torch.device(device).type], device, seed, own_arena)
            pace, start = _Pace(), 0
            bar = ("measuring", done + len(todo), progress and ranks.leads, done)
            if seconds is not None:
                bar = ("measuring, s", math.ceil(seconds), progress and ranks.leads, 0)
            with progress_bar(*bar) as advance:
                while start < len(todo) and (not start or time.monotonic() < deadline):
                    positions = todo[start : start + pace.sets_in(deadline - time.monotonic(), block)]
                    start += len(positions)
                    kernels = [FusedKernel(sets[position], device, seed, own_arena) for position in positions]
                    order = torch.Generator().manual_seed(seed + positions[0])
                    block_samples = time_groups(kernels, repeats, warmup=1, generator=order, reference=reference)
                    blocks.append(positions, block_samples)
                    note = pace.note(block_samples)
                    advance(note, len(positions) if seconds is None else pace.step_seconds)
            if arena is None:
                own_arena.release()

        ranks.gather(lambda: measure() if todo and seconds != 0 else None)
        return blocks.dataset()


class _Pace:
    """Sets per second, the median spread of the repeats so far, and what was launch-bound."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._spreads: list[float] = []
        self._launch_bound = 0.0
        self.step_seconds = 0.0
        """Of the latest block."""

    def sets_in(self, seconds: float, most: int) -> int:
        """How many sets that time suffices for: from one to ``most``, which is also where none was measured yet."""
        if seconds == math.inf or not self._spreads:
            return most
        taken = self._last - self._start
        return max(1, min(most, int(seconds * len(self._spreads) / taken)))

    def note(self, block: Sequence[Samples]) -> str:
        """Of all blocks up to this one."""
        now = time.monotonic()
        self.step_seconds, self._last = now - self._last, now
        self._spreads += [float(samples.spread.mean()) for samples in block]
        self._launch_bound += sum(samples.launch_bound for samples in block)
        rate = len(self._spreads) / (now - self._start)
        waiting = self._launch_bound / len(self._spreads)
        launch_bound = f", {waiting:.1%} of the runs launch-bound" if waiting else ""
        return f"{rate:.1f} sets/s, spread of repeats {statistics.median(self._spreads):.1%}{launch_bound}"
