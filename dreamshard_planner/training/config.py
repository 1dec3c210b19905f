# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Settings of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.network import FitConfig
from dreamshard_planner.policy.reinforce import ReinforceConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """One training."""

    pools: tuple[str, ...] = ("meta_like_2021", "merlin_tiny", "merlin_small")
    """Table pools; half of the tables of each are held out."""
    extra_pools: tuple[str, ...] = ("broad",)
    """Pools for the cost network only, to widen its bounds; the policy does not train on them."""
    device: str = "cpu"
    threads: int = 1
    """Intra-op threads of the measured kernels: those of one rank."""
    seconds: float = 300.0
    """Time for measuring, held-out sets included."""
    rounds: int = 2
    """Times that collect, fit and improve follow each other."""
    test_share: float = 0.15
    """Share of the time that goes into sets of held-out tables."""
    repeats: int = 2
    """Timed runs of each set. Costs of other sets gain more by more sets than by more runs of each."""
    batch_sizes: tuple[int, ...] | None = None
    """Samples that the measured kernels see; default: ``BATCH_SIZES`` of the device."""
    arena_bytes: int | None = None
    """Memory for the weights of measured kernels; larger tables are folded into it. Default: that of ``Arena``."""
    num_tasks: int = 60
    """Tasks that the policy trains on."""
    validation_tasks: int = 30
    """Tasks of held-out tables that it is judged on."""
    task_tables: tuple[int, int] = (8, 80)
    """Fewest and most tables of a task; counts are log-uniform between."""
    task_ranks: tuple[int, ...] = (2, 4, 8, 16, 32)
    fit: FitConfig = FitConfig()
    reinforce: ReinforceConfig = ReinforceConfig()
    start: Checkpoint | None = None
    """Checkpoint whose cost network to start from: on CPUs, of this package's size. On an Intel Xeon, after five
    minutes, a start reduced the error of rare tables from 13 to 15 % to 9 %."""
    collectives: dict[str, Any] | None = None
    """Result of ``python -m dreamshard_planner.measure.collectives``, kept in the checkpoint."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.rounds < 1 or not 0 < self.test_share < 1:
            raise ValueError(
                "seconds and rounds must be positive, test_share between 0 and 1, got "
                f"{self.seconds}, {self.rounds} and {self.test_share}"
            )


QUICK = TrainingConfig(
    pools=("merlin_tiny", "mlperf_dlrm_dcnv2"),
    extra_pools=(),
    seconds=8.0,
    rounds=1,
    batch_sizes=(256,),
    arena_bytes=1 << 26,
    num_tasks=8,
    validation_tasks=4,
    task_tables=(8, 12),
    task_ranks=(2, 4),
    fit=FitConfig(epochs=10),
    reinforce=ReinforceConfig(updates=5, looks=1, tasks_per_update=2, episodes_per_task=4),
)
"""Settings that try the whole flow in seconds; the result is not worth planning with."""
