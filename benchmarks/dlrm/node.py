# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A rank of the DLRM benchmark among the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.planner import Topology

from dreamshard_planner.measure.ranks import local_ranks
from dreamshard_planner.measure.timing import pinned, rank_cores


@dataclass(frozen=True)
class Node:
    """This process among the others."""

    device: torch.device
    rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def join(cls) -> Node:
        """From torchrun's environment; starts the process group."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, world_size, local, local_world_size = (int(os.environ[name]) for name in names)
        cuda = torch.cuda.device_count() >= local_world_size
        if cuda:
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if cuda else "gloo")
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        return cls(device, rank, world_size, local_world_size)

    def topology(self) -> Topology:
        """The devices as TorchRec's planners see them."""
        if self.device.type == "cuda":
            memory = {"hbm_cap": torch.cuda.get_device_properties(self.device).total_memory}
        else:
            host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            memory = {"ddr_cap": host_bytes // self.local_world_size}
        return Topology(self.world_size, self.device.type, local_world_size=self.local_world_size, **memory)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, thing: Any) -> list[Any]:
        """One thing of every rank, on all ranks."""
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, thing)
        return things


@contextmanager
def cpu_rank() -> Iterator[Node]:
    """Join as a rank with one thread, on cores of its own if there are enough."""
    local_rank, local_world_size = local_ranks()
    with pinned(1, rank_cores(local_rank, local_world_size)):
        yield Node.join()
