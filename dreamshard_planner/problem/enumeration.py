# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's options and estimates, to the last bit, in a fraction of the time; and the memory that kernels allocate
beyond them.

TorchRec's estimators read only the size of a shard, and the shards of one option have few sizes, estimated once each.
The estimate of storage misses row-wise optimizer states of tables in unified memory, states in fp32 beside weights in
fp16, caches of key-value stores, and gradients of replicas.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.estimator.types import HardwarePerfConfig
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.modules import shardable_tables
from dreamshard_planner.search_space.options import (
    EnumeratedOption,
    by_table,
    counted,
    fqn_of,
    hot_rows_of,
    refused,
    type_of,
)
from dreamshard_planner.search_space.sharding_types import KERNELS, is_known, serves
from dreamshard_planner.support.reproducible import collector_paused
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.tables import OPTIMIZERS, STATE_BYTES, Table

Lengths = Callable[[ShardingOption], list[float]]
"""Returns the ``input_lengths`` of an option."""
TableKey = tuple[int, str]
"""``id`` of a table's module, and the table's name."""
SHARDS_AT_ONCE = 2**18
"""Tables times ranks enumerated at once; each takes some 2 KB."""
CACHE_SET_ROWS = 32
"""Rows of one set of a cache: FBGEMM's caches have whole sets."""
SLOT_BYTES = 16
"""Id and time of use of one cached row, 8 bytes each."""
EVICTED_BYTES = 12
"""Id and slot of one row on its way to a key-value store, 8 and 4 bytes."""
_PRECISION_BYTES = {"FP32": 4, "FP16": 2, "NFP8": 2}
_ROW_COUNTERS = {"COUNTER": 2, "COWCLIP": 2, "DECOUPLE_GLOBAL": 1}
"""Values per row that row-wise Adagrad keeps for modes of weight decay."""


own_lengths: Lengths = attrgetter("input_lengths")


def equal_lengths(lookups: float) -> Lengths:
    """Return lengths with so many lookups of every feature."""
    return lambda option: [lookups] * len(option.input_lengths)


def _estimate(
    estimator: ShardEstimator, what: str, lengths: Lengths, options: Sequence[ShardingOption], *args: Any, **kwargs: Any
) -> None:
    """Let an estimator of TorchRec's, which reads nothing of a shard but its size, set ``what`` once per size."""
    hook = getattr(type(getattr(estimator, "config", None)), "post_process_perfs", None)
    sees_all = hook not in (None, HardwarePerfConfig.post_process_perfs)
    probes = [copy.copy(option) for option in options]
    for option, probe in zip(options, probes, strict=True):
        probe.input_lengths = lengths(option)
        sizes = dict.fromkeys(tuple(shard.size) for shard, _ in counted(option))
        probe.shards = option.shards if sees_all else [Shard([*size], [0] * len(size)) for size in sizes]
    estimator.estimate(probes, *args, **kwargs)
    for option, probe in zip(options, probes, strict=True):
        option.is_weighted = probe.is_weighted  # set by the perf estimator
        of_size = {tuple(shard.size): getattr(shard, what) for shard in probe.shards}
        for shard, _ in [] if sees_all else counted(option):
            setattr(shard, what, of_size[tuple(shard.size)])


class PerfEstimator(ShardEstimator):
    """Estimates perf as ``EmbeddingEnumerator`` does, and that of quantized tables for inference."""

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        lengths: Lengths = own_lengths,
    ) -> None:
        self._trained, self._served = (compat.perf_estimator(topology, constraints, served) for served in (False, True))
        self._lengths = lengths

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Set the perf of every shard; PlannerError if TorchRec cannot price a kernel."""
        known = [option for option in sharding_options if is_known(option.compute_kernel)]
        for estimator, served in ((self._trained, False), (self._served, True)):
            some = [option for option in known if serves(option.compute_kernel) == served]
            _estimate(estimator, "perf", self._lengths, some, *args, **kwargs)
        for option in sharding_options:
            if not is_known(option.compute_kernel):
                try:
                    _estimate(self._trained, "perf", self._lengths, [option], *args, **kwargs)
                except (RuntimeError, ValueError) as error:
                    why = f"TorchRec's estimator raised {type(error).__name__}, {str(error).rstrip('.')}"
                    raise unpriced(option, why) from error


def unpriced(option: ShardingOption, why: str) -> PlannerError:
    """Make the error of an option whose kernel is unknown and has no price."""
    return refused(
        f"table {fqn_of(option)!r} is to use compute kernel {option.compute_kernel!r}, whose cost is unknown: {why}. "
        "Give the planner an enumerator with an estimator that sets its perf, or allow one of "
        f"{', '.join(KERNELS)} in the table's ParameterConstraints.compute_kernels."
    )


def estimate_all(
    estimators: Iterable[ShardEstimator],
    sharding_options: list[ShardingOption],
    sharders: Sequence[ModuleSharder[nn.Module]],
) -> None:
    """Let every estimator set its part of every shard, in place, for any TorchRec version."""
    arguments = compat.sharders_for_estimators(sharders)
    for estimator in estimators:
        estimator.estimate(sharding_options, **arguments)


class StorageEstimator(ShardEstimator):
    """Estimates storage as ``EmbeddingEnumerator`` does, plus the memory that kernels allocate beyond TorchRec's count,
    which is TorchRec's estimate without lookups."""

    def __init__(
        self, topology: Topology, constraints: dict[str, ParameterConstraints] | None, reader: OptionReader
    ) -> None:
        self._estimator = EmbeddingStorageEstimator(topology, constraints)
        self._reader, self._topology = reader, topology

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Set the storage of every shard."""
        _estimate(self._estimator, "storage", own_lengths, sharding_options, *args, **kwargs)
        estimates = [[shard.storage for shard, _ in counted(option)] for option in sharding_options]
        _estimate(self._estimator, "storage", equal_lengths(0.0), sharding_options, *args, **kwargs)
        for option, estimated in zip(sharding_options, estimates, strict=True):
            for (shard, _), storage in zip(counted(option), estimated, strict=True):
                shard.storage = storage + self._missing(option, shard.size, shard.storage)

    def _missing(self, option: ShardingOption, size: Sequence[int], seen: Storage) -> Storage:
        """Return the bytes that a shard allocates beyond those that TorchRec has ``seen``."""
        kernel = KERNELS.get(option.compute_kernel)
        if kernel is None or kernel.serves:
            return Storage(hbm=0, ddr=0)
        table, on_gpu = self._reader.table(option, self._topology), self._topology.compute_device != "cpu"
        device, host = allocated_bytes(option.compute_kernel, table, size, self._reader.kernel_params(option))
        if not on_gpu:
            device, host = 0, device + host
        device, host, more = max(0, device - seen.hbm), max(0, host - seen.ddr), 0
        if kernel.dense:
            # Every backward makes a gradient as large as the table; DDP copies that of a replica to its bucket.
            copies = 2 if type_of(option).is_replicated else 1
            more = int(copies * math.prod(size) * table.weight_bytes)
        if (hot := hot_rows_of(option)) is not None:  # on every rank, and so with every shard
            more += self._reader.declared(option).trained_bytes(len(hot) * table.dim, table.dim)
        return Storage(hbm=device + more * on_gpu, ddr=host + more * (not on_gpu))


def allocated_bytes(name: str, table: Table, size: Sequence[int], params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the bytes of device and of host memory that FBGEMM's module holds for one shard between two steps, by the
    kernel's name and arguments on a GPU.

    The formulas follow ``split_table_batched_embeddings_ops_training.py`` (``construct_split_state``,
    ``_apply_cache_state``) and ``tbe/ssd/training.py`` of FBGEMM, and ``_populate_ssd_tbe_params`` of TorchRec. Host
    memory that a key-value store takes for its own caches belongs to a whole kernel and is left out.
    """
    kernel, (rows, dim) = KERNELS[name], size
    if not rows:
        return 0, 0
    states = OPTIMIZERS[table.optimizer]
    weights = rows * dim * table.weight_bytes
    per_weight = float(states.per_weight) * rows * dim * STATE_BYTES
    per_row = float(states.per_row + _row_counters(table.optimizer, params)) * rows * STATE_BYTES
    slot_bytes = SLOT_BYTES + (4 if params.get("prefetch_pipeline") else 0)  # rows in use are locked by a counter
    cached, own_sets = table.cache_load_factor * rows, params.get("cache_sets")
    if kernel.store:
        # Row-wise Adagrad is the default optimizer here; Adam counts its steps per row.
        row_states = max(per_row / rows, STATE_BYTES)
        row_bytes = dim * table.weight_bytes
        slots = (own_sets or max(int(cached / CACHE_SET_ROWS), 1)) * CACHE_SET_ROWS
        if (most_mb := params.get("max_l1_cache_size")) is not None:
            slots = min(slots, int(most_mb * 2**20 / row_bytes / CACHE_SET_ROWS) * CACHE_SET_ROWS)
        kept = per_weight + row_states * rows
        if kernel.virtual:  # states lie behind the weights of a row, padded to four elements
            row_bytes += math.ceil(kept / rows / table.weight_bytes / 4) * 4 * table.weight_bytes
            kept = 0.0
        return math.ceil(slots * (row_bytes + slot_bytes) + kept), math.ceil(2 * slots * (row_bytes + EVICTED_BYTES))
    if kernel.memory == "device":
        moved = per_weight if params.get("uvm_non_rowwise_momentum") else 0.0
        return math.ceil(weights + per_weight + per_row - moved), math.ceil(moved)
    device, host = per_row, weights + per_weight
    if params.get("enforce_hbm"):  # moves all but the second state per weight
        left = max(0, states.per_weight - 1) * rows * dim * STATE_BYTES
        device, host = device + host - left, left
    if kernel.memory == "uvm_caching":
        slots = (own_sets or max(math.ceil(int(cached) / CACHE_SET_ROWS), 1)) * CACHE_SET_ROWS
        precision = getattr(params.get("cache_precision"), "name", "")
        device += rows * 4 + slots * (dim * _PRECISION_BYTES.get(precision, table.weight_bytes) + slot_bytes)
        if params.get("cache_algorithm") is CacheAlgorithm.LFU:  # counts uses of all rows
            device += 8 * (rows + 1 - slots)
    return math.ceil(device), math.ceil(host)


def _row_counters(optimizer: str, params: Mapping[str, Any]) -> int:
    """Return how many values per row an optimizer's options add to its states."""
    if optimizer == "rowwise_adagrad":
        return _ROW_COUNTERS.get(getattr(params.get("weight_decay_mode"), "name", ""), 0)
    extra = params.get("extra_optimizer_config")
    return int(optimizer == "adam" and getattr(extra, "use_rowwise_bias_correction", False))


def sharding_only(tables: Collection[TableKey], sharder: ModuleSharder[nn.Module]) -> ModuleSharder[nn.Module]:
    """Return a copy of a sharder that offers only some tables."""
    some = copy.copy(sharder)
    vars(some)["shardable_parameters"] = partial(_parameters, tables, sharder)
    return some


def _parameters(
    tables: Collection[TableKey], sharder: ModuleSharder[nn.Module], module: nn.Module
) -> dict[str, nn.Parameter]:
    offered = sharder.shardable_parameters(module)
    return {name: parameter for name, parameter in offered.items() if (id(module), name) in tables}


class FastEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, with ``variants`` of its options, and with equal blocks of rows also on ranks of unequal
    memory.

    A table's options are sorted by sharding type and kernel, since TorchRec's order changes with Python's hash seed.
    ``lengths`` are by default those of the constraints.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        *,
        variants: Callable[[EnumeratedOption], Sequence[EnumeratedOption]] = lambda _: (),
        lengths: Lengths | None = None,
    ) -> None:
        super().__init__(topology, batch_size, constraints, estimator)
        # TorchRec would cut row_wise tables by the memory of each rank, and its lookup assumes equal blocks.
        self._device_memory_sizes = None
        self._variants, self._lengths, self._enumerating = variants, lengths, False

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """See ``torchrec.distributed.planner.types.Enumerator``."""
        tables = [*dict.fromkeys((id(table.owner.module), table.name) for table in shardable_tables(module, sharders))]
        at_once = max(1, SHARDS_AT_ONCE // self._world_size)
        options: list[ShardingOption] = []
        stored: list[ShardingOption] = []
        self._enumerating = True
        try:
            with collector_paused():
                # Some at a time, since TorchRec makes all their shards before equal ones are grouped.
                for first in range(0, len(tables), at_once):
                    some = frozenset(tables[first : first + at_once])
                    options += super().enumerate(module, [sharding_only(some, sharder) for sharder in sharders])
                    stored += self.last_stored_search_space or []
        except ValueError as error:
            if not compat.tells_of_buckets(error):
                raise
            raise refused(
                f"{error} Give the table's managed collision module a number of buckets that is a multiple of the "
                f"{self._world_size} ranks, such as buckets={self._world_size}."
            ) from error
        finally:
            self._enumerating = False
        self._last_stored_search_space, self._last_stored_sharders = stored, sharders
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """See ``torchrec.distributed.planner.types.Enumerator``."""
        if self._enumerating:
            # In place: ``enumerate`` copies and returns this list.
            sharding_options[:] = self._with_variants(sharding_options)
        if self._lengths is not None:
            for option in sharding_options:
                option.input_lengths = self._lengths(option)
        super().populate_estimates(sharding_options)

    def _with_variants(self, options: list[ShardingOption]) -> list[ShardingOption]:
        chosen: list[ShardingOption] = []
        for of_table in by_table(options).values():
            ways: list[ShardingOption] = []
            for option in map(EnumeratedOption.of, of_table):
                ways += [option, *self._variants(option)]
            chosen += sorted(ways, key=lambda way: (way.sharding_type, way.compute_kernel, -way.num_shards))
        return chosen
