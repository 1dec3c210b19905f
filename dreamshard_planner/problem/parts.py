# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The parts and units of a sharding problem. Shards of one option that cost and need the same are one part; shards that
lie on consecutive ranks together are a unit. Also: which parts TorchRec fuses into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torchrec.distributed.planner.types import Shard, ShardingOption, Topology
from torchrec.distributed.types import CacheParams

from dreamshard_planner.cost.collectives import Collective
from dreamshard_planner.cost.problem import Unit
from dreamshard_planner.cost.roofline import DENSE_PASSES
from dreamshard_planner.search_space.kernels import FUSED, fuses_as, is_known, kernel_of
from dreamshard_planner.search_space.options import cannot_lie_so, fqn_of, ranks_of, runs_of, type_of
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, Ranks
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Table, Workload


@dataclass(frozen=True)
class Part:
    """Shards of one option that cost and need the same."""

    workload: Workload
    shard: Shard
    """One of them."""
    fqn: str
    group: int
    """Fused group of the shards."""
    dense_elements: float
    """Elements of a gradient that leaves the kernel, as large as the shard; 0 for fused kernels."""
    dense_passes: float
    """Times that as many pass through memory beside the kernels, by the table's optimizer."""
    ssd_bytes: float
    """Bytes of the distinct rows that a batch reads from SSDs."""
    synced_bytes: float
    """Bytes that replicas in other sharding groups are averaged with."""
    is_estimated: bool
    """Whether the kernel is unknown, so that the shard's perf is its cost."""
    exchanges: tuple[tuple[Collective, float], ...]
    """Collectives that carry lookups and outputs, and bytes to each peer."""


def parts_of(
    option: ShardingOption,
    table: Table,
    whole: Workload,
    group: int,
    exchanges: Callable[[Workload], Iterable[tuple[Collective, float]]],
    with_storage: bool,
) -> tuple[list[Part], list[int]]:
    """Return the parts of an option, and for each of its shards the index of its part.

    Args:
        option: with its shards.
        table: of the option.
        whole: what the whole table asks for.
        group: fused group of the parts.
        exchanges: collectives that carry the output of a part, and bytes to each peer.
        with_storage: whether storage is estimated already.
    """
    kernel, is_estimated = kernel_of(option.compute_kernel), not is_known(option.compute_kernel)
    index_of: dict[tuple[object, ...], int] = {}
    parts: list[Part] = []
    indices: list[int] = []
    for run in runs_of(option):
        shard = run.first
        # Where it is known which ids are looked up, blocks of rows differ by where they lie.
        differ = whole.ids is not None and shard.size[0] < whole.rows
        for first_row in [run.offset(index)[0] for index in range(run.count)] if differ else [shard.offset[0]]:
            price = shard.perf if is_estimated else None
            key = (*shard.size, shard.storage if with_storage else None, first_row if differ else None, price)
            if key not in index_of:
                # Columns of a quantized table's tensor may be bytes.
                columns = shard.size[1] * whole.dim // max(1, option.tensor.shape[1])
                workload = whole.part(shard.size[0], columns, first_row)
                distinct_bytes = workload.distinct_rows * workload.dim * workload.weight_bytes
                index_of[key] = len(parts)
                parts.append(
                    Part(
                        workload,
                        shard,
                        fqn_of(option),
                        group,
                        dense_elements=workload.rows * workload.dim if kernel.dense else 0.0,
                        dense_passes=DENSE_PASSES[table.optimizer],
                        ssd_bytes=distinct_bytes if workload.memory == "ssd" else 0.0,
                        synced_bytes=_synced_bytes(option, workload),
                        is_estimated=is_estimated,
                        exchanges=tuple(exchanges(workload)),
                    )
                )
            indices += [index_of[key]] * (1 if differ else run.count)
    return parts, indices


def sent_bytes(parts: Sequence[Part]) -> tuple[list[Collective], torch.Tensor]:
    """Return the collectives of parts, and the bytes that each part sends to each peer, float64 [P, C]; one column of
    zeros where nothing is exchanged."""
    columns: dict[Collective, int] = {}
    for part in parts:
        for collective, _ in part.exchanges:
            columns.setdefault(collective, len(columns))
    bytes_PC = torch.zeros(len(parts), max(1, len(columns)), dtype=torch.float64)
    for row, part in enumerate(parts):
        for collective, sent in part.exchanges:
            bytes_PC[row, columns[collective]] = sent
    return list(columns), bytes_PC


def _synced_bytes(option: ShardingOption, shard: Workload) -> float:
    """What ``DMPCollection.sync`` averages of a shard: weights, and row-wise or element-wise sums of the optimizer; it
    looks at fused kernels alone."""
    if fuses_as(option.compute_kernel) != FUSED:
        return 0.0
    states = {"sgd": 0, "adagrad": shard.dim}.get(shard.optimizer, 1)
    return shard.rows * (shard.dim * shard.weight_bytes + states * OUTPUT_BYTES)


_of_option = attrgetter("stochastic_rounding", "bounds_check_mode", "enforce_hbm")
_of_cache = attrgetter("algorithm", "reserved_memory", "precision", "prefetch_pipeline", "multipass_prefetch_config")
_NO_CACHE = CacheParams()
_SET = (
    "stochastic_rounding",
    "bounds_check_mode",
    "enforce_hbm",
    "cache_algorithm",
    "cache_reserved_memory",
    "cache_precision",
    "prefetch_pipeline",
    "multipass_prefetch_config",
)
"""Fused parameters that options set, and their cache parameters. A load factor is not one: a kernel has the mean of its
tables'."""


def set_fused_params(option: ShardingOption, of_sharder: Mapping[str, Any]) -> dict[str, Any]:
    """Those of an option, else of its sharder, as ``torchrec.distributed.utils.add_params_from_parameter_sharding``
    has them."""
    own = _of_option(option) + _of_cache(option.cache_params or _NO_CACHE)
    return {name: of_sharder.get(name) if value is None else value for name, value in zip(_SET, own, strict=True)}


def group_key(option: ShardingOption, table: Table, config: Any, fused_params: dict[str, Any]) -> Hashable:
    """What must agree for TorchRec to fuse two shards of a rank into one kernel
    (``torchrec.distributed.embedding_sharding.group_tables``, once per module and sharding type)."""
    tensor = option.tensor
    key_value = kernel_of(option.compute_kernel).store
    return (
        option.path,
        option.dependency,
        option.sharding_type,
        fuses_as(option.compute_kernel),
        str(tensor.dtype),
        str(getattr(config, "data_type", None)),
        str(getattr(config, "pooling", None)),
        table.weighted,
        getattr(option, "has_feature_processor", False),
        table.optimizer,
        repr(compat.optimizer_classes(tensor)),
        repr(compat.optimizer_arguments(tensor)),
        table.pooled,
        option.name if fused_params.get("use_one_tbe_per_table") or not is_known(option.compute_kernel) else None,
        fused_params.get("output_dtype"),
        tuple(set_fused_params(option, fused_params).values()),
        repr(getattr(option, "key_value_params", None)) if key_value else None,
        option.shards[0].size[1] if table.prefetched or key_value else None,
    )


def impossible_types(topology: Topology) -> dict[str, str]:
    """Sharding types that the topology rules out, and why: TorchRec forms groups of whole hosts only."""
    ranks, host = topology.world_size, topology.intra_group_size
    of_hosts = [kind for kind, spec in SHARDING_TYPES.items() if spec.span == "host"]
    return dict.fromkeys(of_hosts, f"{ranks} ranks are no whole number of hosts of {host}") if ranks % host else {}


def num_ranks(ranks: Ranks, topology: Topology) -> int:
    """How many ranks of the topology these are."""
    return {"rank": 1, "host": topology.intra_group_size, "world": topology.world_size}[ranks]


def units_of(option: ShardingOption, parts: Sequence[int], topology: Topology) -> tuple[Unit, ...]:
    """The option's shards, by their parts, in units.

    Raises:
        PlannerError: they do not fill units, or lie on hosts of which some are not whole.
    """
    span, impossible = num_ranks(type_of(option).span, topology), impossible_types(topology)
    if impossible and (option.dependency or option.sharding_type in impossible):
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} belongs on one host, and {next(iter(impossible.values()))}: give Topology "
            "a local_world_size (and pod_size) that divides its world_size"
        )
    if not parts or len(parts) % span:
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} is to be sharded {option.sharding_type} in {len(parts)} shards, "
            f"which do not fill units of {span} ranks"
        )
    return tuple(Unit(tuple(parts[first : first + span])) for first in range(0, len(parts), span))


def positions_of(option: ShardingOption, units: Sequence[Unit]) -> tuple[int, ...]:
    """The position of each of an option's units, from the ranks of its shards.

    Raises:
        PlannerError: TorchRec would not run the shards on these ranks.
    """
    positions, ranks = [], iter(ranks_of(option))
    for unit in units:
        here = [next(ranks) for _ in range(unit.span)]
        position = (here[0] or 0) // unit.span
        if here != list(unit.ranks(position)):
            raise cannot_lie_so(
                f"table {fqn_of(option)!r} is sharded {option.sharding_type} on ranks {here}, which "
                "TorchRec would not run so"
            )
        positions.append(position)
    return tuple(positions)


def pinned_positions(option: ShardingOption, units: Sequence[Unit]) -> tuple[int, ...] | None:
    """Positions of the units of a dependent table whose shards have ranks, see
    :mod:`~dreamshard_planner.search_space.towers`; None for others."""
    if not option.dependency or None in ranks_of(option):
        return None
    return positions_of(option, units)


def check_hosts(options: Iterable[ShardingOption], topology: Topology) -> None:
    """PlannerError where pinned tables that depend on each other are on several hosts."""
    hosts: dict[str, dict[int, str]] = {}
    for option in options:
        for rank in ranks_of(option) if option.dependency else []:
            if rank is not None:
                host = rank // topology.intra_group_size
                hosts.setdefault(option.dependency, {})[host] = fqn_of(option)
    for dependency, tables in hosts.items():
        if len(tables) > 1:
            raise cannot_lie_so(
                f"tables {sorted(tables.values())} of {dependency!r} are on hosts {sorted(tables)}; TorchRec wants "
                "them on one"
            )
