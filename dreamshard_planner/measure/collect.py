# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measure sets as fused kernels, and keep the results through any interruption.

Sets are measured in blocks. The repeats of one block are interleaved, so that the repeats of a set lie apart in time;
each comes right behind a run of one fixed reference set.

The record is a folder with a dataset file per block. Ranks share the sets, and each writes files of its own, whole or
not at all: a process that dies loses the block that it was measuring. A collection may go on with more or fewer ranks,
since rank r also reads the files of ranks r + size, r + 2 size and so on.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dreamshard_planner.cost.dataset import CostDataset, Hardware, as_measured, require_same_hardware
from dreamshard_planner.errors import DatasetError, FileError, TaskError
from dreamshard_planner.measure.hardware import check_kernels, describe_hardware
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.measure.timing import Samples, pinned, time_groups
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.support.progress import progress_bar
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
_BLOCK = re.compile(r"rank(\d+)-(\d+)\.npz")


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
    """Measure ``sets`` in order, continuing an interrupted collection; also with another number of ranks.

    Args:
        sets: groups, each of which fits one fused kernel.
        folder: record of the measured blocks; made if missing. All its sets must be among ``sets``.
        device: where kernels run.
        threads: intra-op threads.
        repeats: timed runs of each set.
        seed: of indices, lengths and order.
        seconds: time limit, after one block at least; the last block is as small as the rest of it. 0 only reads the
            record.
        progress: show a bar on the first rank's stderr.
        block: sets whose repeats are interleaved, and that an interruption loses.
        arena: weights to use. Default: one of default size.
        ranks: processes that measure; all make this call. Default: this process alone.

    Returns:
        All measured sets, in the order of ``sets``; the same on every rank.

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
    sets = [[as_measured(workload) for workload in group] for group in sets]  # as files hold them
    ranks = ranks or Ranks()
    hardware = describe_hardware(device, threads)
    cores = ranks.cores() if hardware["device"] == "cpu" else None
    with ExitStack() as stack, pinned(threads, cores):
        blocks = _Blocks(Path(folder), sets, repeats, hardware, seed, ranks, stack)
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
                    samples = time_groups(kernels, repeats, warmup=1, generator=order, reference=reference)
                    blocks.append(positions, samples)
                    note, block_seconds = pace.note(samples)
                    advance(note, len(positions) if seconds is None else block_seconds)
            if arena is None:
                own_arena.release()

        ranks.gather(lambda: measure() if todo and seconds != 0 else None)
        return blocks.dataset()


class _Pace:
    """Speed of one rank, spread of the repeats, and share of launch-bound runs."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self._spreads: list[float] = []
        self._launch_bound = 0.0

    def sets_in(self, seconds: float, most: int) -> int:
        """Return how many sets fit into some seconds, from 1 to ``most``; ``most`` if the speed is unknown."""
        if seconds == math.inf or not self._spreads:
            return most
        return max(1, min(most, int(seconds * len(self._spreads) / (self._last - self._start))))

    def note(self, block: Sequence[Samples]) -> tuple[str, float]:
        """Return a note on all blocks up to this one, and the seconds of this one."""
        now = time.monotonic()
        block_seconds, self._last = now - self._last, now
        self._spreads += [float(samples.spread.mean()) for samples in block]
        self._launch_bound += sum(samples.launch_bound for samples in block)
        rate, waiting = len(self._spreads) / (now - self._start), self._launch_bound / len(self._spreads)
        launch_bound = f", {waiting:.1%} of the runs launch-bound" if waiting else ""
        spread = statistics.median(self._spreads)
        return f"{rate:.1f} sets/s, spread of repeats {spread:.1%}{launch_bound}", block_seconds


class _Blocks:
    """Blocks of one collection on one rank; all ranks make it together, and lock their parts of the folder until the
    stack ends."""

    def __init__(
        self,
        folder: Path,
        sets: Sequence[Sequence[Workload]],
        repeats: int,
        hardware: Hardware,
        seed: int,
        ranks: Ranks,
        stack: ExitStack,
    ) -> None:
        self._folder, self._sets, self._repeats = folder, sets, repeats
        self._hardware, self._seed, self._ranks = hardware, seed, ranks
        self._blocks: list[CostDataset] = []
        self._number = 0  # of the next block
        places = self._places(ranks.gather(lambda: self._read(stack)))
        self._positions = places[ranks.rank]
        measured = {position for positions in places for position in positions}
        self.missing = [position for position in range(len(sets)) if position not in measured]
        """Indices of the sets that no rank has measured."""

    def _read(self, stack: ExitStack) -> list[tuple[Workload, ...]]:
        """Lock this rank's part of the folder, read its blocks, and return their sets."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(open_locked(self._folder / f"rank{self._ranks.rank}.lock"))
        except FileError as error:
            raise DatasetError(str(error)) from error
        except OSError as error:
            raise DatasetError(f"{self._folder}: cannot be written: {error.strerror or error}") from error
        for path in sorted(self._folder.iterdir()):
            if (match := _BLOCK.fullmatch(path.name)) is None:
                continue
            self._number = max(self._number, int(match[2]) + 1)
            if int(match[1]) % self._ranks.size != self._ranks.rank:
                continue
            block = CostDataset.load(path)
            require_same_hardware(path, block.hardware, self._hardware)
            if block.seed != self._seed:
                raise DatasetError(
                    f"{path}: collected with seed {block.seed}, asked for {self._seed}; use another folder"
                )
            if block.repeats != self._repeats:
                raise DatasetError(f"{path}: holds {block.repeats} repeats of each set, asked for {self._repeats}")
            self._blocks.append(block)
        return [tuple(group) for block in self._blocks for group in block.sets]

    def _places(self, of_ranks: Sequence[Sequence[tuple[Workload, ...]]]) -> list[list[int]]:
        """Return the index of each measured set, by rank; equal sets take their places in order."""
        open_places: dict[tuple[Workload, ...], deque[int]] = {}
        for position, group in enumerate(self._sets):
            open_places.setdefault(tuple(group), deque()).append(position)
        try:
            return [[open_places[group].popleft() for group in groups] for groups in of_ranks]
        except (KeyError, IndexError):
            raise DatasetError(
                f"{self._folder}: its {sum(map(len, of_ranks))} sets are not all among the {len(self._sets)} asked "
                "for. Continue with the same tables, seed and options, use another folder, or delete this one."
            ) from None

    def append(self, positions: Sequence[int], samples: Sequence[Samples]) -> None:
        """Write a block; raises DatasetError if it cannot be written."""
        sets = [self._sets[position] for position in positions]
        times = [one.samples_ms.tolist() for one in samples]
        references = [one.reference_ms.tolist() for one in samples if one.reference_ms is not None]
        block = CostDataset.from_sets(sets, times, self._hardware, references or None, self._seed)
        try:
            block.save(self._folder / f"rank{self._ranks.rank}-{self._number}.npz")
        except FileError as error:
            raise DatasetError(f"{error}; the {len(self._positions)} sets measured before are kept") from error
        self._number += 1
        self._blocks.append(block)
        self._positions += positions

    def dataset(self) -> CostDataset:
        """Return all ranks' blocks in the order of the sets; raises DatasetError if there is none."""
        parts = self._ranks.gather(lambda: (self._positions, self._blocks))
        blocks = [block for _, of_rank in parts for block in of_rank]
        if not blocks:
            raise DatasetError(f"{self._folder}: nothing was measured yet")
        order = np.concatenate([positions for positions, _ in parts if positions]).argsort(kind="stable")
        return CostDataset.concatenate(blocks).select(order)


def remove_blocks(folder: Path, ranks: Ranks) -> None:
    """Remove the record of a collection whose dataset is saved, on each host."""
    if ranks.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
