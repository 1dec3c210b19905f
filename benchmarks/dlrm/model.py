# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A DLRM for a table collection, and batches for it that read the tables as the collection says.

Shape letters: B local batch, D dense features or columns, R rows, F sparse features x global batch, L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from common.meta_model import feature_names, meta_collection
from dreamshard_planner.measure.kernels import draw_inputs
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES
from dreamshard_planner.workload.tables import FeatureStatistics, Table, workloads_of

DENSE_FEATURES = 13  # Criteo's
SIZES = {"small": ((128,), (128, 1)), "mlperf": ((512, 256), (1024, 1024, 512, 256, 1))}
"""Layers below (the last one, of the embedding dim, is added) and above the interaction. ``mlperf`` is the
MLPerf DLRM-DCNv2 model, with its cross network; ``small`` has plain dot products and thin layers: on CPUs,
where dense layers are slow, embeddings stay as visible a part of the step as they are on accelerators."""
CROSS_LAYERS, CROSS_RANK = 3, 512  # MLPerf DLRM-DCNv2


class EveryTypeSharder(EmbeddingBagCollectionSharder):
    """NOT TorchRec's own: it offers on CPUs what TorchRec's sharder offers on GPUs only, row_wise, table_row_wise and
    grid_shard, so that these types run on gloo ranks, too."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them."""
        return list(SHARDING_TYPES)


def scale_tables(pool: Sequence[Table], max_rows: int, dim: int = 0, hot: float = 1.0) -> tuple[list[Table], str]:
    """Tables of at most ``max_rows`` rows, and in words what was changed.

    Args:
        pool: the tables as they are.
        max_rows: larger tables are cut to this many rows.
        dim: of all tables; 0 keeps theirs, which must then be the same.
        hot: the table that is read most is read so many times as often.

    Raises:
        ValueError: the tables have several dims, which DLRM's interaction can't take.
    """
    tables = [replace(table, rows=min(table.rows, max_rows), dim=dim or table.dim) for table in pool]
    dims = sorted({table.dim for table in tables})
    if len(dims) > 1:
        raise ValueError(f"DLRM needs one embedding dim, these tables have {dims}: choose one with --dim")
    cut = sum(old.rows > new.rows for old, new in zip(pool, tables, strict=True))
    hottest = max(range(len(tables)), key=lambda index: tables[index].pooling_factor)
    tables[hottest] = heated(tables[hottest], hot)
    heat = f", {tables[hottest].name} read {hot:g} times as often" if hot != 1 else ""
    before, after = (sum(table.rows for table in some) for some in (pool, tables))
    size_gb = [sum(table.size_bytes for table in some) / 1e9 for some in (pool, tables)]
    return tables, (
        f"{len(tables)} tables of dim {dims[0]}, {cut} of them cut to {max_rows:,} rows: "
        f"rows in all {before:,} -> {after:,}, weights {size_gb[0]:,.1f} -> {size_gb[1]:,.2f} GB{heat}"
    )


def heated(table: Table, times: float) -> Table:
    """The table with more lookups per sample; how they reuse rows is then derived from rows and lookups."""
    if times == 1:
        return table
    features = tuple(FeatureStatistics(feature.pooling_factor * times) for feature in table.features)
    return replace(table, features=features)


def make_model(tables: Sequence[Table], size: str, seed: int, device: torch.device) -> DLRMTrain:
    """DLRM with its loss.

    Dense weights come from the seed and are on ``device``. Embeddings are on no device until the model is sharded;
    :func:`fill_tables` then gives them weights.
    """
    below, above = SIZES[size]
    arguments = (meta_collection(tables), DENSE_FEATURES, [*below, tables[0].dim], list(above))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if size == "mlperf":
            return DLRMTrain(DLRM_DCN(*arguments, CROSS_LAYERS, CROSS_RANK, dense_device=device))
        return DLRMTrain(DLRM(*arguments, dense_device=device))


@torch.no_grad()
def fill_tables(model: DistributedModelParallel, tables: Sequence[Table], seed: int) -> None:
    """Weights that come from the seed, whichever rank holds which part of a table."""
    index_of = {table.name: index for index, table in enumerate(tables)}
    for key, value in model.state_dict().items():
        index = index_of.get(key.split(".")[-2]) if "embedding_bags" in key else None
        if index is None:
            continue
        table = tables[index]
        limit, generator = table.rows**-0.5, torch.Generator().manual_seed(seed + index)
        weight_RD = torch.empty(table.rows, table.dim).uniform_(-limit, limit, generator=generator)
        if isinstance(value, ShardedTensor):
            parts = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
        else:  # data-parallel
            parts = [((0, 0), value)]
        for (row, column), part in parts:
            part.copy_(weight_RD[row : row + part.shape[0], column : column + part.shape[1]])


def make_batches(
    tables: Sequence[Table], count: int, batch_size: int, rank: int, world_size: int, seed: int
) -> list[Batch]:
    """One rank's share, ``batch_size`` samples, of global batches that follow the tables' pooling factors and reuse.

    All ranks draw the same global batches: rows that several ranks read are as common as the tables say.
    """
    generator = torch.Generator().manual_seed(seed)
    samples, first = batch_size * world_size, batch_size * rank
    workloads = workloads_of(tables, samples)
    names = [name for table in tables for name in feature_names(table)]

    def draw() -> Batch:
        indices, lengths = [], []
        for workload in workloads:
            indices_L, lengths_F = draw_inputs(workload, generator)
            offsets_F = nn.functional.pad(lengths_F.cumsum(0), (1, 0))
            for start in range(first, workload.num_features * samples, samples):
                indices.append(indices_L[offsets_F[start] : offsets_F[start + batch_size]])
                lengths.append(lengths_F[start : start + batch_size])
        sparse = KeyedJaggedTensor(names, torch.cat(indices), lengths=torch.cat(lengths))
        dense_BD = torch.rand(samples, DENSE_FEATURES, generator=generator)[first : first + batch_size]
        labels_B = torch.randint(2, (samples,), generator=generator)[first : first + batch_size]
        return Batch(dense_BD, sparse, labels_B)

    return [draw() for _ in range(count)]
