# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Milliseconds of the collectives around the embedding kernels, from the bytes that each rank moves.

Latency plus bytes over bandwidth (the alpha-beta model): measured between real ranks where a checkpoint has that,
else with the bandwidth of TorchRec's ``Topology``.

Shapes: D devices; leading dimensions are free.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LATENCY_MS = 0.02
"""Start-up of one collective: the order of a small NCCL all-to-all within a node."""


@dataclass(frozen=True)
class CollectiveModel:
    """Alpha-beta model of one process group."""

    world_size: int
    bytes_per_ms: float
    latency_ms: float = LATENCY_MS
    source: str = "bandwidth given, nothing measured"
    """Where the figures came from."""

    def __post_init__(self) -> None:
        if not self.bytes_per_ms > 0:
            raise ValueError(f"collective bandwidth must be positive, got {self.bytes_per_ms} bytes/ms")

    def all_to_all_ms(self, output_bytes_XD: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward milliseconds [...] of the output all-to-all of table-wise shards.

        ``output_bytes_XD`` [..., D] is what each rank sends to each single peer.
        """
        return self.bounded_all_to_all_ms(output_bytes_XD.amax(-1), output_bytes_XD.amin(-1), output_bytes_XD.sum(-1))

    def bounded_all_to_all_ms(self, largest_X: Tensor, smallest_X: Tensor, total_X: Tensor) -> tuple[Tensor, Tensor]:
        """The same from the largest and smallest bytes of a rank and the sum over ranks, which is all it takes:
        the collective lasts as long as its slowest rank, which sends to, and receives from, every other rank.
        The backward moves the same bytes the other way, so it costs the same.
        """
        slowest_X = torch.maximum(largest_X * (self.world_size - 1), total_X - smallest_X)
        time_X = self.latency_ms + slowest_X / self.bytes_per_ms
        time_X = torch.where((slowest_X > 0) & (self.world_size > 1), time_X, 0.0)
        return time_X, time_X
