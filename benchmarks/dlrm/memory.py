# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Memory of many models side by side, said before any of them is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torchrec.distributed.planner.types import ShardingOption

DENSE_COPIES = 3
"""Of a dense weight: itself, its gradient, and the state of Adagrad."""


@dataclass(frozen=True)
class ModelMemory:
    """Bytes on each rank of all models of a run."""

    models: int
    embedding_bytes: tuple[int, ...]
    """By rank: tables with their optimizer, and batches on their way, as TorchRec estimates them."""
    dense_bytes: int
    """Of all dense layers, on every rank."""

    def told(self, free_bytes: Sequence[int]) -> tuple[str, bool]:
        """One line for people, and whether every rank has that much; ``free_bytes`` by rank."""
        needed = [own + self.dense_bytes for own in self.embedding_bytes]
        tightest = max(range(len(needed)), key=lambda rank: needed[rank] - free_bytes[rank])
        fits = needed[tightest] <= free_bytes[tightest]
        text = (
            f"{self.models} models take {needed[tightest] / 1e9:.2f} GB on rank {tightest}: embeddings "
            f"{self.embedding_bytes[tightest] / 1e9:.2f}, dense layers {self.dense_bytes / 1e9:.2f}, activations not "
            f"counted; {free_bytes[tightest] / 1e9:.1f} GB are free there"
        )
        return text if fits else f"error: {text}: take fewer --copies or --planners, or smaller --max-rows", fits


def memory_of_models(
    plans: Mapping[str, Sequence[ShardingOption]], copies: int, bare_model: nn.Module, world_size: int
) -> ModelMemory:
    """Of ``copies`` models for every plan; ``bare_model`` has its dense layers on a device, and its tables on none."""
    embedding_bytes = [0] * world_size
    for options in plans.values():
        for shard in (shard for option in options for shard in option.shards):
            embedding_bytes[shard.rank] += copies * (shard.storage.hbm + shard.storage.ddr)
    models = copies * len(plans)
    dense = sum(p.numel() * p.element_size() for p in bare_model.parameters() if p.device.type != "meta")
    return ModelMemory(models, tuple(embedding_bytes), models * DENSE_COPIES * dense)
