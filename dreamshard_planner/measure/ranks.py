# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Processes that share the work of a measurement. All get the same result; none waits for one that failed.

    torchrun --nproc_per_node=8 -m dreamshard_planner collect --device cuda --out sets.npz

They exchange results over gloo, whatever they measure on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dreamshard_planner.errors import DreamShardError

Thing = TypeVar("Thing")

_LONGEST_WAIT = timedelta(days=1)
"""Timeout of gloo: other ranks wait while the first one fits a network. A rank that has died is noticed at once."""


def local_ranks() -> tuple[int, int]:
    """Return this process's rank on its host, and the ranks of the host.

    Raises:
        DreamShardError: torchrun did not start this process.
    """
    try:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except KeyError as error:
        raise DreamShardError(
            "torchrun has to start this, one process for each rank: "
            "torchrun --standalone --nproc_per_node=2 SCRIPT, or with -m MODULE for a module"
        ) from error


def rank_cores(local_rank: int, local_world_size: int) -> list[int] | None:
    """Return one rank's own cores of its host; None if there are fewer cores than ranks, or no affinities."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[local_rank::local_world_size] if len(cores) >= local_world_size else None


@dataclass(frozen=True)
class Ranks:
    """Processes of one measurement, each on a device or cores of its own; by default this process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this host."""
    group: dist.ProcessGroup | None = None
    """Process group; None for the default one."""

    @classmethod
    @contextmanager
    def joined(cls, device: str = "cpu") -> Iterator[Ranks]:
        """Join all processes that torchrun started until the block ends; elsewhere this process is alone.

        Args:
            device: ``cuda`` gives each rank the GPU of its local rank.

        Raises:
            DreamShardError: a host has more ranks than GPUs.
        """
        if "LOCAL_RANK" not in os.environ:
            yield cls()
            return
        local_rank, local_size = local_ranks()
        if device == "cuda":
            if local_size > (gpus := torch.cuda.device_count()):
                raise DreamShardError(f"{local_size} ranks on a host with {gpus} GPU(s): --nproc_per_node={gpus}")
            torch.cuda.set_device(local_rank)  # FBGEMM's default
        dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
        try:
            yield cls(dist.get_rank(), dist.get_world_size(), local_rank, local_size)
        finally:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """True on the rank that does the work to be done once."""
        return self.rank == 0

    def device(self, kind: str) -> torch.device:
        """Return ``cpu``, or this rank's own GPU."""
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    def cores(self) -> list[int] | None:
        """Return cores for this rank's kernels on the CPU; None for all."""
        return rank_cores(self.local_rank, self.local_size) if self.local_size > 1 else None

    def share(self, items: Sequence[Thing]) -> Sequence[Thing]:
        """Return every ``size``-th item from the ``rank``-th on."""
        return items[self.rank :: self.size]

    def gather(self, make: Callable[[], Thing]) -> list[Thing]:
        """Call ``make`` on all ranks, and return all results by rank on each of them.

        Raises:
            Exception: the error of ``make``, on the rank where it failed.
            DreamShardError: on the other ranks, with rank and text; or a rank has ended.
        """
        if self.size == 1:
            return [make()]
        made, failed = None, None
        try:
            made = make()
        except Exception as error:
            failed = error
        results: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(results, (made, failed and f"{type(failed).__name__}: {failed}"), group=self.group)
        except RuntimeError as error:
            raise DreamShardError(
                "another rank has ended; what each has recorded is kept, and the same command goes on with it"
            ) from (failed or error)
        if failed is not None:
            raise failed
        for rank, (_, text) in enumerate(results):
            if text is not None:
                raise DreamShardError(f"rank {rank} failed: {text}")
        return [thing for thing, _ in results]

    def from_first(self, make: Callable[[], Thing]) -> Thing:
        """Call ``make`` on the first rank, and return its result on all. Raises as :meth:`gather`."""
        return cast("Thing", self.gather(make if self.leads else lambda: None)[0])
