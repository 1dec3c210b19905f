# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sets of tables measured on all ranks, for a share of a training's time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.measure.collect import collect
from dreamshard_planner.measure.kernels import Arena
from dreamshard_planner.measure.ranks import Ranks
from dreamshard_planner.training.config import TrainingConfig
from dreamshard_planner.workload.tables import Workload

MAX_SETS_PER_SECOND = 30
"""More than any machine measures; sets are drawn for this rate."""
FINISHED = "finished"
"""File in the folder of a training's blocks: its measurements came to their end."""


def most_sets(seconds: float, ranks: Ranks) -> int:
    """Sets to draw for so much time: more than are measured in it."""
    return ranks.size * int(seconds * MAX_SETS_PER_SECOND) + 1


def measure(
    config: TrainingConfig,
    sets: Sequence[Sequence[Workload]],
    folder: Path,
    share: float,
    progress: bool,
    ranks: Ranks,
    *,
    once: bool = False,
) -> CostDataset:
    """Measure for a share of the time. Memory for kernels is taken for that alone: what follows needs it.

    Args:
        config: of the training.
        sets: to measure, in this order.
        folder: of the measured blocks; continued.
        share: of ``config.seconds``.
        progress: a bar on stderr.
        ranks: that measure together.
        once: what an earlier run of the training finished is only read: more sets there would lead to other networks,
            and so to other sets in later rounds than that run has measured.
    """
    finished = once and ranks.from_first(lambda: (folder / FINISHED).is_file())
    device = ranks.device(config.device)
    arena = Arena(device, config.arena_bytes, seed=config.seed)
    try:
        dataset = collect(
            sets,
            folder,
            device=device,
            threads=config.threads,
            repeats=config.repeats,
            seed=config.seed,
            seconds=0.0 if finished else config.seconds * share,
            progress=progress,
            arena=arena,
            ranks=ranks,
        )
    finally:
        arena.release()
    if once and ranks.leads:
        (folder / FINISHED).touch()
    return dataset
