# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Processes that measure together: each its share of the work, all the same result, and none waits for one that failed.

    torchrun --nproc_per_node=8 -m dreamshard_planner collect --device cuda --out sets.npz

They talk over gloo, whatever they measure on: only what was measured is exchanged, and only at the end.
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
from dreamshard_planner.measure.timing import rank_cores

Thing = TypeVar("Thing")

_LONGEST_WAIT = timedelta(days=1)
"""For the first rank to fit a network, while the others wait. A rank that has died is noticed at once."""


def local_ranks() -> tuple[int, int]:
    """This process's place among those that torchrun started on this host, and their number.

    Raises:
        DreamShardError: torchrun did not start this process; says how it would.
    """
    try:
        return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except KeyError as error:
        raise DreamShardError(
            "torchrun has to start this, one process for each rank: "
            "torchrun --standalone --nproc_per_node=2 SCRIPT, or with -m MODULE for a module"
        ) from error


@dataclass(frozen=True)
class Ranks:
    """The processes of one measurement, each on a device or on cores of its own. By default this process alone."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this host."""
    group: dist.ProcessGroup | None = None
    """To talk in; None: the default group."""

    @classmethod
    @contextmanager
    def joined(cls, device: str = "cpu") -> Iterator[Ranks]:
        """All that torchrun started, in a process group that ends with the block; elsewhere this process alone.

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
            if local_size > torch.cuda.device_count():
                gpus = torch.cuda.device_count()
                raise DreamShardError(f"{local_size} ranks on a host with {gpus} GPU(s): --nproc_per_node={gpus}")
            torch.cuda.set_device(local_rank)  # what FBGEMM and names of devices without a number mean
        dist.init_process_group("gloo", timeout=_LONGEST_WAIT)
        try:
            yield cls(dist.get_rank(), dist.get_world_size(), local_rank, local_size)
        finally:
            dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this rank does what is to be done once."""
        return self.rank == 0

    def device(self, kind: str) -> torch.device:
        """``cpu``, or this rank's own GPU."""
        return torch.device(kind, self.local_rank) if kind == "cuda" else torch.device(kind)

    def cores(self) -> list[int] | None:
        """Cores for kernels of this rank on the CPU; None: wherever the system likes."""
        return rank_cores(self.local_rank, self.local_size) if self.local_size > 1 else None

    def share(self, items: Sequence[Thing]) -> Sequence[Thing]:
        """Every ``size``-th, from the ``rank``-th on: of a random sequence, a sample like any other rank's."""
        return items[self.rank :: self.size]

    def gather(self, make: Callable[[], Thing]) -> list[Thing]:
        """What ``make`` returns on each rank, in the order of ranks, on all of them.

        Raises:
            Exception: what ``make`` raised, on the rank where it did.
            DreamShardError: on the others, with rank and text; or a rank has ended.
        """
        if self.size == 1:
            return [make()]
        made, failed = None, None
        try:
            made = make()
        except Exception as error:
            failed = error
        outcomes: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(outcomes, (made, failed and f"{type(failed).__name__}: {failed}"), group=self.group)
        except RuntimeError as error:
            raise DreamShardError(
                "another rank has ended; what each has recorded is kept, and the same command goes on with it"
            ) from (failed or error)
        if failed is not None:
            raise failed
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise DreamShardError(f"rank {rank} failed: {text}")
        return [thing for thing, _ in outcomes]

    def from_first(self, make: Callable[[], Thing]) -> Thing:
        """What ``make`` returns on the first rank, which alone calls it, on all ranks. Raises as :meth:`gather`."""
        return cast("Thing", self.gather(make if self.leads else lambda: None)[0])
