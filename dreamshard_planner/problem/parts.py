# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Makes the parts of a sharding problem: shards of one option that cost and need the same are one part; and says which
of them TorchRec fuses into one kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torchrec.distributed.planner.types import Shard, ShardingOption
from torchrec.distributed.types import CacheParams

from dreamshard_planner.cost.collectives import Collective
from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.cost.roofline import DENSE_PASSES
from dreamshard_planner.search_space.input_checks import needed_bytes
from dreamshard_planner.search_space.kernels import FUSED, fuses_as, is_known, kernel_of
from dreamshard_planner.search_space.options import fqn_of, runs_of
from dreamshard_planner.torchrec_components import compat
from dreamshard_planner.workload.tables import OUTPUT_BYTES, Table, Workload


class Parts:
    """The parts of a problem that is being made, one entry of each list per part."""

    def __init__(self) -> None:
        self.workloads: list[Workload] = []
        self.shards: list[Shard] = []
        self.fqns: list[str] = []
        self.groups: list[int] = []
        self.dense_elements: list[float] = []
        self.dense_passes: list[float] = []
        self.ssd_bytes: list[float] = []
        self.synced_bytes: list[float] = []
        self.are_estimated: list[bool] = []
        self.columns: dict[Collective, int] = {}
        """Column of each collective that some part takes part in."""
        self._sent: list[tuple[int, int, float]] = []

    def add(
        self,
        option: ShardingOption,
        table: Table,
        whole: Workload,
        group: int,
        exchanges: Callable[[Workload], Iterable[tuple[Collective, float]]],
        with_storage: bool,
    ) -> list[int]:
        """Add the parts of an option; returns the row of each shard's part.

        Args:
            option: with its shards.
            table: of the option.
            whole: what the whole table asks for.
            group: fused group of the parts.
            exchanges: collectives that carry the output of a part, and bytes to each peer.
            with_storage: whether storage is estimated already.
        """
        row_of: dict[tuple[object, ...], int] = {}
        rows = []
        for run in runs_of(option):
            shard = run.first
            # Where it is known which ids are looked up, blocks of rows differ by where they lie.
            differ = whole.ids is not None and shard.size[0] < whole.rows
            for first_row in [run.offset(index)[0] for index in range(run.count)] if differ else [shard.offset[0]]:
                price = None if is_known(option.compute_kernel) else shard.perf
                key = (*shard.size, shard.storage if with_storage else None, first_row if differ else None, price)
                if key not in row_of:
                    # Columns of a quantized table's tensor may be bytes.
                    columns = shard.size[1] * whole.dim // max(1, option.tensor.shape[1])
                    workload = whole.part(shard.size[0], columns, first_row)
                    row_of[key] = self._add_part(option, table, shard, workload, group, exchanges(workload))
                rows += [row_of[key]] * (1 if differ else run.count)
        return rows

    def _add_part(
        self,
        option: ShardingOption,
        table: Table,
        shard: Shard,
        workload: Workload,
        group: int,
        exchanges: Iterable[tuple[Collective, float]],
    ) -> int:
        row = len(self.workloads)
        self.workloads.append(workload)
        self.shards.append(shard)
        self.fqns.append(fqn_of(option))
        self.groups.append(group)
        self.dense_elements.append(workload.rows * workload.dim if kernel_of(option.compute_kernel).dense else 0.0)
        self.dense_passes.append(DENSE_PASSES[table.optimizer])
        distinct_bytes = workload.distinct_rows * workload.dim * workload.weight_bytes
        self.ssd_bytes.append(distinct_bytes if workload.memory == "ssd" else 0.0)
        self.synced_bytes.append(_synced_bytes(option, workload))
        self.are_estimated.append(not is_known(option.compute_kernel))
        for collective, sent in exchanges:
            self._sent.append((row, self.columns.setdefault(collective, len(self.columns)), sent))
        return row

    def bytes_PC(self) -> torch.Tensor:
        """See :class:`~dreamshard_planner.cost.problem.Problem`; one column of zeros where nothing is exchanged."""
        bytes_PC = torch.zeros(len(self.workloads), max(1, len(self.columns)), dtype=torch.float64)
        for row, column, sent in self._sent:
            bytes_PC[row, column] = sent
        return bytes_PC

    def storage_PM(self, with_storage: bool) -> torch.Tensor:
        """See :class:`~dreamshard_planner.cost.problem.Problem`; nothing before storage is estimated."""
        if not with_storage:
            return torch.zeros(len(self.shards), len(MEMORY_KINDS), dtype=torch.int64)
        return needed_bytes(self.shards)


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
