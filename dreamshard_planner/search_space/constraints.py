# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Check users' constraints, and make one per table: one value per feature, and the sharding types and kernels that it
may have. Types are left out by the sharder, the user, the topology, placement rules, TorchRec's defects, or exact
training.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS, GUARDED_SHARDING_TYPES_FOR_FP_MODULES
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.planner.utils import sharder_name
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dreamshard_planner.search_space.modules import ShardableTable
from dreamshard_planner.search_space.options import refused, tower_refused
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.replica_rules import in_backward_arguments, why_not_replicas
from dreamshard_planner.search_space.sharding_types import (
    KERNELS,
    KEY_VALUE,
    LATE_MEANS,
    MIXED_MEAN,
    SHARDING_TYPES,
    TW,
    TableFacts,
    broken,
    in_host_memory,
    inexact,
    is_known,
    serves,
)
from dreamshard_planner.support.formatting import checked, nearest
from dreamshard_planner.torchrec_components.compat import grid_takes_varied_batches
from dreamshard_planner.workload.lookups import FeatureStatistics

NOT_OFFERED = "the sharder does not offer it"
NO_SUCH_TYPE = "there is no such type"
UNEVEN_OUTPUTS = (
    "ranks without such a table would send float32 and others the table's output_dtype, which TorchRec cannot exchange "
    "(leave output_dtype out, quantize the exchange by the sharder's qcomm_codecs_registry, or name the type in the "
    "table's constraint)"
)
"""Reason against types that leave some rank without the table, if it puts out another type than float32."""
DEFAULT = "*"
"""Key of the constraint of all tables without one of their own."""
MAX_PER_SAMPLE = 2**40
"""Most lookups or poolings per sample, or samples per batch, of one feature."""
PER_FEATURE = ("pooling_factors", "num_poolings", "batch_sizes")
"""Fields of a constraint with a value per feature."""


@dataclass(frozen=True)
class AllowedTypes:
    """Sharding types that topology and settings allow for any table."""

    topology: Topology
    sharding_types: Sequence[str] | None = None
    """TorchRec's names of the types to use; None for all."""
    exact_training: bool = True
    """True to leave out types that change a table's training, unless its constraint names them or nothing else is
    left by its sharder and its constraint's kernels."""
    optimizers_attached: bool = False
    """True if optimizers are attached to the replicas of data-parallel tables, some of which then train exactly."""
    in_groups: bool = False
    """True for several sharding groups (2D parallelism)."""
    legal: LegalRanks | None = None
    """Ranks that placement rules allow; None for all."""

    def facts(self, table: ShardableTable, constraint: ParameterConstraints) -> TableFacts:
        """Return the facts that decide which sharding types a table may have."""
        owner, parameter, attached = table.owner, table.parameter, self.optimizers_attached
        arguments = in_backward_arguments(parameter, owner.fused_params(constraint.output_dtype))
        return TableFacts(
            compute_device=self.topology.compute_device,
            optimizer=table.optimizer,
            weight_bytes=parameter.dtype.itemsize,
            is_mean=table.is_mean,
            is_weighted=bool(constraint.is_weighted) or owner.weighted_batches or owner.is_weighted,
            is_sequence=owner.is_sequence,
            bag_mode=owner.module.mode if isinstance(owner.module, nn.EmbeddingBag) else None,
            attached=attached,
            replicas_follow=attached and why_not_replicas(arguments, parameter.dtype, owner.module) is None,
            quantized=table.quantized,
            varied_batches=bool(constraint.batch_sizes) or owner.varied_batches,
            grid_takes_varied_batches=grid_takes_varied_batches(),
            in_groups=self.in_groups,
        )

    def reasons(
        self, table: ShardableTable, constraint: ParameterConstraints, is_everywhere: bool
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return the sharding types that a table may not take by the kernels of its constraint, and those that
        change its training, each with the reason; ``is_everywhere`` if whole tables of its module leave no rank
        without one."""
        device, sharder = self.topology.compute_device, table.sharder
        supported, named = sharder.sharding_types(device), constraint.sharding_types or None
        facts = self.facts(table, constraint)
        changes = {kind: why for kind in SHARDING_TYPES if (why := inexact(kind, facts))}
        only = constraint.compute_kernels
        offered = {one for one in supported if not only or {*only} & {*sharder.compute_kernels(one, device)}}
        # A sharder, or kernels of a constraint, that leave nothing else are consent as a constraint's types are.
        exact = self.exact_training and any(kind in SHARDING_TYPES and kind not in changes for kind in offered)
        exchanges = self.topology.world_size > 1 and not table.owner.exchange_codecs
        output = table.owner.output_type(constraint.output_dtype)
        uneven = facts.quantized is None and exchanges and output != torch.float32
        ruled_out = {**impossible_types(self.topology), **(self.legal.left_out(table.fqn) if self.legal else {})}
        processed = "FeatureProcessedEmbeddingBagCollection" in sharder_name(type(table.owner.module))

        def reason(kind: str) -> str | None:
            if kind not in supported:
                return NOT_OFFERED if kind in SHARDING_TYPES else NO_SUCH_TYPE + nearest(kind, SHARDING_TYPES)
            if kind not in SHARDING_TYPES:
                return "the planner does not know it"
            if named is not None and kind not in named:
                return "its constraint's sharding_types leave it out"
            if self.sharding_types is not None and kind not in self.sharding_types:
                return "the planner's sharding_types leave it out"
            if why := ruled_out.get(kind) or broken(kind, facts):
                return why
            if kind not in offered:
                return f"it takes compute kernels {sharder.compute_kernels(kind, device)}, and only {only} may be used"
            if named is not None:
                return None
            if SHARDING_TYPES[kind].only_named and kind not in (self.sharding_types or ()):
                return "the table's constraint or the planner's sharding_types must name it"
            if processed and kind in GUARDED_SHARDING_TYPES_FOR_FP_MODULES:
                return "the constraint of a table with feature processors must name it"
            if uneven and SHARDING_TYPES[kind].span != "world" and not (is_everywhere and kind == TW):
                return UNEVEN_OUTPUTS
            if exact and kind in changes:
                return f"{changes[kind]} (name it in the table's constraint, or plan with exact_training=False)"
            return None

        kinds = sorted({*SHARDING_TYPES, *supported, *(named or ())})
        left_out = {kind: why for kind in kinds if (why := reason(kind))}
        for kind, spec in SHARDING_TYPES.items():
            if kind not in left_out and spec.runs_as is not None and spec.runs_as not in left_out:
                left_out[kind] = f"it runs as {spec.runs_as}"
        return left_out, changes


def impossible_types(topology: Topology) -> dict[str, str]:
    """Return the sharding types that the topology rules out, and why: TorchRec forms groups of whole hosts only."""
    ranks, host = topology.world_size, topology.intra_group_size
    of_hosts = [kind for kind, spec in SHARDING_TYPES.items() if spec.span == "host"]
    return dict.fromkeys(of_hosts, f"{ranks} ranks are no whole number of hosts of {host}") if ranks % host else {}


def reasons_in_words(left_out: Mapping[str, str]) -> str:
    """Group types by reason, as "column_wise, row_wise: the sharder does not offer it"."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in sorted(left_out.items()):
        kinds.setdefault(reason, []).append(kind)
    return "; ".join(f"{', '.join(of_one)}: {reason}" for reason, of_one in kinds.items())


def _usable_kernels(
    table: ShardableTable, constraint: ParameterConstraints, topology: Topology
) -> tuple[set[str], bool]:
    """Return the kernels that a table may have, unknown ones if there are no others; and if TorchRec chooses so too."""
    sharder, compute_device = table.sharder, topology.compute_device
    types = sharder.sharding_types(compute_device)
    told = {kernel for kind in types for kernel in sharder.compute_kernels(kind, compute_device)}
    # Managed collisions' sharders offer kernels of GPUs on CPUs as well.
    offered = {kernel for kernel in told if compute_device != "cpu" or not in_host_memory(kernel)}
    # A sharder of trained tables that offers a kernel of quantized ones, or the other way round, cannot mean it.
    quantized = isinstance(sharder, BaseQuantEmbeddingSharder)
    fitting = {kernel for kernel in offered if serves(kernel) == quantized or not is_known(kernel)}
    if not fitting:
        what = "no kernel" if types else "no sharding type"
        if told:
            needs = f"are for {'trained' if quantized else 'quantized'} tables" if offered else "need GPUs"
            what = f"kernels {sorted(told)}, which {needs},"
        raise refused(
            f"table {table.fqn!r} cannot be sharded: {type(sharder).__name__} offers {what} on {compute_device}"
        )
    named = constraint.compute_kernels
    if not named:
        unasked = {kernel for kernel in fitting & KERNELS.keys() if not KERNELS[kernel].store}
        torchrecs = told - {kernel.value for kernel in GUARDED_COMPUTE_KERNELS}
        return unasked or fitting, bool(unasked) and unasked == torchrecs
    has_ssd = any(device.storage.ssd > 0 for device in topology.devices)
    usable = {kernel for kernel in named if has_ssd or kernel != KEY_VALUE}
    if not usable & fitting:
        why = "" if has_ssd or KEY_VALUE not in named else ", and 'key_value' needs SSDs: give Topology an ssd_cap"
        raise refused(
            f"table {table.fqn!r} may only use compute kernels {sorted(set(named))}, and {type(sharder).__name__} "
            f"offers {sorted(offered)} on {compute_device}{why}. Allow another one in its "
            "ParameterConstraints.compute_kernels."
        )
    return usable, False


def _usable_types(left_out: Mapping[str, Mapping[str, str]], named: Sequence[str] | None) -> list[str]:
    """Return the types that all tables of one name may use, given reasons by table and the types that are named."""
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
        "Allow another one in the planner's sharding_types and the table's ParameterConstraints, or another kernel in "
        "its compute_kernels."
    )


def _keep_means_apart(
    tables: Sequence[ShardableTable],
    constraints: Mapping[str, ParameterConstraints],
    left_out: Mapping[str, dict[str, str]],
) -> None:
    """Put all tables of a module into blocks of rows if a mean-pooled one must be, else none, see ``MIXED_MEAN``."""
    modules: dict[str, list[ShardableTable]] = {}
    for table in tables:
        modules.setdefault(table.owner.path, []).append(table)
    for members in modules.values():
        types = {table.name: constraints[table.name].sharding_types or [] for table in members}
        means = [table for table in members if table.is_mean]
        in_rows = any(LATE_MEANS.issuperset(types[table.name]) for table in means)
        whole = [table for table in members if LATE_MEANS.isdisjoint(types[table.name])]
        why = f"{MIXED_MEAN} (sharding_types=['row_wise'] in its constraint puts all tables of the module in rows)"
        if whole:
            why = f"{MIXED_MEAN}, and table {whole[0].fqn!r} may be neither"
        for table in (members if in_rows else means) if len(members) > 1 else ():
            kept = [kind for kind in types[table.name] if (kind in LATE_MEANS) == in_rows]
            if not kept:
                raise refused(
                    f"no sharding type is left for table {table.fqn!r} of {types[table.name]}: {MIXED_MEAN}. Allow "
                    "whole tables in ParameterConstraints.sharding_types of the module's mean-pooled tables, or those "
                    "two types for all of its tables."
                )
            constraints[table.name].sharding_types = kept
            left_out[table.fqn].update((kind, why) for kind in types[table.name] if kind not in kept)


class PlanningConstraints(dict[str, ParameterConstraints]):
    """Constraints by table name, made by :func:`planning_constraints`."""

    def __init__(self, constraints: Mapping[str, ParameterConstraints] | None = None) -> None:
        super().__init__(constraints or {})
        self.left_out: dict[str, dict[str, str]] = {}
        """Sharding types that a table may not take, and why, by its fully qualified name."""
        self.changes: dict[str, dict[str, str]] = {}
        """Sharding types that change a table's training, allowed or not, and why, by its fully qualified name."""
        self.torchrec_lengths: dict[str, list[float]] = {}
        """Pooling factors that TorchRec itself counts, by table name, if they are fewer than the features."""

    def lengths_of_torchrec(self, option: ShardingOption) -> list[float]:
        """Return the lookups per sample that TorchRec itself counts."""
        return self.torchrec_lengths.get(option.name, option.input_lengths)


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
        outputs.setdefault(table.owner.path, []).append(table.owner.output_type(output_dtype))
    enough = 2 * allowed.topology.world_size  # whole tables of a type leave no rank without one; a plan is checked
    everywhere = {path for path, types in outputs.items() if len(types) >= enough and len({*types}) == 1}
    planned: list[ShardableTable] = []
    for name, namesakes in by_name.items():  # TorchRec looks up one constraint for all tables of a name
        constraint = copy.copy(expanded.get(name)) or ParameterConstraints()
        check_constraint(constraint, namesakes[0])  # also of tables that are left out, which memory is reserved for
        if constraint.device_group and constraint.device_group != allowed.topology.compute_device:
            continue
        found = [_usable_kernels(table, constraint, allowed.topology) for table in namesakes]
        kernels = sorted({kernel for usable, _ in found for kernel in usable})
        # TorchRec's statistics list tables whose kernels are constrained.
        constraint.compute_kernels = None if all(is_torchrecs for _, is_torchrecs in found) else kernels
        for table in namesakes:
            reasons = allowed.reasons(table, constraint, table.owner.path in everywhere)
            expanded.left_out[table.fqn], expanded.changes[table.fqn] = reasons
        left_out = {table.fqn: expanded.left_out[table.fqn] for table in namesakes}
        constraint.sharding_types = _usable_types(left_out, constraint.sharding_types or allowed.sharding_types)
        known = any(feature in table.owner.counted for table in namesakes for feature in table.feature_names)
        # TorchRec wants as many of these as pooling factors.
        each = known or constraint.num_poolings or constraint.batch_sizes
        if not each and len(constraint.pooling_factors or ()) == 1:
            expanded.torchrec_lengths[name] = constraint.pooling_factors
        _fill_per_feature(constraint, namesakes)
        expanded[name] = constraint
        planned += namesakes
    _keep_means_apart(planned, expanded, expanded.left_out)
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


def counted_factors(
    factors: Sequence[float], features: Sequence[str], statistics: Mapping[str, FeatureStatistics], table: str
) -> list[float]:
    """Return one pooling factor per feature: of its statistics, else the given one; PlannerError as of
    :func:`per_feature`."""
    given = zip(features, per_feature(factors, len(features), table, "pooling_factors"), strict=True)
    found = [statistics[name].pooling_factor if name in statistics else factor for name, factor in given]
    check_per_feature(found, table, f"pooling factors of {list(features)}")
    return found


def _fill_per_feature(constraint: ParameterConstraints, namesakes: Sequence[ShardableTable]) -> None:
    """Set one value per feature; tables of one name and unequal numbers of features share pooling factors alone."""
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
        constraint.pooling_factors = counted_factors(
            constraint.pooling_factors, features, first.owner.counted, first.name
        )
