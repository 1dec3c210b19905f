# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Memory that is kept for all but tables, if nobody gives a reservation."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.torchrec_components.compat import dense_tensor_bytes, set_dense_tensor_bytes

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
        dense_bytes = dense_tensor_bytes(self, module, sharders, batch_size, constraints)
        set_dense_tensor_bytes(self, max(1, dense_bytes))  # 0 would mean none given
        return super().reserve(topology, batch_size, module, sharders, constraints)
