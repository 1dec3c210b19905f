# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Check users' constraints, and make one per table, with one value per feature, as TorchRec's estimates need."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dreamshard_planner.search_space.allowed_types import AllowedTypes, keep_means_apart, usable_kernels, usable_types
from dreamshard_planner.search_space.modules import ShardableTable, output_type
from dreamshard_planner.search_space.options import refused, tower_refused
from dreamshard_planner.support.formatting import checked

DEFAULT = "*"
"""Key of the constraint of all tables without one of their own."""
MAX_PER_SAMPLE = 2**40
"""Most lookups or poolings per sample, or samples per batch, of one feature."""
PER_FEATURE = ("pooling_factors", "num_poolings", "batch_sizes")
"""Fields of a constraint with a value per feature."""


class PlanningConstraints(dict[str, ParameterConstraints]):
    """Constraints by table name, made by :func:`planning_constraints`."""

    def __init__(self, constraints: Mapping[str, ParameterConstraints]) -> None:
        super().__init__(constraints)
        self.left_out: dict[str, dict[str, str]] = {}
        """Sharding types that a table may not take, and why, by its fully qualified name."""
        self.changes: dict[str, dict[str, str]] = {}
        """Sharding types that change a table's training, allowed or not, and why, by its fully qualified name."""
        self.torchrec_lengths: dict[str, list[float]] = {}
        """Pooling factors that TorchRec itself counts, by table name, if they are fewer than the features."""


def given_constraints(
    constraints: Mapping[str, ParameterConstraints | None] | None,
) -> dict[str, ParameterConstraints] | None:
    """Copy without entries of None, which TorchRec ignores, and with plain numbers for NumPy's and torch's; TypeError
    names the table of any other value."""
    if constraints is None:
        return None
    if not isinstance(constraints, Mapping):
        raise TypeError(f"constraints must be ParameterConstraints by table name, got {type(constraints).__name__}")
    given = {name: one for name, one in constraints.items() if one is not None}
    for name, one in given.items():
        if not isinstance(one, ParameterConstraints):
            raise TypeError(f"constraints[{name!r}] must be ParameterConstraints, got {type(one).__name__}")
        for what in (*PER_FEATURE, "min_partition"):
            if hasattr(values := getattr(one, what), "tolist"):
                given[name] = one = copy.copy(one)
                setattr(one, what, values.tolist())
    return given


def constraint_of(constraints: Mapping[str, ParameterConstraints], name: str, fqn: str) -> ParameterConstraints | None:
    """Return a table's constraint: by its fully qualified name, else by its own name, else :data:`DEFAULT`."""
    return next((constraints[key] for key in (fqn, name, DEFAULT) if key in constraints), None)


def constraints_by_name(
    tables: Iterable[ShardableTable], constraints: Mapping[str, ParameterConstraints] | None
) -> dict[str, ParameterConstraints] | None:
    """Return the constraints by the tables' own names, as TorchRec looks them up. Keys of no table stay as they are.
    PlannerError if tables of one name have different constraints."""
    if not constraints:
        return None if constraints is None else {}
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
    tables: Sequence[ShardableTable], given: Mapping[str, ParameterConstraints] | None, allowed: AllowedTypes
) -> PlanningConstraints:
    """Copy constraints, one per table, with allowed types and one value per feature, for TorchRec's estimates.

    A feature's pooling factor comes from its statistics, else from the constraint, else from TorchRec's default.

    Raises:
        PlannerError: no type is left for a table, a number is impossible, lengths do not match the features, or a table
            is in an embedding tower.
    """
    expanded = PlanningConstraints(given or {})
    by_name: dict[str, list[ShardableTable]] = {}
    outputs: dict[str, list[torch.dtype]] = {}
    for table in tables:
        if isinstance(table.owner.module, EmbeddingTower | EmbeddingTowerCollection):
            raise tower_refused(table.fqn)
        by_name.setdefault(table.name, []).append(table)
        output_dtype = getattr(expanded.get(table.name), "output_dtype", None)
        outputs.setdefault(table.owner.path, []).append(output_type(table.owner.fused_params(output_dtype)))
    enough = 2 * allowed.topology.world_size  # whole tables of a type leave no rank without one; a plan is checked
    everywhere = {path for path, types in outputs.items() if len(types) >= enough and len({*types}) == 1}
    planned: list[ShardableTable] = []
    for name, namesakes in by_name.items():  # TorchRec looks up one constraint for all tables of a name
        constraint = copy.copy(expanded.get(name)) or ParameterConstraints()
        check_constraint(constraint, namesakes[0])  # also of tables that are left out, which memory is reserved for
        if constraint.device_group and constraint.device_group != allowed.topology.compute_device:
            continue
        for table in namesakes:
            kernels = usable_kernels(table, constraint, allowed.topology)
        constraint.compute_kernels = kernels
        for table in namesakes:
            reasons = allowed.reasons(table, constraint, table.owner.path in everywhere)
            expanded.left_out[table.fqn], expanded.changes[table.fqn] = reasons
        left_out = {table.fqn: expanded.left_out[table.fqn] for table in namesakes}
        constraint.sharding_types = usable_types(left_out, constraint.sharding_types or allowed.sharding_types)
        known = any(feature in table.owner.counted for table in namesakes for feature in table.feature_names)
        # TorchRec wants as many of these as pooling factors.
        each = known or constraint.num_poolings or constraint.batch_sizes
        if not each and len(constraint.pooling_factors or ()) == 1:
            expanded.torchrec_lengths[name] = constraint.pooling_factors
        _fill_per_feature(constraint, namesakes)
        expanded[name] = constraint
        planned += namesakes
    keep_means_apart(planned, expanded, expanded.left_out)
    return expanded


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
    share: Any = constraint.cache_params and constraint.cache_params.load_factor
    if share is not None and not (isinstance(share, Real) and 0 < float(share) <= 1):
        raise refused(
            f"table {table.fqn!r}: load_factor of its constraint's cache_params must be a share of its rows, above 0, "
            f"up to 1, got {share!r}"
        )


def check_per_feature(values: Sequence[float], table: str, what: str) -> None:
    """Raise PlannerError, naming the table, if a value is no number or out of bounds."""
    if not isinstance(values, Iterable):
        raise refused(f"table {table!r}: {what} must be a list, one number per feature, got {values!r}")
    for value in values:
        if not (isinstance(value, Real) and 0 <= value <= MAX_PER_SAMPLE):
            raise refused(
                f"table {table!r}: {what} must be numbers from 0 to {MAX_PER_SAMPLE:,}, got {value!r}; they count per "
                "sample and feature (batch_sizes: samples of a rank's batch)"
            )
        if what == "batch_sizes" and (value < 1 or value % 1):
            raise refused(f"table {table!r}: batch_sizes must be whole numbers from 1, got {value!r}")


def per_feature(values: Sequence[float], count: int, table: str, what: str) -> list[float]:
    """Return one value per feature, of which a single value holds for all; PlannerError if lengths do not match, or
    a value is no number or out of bounds."""
    check_per_feature(values, table, what)
    if len(values) == count:
        return list(values)
    if len(values) == 1:
        return list(values) * count
    raise refused(
        f"table {table!r} serves {count} features, but its constraints give {len(values)} {what}: {list(values)}. "
        "Give one per feature."
    )


def _fill_per_feature(constraint: ParameterConstraints, namesakes: Sequence[ShardableTable]) -> None:
    """Set one value per feature in the constraint of tables of one name; PlannerError if values do not fit. Tables
    that differ in their number of features can share pooling factors alone."""
    first, counts = namesakes[0], {len(table.feature_names) for table in namesakes}
    features = first.feature_names
    for what in PER_FEATURE:
        values = getattr(constraint, what)
        if len(counts) == 1 and features and (values or what == "pooling_factors"):
            setattr(constraint, what, per_feature(values, len(features), first.name, what))
        elif len(counts) > 1 and values and (what != "pooling_factors" or len(values) not in {1, *counts}):
            raise refused(
                f"tables {sorted(table.fqn for table in namesakes)} have one name and {sorted(counts)} features: the "
                f"constraint of {first.name!r} cannot give them {what} {list(values)}. Rename one of the tables."
            )
    # Tables of one name and other features have no statistics here, and the reader adds these.
    if features and all(table.feature_names == features for table in namesakes):
        known = first.owner.counted
        constraint.pooling_factors = [
            known[feature].pooling_factor if feature in known else factor
            for feature, factor in zip(features, constraint.pooling_factors, strict=True)
        ]
        check_per_feature(constraint.pooling_factors, first.name, f"pooling factors of {list(features)}")
