# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Facts that the driver tells about this process's device. Tests replace these functions to pretend other hardware, so
callers look them up on the module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One GPU in the words of its driver."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    memory_bytes_per_s: float | None = None
    """Memory clock times bus width; None if the driver hides either."""


def read_card() -> Card | None:
    """Return the GPU that this process uses, or None without one."""
    import torch  # late: commands read this module for --help

    if not torch.cuda.device_count():
        return None
    told = torch.cuda.get_device_properties(torch.cuda.current_device())
    kilohertz, bits = (getattr(told, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    bytes_per_s = 2 * kilohertz * 1e3 * bits / 8  # memory transfers twice in a clock
    return Card(told.name, told.total_memory, (told.major, told.minor), bytes_per_s or None)


def compute_device() -> str:
    """Return the kind of device that ranks of the default process group compute on: CPUs if its backend is gloo, which
    also runs on hosts that have GPUs, else the kind that TorchRec takes."""
    import torch.distributed as dist
    from torchrec.distributed.utils import get_device_type

    return "cpu" if dist.get_backend() == "gloo" else get_device_type()
