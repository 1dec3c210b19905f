# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The record of a running collection: a folder with one dataset file per measured block of sets.

Each rank writes files of its own, whole or not at all, so a process that dies loses the block that it was measuring.
A collection may go on with more or fewer ranks: rank r also reads the files of ranks r + size, r + 2 size and so on.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from dreamshard_planner.cost.dataset import CostDataset, Hardware, require_same_hardware
from dreamshard_planner.errors import DatasetError, FileError
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.measure.timing import Samples
from dreamshard_planner.support.files import open_locked
from dreamshard_planner.workload.tables import Workload

_BLOCK = re.compile(r"rank(\d+)-(\d+)\.npz")


class MeasuredBlocks:
    """All blocks of one collection, as one rank sees them. A context manager, entered by all ranks together.

    Args:
        folder: holds the blocks; made if missing.
        sets: to be measured.
        repeats: timed runs of each set.
        hardware: of this rank.
        seed: of the collection.
        ranks: processes that collect.

    Raises:
        DatasetError: a block is damaged, or of other sets, repeats, seed or hardware; or another process collects
            into the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        sets: Sequence[Sequence[Workload]],
        repeats: int,
        hardware: Hardware,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self._folder, self._sets, self._repeats = Path(folder), sets, repeats
        self._hardware, self._seed, self._ranks, self._stack = hardware, seed, ranks, ExitStack()
        self._blocks: list[CostDataset] = []
        self._number = 0
        try:
            places = self._places(ranks.gather(self._read_blocks))
        except BaseException:
            self._stack.close()
            raise
        self._positions = places[ranks.rank]
        measured = {position for positions in places for position in positions}
        self.missing = [position for position in range(len(sets)) if position not in measured]
        """Indices of the sets that no rank has measured yet."""

    def __enter__(self) -> MeasuredBlocks:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _read_blocks(self) -> list[tuple[Workload, ...]]:
        """Lock this rank's part of the folder and read its blocks; returns their sets."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(open_locked(self._folder / f"rank{self._ranks.rank}.lock"))
        except FileError as error:
            raise DatasetError(str(error)) from error
        except OSError as error:
            raise DatasetError(f"{self._folder}: cannot be written: {error.strerror or error}") from error
        found = [(path, _BLOCK.fullmatch(path.name)) for path in sorted(self._folder.iterdir())]
        for path, rank, number in [(path, int(match[1]), int(match[2])) for path, match in found if match]:
            self._number = max(self._number, number + 1)
            if rank % self._ranks.size == self._ranks.rank:
                self._blocks.append(self._checked(path))
        return [tuple(group) for block in self._blocks for group in block.sets]

    def _checked(self, path: Path) -> CostDataset:
        block = CostDataset.load(path)
        require_same_hardware(path, block.hardware, self._hardware)
        if block.seed != self._seed:
            raise DatasetError(f"{path}: collected with seed {block.seed}, asked for {self._seed}; use another folder")
        if block.repeats != self._repeats:
            raise DatasetError(f"{path}: holds {block.repeats} repeats of each set, asked for {self._repeats}")
        return block

    def _places(self, of_ranks: Sequence[Sequence[tuple[Workload, ...]]]) -> list[list[int]]:
        """Index of each measured set, by rank. Of equal sets, the first one measured is the first one asked for."""
        open_places: dict[tuple[Workload, ...], deque[int]] = {}
        for position, group in enumerate(self._sets):
            open_places.setdefault(tuple(group), deque()).append(position)
        try:
            return [[open_places[group].popleft() for group in groups] for groups in of_ranks]
        except (KeyError, IndexError):
            measured = sum(map(len, of_ranks))
            raise DatasetError(
                f"{self._folder}: its {measured} sets are not all among the {len(self._sets)} asked for. Continue with "
                "the same tables, seed and options, use another folder, or delete this one."
            ) from None

    def append(self, positions: Sequence[int], samples: Sequence[Samples]) -> None:
        """Write a block of missing sets; it is on disk on return.

        Raises:
            DatasetError: the block cannot be written; those before it are kept.
        """
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
        """All blocks of all ranks, in the order of the sets.

        Raises:
            DatasetError: nothing was measured yet, or not all on one kind of hardware.
        """
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
