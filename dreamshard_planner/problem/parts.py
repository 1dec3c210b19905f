# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A sharding problem beside the TorchRec options that it was made from: parts, units, fused groups, and collectives.

Shards of one option that cost and need the same are one part. Shards that lie on consecutive ranks are a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torchrec.distributed.planner.types import Perf, Shard, ShardingOption, Topology
from torchrec.distributed.types import CacheParams, CommOp

from dreamshard_planner.cost.collectives import LOOKUP_EXCHANGES, SORTED_BAG, Collective, CollectiveModel, bag_bytes
from dreamshard_planner.cost.problem import Problem, Sharding
from dreamshard_planner.cost.roofline import DENSE_PASSES
from dreamshard_planner.search_space.constraints import impossible_types
from dreamshard_planner.search_space.modules import ShardableTable, TableModule
from dreamshard_planner.search_space.options import (
    cannot_lie_so,
    fqn_of,
    hot_rows_of,
    ranks_of,
    refused,
    runs_of,
    same_option,
    set_ranks,
    type_of,
)
from dreamshard_planner.search_space.sharding_types import (
    FUSED,
    Ranks,
    ShardingTypeSpec,
    fuses_as,
    is_known,
    kernel_of,
    serves,
)
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.tables import INDEX_BYTES, OPTIMIZERS, OUTPUT_BYTES, STATE_BYTES, Table, Workload

HOT_LOOKUP_PASSES = 5
"""Passes of an embedding's bytes through memory, for a lookup of a hot row: gather, its gradient, sum by row."""
HOT_ROW_PASSES = 10
"""Passes of a hot row's bytes through memory: copy, gradient, update, copy to the shard, comparison with it."""
ROUTED_BYTES = 120
"""Bytes of memory traffic that tell a lookup of a hot row from another."""
_NO_CACHE = CacheParams()


@dataclass(frozen=True)
class Part:
    """Shards of one option that cost and need the same."""

    option: ShardingOption
    shard: Shard
    """One of the shards."""
    workload: Workload
    group: int
    """Index of the fused group."""
    exchanges: tuple[tuple[Collective, float], ...]
    """Collectives that carry lookups and outputs, and bytes to each peer."""
    hot_bytes: float = 0.0
    """Bytes of memory traffic for hot rows."""

    @property
    def is_estimated(self) -> bool:
        """True if the kernel is unknown, so that the shard's perf is its cost."""
        return not is_known(self.option.compute_kernel)

    @property
    def estimate(self) -> Perf:
        """Estimate of each shard, if it is the cost; PlannerError, naming table and value, if it is no time."""
        perf: Perf = self.shard.perf
        if not 0 <= perf.total < math.inf:
            raise refused(
                f"table {fqn_of(self.option)!r}: its enumerator estimates {perf.total} ms for "
                f"{self.option.sharding_type} {self.option.compute_kernel}, which must be a number from 0. Leave out "
                "options that must not be chosen"
            )
        return perf

    @property
    def dense_elements(self) -> float:
        """Elements of the shard-sized gradient of a dense kernel; 0 for fused kernels."""
        work = self.workload
        return work.rows * work.dim if kernel_of(self.option.compute_kernel).dense else 0.0

    @property
    def dense_passes(self) -> float:
        """Times that a dense gradient's size passes through memory beside the kernels."""
        return DENSE_PASSES[self.workload.optimizer]

    @property
    def ssd_bytes(self) -> float:
        """Bytes of the distinct rows that a batch reads from SSDs."""
        work = self.workload
        return work.distinct_rows * work.dim * work.weight_bytes if work.memory == "ssd" else 0.0

    @property
    def synced_bytes(self) -> float:
        """Bytes that ``DMPCollection.sync`` averages with replicas in other sharding groups: weights and optimizer
        states of fused kernels."""
        work = self.workload
        if fuses_as(self.option.compute_kernel) != FUSED:
            return 0.0
        states = OPTIMIZERS[work.optimizer]
        values = states.per_weight * work.dim + states.per_row
        return work.rows * (work.dim * work.weight_bytes + values * STATE_BYTES)


@dataclass(frozen=True)
class ReadProblem:
    """A sharding problem and the TorchRec options that it was made from."""

    problem: Problem
    options: tuple[tuple[ShardingOption, ...], ...]
    """Options by table, in the problem's order."""
    parts: tuple[Part, ...]

    @property
    def workload_P(self) -> tuple[Workload, ...]:
        """Work of each part on its rank."""
        return tuple(part.workload for part in self.parts)

    def assign(self, sharding: Sharding) -> list[ShardingOption]:
        """Return the chosen options after setting the ranks of their shards."""
        chosen = []
        for options, units, option, positions in zip(
            self.options, self.problem.tables, sharding.options, sharding.positions, strict=True
        ):
            set_ranks(options[option], units[option].ranks(positions))
            chosen.append(options[option])
        return chosen

    def sharding(self, plan: Sequence[ShardingOption]) -> Sharding:
        """Return a plan with ranks as a sharding; PlannerError if a table is missing, or is sharded as no option of
        this problem."""
        given = {option.fqn: option for option in plan}
        options, positions = [], []
        for choices, units in zip(self.options, self.problem.tables, strict=True):
            option = given.get(choices[0].fqn)
            index = next(
                (i for i, choice in enumerate(choices) if option is not None and same_option(choice, option)), None
            )
            if option is None or index is None:
                raise refused(f"the plan has no sharding of table {fqn_of(choices[0])!r} that could be rated")
            options.append(index)
            positions.append(positions_of(option, units[index].span))
        return Sharding(tuple(options), tuple(positions))


def parts_of(
    option: ShardingOption,
    whole: Workload,
    group: int,
    exchanges: Callable[[Workload], Iterable[tuple[Collective, float]]],
    with_storage: bool,
    hot_bytes: float,
) -> tuple[list[Part], list[int]]:
    """Return the parts of an option, given the work of the whole table, and the index of the part of each of its
    shards. Shards with the same size, estimates and rows, if it is known how these are read, are one part."""
    index_of: dict[tuple[object, ...], int] = {}
    parts: list[Part] = []
    indices: list[int] = []
    for run in runs_of(option):
        shard = run.first
        # Row blocks differ by their place if the looked-up ids are known.
        differ = whole.ids is not None and shard.size[0] < whole.rows
        for first_row in [run.offset(index)[0] for index in range(run.count)] if differ else [shard.offset[0]]:
            key = (*shard.size, shard.storage if with_storage else None, shard.perf, first_row if differ else None)
            if key not in index_of:
                # Columns of a quantized table's tensor may be bytes.
                columns = shard.size[1] * whole.dim // max(1, option.tensor.shape[1])
                workload = whole.part(shard.size[0], columns, first_row)
                index_of[key] = len(parts)
                parts.append(Part(option, shard, workload, group, tuple(exchanges(workload)), hot_bytes))
            indices += [index_of[key]] * (1 if differ else run.count)
    return parts, indices


def hot_bytes_of(option: ShardingOption, table: Table) -> float:
    """Return the bytes of a rank's memory traffic for the hot rows of a table, beside its kernels."""
    if (hot := hot_rows_of(option)) is None:
        return 0.0
    routed = ROUTED_BYTES * (table.pooling_factor + table.hot_lookups) * option.batch_size
    passed = HOT_LOOKUP_PASSES * table.hot_lookups * option.batch_size + HOT_ROW_PASSES * len(hot)
    return routed + passed * table.dim * OUTPUT_BYTES


def sent_bytes(parts: Sequence[Part]) -> tuple[list[Collective], torch.Tensor]:
    """Return the collectives of parts, and the bytes that each part sends to each peer, float64 [P, C]; one column of
    zeros if nothing is exchanged."""
    columns: dict[Collective, int] = {}
    for part in parts:
        for collective, _ in part.exchanges:
            columns.setdefault(collective, len(columns))
    bytes_PC = torch.zeros(len(parts), max(1, len(columns)), dtype=torch.float64)
    for row, part in enumerate(parts):
        for collective, sent in part.exchanges:
            bytes_PC[row, columns[collective]] = sent
    return list(columns), bytes_PC


def set_fused_params(option: ShardingOption, of_sharder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fused parameters that options may set, of an option, else of its sharder, as
    ``torchrec.distributed.utils.add_params_from_parameter_sharding`` sets them. The load factor is left out: a kernel
    has the mean of its tables'."""
    cache = option.cache_params or _NO_CACHE
    own = {
        "stochastic_rounding": option.stochastic_rounding,
        "bounds_check_mode": option.bounds_check_mode,
        "enforce_hbm": option.enforce_hbm,
        "cache_algorithm": cache.algorithm,
        "cache_reserved_memory": cache.reserved_memory,
        "cache_precision": cache.precision,
        "prefetch_pipeline": cache.prefetch_pipeline,
        "multipass_prefetch_config": cache.multipass_prefetch_config,
    }
    return {name: of_sharder.get(name) if value is None else value for name, value in own.items()}


def group_key(option: ShardingOption, declared: ShardableTable, table: Table) -> Hashable:
    """Return the fields that must agree for TorchRec to fuse two shards of a rank into one kernel
    (``torchrec.distributed.embedding_sharding.group_tables``, once per module and sharding type)."""
    key_value, config = kernel_of(option.compute_kernel).store, declared.config
    fused_params = declared.owner.fused_params(option.output_dtype)
    return (
        option.path,
        option.sharding_type,
        fuses_as(option.compute_kernel),
        str(option.tensor.dtype),
        str(getattr(config, "data_type", None)),
        str(getattr(config, "pooling", None)),
        table.weighted,
        getattr(option, "has_feature_processor", False),
        repr(compat.optimizer_classes(option.tensor)),
        repr(compat.optimizer_arguments(option.tensor)),
        option.name if fused_params.get("use_one_tbe_per_table") or not is_known(option.compute_kernel) else None,
        fused_params.get("output_dtype"),
        tuple(set_fused_params(option, fused_params).values()),
        repr(getattr(option, "key_value_params", None)) if key_value else None,
        runs_of(option)[0].first.size[1] if table.prefetched or key_value else None,
    )


def num_ranks(ranks: Ranks, topology: Topology) -> int:
    """Return the number of these ranks in the topology."""
    return {"rank": 1, "host": topology.intra_group_size, "world": topology.world_size}[ranks]


def units_of(option: ShardingOption, parts: Sequence[int], topology: Topology) -> np.ndarray:
    """Group the option's shards, given by their parts, into units, int64 [U, span]; PlannerError if they do not fill
    units, or the topology has incomplete hosts."""
    spec, impossible = type_of(option), impossible_types(topology)
    span = num_ranks(spec.span, topology)
    if why := impossible.get(option.sharding_type):
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} belongs on one host, and {why}: give Topology "
            "a local_world_size (and pod_size) that divides its world_size"
        )
    first_rows = [run.first.offset[0] + run.step[0] * np.arange(run.count) for run in runs_of(option)]
    fills = bool(parts) and len(parts) % span == 0
    if fills and spec.splits_rows:
        fills = np.array_equal(np.flatnonzero(np.concatenate(first_rows) == 0), range(0, len(parts), span))
    if not fills:
        raise cannot_lie_so(
            f"table {fqn_of(option)!r} is to be sharded {option.sharding_type} in {len(parts)} shards, "
            f"which do not fill units of {span} ranks: make plan and enumerator with the planner's topology"
        )
    return np.reshape(parts, (-1, span))


def positions_of(option: ShardingOption, span: int) -> tuple[int, ...]:
    """Return the position of each of an option's units of this span, from the ranks of its shards; PlannerError if
    TorchRec would not run the shards on these ranks."""
    positions, ranks = [], list(ranks_of(option))
    for first in range(0, len(ranks), span):
        here = ranks[first : first + span]
        position = (here[0] or 0) // span
        if here != [*range(position * span, (position + 1) * span)]:
            raise cannot_lie_so(
                f"table {fqn_of(option)!r} is sharded {option.sharding_type} on ranks {here}, which "
                "TorchRec would not run so"
            )
        positions.append(position)
    return tuple(positions)


ORDERED_ID, ORDERED_BAG = 0.2, 1.0
"""Time to reorder an id, and a bag in a block, over the time to sort an id into a block. TorchRec's processor time on a
Xeon with 4 to 96 features, 1 to 100 lookups, 2 and 4 blocks: 1.5 ns an id, 7 to 15 ns a bag, and 8.4 ns."""


Links: TypeAlias = Mapping[str, CollectiveModel]
"""Models of a topology's exchanges by operation, between all ranks but for ``all_reduce`` (those of all sharding
groups), ``host_reduce_scatter`` and ``host_all_gather`` (those of one host), and ``across`` (an all-to-all of those of
the same place on every host). ``all_to_one`` takes the bytes of all ranks together. ``lookups`` are lengths, ids and
weights, with TorchRec's work on them; ``bucketing`` sorts a rank's own ids into row blocks. Both may be left out."""


def exchanges_of(
    option: ShardingOption, workload: Workload, topology: Topology, links: Links, element_bytes: float
) -> Iterable[tuple[Collective, float]]:
    """Yield the collectives that carry a shard's output and its lookups, with the bytes between its rank and each peer;
    ``element_bytes`` are those of one output element on the wire."""
    spec = type_of(option)
    name = f"{option.path or 'model'} {option.sharding_type}"
    world, host = topology.world_size, topology.intra_group_size
    output_bytes = workload.output_elements * element_bytes
    if serves(option.compute_kernel):
        yield Collective(f"{name} all-to-one", "world", links["all_to_one"], None), output_bytes
        return
    for exchange in spec.exchanges_of(option.is_pooled):
        # If each rank is a host of its own, the ranks of the same place on every host are all ranks.
        over = "world" if host == 1 and exchange.over == "across" else exchange.over
        if host == 1 and over == "host":
            continue
        names = {"world": "{}", "host": "host_{}", "across": "across"}
        forward, backward = (
            links[names[over].format(operation)] if operation else None
            for operation in (exchange.forward, exchange.backward)
        )
        collective = Collective(f"{name} {exchange.operation.replace('_', '-')}", over, forward, backward)
        if exchange.operation == "all_reduce":  # of the gradient, by the ranks of all sharding groups
            gradient_bytes = workload.rows * workload.dim * workload.weight_bytes
            yield collective, gradient_bytes / max(world, links["all_reduce"].world_size)
        else:
            yield collective, output_bytes / (host if over == "host" else world)
    if (hot := hot_rows_of(option)) is not None:
        ranks = max(world, links["all_reduce"].world_size)
        reduced = Collective(f"{name} hot rows all-reduce", "world", None, links["all_reduce"])
        yield reduced, len(hot) * workload.dim * OUTPUT_BYTES / ranks
    if spec.is_replicated or "lookups" not in links:
        return
    # Also between hosts, ids go straight to the rank that holds their rows.
    model = links["lookups"]
    model = replace(model, latency_ms=model.latency_ms * lookup_exchanges(workload.weighted))
    lookup_bytes = workload.lookup_bytes + bag_bytes(topology.compute_device) * workload.pooled_vectors
    yield Collective(f"{name} lookups", "world", model, None, of_lookups=True), lookup_bytes / world
    sorted_bytes = sorting_bytes(spec, workload.lookups, workload.pooled_vectors)
    if sorted_bytes and "bucketing" in links:
        yield Collective(f"{name} bucketing", "world", links["bucketing"], None, of_lookups=True), sorted_bytes / world


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


def wire_bytes(option: ShardingOption, owner: TableModule) -> float:
    """Return the bytes of one output element on the wire, mean over forward and backward: of the sharder's quantized
    type, else of the kernel's output."""
    if serves(option.compute_kernel):
        return getattr(option.module[1], "output_dtype", lambda: torch.float)().itemsize
    if not option.is_pooled:
        operation = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    elif type_of(option).exchanges[0].forward == "reduce_scatter":
        operation = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    else:
        operation = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    codecs = owner.exchange_codecs.get(operation.name)
    if codecs is not None:
        return (codecs.forward.quantized_dtype.itemsize + codecs.backward.quantized_dtype.itemsize) / 2
    return owner.output_type(option.output_dtype).itemsize
