# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure sets as fused kernels, and keep the results through any interruption.

Sets are measured in blocks. The repeats of one block are interleaved, so that the repeats of a set lie apart in time;
each comes right behind a run of one fixed reference set.

The record is a folder with a dataset file per block, written whole or not at all: a process that dies loses the block
that it was measuring.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dreamshard_planner.cost.dataset import CostDataset, Hardware, as_measured, require_same_hardware
from dreamshard_planner.errors import DatasetError, TaskError
from dreamshard_planner.measure.hardware import check_kernels, describe_hardware
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.timing import kernel_threads, time_groups
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.support.formatting import progress_bar
from dreamshard_planner.workload.tables import Workload

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
    block: int = 8,
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
        block: sets whose repeats are interleaved, and that an interruption loses; always the same for one folder.
        arena: weights to use. Default: one of default size.

    Returns:
        All measured sets, in the order of ``sets``.

    Raises:
        DatasetError: a block is damaged, or of other sets, repeats, seed or hardware.
        FileError: the folder cannot be written, or another process measures into it.
        TaskError: a set does not fit one kernel.
        DreamShardError: FBGEMM runs its reference kernels.
    """
    if seconds != 0:
        check_kernels(device)
    if block < 1 or repeats < 1:
        raise TaskError(f"block and repeats must be at least 1, got {block} and {repeats}")
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    measured = [[as_measured(workload) for workload in group] for group in sets]  # as files hold them
    blocks = [measured[first : first + block] for first in range(0, len(measured), block)]
    folder, hardware, arena = Path(folder), describe_hardware(device, threads), arena or Arena(device, seed=seed)
    with open_locked(folder / "lock"), kernel_threads(threads):
        found = _read(folder, blocks, repeats, hardware, seed)
        if progress and found:
            print(f"{folder}: continues after {sum(map(len, found.values()))} sets", file=sys.stderr)
        todo = [index for index in range(len(blocks)) if index not in found and seconds != 0]
        reference = FusedKernel(REFERENCE_SETS[torch.device(device).type], device, seed, arena) if todo else None
        spreads: list[float] = []
        start = last = time.monotonic()
        bar = ("measuring", sum(len(blocks[index]) for index in todo))
        if seconds is not None:
            bar = ("measuring, s", math.ceil(seconds))
        with progress_bar(*bar, progress and bool(todo)) as advance:
            for index in todo:
                kernels = [FusedKernel(group, device, seed, arena) for group in blocks[index]]
                order = torch.Generator().manual_seed(seed + index * block)
                samples = time_groups(kernels, repeats, warmup=1, generator=order, reference=reference)
                times = [one.samples_ms.tolist() for one in samples]
                references = [one.reference_ms.tolist() for one in samples if one.reference_ms is not None]
                found[index] = CostDataset.from_sets(blocks[index], times, hardware, references, seed)
                found[index].save(folder / f"block-{index}.npz")
                spreads += [float(one.spread.mean()) for one in samples]
                begun, last = last, time.monotonic()
                waiting = sum(one.launch_bound for one in samples) / len(samples)
                note = f"{len(spreads) / (last - start):.1f} sets/s, spread of repeats {statistics.median(spreads):.1%}"
                note += f", {waiting:.1%} of the runs launch-bound" if waiting else ""
                advance(note, len(samples) if seconds is None else last - begun)
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
        require_same_hardware(path, made.hardware, hardware)
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
