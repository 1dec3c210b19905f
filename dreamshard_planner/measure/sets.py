# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets to measure as fused kernels: drawn, and measured so that the results outlive any interruption.

Sets have whole tables, or shards as TorchRec fuses them. It computes each sharding type by a kernel of its own, so all
shards of a set are cut alike: column slices, blocks of rows, or both.

They are measured in blocks. The repeats of one block are interleaved, so that the repeats of a set lie apart in time;
each comes right behind a run of one fixed reference set. The record is a folder with a dataset file per block, written
whole or not at all: a process that dies loses the block that it was measuring.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dreamshard_planner.cost.dataset import CostDataset, Hardware, as_measured, other_hardware
from dreamshard_planner.errors import DatasetError, TaskError
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.measure.kernels import Arena, FusedKernel, time_groups
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.support.formatting import progress_bar
from dreamshard_planner.support.reproducible import intra_op_threads
from dreamshard_planner.workload.tables import Table, Workload, workloads_of

SEQUENCES, WEIGHTED, FP16, ONE_DIM = 0.08, 0.08, 0.10, 0.25
"""Shares of drawn sets with an attribute; the others are pooled, unweighted, fp32, and of mixed dims. Sequences take no
weights, and have one dim. On GPUs the widest table of a kernel counts for all."""
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
BLOCK = 8
"""Sets whose repeats are interleaved, and that an interruption loses."""
_ROOM = 8  # ratio of the limits of whole tables and of the shards cut from them


def random_optimizer(rng: np.random.Generator) -> str:
    """Return the optimizer of a set."""
    uniform = rng.random()
    return "rowwise_adagrad" if uniform < 0.3 else "adagrad" if uniform < 0.6 else "sgd"


def random_limit(device: str, rng: np.random.Generator) -> float:
    """Return the most :func:`set_work` of a set."""
    return MAX_SET_WORK[device] / WORK_SPREAD ** rng.random()


_workloads = lru_cache(maxsize=16)(workloads_of)  # calibration draws from the same tables for each optimizer


def draw_sets(
    tables: Sequence[Table],
    num_sets: int,
    seed: int,
    batch_sizes: Sequence[int] | None = None,
    max_tables: int = 40,
    optimizer: str | None = None,
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
        optimizer: of all sets. Default: a random one for each.
        max_work: limit of all sets. Default: a random one for each, up to ``MAX_SET_WORK`` of the device.
        device: ``cpu`` or ``cuda``.
        shard_share: share of the sets that are cut, evenly among the others.
    """
    batch_sizes = BATCH_SIZES[device] if batch_sizes is None else batch_sizes
    if not tables or not batch_sizes or max_tables < 1:
        raise TaskError(f"no sets to draw: {len(tables)} tables, batch sizes {batch_sizes}, {max_tables} tables a set")
    if not 0 <= shard_share <= 1:
        raise TaskError(f"share of shards must be between 0 and 1, got {shard_share}")
    pools = [_workloads(tuple(tables), batch_size) for batch_size in batch_sizes]
    rng, sets = np.random.default_rng(seed), []
    for place in range(num_sets):
        is_cut = int((place + 1) * shard_share) > int(place * shard_share)
        size, pool = int((max_tables + 1) ** rng.random()), pools[int(rng.integers(len(pools)))]
        limit = random_limit(device, rng) if max_work is None else max_work
        pooled = rng.random() >= SEQUENCES
        attributes: dict[str, Any] = {
            "pooled": pooled,
            "weighted": pooled and rng.random() < WEIGHTED,
            "weight_bytes": 2 if rng.random() < FP16 else 4,
            "optimizer": optimizer or random_optimizer(rng),
            "memory": "device",
        }
        order = rng.permutation(len(tables)).tolist()
        if not pooled or rng.random() < ONE_DIM:
            order = [i for i in order if tables[i].dim == tables[order[0]].dim]
        group = _those_that_fit((replace(pool[i], **attributes) for i in order), limit * (_ROOM if is_cut else 1), size)
        sets.append(_cut(group, limit, rng) if is_cut else group)
    return sets


def _those_that_fit(workloads: Iterable[Workload], limit: float, tried: float = math.inf) -> list[Workload]:
    """Return workloads within a limit of :func:`set_work` from the first few, else the next that fits, or the
    lightest."""
    fitting: list[Workload] = []
    heavy: list[Workload] = []
    for position, workload in enumerate(workloads):
        if position >= tried and fitting:
            break
        (fitting if set_work([*fitting, workload]) <= limit else heavy).append(workload)
    return fitting or [min(heavy, key=lambda workload: set_work([workload]))]


def most_sets(seconds: float) -> int:
    """Return more sets than any machine can measure in some seconds."""
    return int(seconds * 30) + 1


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


def _cut(group: Sequence[Workload], limit: float, rng: np.random.Generator) -> list[Workload]:
    """Return shards of the tables of a set, as many as the limit of :func:`set_work` allows."""
    kind, shards = KINDS[rng.integers(len(KINDS))], list(group)
    if kind != "row":
        common = rng.random()  # sequences of one kernel have one dim, hence one width
        shards = [part for w in group for part in _slices(w, rng.random() if w.pooled else common, rng)]
    if kind != "column":
        blocks, is_skewed = round(2 * (MAX_ROW_BLOCKS / 2) ** rng.random()), rng.random() < 1 / 3
        shards = [_block(shard, blocks, is_skewed, rng) for shard in shards]
    return _those_that_fit(shards, limit)


def _slices(workload: Workload, width_share: float, rng: np.random.Generator) -> list[Workload]:
    """Return one device's column slices of a table; the whole table if it is too narrow."""
    widest = workload.dim // 8
    if widest < 1:
        return [workload]
    width = 4 * round(widest**width_share)
    held = min(int((MAX_SLICES + 1) ** rng.random()), workload.dim // width)
    return [workload.part(workload.rows, width)] * held


def _block(shard: Workload, blocks: int, is_skewed: bool, rng: np.random.Generator) -> Workload:
    """Return one of so many blocks of rows."""
    rows, even = max(1, shard.rows // blocks), 1 / blocks
    if not is_skewed:
        return shard.part(rows, shard.dim)
    # Lookups from nearly all down to less than the even share, distinct rows between that and the even share.
    power = 0.2 + rng.random()
    return shard.block(rows, shard.dim, even**power, even ** (1 + (power - 1) * rng.random()))


def _reference_set(rows: int, batch_size: int, distinct_rows: float) -> list[Workload]:
    reuse = (0.45, 0.20, 0.14, 0.10, 0.07, 0.04) + (0.0,) * 11
    dims = (16, 32, 64, 128)
    return [Workload(f"reference {dim}", rows, dim, batch_size, 16.0, distinct_rows, reuse) for dim in dims]


REFERENCE_SETS = {"cpu": _reference_set(200_000, 512, 2048.0), "cuda": _reference_set(2_000_000, 65_536, 262_144.0)}
"""Set by device that is timed right before every measured set, to tell how fast the machine is then. On CUDA it moves
gigabytes, to take about a millisecond as well."""


def collect(
    sets: Sequence[Sequence[Workload]],
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    threads: int = 1,
    repeats: int = 3,
    seed: int = 0,
    seconds: float | None = None,
    progress: bool = True,
    arena: Arena | None = None,
) -> CostDataset:
    """Measure ``sets`` in order, continuing an interrupted collection.

    Args:
        sets: groups, each of which fits one fused kernel.
        folder: record of the measured blocks, made if missing.
        device: where kernels run.
        threads: intra-op threads.
        repeats: timed runs of each set.
        seed: of indices, lengths and order.
        seconds: time after which no block is begun, but the first. 0 only reads the record.
        progress: show a bar on stderr.
        arena: weights to use. Default: one of default size.

    Returns:
        All measured sets, in the order of ``sets``.

    Raises:
        DatasetError: a block is damaged, or of other sets, repeats, seed or hardware.
        FileError: the folder cannot be written, or another process measures into it.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    measured = [[as_measured(workload) for workload in group] for group in sets]  # as files hold them
    blocks = [measured[first : first + BLOCK] for first in range(0, len(measured), BLOCK)]
    folder, hardware, arena = Path(folder), describe_hardware(device, threads), arena or Arena(device, seed=seed)
    with open_locked(folder / "lock"), intra_op_threads(threads):
        found = _read(folder, blocks, repeats, hardware, seed)
        if progress and found:
            print(f"{folder}: continues after {sum(map(len, found.values()))} sets", file=sys.stderr)
        todo = [index for index in range(len(blocks)) if index not in found and seconds != 0]
        last, unit = time.monotonic(), "" if seconds is None else ", s"
        total = sum(len(blocks[index]) for index in todo) if seconds is None else math.ceil(seconds)
        with progress_bar(f"measuring{unit}", total, progress and bool(todo)) as advance:
            for index in todo:
                groups = (*blocks[index], REFERENCE_SETS[arena.device.type])
                *kernels, reference = [FusedKernel(group, arena, seed) for group in groups]
                order = torch.Generator().manual_seed(seed + index * BLOCK)
                timed = time_groups(kernels, reference, repeats, generator=order)
                made = CostDataset.from_sets(blocks[index], timed.samples_ms, hardware, timed.reference_ms, seed)
                made.save(folder / f"block-{index}.npz")
                found[index] = made
                begun, last = last, time.monotonic()
                note = f"{len(made) / (last - begun):.1f} sets/s, spread of repeats {made.spread.mean():.1%}"
                if waiting := float(timed.launch_bound_N.mean()):
                    note += f", {waiting:.1%} of the runs launch-bound"
                advance(note, len(made) if seconds is None else last - begun)
                if last >= deadline:
                    break
    if not found:
        raise DatasetError(f"{folder}: nothing was measured yet")
    return CostDataset.concatenate([found[index] for index in sorted(found)])


def _read(
    folder: Path, blocks: Sequence[Sequence[Sequence[Workload]]], repeats: int, hardware: Hardware, seed: int
) -> dict[int, CostDataset]:
    """Return the measured blocks in a folder by index; raises DatasetError if one is of other sets."""
    found = {}
    for path in folder.glob("block-*.npz"):
        index, made = int(path.stem.removeprefix("block-")), CostDataset.load(path)
        if differing := other_hardware(made.hardware, hardware):
            raise DatasetError(f"{path}: measured on {differing}; use another folder")
        if made.seed != seed:
            raise DatasetError(f"{path}: collected with seed {made.seed}, asked for {seed}; use another folder")
        if made.repeats != repeats:
            raise DatasetError(f"{path}: holds {made.repeats} repeats of each set, asked for {repeats}")
        if index >= len(blocks) or made.sets != blocks[index][: len(made)]:
            raise DatasetError(
                f"{path}: its sets are not those asked for. Continue with the same tables, seed and options, use "
                "another folder, or delete this one."
            )
        if len(made) == len(blocks[index]):  # else more sets are asked for now
            found[index] = made
    return found
