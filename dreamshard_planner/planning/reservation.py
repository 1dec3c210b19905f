# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Memory that is kept for all but tables, if nobody gives a reservation."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torchrec.distributed.planner.storage_reservations import (
    HeuristicalStorageReservation,
    _get_batch_inputs_and_shardable_parameters,
    _get_dense_tensor_size,
)
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ModuleSharder

SHARE = 0.15
"""Of device memory, as TorchRec's planner keeps by default."""


class DefaultReservation(HeuristicalStorageReservation):
    """TorchRec's default reservation with the size of the dense layers given, as TorchRec's warning asks."""

    def __init__(self, percentage: float = SHARE) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it comes even with a dense_tensor_estimate
            super().__init__(percentage)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: Any = None,
    ) -> Topology:
        """See ``StorageReservation.reserve``."""
        _, sharded = _get_batch_inputs_and_shardable_parameters(module, sharders, batch_size, constraints)
        dense_bytes = _get_dense_tensor_size(module, sharded, self._parameter_multiplier)
        self._dense_tensor_estimate = max(1, int(dense_bytes))  # 0 would mean none given
        return super().reserve(topology, batch_size, module, sharders, constraints)
