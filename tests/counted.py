# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Lengths and ids as batches, and their statistics."""

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner import TableStatistics


def batches_of(counts: Mapping[str, tuple[Any, Any]], batch_size: int) -> list[KeyedJaggedTensor]:
    """Whole batches of the samples with these lengths and ids, by feature."""
    tensors = {name: [torch.as_tensor(values).long() for values in pair] for name, pair in counts.items()}
    cut = {}
    for name, (length_B, id_N) in tensors.items():
        lengths = [part for part in length_B.split(batch_size) if len(part) == batch_size]
        cut[name] = list(
            zip(lengths, id_N.split([*map(int, map(torch.sum, length_B.split(batch_size)))]), strict=False)
        )
    return [
        KeyedJaggedTensor(
            list(cut), torch.cat([ids for _, ids in parts]), lengths=torch.cat([part for part, _ in parts])
        )
        for parts in zip(*cut.values(), strict=True)
    ]


def counted(counts: Mapping[str, tuple[Any, Any]], batch_size: int) -> TableStatistics:
    return TableStatistics.from_batches(batches_of(counts, batch_size))
