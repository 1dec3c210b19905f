# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Checks of inputs: numbers that would overflow tensors, and inputs that are hardly meant.

Shapes: S shards, D devices, M limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType, Shard, Topology
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import data_type_to_dtype

from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.search_space.modules import ShardableTable, output_type, table_configs
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.search_space.sharding_types import CPU_OPTIMIZERS, CPU_OUTPUTS, CPU_WEIGHTS, SHARDING_TYPES
from dreamshard_planner.support.formatting import checked, some_of
from dreamshard_planner.torchrec_components.compat import optimizer_name
from dreamshard_planner.workload.statistics import TableStatistics

MAX_BYTES = 2**50
"""Most bytes of a memory that is a limit; sums of thousands fit into int64. A part that takes more does not fit."""
MAX_PER_SAMPLE = 2**40
"""Most lookups or poolings per sample, or samples per batch, of one feature."""
PER_FEATURE = ("pooling_factors", "num_poolings", "batch_sizes")
"""Fields of a constraint with a value per feature."""
DIM_STEP = 4
"""FBGEMM's kernels read four columns at once."""
MAX_MEANT_DIM = 8192
"""Most columns of embeddings; beyond, rows and dim have probably changed places."""


def check_constraint(constraint: ParameterConstraints, table: ShardableTable) -> None:
    """Raise PlannerError, naming the table, for impossible values of a constraint."""
    for what in PER_FEATURE:
        check_per_feature(getattr(constraint, what) or (), table.name, what)
    for what in ("sharding_types", "compute_kernels"):
        if isinstance(one := getattr(constraint, what), str):
            raise refused(f"table {table.fqn!r}: {what} of its constraint are a list, got {one!r}: give [{one!r}]")
        for given in one or ():
            if not isinstance(given, str):
                raise refused(
                    f"table {table.fqn!r}: {what} of its constraint are strings, got {given!r}"
                    + (f": give {given}.value" if isinstance(given, Enum) else "")
                )
    if constraint.min_partition is not None:
        checked(f"table {table.fqn!r}: min_partition", constraint.min_partition, 0, error=refused)
    share = constraint.cache_params and constraint.cache_params.load_factor
    if share is not None and not (_is_finite(share) and 0 < share <= 1):
        raise refused(
            f"table {table.fqn!r}: load_factor of its constraint's cache_params must be a share of its rows, above 0, "
            f"up to 1, got {share!r}"
        )


def check_shared(constraint: ParameterConstraints, tables: Sequence[ShardableTable]) -> None:
    """Raise PlannerError if tables of one name cannot share the constraint of that name."""
    counts, named = {len(table.feature_names) for table in tables}, sorted(table.fqn for table in tables)
    for what in PER_FEATURE:
        values = getattr(constraint, what)
        if not values:
            continue
        if what != "pooling_factors" or len(values) not in {1, *counts}:
            raise refused(
                f"tables {named} have one name and {sorted(counts)} features: the constraint of {tables[0].name!r} "
                f"cannot give them {what} {list(values)}. Rename one of the tables."
            )


def check_per_feature(values: Sequence[float], table: str, what: str) -> None:
    """Raise PlannerError, naming the table, if a value is no number or out of bounds."""
    if not isinstance(values, Iterable):
        raise refused(f"table {table!r}: {what} must be a list, one number per feature, got {values!r}")
    for value in values:
        if not (_is_finite(value) and 0 <= value <= MAX_PER_SAMPLE):
            raise refused(
                f"table {table!r}: {what} must be numbers from 0 to {MAX_PER_SAMPLE:,}, got {value!r}; they count per "
                "sample and feature (batch_sizes: samples of a rank's batch)"
            )
        if what == "batch_sizes" and (value < 1 or value % 1):
            raise refused(f"table {table!r}: batch_sizes must be whole numbers from 1, got {value!r}")


def per_feature(values: Sequence[float], count: int, table: str, what: str) -> list[float]:
    """Return one value per feature; a single value holds for all.

    Raises:
        PlannerError: lengths do not match, or a value is no number or out of bounds.
    """
    check_per_feature(values, table, what)
    if len(values) == count:
        return list(values)
    if len(values) == 1:
        return list(values) * count
    raise refused(
        f"table {table!r} serves {count} features, but its constraints give {len(values)} {what}: {list(values)}. "
        "Give one per feature."
    )


def checked_sharders(sharders: Sequence[ModuleSharder[nn.Module]]) -> list[ModuleSharder[nn.Module]]:
    """Return the sharders; TypeError for a single one, or for classes instead of their objects."""
    given = list(sharders) if isinstance(sharders, Iterable) else None
    if given is None or any(isinstance(one, type) for one in given):
        raise TypeError(f"sharders must be a list of objects, as [EmbeddingBagCollectionSharder()], got {sharders!r}")
    return given


def check_topology(topology: Topology) -> None:
    """Raise PlannerError if there are no ranks, or, naming the rank, if a memory is no number of bytes."""
    if not topology.devices:
        raise PlannerError("the topology has no ranks: give Topology a world_size from 1", PlannerErrorType.OTHER)
    for rank, device in enumerate(topology.devices):
        for kind in MEMORY_KINDS:
            size = getattr(device.storage, kind.lower())
            if not _is_finite(size):
                raise PlannerError(
                    f"rank {rank} of the topology has {size!r} bytes of {kind}: give a whole number, or one as large "
                    f"as {MAX_BYTES:,} (2**50) where memory is no limit",
                    PlannerErrorType.OTHER,
                )


def available_bytes(topology: Topology) -> Tensor:
    """Return the memory of every device, int64 [D, M]; negative if the reservation exceeds it."""
    check_topology(topology)
    sizes = [[getattr(device.storage, kind.lower()) for kind in MEMORY_KINDS] for device in topology.devices]
    return torch.tensor(
        [[int(min(max(size, -MAX_BYTES), MAX_BYTES)) for size in row] for row in sizes], dtype=torch.int64
    )


def needed_bytes(shards: Sequence[Shard]) -> Tensor:
    """Return the memory that every shard needs, int64 [P, M]."""
    needs = [[min(getattr(shard.storage, kind.lower()), 2 * MAX_BYTES) for kind in MEMORY_KINDS] for shard in shards]
    return torch.tensor(needs, dtype=torch.int64).view(-1, len(MEMORY_KINDS))


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def unused_names(
    module: nn.Module,
    tables: Sequence[ShardableTable],
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: TableStatistics | None,
) -> tuple[str, ...]:
    """Tell which tables and features of constraints and statistics the model lacks.

    Raises:
        StatisticsError: no statistics are for a feature of the model.
    """
    features = [feature for table in tables for feature in table.feature_names]
    of_statistics = None if statistics is None or not tables else statistics.unused(features)
    of_constraints = _constraints_of_others(module, tables, constraints, every=False)
    return tuple(text for text in (of_statistics, of_constraints) if text is not None)


def _constraints_of_others(
    module: nn.Module,
    tables: Sequence[ShardableTable],
    constraints: Mapping[str, ParameterConstraints] | None,
    every: bool,
) -> str | None:
    """Tell which constraints match no table of the model, sharded or not, or None.

    Args:
        every: True to tell only if no constraint matches, False only if some match.
    """
    known = {table.name for table in tables} | table_configs(module).keys()
    known |= {f"{path}.{name}" for path, child in module.named_modules() for name in table_configs(child, deep=False)}
    unknown = [name for name in constraints or {} if name not in known]
    if not unknown or not known or every != (len(unknown) == len(constraints or {})):
        return None
    return (
        f"constraints for tables that the model does not have: {some_of(unknown, known)}; a key is the table's own "
        "name, its fully qualified name, or '*' for all tables without a key"
    )


def doubtful_inputs(
    module: nn.Module,
    tables: Sequence[ShardableTable],
    statistics: TableStatistics | None,
    compute_device: str,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> tuple[str, ...]:
    """Tell which inputs are hardly meant, before planning.

    These are dims that kernels refuse or that are too large, ids beyond a table's rows, constraints of which none is
    for a table of the model, and tables whose constraint names another device.
    """
    of_others = _constraints_of_others(module, tables, constraints, every=True)
    named: dict[str, list[str]] = {}
    """Tables of each reason."""
    paths: dict[int, str] = {}
    for table in tables:
        if (path := paths.setdefault(id(table.module), table.path)) != table.path:
            again = f"is also in {path!r}, the same module, which TorchRec shards once: costs and memory count it twice"
            named.setdefault(again, []).append(table.fqn)
        constraint = (constraints or {}).get(table.name, ParameterConstraints())
        for reason in _doubts(table, statistics, compute_device, constraint):
            named.setdefault(reason, []).append(table.fqn)
    found = [] if of_others is None else [of_others]
    for reason, (first, *others) in named.items():
        found.append(f"table {first!r}{f' (and {len(others)} more)' if others else ''} {reason}")
    return tuple(found)


def _doubts(
    table: ShardableTable, statistics: TableStatistics | None, compute_device: str, constraint: ParameterConstraints
) -> Iterator[str]:
    """Tell what is hardly meant of one table."""
    if (group := constraint.device_group or compute_device) != compute_device:
        yield (
            f"is left out: the device_group of its constraint is {group!r}, the topology's device {compute_device!r}, "
            "and TorchRec shards no module without one of its tables"
        )
    rows, dim = table.parameter.shape
    dim = getattr(table.config, "embedding_dim", dim)  # columns of quantized tables may be bytes
    if compute_device == "cuda" and dim % DIM_STEP:
        yield (
            f"has dim {dim}: FBGEMM's kernels for GPUs need a multiple of {DIM_STEP}, such as "
            f"{-(-dim // DIM_STEP) * DIM_STEP}"
        )
    if compute_device == "cpu":
        yield from _unrunnable_on_cpu(table, constraint)
    if dim > MAX_MEANT_DIM:
        yield f"has {rows:,} rows of dim {dim:,}: perhaps these have changed places"
    counted = {} if statistics is None or table.owner.remaps_ids else statistics
    for name in table.feature_names:
        ids = counted[name].ids if name in counted else None
        if ids is not None and ids.end > rows:
            yield (
                f"has {rows:,} rows, and statistics of its feature {name!r} count ids up to {ids.end - 1:,}: they may "
                "be of another table, or FBGEMM reads row 0 instead"
            )


def _unrunnable_on_cpu(table: ShardableTable, constraint: ParameterConstraints) -> Iterator[str]:
    """Tell why FBGEMM's CPU kernels cannot train a table under its constraint."""
    if not table.parameter.is_floating_point():
        return
    declared = getattr(table.config, "data_type", None)  # a collection holds bfloat16 tables as float16 until sharded
    dtype = table.parameter.dtype if declared is None else data_type_to_dtype(declared)
    weights, known = str(dtype).removeprefix("torch."), ", ".join(CPU_OPTIMIZERS)
    if weights not in CPU_WEIGHTS:
        yield (
            f"has weights of {weights}, and FBGEMM's CPU kernels train "
            f"{' and '.join(CPU_WEIGHTS)}: set data_type in its config, or train it on GPUs"
        )
    types = constraint.sharding_types
    if types and all(kind in SHARDING_TYPES and SHARDING_TYPES[kind].is_replicated for kind in types):
        return  # without fused kernels
    params = table.owner.fused_params(constraint.output_dtype)
    output = str(output_type(params)).removeprefix("torch.")
    if output not in CPU_OUTPUTS:
        yield (
            f"has outputs of {output}, and FBGEMM's fused kernels on CPUs give "
            f"{' and '.join(CPU_OUTPUTS)}: leave output_dtype out of its constraint and its sharder's fused_params, or "
            "train it on GPUs"
        )
    optimizer = optimizer_name(table.parameter, params)
    if optimizer not in CPU_OPTIMIZERS:
        yield (
            f"has the in-backward optimizer {optimizer}, and FBGEMM's CPU kernels have {known}: "
            "DistributedModelParallel would end in an AssertionError. Apply one of these, or train it on "
            "GPUs"
        )
