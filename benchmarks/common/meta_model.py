# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables as TorchRec's module on the meta device: planning reads shapes only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dreamshard_planner.workload.tables import Table


def meta_collection(tables: Iterable[Table]) -> EmbeddingBagCollection:
    """All of them in one collection, each with features of its own."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=feature_names(table),
        )
        for table in tables
    ]
    return EmbeddingBagCollection(device=torch.device("meta"), tables=configs)


def feature_names(table: Table) -> list[str]:
    """One name per feature that the table serves."""
    return [f"{table.name}_f{index}" for index in range(len(table.features))]
