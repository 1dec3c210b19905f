# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checks of the numbers that users and topologies give, before tensors hold them, where they must not overflow.

Shapes: S shards, D devices, M limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, Shard, ShardingOption, Topology

from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.search_space.options import counted, fqn_of, lacks_room, refused

MAX_BYTES = 2**60
"""Of all tables together, and so of any memory that limits them: what is larger is as good as this. Sums of a few fit
into int64."""
MAX_PER_SAMPLE = 2**40
"""Lookups or poolings per sample, and samples per batch, of one feature."""


def check_per_feature(values: Sequence[float], table: str, what: str) -> None:
    """PlannerError, naming the table, where a value is no number or cannot be meant."""
    if not isinstance(values, Iterable):
        raise refused(f"table {table!r}: {what} must be a list, one number per feature, got {values!r}")
    for value in values:
        if not (_is_finite(value) and 0 <= value <= MAX_PER_SAMPLE):
            raise refused(
                f"table {table!r}: {what} must be numbers from 0 to {MAX_PER_SAMPLE:,}, got {value!r}; they count per "
                "sample and feature (batch_sizes: samples of a rank's batch)"
            )
        if what == "batch_sizes" and (value < 1 or value % 1):
            raise refused(f"table {table!r}: batch_sizes must be whole numbers from 1, got {value!r}")


def per_feature(values: Sequence[float], count: int, table: str, what: str) -> list[float]:
    """One value per feature; a single value holds for all of them.

    Raises:
        PlannerError: where the lengths don't match, or a value is no number or cannot be meant.
    """
    check_per_feature(values, table, what)
    if len(values) == count:
        return list(values)
    if len(values) == 1:
        return list(values) * count
    raise refused(
        f"table {table!r} serves {count} features, but its constraints give {len(values)} {what}: {list(values)}. "
        "Give one per feature."
    )


def checked_seed(seed: int) -> int:
    """The seed; TypeError unless it is a whole number, ValueError for one that torch's generators do not take."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed must be a whole number, the same for the same plan; got {seed!r}")
    if not -(2**63) <= int(seed) < 2**64:
        raise ValueError(f"seed must be from -2**63 to 2**64 - 1, got {seed}")
    return int(seed)


def check_topology(topology: Topology) -> None:
    """PlannerError, naming the device, where a memory is no number of bytes."""
    for rank, device in enumerate(topology.devices):
        for kind in MEMORY_KINDS:
            size = getattr(device.storage, kind.lower())
            if not _is_finite(size):
                raise PlannerError(
                    f"rank {rank} of the topology has {size!r} bytes of {kind}: give a whole number, or one as large "
                    f"as {MAX_BYTES:,} (2**60) where memory is no limit",
                    PlannerErrorType.OTHER,
                )


def available_bytes(topology: Topology) -> Tensor:
    """Memory of every device, int64 [D, M]; below nothing where more is reserved than there is."""
    check_topology(topology)
    sizes = [[getattr(device.storage, kind.lower()) for kind in MEMORY_KINDS] for device in topology.devices]
    return torch.tensor(
        [[int(min(max(size, -MAX_BYTES), MAX_BYTES)) for size in row] for row in sizes], dtype=torch.int64
    )


def needed_bytes(shards: Sequence[Shard]) -> Tensor:
    """What every shard needs, int64 [P, M]."""
    needs = [[min(getattr(shard.storage, kind.lower()), MAX_BYTES) for kind in MEMORY_KINDS] for shard in shards]
    return torch.tensor(needs, dtype=torch.int64).view(-1, len(MEMORY_KINDS))


def check_needs(tables: Iterable[Sequence[ShardingOption]]) -> None:
    """PlannerError where the first shards of all tables together need more than :data:`MAX_BYTES` of some memory,
    however each is sharded; names the table that needs most."""
    for kind in MEMORY_KINDS:

        def need(option: ShardingOption, kind: str = kind.lower()) -> int:
            return getattr(counted(option)[0][0].storage, kind)

        least = [min(options, key=need) for options in tables]
        total, largest = sum(map(need, least)), max(least, key=need)
        if total > MAX_BYTES:
            raise lacks_room(
                f"Tables do not fit: they need {total:.3g} bytes of {kind}, more than any machine has; table "
                f"{fqn_of(largest)!r} alone needs {need(largest):.3g}, with pooling factors "
                f"{list(largest.input_lengths)} and {largest.batch_size:,} samples in a rank's batch. Pooling factors "
                "are lookups per sample."
            )


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False
