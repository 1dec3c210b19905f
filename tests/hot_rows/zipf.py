# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sequence tables whose rows are read by a power law."""

from collections.abc import Iterator

import torch
from small_models import sequences, table
from torch import nn
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES = ("t0_f0", "t1_f0")


def sequence_model(rows: int, dim: int) -> nn.Module:
    model = nn.ModuleDict({"ec": sequences(table("t0", rows, dim), table("t1", rows, dim))})
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1, "eps": 1e-3})
    return model


def zipf_batches(exponent: float, rows: int, samples: int, lookups: int, batches: int) -> Iterator[KeyedJaggedTensor]:
    """Batches whose k-th most read row is read as often as k ** -exponent, at a random place of the table."""
    generator = torch.Generator().manual_seed(3)
    place = torch.randperm(rows, generator=generator)
    below = (torch.arange(1, rows + 1, dtype=torch.float64) ** -exponent).cumsum(0)
    for _ in range(batches):
        number = samples * lookups * len(FEATURES)
        at = torch.rand(number, generator=generator, dtype=torch.float64) * below[-1]
        ids = place[torch.searchsorted(below, at).clamp_max(rows - 1)]
        yield KeyedJaggedTensor([*FEATURES], ids, lengths=torch.full((samples * len(FEATURES),), lookups))
