# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Measured fused groups as tensors, which cost networks are fitted to and judged by.

Shapes: X sets, S shards (of all sets, flat), F features, H channels, 2 = forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from dreamshard_planner.cost.dataset import CostDataset
from dreamshard_planner.cost.roofline import RooflineCost
from dreamshard_planner.workload.features import feature_matrix, features_of
from dreamshard_planner.workload.tables import Workload


@dataclass(frozen=True)
class LabelledSets:
    """Measured fused groups as flat tensors."""

    features_SF: Tensor
    offsets_X1: Tensor
    """First shard of each set, and the end: int64 [X + 1]."""
    labels_ms_X2: Tensor
    prior: RooflineCost | None = None
    """Of the device that measured them, where that knows more than they show: on GPUs."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[Workload]], labels_ms_X2: Tensor) -> LabelledSets:
        """From sets of workloads and their forward and backward milliseconds [X, 2]."""
        offsets = torch.tensor([0, *accumulate(map(len, sets))])
        features_SF = feature_matrix([workload for workloads in sets for workload in workloads])
        return cls(features_SF, offsets, labels_ms_X2.float())

    @classmethod
    def of_dataset(cls, data: CostDataset, usual_ms: float | None = None) -> LabelledSets:
        """From what was measured, as at the speed of ``usual_ms``, see :meth:`CostDataset.at_speed_ms`; default: its
        own."""
        offsets = torch.from_numpy(data.set_offsets)
        on_gpu = data.hardware["device"] == "cuda"
        prior = RooflineCost.of_card(str(data.hardware["name"])) if on_gpu else None
        return cls(features_of(data.columns), offsets, data.at_speed_ms(usual_ms).float(), prior)

    def __len__(self) -> int:
        return len(self.labels_ms_X2)

    @property
    def set_S(self) -> Tensor:
        """Set of each shard."""
        return torch.repeat_interleave(torch.arange(len(self)), self.offsets_X1.diff())

    def select(self, index_X: Tensor) -> LabelledSets:
        """The sets at ``index_X``, in that order."""
        lengths = self.offsets_X1.diff()[index_X]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        start_S = torch.repeat_interleave(self.offsets_X1[:-1][index_X] - offsets[:-1], lengths)
        shard_S = start_S + torch.arange(int(offsets[-1]))
        return LabelledSets(self.features_SF[shard_S], offsets, self.labels_ms_X2[index_X], self.prior)

    def sum(self, values_SH: Tensor) -> Tensor:
        """Sum of per-shard values over each set, [X, H]."""
        sums_XH = values_SH.new_zeros(len(self), values_SH.shape[1])
        return sums_XH.index_add_(0, self.set_S, values_SH)
