# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What TorchRec's performance estimator says that tables cost, one by one.

Shapes: X sets, S tables, H = 3 latent channels, 2 = forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner.cost.compute import ComputeCost, CostSource
from dreamshard_planner.workload.tables import Workload


def torchrec_table_ms(sets: Sequence[Sequence[Workload]], device: str) -> Tensor:
    """Estimated compute of sets, the sum over their tables, [X, 2]; all taken as pooled, on one device.

    An estimate's unit is a second times unknown constants: scale it before any comparison in milliseconds.
    """
    by_batch: dict[int, dict[Workload, str]] = {}
    for workloads in sets:
        for workload in workloads:
            names = by_batch.setdefault(workload.batch_size, {})
            names.setdefault(workload, f"t{len(names)}")
    estimates = {batch: _estimate(names, batch, device) for batch, names in by_batch.items()}
    return torch.stack(
        [torch.stack([estimates[w.batch_size][w] for w in workloads]).sum(0) for workloads in sets]
    ).double()


class TorchRecCost(ComputeCost):
    """TorchRec's estimates of given tables, added up, for any problem over these tables in this order."""

    def __init__(self, workloads: Sequence[Workload], device: str) -> None:
        self.source = CostSource("torchrec", "its estimator, added up")
        estimate_S2 = torchrec_table_ms([[workload] for workload in workloads], device)
        self._latent_SH = torch.cat([torch.ones(len(workloads), 1).double(), estimate_S2], dim=-1)

    def encode(self, features_SF: Tensor) -> Tensor:
        """A one and both estimates of each table."""
        if len(features_SF) != len(self._latent_SH):
            raise ValueError(f"estimates of {len(self._latent_SH)} tables, asked for {len(features_SF)}")
        return self._latent_SH

    def group_cost_ms(self, latent_XH: Tensor) -> Tensor:
        """Their sums."""
        return latent_XH[..., 1:]


def _estimate(names: dict[Workload, str], batch_size: int, device: str) -> dict[Workload, Tensor]:
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=w.rows,
                embedding_dim=w.dim,
                feature_names=[f"{name}_{index}" for index in range(w.num_features)],
            )
            for w, name in names.items()
        ],
    )
    constraints = {
        name: ParameterConstraints(
            ["table_wise"], ["fused"], pooling_factors=[w.pooling_factor / w.num_features] * w.num_features
        )
        for w, name in names.items()
    }
    enumerator = EmbeddingEnumerator(Topology(1, device), batch_size, constraints)
    options = {o.name: o for o in enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])}
    perf = {w: options[name].shards[0].perf for w, name in names.items()}
    return {w: torch.tensor([p.fwd_compute, p.bwd_compute]) for w, p in perf.items()}
