# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Collectives that carry the lookups of a shard and its output, with their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import CommOp, ModuleSharder

from dreamshard_planner.cost.collectives import LOOKUP_EXCHANGES, SORTED_BAG, Collective, CollectiveModel, bag_bytes
from dreamshard_planner.search_space.kernels import serves
from dreamshard_planner.search_space.modules import exchange_codecs, output_type
from dreamshard_planner.search_space.options import type_of
from dreamshard_planner.search_space.sharding_types import ShardingTypeSpec
from dreamshard_planner.workload.tables import INDEX_BYTES, Workload

ORDERED_ID, ORDERED_BAG = 0.2, 1.0
"""Time to reorder an id, and a bag in a block, over the time to sort an id into a block. TorchRec's processor time on a
Xeon with 4 to 96 features, 1 to 100 lookups, 2 and 4 blocks: 1.5 ns an id, 7 to 15 ns a bag, and 8.4 ns."""


@dataclass(frozen=True)
class Links:
    """Models of a topology's exchanges, between all ranks unless a field says otherwise."""

    all_to_all: CollectiveModel
    reduce_scatter: CollectiveModel
    all_gather: CollectiveModel
    all_reduce: CollectiveModel
    """Between the ranks of all sharding groups; a rank counts as sending an n-th of the tensor to each peer."""
    host_reduce_scatter: CollectiveModel
    """Between the ranks of one host."""
    host_all_gather: CollectiveModel
    """Between the ranks of one host."""
    across: CollectiveModel
    """An all-to-all between the ranks of the same place on every host."""
    all_to_one: CollectiveModel
    """From all ranks to one, by the bytes of all ranks together."""
    lookups: CollectiveModel | None = None
    """Exchange of lengths, ids and weights, with TorchRec's work on them; None: not counted."""
    bucketing: CollectiveModel | None = None
    """Sorting of a rank's own ids into row blocks, by the bytes of the ids; None: not counted."""

    def model(self, operation: str | None, over: str) -> CollectiveModel | None:
        """Return the model of a sharding type's exchange; None without an operation."""
        if operation is None:
            return None
        fields = {"world": operation, "host": f"host_{operation}", "across": "across"}
        model: CollectiveModel = getattr(self, fields[over])
        return model


def exchanges_of(
    option: ShardingOption, workload: Workload, topology: Topology, links: Links, element_bytes: float
) -> Iterable[tuple[Collective, float]]:
    """Yield the collectives that carry a shard's output and its lookups, with the bytes between its rank and each peer.

    Args:
        option: of the shard.
        workload: of the shard.
        topology: of the ranks.
        links: models of the exchanges.
        element_bytes: bytes of one output element on the wire.
    """
    spec = type_of(option)
    name = f"{option.path or 'model'} {option.sharding_type}"
    world, host = topology.world_size, topology.intra_group_size
    output_bytes = workload.output_elements * element_bytes
    if serves(option.compute_kernel):
        yield Collective(f"{name} all-to-one", "world", links.all_to_one, None), output_bytes
        return
    for exchange in spec.exchanges_of(option.is_pooled):
        # If each rank is a host of its own, the ranks of the same place on every host are all ranks.
        over = "world" if host == 1 and exchange.over == "across" else exchange.over
        if host == 1 and over == "host":
            continue
        label = f"{name} {exchange.operation.replace('_', '-')}"
        passes = links.model(exchange.forward, over), links.model(exchange.backward, over)
        if exchange.operation == "all_reduce":  # of the gradient, by the ranks of all sharding groups
            gradient_bytes = workload.rows * workload.dim * workload.weight_bytes
            yield Collective(label, over, *passes), gradient_bytes / max(world, links.all_reduce.world_size)
        else:
            yield Collective(label, over, *passes), output_bytes / (host if over == "host" else world)
    if spec.is_replicated or links.lookups is None:
        return
    # Also between hosts, ids go straight to the rank that holds their rows.
    model = replace(links.lookups, latency_ms=links.lookups.latency_ms * lookup_exchanges(workload.weighted))
    lookup_bytes = workload.lookup_bytes + bag_bytes(topology.compute_device) * workload.pooled_vectors
    yield Collective(f"{name} lookups", "world", model, None, of_lookups=True), lookup_bytes / world
    sorted_bytes = sorting_bytes(spec, workload.lookups, workload.pooled_vectors)
    if sorted_bytes and links.bucketing is not None:
        yield Collective(f"{name} bucketing", "world", links.bucketing, None, of_lookups=True), sorted_bytes / world


def sorting_bytes(spec: ShardingTypeSpec, lookups: float, bags: float) -> float:
    """Return the bytes of ids that take as long to sort into row blocks as the lookups and bags of one block.

    ``TwRwSparseFeaturesDist`` also reorders blocks on one host into the order of the hosts.
    """
    if not spec.splits_rows:
        return 0.0
    reordered = ORDERED_ID * lookups + ORDERED_BAG * bags if spec.span == "host" else 0.0
    return (lookups + SORTED_BAG * bags + reordered) * INDEX_BYTES


def lookup_exchanges(weighted: bool) -> float:
    """Return the number of exchanges of a module's lookups, over the measured ones."""
    return 1 + weighted / LOOKUP_EXCHANGES


def wire_bytes(
    option: ShardingOption, sharder: ModuleSharder[nn.Module] | None, fused_params: Mapping[str, Any]
) -> float:
    """Return the bytes of one output element on the wire, mean over forward and backward: of the sharder's quantized
    type, else of the kernel's output with these arguments."""
    if serves(option.compute_kernel):
        return getattr(option.module[1], "output_dtype", lambda: torch.float)().itemsize
    if not option.is_pooled:
        operation = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    elif type_of(option).exchanges[0].forward == "reduce_scatter":
        operation = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    else:
        operation = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    codecs = exchange_codecs(sharder).get(operation.name)
    if codecs is not None:
        return (codecs.forward.quantized_dtype.itemsize + codecs.backward.quantized_dtype.itemsize) / 2
    return output_type(fused_params).itemsize
