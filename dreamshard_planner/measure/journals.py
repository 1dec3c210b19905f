# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The record of one collection by several ranks: a journal for each, so that what one has recorded is safe whatever
happens to another, and one dataset in the end.

Ranks may be more or fewer when a collection goes on: journals of ranks that are no more are read by one of those left.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor

from dreamshard_planner.cost.dataset import CostDataset, Hardware
from dreamshard_planner.cost.journal import Journal
from dreamshard_planner.errors import DatasetError
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.workload.tables import Workload


def journal_paths(path: str | os.PathLike[str], ranks: Ranks) -> list[Path]:
    """This rank's journals: the one that it writes, then those of earlier ranks that it answers for."""
    path = Path(path)
    own = path if ranks.leads else path.with_name(f"{path.stem}.rank{ranks.rank}{path.suffix}")
    form = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(path.suffix)}")
    left = {int(match[1]): other for other in path.parent.iterdir() if (match := form.fullmatch(other.name))}
    return [own, *(left[k] for k in sorted(left) if k >= ranks.size and k % ranks.size == ranks.rank)]


class RankJournals:
    """All journals of one collection, as one rank sees them. Use as a context manager; ranks do all of it together.

    Args:
        path: of the first rank's journal; the others' names follow from it.
        sets: what is to be measured.
        repeats: of each set.
        hardware: of this rank; a dataset is of one kind of hardware.
        seed: of the collection.
        ranks: the processes that collect.

    Raises:
        DatasetError: a journal is damaged, in use, or of other sets, repeats, seed or hardware.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        sets: Sequence[Sequence[Workload]],
        repeats: int,
        hardware: Hardware,
        seed: int,
        ranks: Ranks,
    ) -> None:
        self._sets, self._ranks, self._stack = sets, ranks, ExitStack()
        self._journals: list[Journal] = []
        first_of: dict[tuple[Workload, ...], int] = {}
        firsts = [first_of.setdefault(tuple(group), position) for position, group in enumerate(sets)]
        try:
            held = ranks.gather(
                lambda: [self._open(path, first_of, repeats, hardware, seed) for path in journal_paths(path, ranks)]
            )
            places = _places(firsts, held)
        except BaseException:
            self._stack.close()
            raise
        self._positions = places[ranks.rank]
        recorded = {position for journals in places for journal in journals for position in journal}
        self.missing = [position for position in range(len(sets)) if position not in recorded]
        """Sets that no rank has measured yet, as indices."""

    def __enter__(self) -> RankJournals:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(
        self, path: Path, first_of: dict[tuple[Workload, ...], int], repeats: int, hardware: Hardware, seed: int
    ) -> list[int]:
        """Open one; returns the sets that it holds, equal ones as the first of them."""
        journal = self._stack.enter_context(Journal.open(path, hardware, seed))
        self._journals.append(journal)
        held = [first_of[group] for group in map(tuple, journal.sets) if group in first_of]
        if len(held) < len(journal):
            raise DatasetError(
                f"{path}: its {len(journal)} sets are not all among the {len(self._sets)} asked for; "
                "continue with the same tables, seed and options, use another file, or delete this one"
            )
        if held and journal.repeats != repeats:
            raise DatasetError(f"{path}: holds {journal.repeats} repeats of each set, asked for {repeats}")
        return held

    def append(self, position: int, samples_ms: Tensor, reference_ms: Tensor | None) -> None:
        """Record one of the missing sets."""
        self._journals[0].append(self._sets[position], samples_ms, reference_ms)
        self._positions[0].append(position)

    def dataset(self) -> CostDataset:
        """What all journals hold, in the order of the sets.

        Raises:
            DatasetError: nothing was measured, or not by one kind of hardware.
        """
        parts = [part for parts in self._ranks.gather(self._parts) for part in parts]
        if not parts:
            raise DatasetError(f"{self._journals[0].path}: nothing was measured yet")
        order = np.concatenate([positions for positions, _ in parts]).argsort(kind="stable")
        return CostDataset.concatenate([data for _, data in parts]).select(order)

    def _parts(self) -> list[tuple[list[int], CostDataset]]:
        recorded = zip(self._positions, self._journals, strict=True)
        return [(positions, journal.to_dataset()) for positions, journal in recorded if positions]


def _places(firsts: Sequence[int], held: Sequence[Sequence[Sequence[int]]]) -> list[list[list[int]]]:
    """Sets that the records of each rank's journals stand for, where equal sets are known as the first of them: the
    first record stands for the first of these, and so on."""
    equal: dict[int, list[int]] = {}
    for position, first in enumerate(firsts):
        equal.setdefault(first, []).append(position)
    left = {first: deque(positions) for first, positions in equal.items()}
    try:
        return [[[left[first].popleft() for first in journal] for journal in journals] for journals in held]
    except IndexError as error:
        raise DatasetError("journals of one collection hold a set more often than it is asked for") from error


def remove_journals(paths: Iterable[Path], ranks: Ranks) -> None:
    """Remove this rank's part of some collections, whose datasets are safe."""
    for path in paths:
        for journal in journal_paths(path, ranks):
            journal.unlink(missing_ok=True)
