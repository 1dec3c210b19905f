# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ranks of a job, and results that they agree on; none waits for a rank that failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from dreamshard_planner.errors import DreamShardError

Thing = TypeVar("Thing")


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


@dataclass(frozen=True)
class Ranks:
    """Processes that agree on results."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """Process group; None for the default one."""

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
            raise DreamShardError("another rank has ended") from (failed or error)
        if failed is not None:
            raise failed
        for rank, (_, text) in enumerate(results):
            if text is not None:
                raise DreamShardError(f"rank {rank} failed: {text}")
        return [thing for thing, _ in results]

    def from_first(self, make: Callable[[], Thing]) -> Thing:
        """Call ``make`` on the first rank, and return its result on all. Raises as :meth:`gather`."""
        return cast("Thing", self.gather(make if self.rank == 0 else lambda: None)[0])
