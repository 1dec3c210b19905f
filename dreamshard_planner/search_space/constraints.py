# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""TorchRec's constraints as the planner uses them: one value per feature, and the sharding types that may be used."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import data_type_to_dtype

from dreamshard_planner.search_space.allowed_types import NOT_OFFERED, AllowedTypes, reasons_in_words
from dreamshard_planner.search_space.input_checks import check_per_feature, per_feature
from dreamshard_planner.search_space.kernels import (
    CPU_OPTIMIZERS,
    CPU_OUTPUTS,
    CPU_WEIGHTS,
    KERNELS,
    KEY_VALUE,
    in_host_memory,
    is_known,
    serves,
)
from dreamshard_planner.search_space.modules import (
    ShardableTable,
    is_mean,
    shardable_tables,
    table_configs,
)
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.search_space.sharding_types import LATE_MEANS, MIXED_MEAN, SHARDING_TYPES
from dreamshard_planner.support.formatting import some_of
from dreamshard_planner.torchrec_components.compat import optimizer_name, tells_of_missing_modules
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics

PER_FEATURE = ("pooling_factors", "num_poolings", "batch_sizes")
"""What a constraint has of each feature."""
DIM_STEP = 4
"""FBGEMM's kernels read four columns at once."""
MAX_MEANT_DIM = 8192
"""More columns than embeddings have; rows and dim are taken to have changed places."""


DEFAULT = "*"
"""Key of the constraint of every table that has none of its own."""


class PlanningConstraints(dict[str, ParameterConstraints]):
    """TorchRec's constraints by table name, as :func:`planning_constraints` makes them."""

    def __init__(self, constraints: Mapping[str, ParameterConstraints]) -> None:
        super().__init__(constraints)
        self.left_out: dict[str, dict[str, str]] = {}
        """By fully qualified name of a table, the sharding types that it may not take, and why."""
        self.torchrec_lengths: dict[str, list[float]] = {}
        """By table name, the pooling factors that TorchRec itself counts, where these are fewer than features: one
        given for all of them, or its default, is that of the table."""
        self.rows_instead: frozenset[str] = frozenset()
        """Paths of modules whose mean-pooled tables may not lie in blocks of rows, since other tables need not, though
        all of them may."""


def given_constraints(
    constraints: Mapping[str, ParameterConstraints | None] | None,
) -> dict[str, ParameterConstraints] | None:
    """A copy without those that are None, which TorchRec passes over; TypeError, naming the table, for other things."""
    if constraints is None:
        return None
    if not isinstance(constraints, Mapping):
        raise TypeError(f"constraints must be ParameterConstraints by table name, got {type(constraints).__name__}")
    given = {name: one for name, one in constraints.items() if one is not None}
    for name, one in given.items():
        if not isinstance(one, ParameterConstraints):
            raise TypeError(f"constraints[{name!r}] must be ParameterConstraints, got {type(one).__name__}")
    return given


def constraint_of(constraints: Mapping[str, ParameterConstraints], name: str, fqn: str) -> ParameterConstraints | None:
    """Return a table's constraint: by its fully qualified name, else by its own name, else :data:`DEFAULT`."""
    return next((constraints[key] for key in (fqn, name, DEFAULT) if key in constraints), None)


def constraints_by_name(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, ParameterConstraints] | None:
    """Return the constraints by the tables' own names, as TorchRec looks them up. Keys of no table stay as they are.

    Raises:
        PlannerError: tables of one name have different constraints.
    """
    if not constraints:
        return None if constraints is None else {}
    tables = shardable_tables(module, sharders)
    used = {DEFAULT} | {table.fqn for table in tables}
    found = {key: one for key, one in constraints.items() if key not in used}
    first: dict[str, ShardableTable] = {}
    for table in tables:
        one = constraint_of(constraints, table.name, table.fqn)
        other = first.setdefault(table.name, table)
        if one != constraint_of(constraints, other.name, other.fqn):
            raise refused(
                f"tables {other.fqn!r} and {table.fqn!r} have one name and different constraints, and TorchRec looks "
                "constraints up by that name. Give both the same ParameterConstraints, or rename one of the tables."
            )
        if one is not None:
            found[table.name] = one
    return found


def planning_constraints(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: TableStatistics | None,
    allowed: AllowedTypes,
    in_rows: Collection[str] = (),
) -> PlanningConstraints:
    """Copies of the constraints, one per table, with the sharding types that may be used and with one pooling factor,
    ``num_poolings`` and batch size per feature, so that TorchRec's storage and estimates are right.

    A feature's pooling factor comes from ``statistics``, else from the table's constraint, else from TorchRec's
    default.

    Args:
        module: the model.
        sharders: its sharders.
        constraints: the user's, by table name.
        statistics: per feature.
        allowed: whatever the table.
        in_rows: paths of modules all of whose tables are to lie in blocks of rows, of
            :attr:`PlanningConstraints.rows_instead`.

    Raises:
        PlannerError: where no type is left for a table, numbers make no sense, or lengths don't match the features.
    """
    tables = shardable_tables(module, sharders)
    varied, weighted = _unusual_batches(tables, statistics or {})
    expanded = PlanningConstraints(constraints or {})
    by_name: dict[str, list[ShardableTable]] = {}
    for table in tables:
        by_name.setdefault(table.name, []).append(table)
    for table in tables:
        name = table.name
        constraint = copy.copy((constraints or {}).get(name)) or ParameterConstraints()
        for what in PER_FEATURE:  # also of tables that are left out, which memory is reserved for as well
            check_per_feature(getattr(constraint, what) or (), name, what)
        if constraint.device_group and constraint.device_group != allowed.compute_device:
            continue
        _check_texts(table, constraint)
        _check_min_partition(table, constraint)
        constraint.compute_kernels = _usable_kernels(table, constraint, allowed.compute_device, allowed.has_ssd)
        # TorchRec looks up one constraint for all tables of a name.
        for one in by_name[name]:
            expanded.left_out[one.fqn] = allowed.left_out(one, constraint, one.path in varied, one.path in weighted)
        constraint.sharding_types = _usable_types(
            {one.fqn: expanded.left_out[one.fqn] for one in by_name[name]}, constraint.sharding_types
        )
        features = table.feature_names
        # It holds no table's own statistics then, and the reader adds these.
        namesakes = [other for other in by_name[name] if other.feature_names != features]
        own = None if namesakes else statistics
        known = any(feature in (statistics or {}) for one in by_name[name] for feature in one.feature_names)
        # TorchRec wants as many of these as pooling factors.
        each = known or constraint.num_poolings or constraint.batch_sizes
        if not each and len(constraint.pooling_factors or ()) == 1:
            expanded.torchrec_lengths[name] = constraint.pooling_factors
        if any(len(other.feature_names) != len(features) for other in namesakes):
            _check_shared(constraint, [table, *namesakes])
        elif features:
            pooling_factors = per_feature(constraint.pooling_factors, len(features), name, "pooling_factors")
            constraint.pooling_factors = [
                own[feature].pooling_factor if own is not None and feature in own else given
                for feature, given in zip(features, pooling_factors, strict=True)
            ]
            check_per_feature(constraint.pooling_factors, name, f"pooling factors of {list(features)}")
            for what in ("num_poolings", "batch_sizes"):
                values = getattr(constraint, what)
                if values:
                    setattr(constraint, what, per_feature(values, len(features), name, what))
        expanded[name] = constraint
    _keep_means_apart([table for table in tables if table.name in expanded], expanded, in_rows)
    return expanded


def _unusual_batches(
    tables: Iterable[ShardableTable], statistics: Mapping[str, FeatureStatistics]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the paths of modules of which statistics know batch sizes that vary by feature, and of those of which they
    know batches with weights."""
    known: dict[str, dict[str, FeatureStatistics]] = {}
    for table in tables:
        counted = {name: statistics[name] for name in table.feature_names if name in statistics}
        known.setdefault(table.path, {}).update(counted)
    varied = frozenset(path for path, features in known.items() if in_smaller_batches(features))
    weighted = (path for path, features in known.items() if any(one.weighted for one in features.values()))
    return varied, frozenset(weighted)


def left_out_by_group(
    error: PlannerError, constraints: Mapping[str, ParameterConstraints], compute_device: str
) -> str | None:
    """Which tables a constraint's device group left out, in words; None unless TorchRec's error is of modules without a
    plan, and there are such tables."""
    others = [name for name, c in constraints.items() if c.device_group and c.device_group != compute_device]
    if not others or not tells_of_missing_modules(error):
        return None
    groups = sorted({constraints[name].device_group for name in others})
    return (
        f"ParameterConstraints.device_group leaves out {', '.join(map(repr, others[:5]))}: it is "
        f"{', '.join(map(repr, groups))} there, and this topology plans for {compute_device!r}."
    )


def unused_names(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: TableStatistics | None,
) -> tuple[str, ...]:
    """What constraints and statistics name that the model does not have, in words: one dictionary of either may serve
    several models.

    Raises:
        StatisticsError: no statistics are for a feature of it.
    """
    tables = shardable_tables(module, sharders)
    features = [feature for table in tables for feature in table.feature_names]
    of_statistics = None if statistics is None or not tables else statistics.unused(features)
    of_constraints = _constraints_of_others(module, sharders, constraints, every=False)
    return tuple(text for text in (of_statistics, of_constraints) if text is not None)


def _constraints_of_others(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    every: bool,
) -> str | None:
    """Which constraints no table of the model has, sharded or not, in words, where that is true of every constraint, or
    of some but not all; None elsewhere, and for a model without tables."""
    known = {table.name for table in shardable_tables(module, sharders)} | table_configs(module).keys()
    known |= {f"{path}.{name}" for path, child in module.named_modules() for name in table_configs(child, deep=False)}
    unknown = [name for name in constraints or {} if name not in known]
    if not unknown or not known or every != (len(unknown) == len(constraints or {})):
        return None
    return (
        f"constraints for tables that the model does not have: {some_of(unknown, known)}; a key is the table's own "
        f"name, its fully qualified name, or {DEFAULT!r} for all tables without a key"
    )


def doubtful_inputs(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    statistics: TableStatistics | None,
    compute_device: str,
    constraints: Mapping[str, ParameterConstraints] | None = None,
) -> tuple[str, ...]:
    """What is hardly meant, in words, known before anything is planned: dims that kernels refuse or nobody means, ids
    in statistics that a table has no rows for, constraints of which none is for a table of the model, and tables whose
    constraint names another device than the rest of their module has."""
    of_others = _constraints_of_others(module, sharders, constraints, every=True)
    found = [] if of_others is None else [of_others]
    tables = shardable_tables(module, sharders)
    groups = {name: one.device_group or compute_device for name, one in (constraints or {}).items()}
    planned = {table.path for table in tables if groups.get(table.name, compute_device) == compute_device}
    for table in tables:
        if (group := groups.get(table.name, compute_device)) != compute_device and table.path in planned:
            found.append(
                f"table {table.fqn!r} is left out: the device_group of its constraint is {group!r}, the topology's "
                f"device {compute_device!r}, and TorchRec shards no module without one of its tables"
            )
        rows, dim = table.parameter.shape
        dim = getattr(table.config, "embedding_dim", dim)  # columns of quantized tables may be bytes
        if compute_device == "cuda" and dim % DIM_STEP:
            found.append(
                f"table {table.fqn!r} has dim {dim}: FBGEMM's kernels for GPUs need a multiple of {DIM_STEP}, such as "
                f"{-(-dim // DIM_STEP) * DIM_STEP}"
            )
        if compute_device == "cpu":
            found += _unrunnable_on_cpu(table, (constraints or {}).get(table.name, ParameterConstraints()))
        if dim > MAX_MEANT_DIM:
            found.append(f"table {table.fqn!r} has {rows:,} rows of dim {dim:,}: perhaps these have changed places")
        counted = {} if statistics is None or table.owner.remaps_ids else statistics
        for name in table.feature_names:
            ids = counted[name].ids if name in counted else None
            if ids is not None and ids.end > rows:
                found.append(
                    f"table {table.fqn!r} has {rows:,} rows, and statistics of its feature {name!r} count ids up to "
                    f"{ids.end - 1:,}: they may be of another table, or FBGEMM reads row 0 instead"
                )
    return tuple(found)


def _unrunnable_on_cpu(table: ShardableTable, constraint: ParameterConstraints) -> Iterator[str]:
    """Tell why FBGEMM's CPU kernels cannot train a table under its constraint; quantized tables are served alone."""
    if not table.parameter.is_floating_point():
        return
    declared = getattr(table.config, "data_type", None)  # a collection holds bfloat16 tables as float16 until sharded
    dtype = table.parameter.dtype if declared is None else data_type_to_dtype(declared)
    weights, known = str(dtype).removeprefix("torch."), ", ".join(CPU_OPTIMIZERS)
    if weights not in CPU_WEIGHTS:
        yield (
            f"table {table.fqn!r} has weights of {weights}, and FBGEMM's CPU kernels train "
            f"{' and '.join(CPU_WEIGHTS)}: set data_type in its config, or train it on GPUs"
        )
    types = constraint.sharding_types
    if types and all(kind in SHARDING_TYPES and SHARDING_TYPES[kind].is_replicated for kind in types):
        return  # without fused kernels
    params = table.owner.fused_params(constraint.output_dtype)
    output = str(params.get("output_dtype", SparseType.FP32).as_dtype()).removeprefix("torch.")
    if output not in CPU_OUTPUTS:
        yield (
            f"table {table.fqn!r} has outputs of {output}, and FBGEMM's fused kernels on CPUs give "
            f"{' and '.join(CPU_OUTPUTS)}: leave output_dtype out of its constraint and its sharder's fused_params, or "
            "train it on GPUs"
        )
    optimizer = optimizer_name(table.parameter, params)
    if optimizer not in CPU_OPTIMIZERS:
        yield (
            f"table {table.fqn!r} has the in-backward optimizer {optimizer}, and FBGEMM's CPU kernels have {known}: "
            "DistributedModelParallel would end in an AssertionError. Apply one of these, or train it on "
            "GPUs"
        )


def _keep_means_apart(
    tables: Sequence[ShardableTable], constraints: PlanningConstraints, in_rows: Collection[str]
) -> None:
    """Narrow the types of every module's tables to those that mean pooling survives, in place.

    Args:
        tables: of the model.
        constraints: of these.
        in_rows: paths of modules all of whose tables are to lie in blocks of rows.

    Raises:
        PlannerError: none is left for a table.
    """
    modules: dict[str, list[ShardableTable]] = {}
    for table in tables:
        modules.setdefault(table.path, []).append(table)
    for path, members in modules.items():
        fqns = {table.name: table.fqn for table in members}
        types = {table.name: constraints[table.name].sharding_types for table in members}
        if None in types.values():
            continue  # of another device
        means = [table.name for table in members if is_mean(table.config)]
        never_in_rows = [name for name, kinds in types.items() if LATE_MEANS.isdisjoint(kinds)]
        why = MIXED_MEAN + (f", and table {fqns[never_in_rows[0]]!r} may be neither" if never_in_rows else "")
        narrowed = without_mixed_means(types, means, path in in_rows)
        if not never_in_rows and any(LATE_MEANS.isdisjoint(narrowed[name]) for name in means):
            constraints.rows_instead |= {path}
        for name, kept in narrowed.items():
            if not kept:
                raise refused(
                    f"no sharding type is left for table {fqns[name]!r} of {types[name]}: {MIXED_MEAN}. Allow "
                    "whole tables in ParameterConstraints.sharding_types of the module's mean-pooled tables, or those "
                    "two types for all of its tables."
                )
            constraints[name].sharding_types = kept
            constraints.left_out[fqns[name]].update((kind, why) for kind in types[name] or () if kind not in kept)


def without_mixed_means(
    types: Mapping[str, Collection[str]], means: Collection[str], in_rows: bool = False
) -> dict[str, list[str]]:
    """The types that the tables of one module may be given whatever the others are: a mean-pooled table in blocks of
    rows leaves no other type to any table of its module, see ``MIXED_MEAN``.

    Args:
        types: what each table may be by itself.
        means: the tables with mean pooling.
        in_rows: whether blocks of rows are wanted, of all tables.

    Returns:
        By table; blocks of rows where they are wanted or some mean-pooled table may be nothing else, no such blocks of
        mean-pooled tables elsewhere. A list may be empty.
    """
    kept = {name: list(kinds) for name, kinds in types.items()}
    if len(types) == 1:
        return kept
    if means and in_rows or any(LATE_MEANS.issuperset(types[name]) for name in means):
        return {name: [kind for kind in kinds if kind in LATE_MEANS] for name, kinds in kept.items()}
    return kept | {name: [kind for kind in kept[name] if kind not in LATE_MEANS] for name in means}


def _usable_kernels(
    table: ShardableTable, constraint: ParameterConstraints, compute_device: str, has_ssd: bool
) -> list[str] | None:
    """The compute kernels that a table may use: its sharder offers them, the device runs them, and its constraint names
    them where it names any. Unnamed, unknown kernels are used where the sharder offers no others. None where TorchRec
    would take the same ones unasked: its statistics list the tables that users constrained.

    Raises:
        PlannerError: there are none; says whether the sharder or the constraint is the reason.
    """
    sharder = table.sharder
    types = sharder.sharding_types(compute_device)
    told = {kernel for kind in types for kernel in sharder.compute_kernels(kind, compute_device)}
    # Managed collisions' sharders offer kernels of GPUs on CPUs as well.
    offered = {kernel for kernel in told if compute_device != "cpu" or not in_host_memory(kernel)}
    if not offered:
        of_gpus = f"kernels {sorted(told)}, which need GPUs," if told else "no kernel"
        what = of_gpus if types else "no sharding type"
        raise refused(
            f"table {table.fqn!r} cannot be sharded: {type(sharder).__name__} offers {what} on {compute_device}"
        )
    # A sharder of trained tables that offers a kernel of quantized ones, or the other way round, cannot mean it.
    quantized = isinstance(sharder, BaseQuantEmbeddingSharder)
    fitting = {kernel for kernel in offered if serves(kernel) == quantized or not is_known(kernel)}
    if not fitting:
        raise refused(
            f"table {table.fqn!r} may only use compute kernels {sorted(offered)}: {type(sharder).__name__} offers no "
            f"others on {compute_device}, and they are for tables that are {'trained' if quantized else 'quantized'}. "
            "Give the sharder's kernels for its own tables."
        )
    named = constraint.compute_kernels
    if not named:
        unasked = {kernel for kernel in fitting & KERNELS.keys() if not KERNELS[kernel].store}
        if unasked and unasked == told - {kernel.value for kernel in GUARDED_COMPUTE_KERNELS}:
            return None
        return sorted(unasked or fitting)
    usable = {kernel for kernel in named if has_ssd or kernel != KEY_VALUE}
    if not usable & fitting:
        why = "" if has_ssd or KEY_VALUE not in named else ", and 'key_value' needs SSDs: give Topology an ssd_cap"
        raise refused(
            f"table {table.fqn!r} may only use compute kernels {sorted(set(named))}, and {type(sharder).__name__} "
            f"offers {sorted(offered)} on {compute_device}{why}. Allow another one in its "
            "ParameterConstraints.compute_kernels."
        )
    return sorted(usable)


def _check_texts(table: ShardableTable, constraint: ParameterConstraints) -> None:
    """PlannerError for sharding types and kernels that are no lists of strings, such as members of TorchRec's enums."""
    for what in ("sharding_types", "compute_kernels"):
        if isinstance(one := getattr(constraint, what), str):
            raise refused(f"table {table.fqn!r}: {what} of its constraint are a list, got {one!r}: give [{one!r}]")
        for given in one or ():
            if not isinstance(given, str):
                raise refused(
                    f"table {table.fqn!r}: {what} of its constraint are strings, got {given!r}"
                    + (f": give {given}.value" if isinstance(given, Enum) else "")
                )


def _check_min_partition(table: ShardableTable, constraint: ParameterConstraints) -> None:
    """PlannerError where min_partition is no number of columns; one above the table's dim leaves one slice."""
    given = constraint.min_partition
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise refused(
            f"table {table.fqn!r}: min_partition must be a number of columns, 1 to the dim of "
            f"{table.parameter.shape[1]} (0 or None for TorchRec's default), got {given!r}"
        )


def _check_shared(constraint: ParameterConstraints, tables: Sequence[ShardableTable]) -> None:
    """PlannerError where several tables of one name cannot share the constraint of that name."""
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


def _usable_types(left_out: Mapping[str, Mapping[str, str]], named: Sequence[str] | None) -> list[str]:
    """Those that all tables of one name may use, sorted.

    Args:
        left_out: by table.
        named: in their constraint.

    Raises:
        PlannerError: none is left; says why each was left out.
    """
    usable = sorted(kind for kind in SHARDING_TYPES if not any(kind in reasons for reasons in left_out.values()))
    if usable:
        return usable
    tables = " and ".join(repr(fqn) for fqn in sorted(left_out))
    reasons = {
        kind: reason
        for of_table in left_out.values()
        for kind, reason in of_table.items()
        if kind in (named or SHARDING_TYPES) and (named or reason != NOT_OFFERED)
    }
    raise refused(
        f"no sharding type is left for table {tables} ({reasons_in_words(reasons) or 'the sharder offers none'}). "
        "Allow another one in its ParameterConstraints.sharding_types, or another kernel in compute_kernels."
    )
