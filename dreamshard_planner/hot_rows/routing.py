# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tells lookups of hot rows from others, on the device, for all features of a batch at once.

Shapes: N lookups of a batch, H of hot rows and C of others; F features; S = F x B samples; W words of 64 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.workload.hot_rows import HotRows

WORD_BITS = 64


@dataclass(frozen=True)
class Routed:
    """A batch, told apart."""

    position_H: Tensor
    """Lookups of hot rows, ascending."""
    hot_row_H: Tensor
    """Their rows among the hot rows of all tables."""
    position_C: Tensor
    """All other lookups, ascending."""
    others: KeyedJaggedTensor
    """Batch of the other lookups alone."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator of CUDA that a stream reads these tensors."""
        for tensor in (self.position_H, self.hot_row_H, self.position_C, self.others):
            tensor.record_stream(stream)


class HotIndex:
    """A bitmap of every table, with the number of hot rows before each word: 12 bytes for 64 rows.

    Args:
        hot: hot rows by table; they are numbered through all tables, in this order.
        table_of_feature: the table that each feature of a batch reads, in the batch's order.
    """

    def __init__(self, hot: Mapping[str, HotRows], table_of_feature: Sequence[str], device: torch.device) -> None:
        first, words, before = {}, [], []
        start, hot_before = 0, 0
        for name, of_table in hot.items():
            first[name] = start
            size = -(-of_table.table_rows // WORD_BITS)
            word_K, bit_K = of_table.ids // WORD_BITS, of_table.ids % WORD_BITS
            # The bits of one word differ, so that their sum is their union.
            words.append(torch.zeros(size, dtype=torch.int64).index_add_(0, word_K, torch.ones_like(bit_K) << bit_K))
            counts = torch.bincount(word_K, minlength=size)
            before.append(hot_before + counts.cumsum(0) - counts)
            start, hot_before = start + size, hot_before + len(of_table)
        self._words_W = torch.cat(words).to(device)
        self._before_W = torch.cat(before).to(device, torch.int32)
        # A table without hot rows has none of its ids in a bitmap.
        self._rows_F = torch.tensor([hot[name].table_rows if name in hot else 0 for name in table_of_feature]).to(
            device
        )
        self._first_word_F = torch.tensor([first.get(name, 0) for name in table_of_feature]).to(device)

    def route(self, batch: KeyedJaggedTensor) -> Routed:
        """Tell the lookups of a batch apart. Ids outside of their table are no hot rows."""
        id_N, length_S = batch.values().long(), batch.lengths()
        feature_N = torch.repeat_interleave(length_S.view(len(self._rows_F), -1).sum(1), output_size=len(id_N))
        inside_N = (id_N >= 0) & (id_N < self._rows_F[feature_N])
        word_N = torch.where(inside_N, self._first_word_F[feature_N] + id_N // WORD_BITS, 0)
        bit_N = id_N % WORD_BITS
        bits_N = self._words_W[word_N]
        hot_N = ((bits_N >> bit_N) & 1).bool() & inside_N
        position_H, position_C = hot_N.nonzero().squeeze(1), (~hot_N).nonzero().squeeze(1)
        lower_H = bits_N[position_H] & ((torch.ones_like(position_H) << bit_N[position_H]) - 1)
        hot_row_H = self._before_W[word_N[position_H]] + _ones(lower_H)
        before_N1 = torch.nn.functional.pad(hot_N.cumsum(0), (1, 0))
        hot_S = before_N1[torch.nn.functional.pad(length_S.cumsum(0), (1, 0))].diff()
        weight_N = batch.weights_or_none()
        others = KeyedJaggedTensor(
            batch.keys(),
            batch.values()[position_C],
            None if weight_N is None else weight_N[position_C],
            lengths=length_S - hot_S.to(length_S.dtype),
            stride=batch.stride(),
        )
        return Routed(position_H, hot_row_H, position_C, others)


def _ones(bits: Tensor) -> Tensor:
    """Count the ones of each non-negative int64."""
    bits = bits - ((bits >> 1) & 0x5555555555555555)
    bits = (bits & 0x3333333333333333) + ((bits >> 2) & 0x3333333333333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (bits * 0x0101010101010101) >> 56
