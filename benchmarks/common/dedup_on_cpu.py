# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A CPU kernel of FBGEMM's ``jagged_unique_indices``, which TorchRec's index dedup needs and FBGEMM has for CUDA alone.

Shapes: F features, T tables, B samples, N lookups, U unique rows of all tables.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("fbgemm", "IMPL")


def _unique(
    first_id_F: Tensor, first_feature_T: Tensor, offsets: Tensor, id_N: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return lengths, offsets and ids of the unique rows, and the number of each lookup among them."""
    features, samples = len(first_id_F) - 1, (len(offsets) - 1) // (len(first_id_F) - 1)
    feature_N = torch.repeat_interleave(torch.arange(features), offsets[::samples].diff())
    key_U, reverse_N = torch.unique(id_N + first_id_F[feature_N], return_inverse=True)
    length_FB = torch.zeros(features, samples, dtype=torch.int64)
    id_U = key_U.clone()
    for first, end in zip(first_feature_T[:-1].tolist(), first_feature_T[1:].tolist(), strict=True):
        if first < end:  # the rows of a table, spread evenly over the samples of its features
            low, high = torch.searchsorted(key_U, first_id_F[[first, end]]).tolist()
            id_U[low:high] -= first_id_F[first]
            length_FB[first:end] = torch.tensor(
                [len(part) for part in torch.arange(high - low).tensor_split((end - first) * samples)]
            ).view(end - first, samples)
    lengths = length_FB.flatten()
    return lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), id_U, reverse_N


def dedup_on_cpu() -> None:
    """Let TorchRec's index dedup run on CPU tensors."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::jagged_unique_indices", "CPU"):
        _LIBRARY.impl("jagged_unique_indices", _unique, "CPU")
