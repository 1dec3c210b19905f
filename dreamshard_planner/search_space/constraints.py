# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Constraints for planning: one value per feature, the allowed sharding types, and reasons against all others.

Types are left out by the sharder, the user, the topology, placement rules, TorchRec's defects, or exact training.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS, GUARDED_SHARDING_TYPES_FOR_FP_MODULES
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from dreamshard_planner.search_space.input_checks import (
    PER_FEATURE,
    check_constraint,
    check_per_feature,
    check_shared,
    per_feature,
)
from dreamshard_planner.search_space.modules import ShardableTable, exchange_codecs, is_mean, output_type
from dreamshard_planner.search_space.options import refused, tower_refused
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.sharding_types import (
    KERNELS,
    KEY_VALUE,
    LATE_MEANS,
    MIXED_MEAN,
    SHARDING_TYPES,
    TW,
    broken,
    in_host_memory,
    inexact,
    is_known,
    serves,
)
from dreamshard_planner.support.formatting import nearest
from dreamshard_planner.workload.counting import in_smaller_batches
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import FeatureStatistics

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


@dataclass(frozen=True)
class ModuleTraits:
    """Properties of a module that its tables share, from statistics and constraints."""

    varied_batches: bool = False
    """True if batch sizes vary by feature."""
    weighted_batches: bool = False
    """True if batches carry weights of lookups."""
    whole_on_all_ranks: bool = False
    """True if its tables have one output type and are at least twice as many as the ranks, so that whole tables leave
    no rank without one; a plan that does so is refused."""


@dataclass(frozen=True)
class AllowedTypes:
    """Sharding types that the planner's settings allow for any table."""

    compute_device: str
    sharding_types: Sequence[str] | None = None
    """TorchRec's names of the types to use; None for all."""
    exact_training: bool = True
    """True to leave out types that change a table's training, unless its constraint names them or nothing else is
    left by its sharder and its constraint's kernels."""
    optimizers_attached: bool = False
    """True if optimizers are attached to the replicas of data-parallel tables, some of which then train exactly."""
    in_groups: bool = False
    """True for several sharding groups (2D parallelism)."""
    has_ssd: bool = True
    """True if the topology has SSDs, without which TorchRec leaves ``key_value`` out."""
    legal: LegalRanks | None = None
    """Ranks that placement rules allow; None for all."""
    ranks: int = 1
    """Number of ranks that exchange outputs."""
    impossible: Mapping[str, str] = field(default_factory=dict)
    """Sharding types that the topology leaves no place for, and why."""

    def left_out(
        self, table: ShardableTable, constraint: ParameterConstraints, traits: ModuleTraits | None = None
    ) -> dict[str, str]:
        """Return the sharding types that a table may not take by the kernels of its constraint, and why."""
        traits = traits or ModuleTraits()
        supported = table.sharder.sharding_types(self.compute_device)
        named = constraint.sharding_types or None
        facts = table.facts(
            self.compute_device,
            constraint.output_dtype,
            attached=self.optimizers_attached,
            in_groups=self.in_groups,
            varied_batches=bool(constraint.batch_sizes) or traits.varied_batches,
            weighted_batches=bool(constraint.is_weighted) or traits.weighted_batches,
        )
        exchanges = self.ranks > 1 and not exchange_codecs(table.sharder)
        output = output_type(table.owner.fused_params(constraint.output_dtype))
        uneven = facts.quantized is None and exchanges and output != torch.float32
        ruled_out = {**self.impossible, **(self.legal.left_out(table.fqn) if self.legal else {})}
        processed = "FeatureProcessedEmbeddingBagCollection" in sharder_name(type(table.module))

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
            if not self._offers(table, kind, constraint):
                kernels = table.sharder.compute_kernels(kind, self.compute_device)
                return f"it takes compute kernels {kernels}, and only {constraint.compute_kernels} may be used"
            if named is not None:
                return None
            if SHARDING_TYPES[kind].only_named and kind not in (self.sharding_types or ()):
                return "the table's constraint or the planner's sharding_types must name it"
            if processed and kind in GUARDED_SHARDING_TYPES_FOR_FP_MODULES:
                return "the constraint of a table with feature processors must name it"
            if uneven and SHARDING_TYPES[kind].span != "world" and not (traits.whole_on_all_ranks and kind == TW):
                return UNEVEN_OUTPUTS
            return None

        kinds = sorted({*SHARDING_TYPES, *supported, *(named or ())})
        left_out = {kind: why for kind in kinds if (why := reason(kind))}
        differ = {kind: why for kind in kinds if kind not in left_out and (why := inexact(kind, facts))}
        # A sharder, or kernels of a constraint, that leave nothing else are consent as a constraint's types are.
        nothing_else = not any(
            self._offers(table, kind, constraint) and not inexact(kind, facts) for kind in SHARDING_TYPES
        )
        if self.exact_training and named is None and not nothing_else:
            left_out |= {
                kind: f"{why} (name it in the table's constraint, or plan with exact_training=False)"
                for kind, why in differ.items()
            }
        for kind, spec in SHARDING_TYPES.items():
            if kind not in left_out and spec.runs_as is not None and spec.runs_as not in left_out:
                left_out[kind] = f"it runs as {spec.runs_as}"
        return left_out

    def _offers(self, table: ShardableTable, kind: str, constraint: ParameterConstraints) -> bool:
        """Return whether the table's sharder offers the type with a kernel that its constraint allows."""
        if kind not in table.sharder.sharding_types(self.compute_device):
            return False
        kernels, named = table.sharder.compute_kernels(kind, self.compute_device), constraint.compute_kernels
        return not named or not set(kernels).isdisjoint(named)


def reasons_in_words(left_out: Mapping[str, str]) -> str:
    """Group types by reason, as "column_wise, row_wise: the sharder does not offer it"."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in sorted(left_out.items()):
        kinds.setdefault(reason, []).append(kind)
    return "; ".join(f"{', '.join(of_one)}: {reason}" for reason, of_one in kinds.items())


class PlanningConstraints(dict[str, ParameterConstraints]):
    """Constraints by table name, made by :func:`planning_constraints`."""

    def __init__(self, constraints: Mapping[str, ParameterConstraints]) -> None:
        super().__init__(constraints)
        self.left_out: dict[str, dict[str, str]] = {}
        """Sharding types that a table may not take, and why, by its fully qualified name."""
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

    Raises:
        PlannerError: tables of one name have different constraints.
    """
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
    tables: Sequence[ShardableTable],
    constraints: Mapping[str, ParameterConstraints] | None,
    statistics: TableStatistics | None,
    allowed: AllowedTypes,
) -> PlanningConstraints:
    """Copy the constraints, one per table, with allowed types and one value per feature, for TorchRec's estimates.

    A feature's pooling factor comes from ``statistics``, else from the constraint, else from TorchRec's default.

    Args:
        tables: of the model.
        constraints: of the user, by table name.
        statistics: per feature.
        allowed: types for any table.

    Raises:
        PlannerError: no type is left for a table, a number is impossible, lengths do not match the features, or a table
            is in an embedding tower.
    """
    for table in tables:
        if isinstance(table.module, EmbeddingTower | EmbeddingTowerCollection):
            raise tower_refused(table.fqn)
    traits = _module_traits(tables, constraints or {}, statistics or {}, allowed.ranks)
    expanded = PlanningConstraints(constraints or {})
    by_name: dict[str, list[ShardableTable]] = {}
    for table in tables:
        by_name.setdefault(table.name, []).append(table)
    for name, namesakes in by_name.items():  # TorchRec looks up one constraint for all tables of a name
        constraint = copy.copy((constraints or {}).get(name)) or ParameterConstraints()
        check_constraint(constraint, namesakes[0])  # also of tables that are left out, which memory is reserved for
        if constraint.device_group and constraint.device_group != allowed.compute_device:
            continue
        for table in namesakes:
            kernels = _usable_kernels(table, constraint, allowed.compute_device, allowed.has_ssd)
        constraint.compute_kernels = kernels
        left_out = {one.fqn: allowed.left_out(one, constraint, traits[one.path]) for one in namesakes}
        expanded.left_out |= left_out
        constraint.sharding_types = _usable_types(left_out, constraint.sharding_types or allowed.sharding_types)
        known = any(feature in (statistics or {}) for one in namesakes for feature in one.feature_names)
        # TorchRec wants as many of these as pooling factors.
        each = known or constraint.num_poolings or constraint.batch_sizes
        if not each and len(constraint.pooling_factors or ()) == 1:
            expanded.torchrec_lengths[name] = constraint.pooling_factors
        if len({len(one.feature_names) for one in namesakes}) > 1:
            check_shared(constraint, namesakes)
        elif features := namesakes[0].feature_names:
            # Tables of one name and other features have no statistics here, and the reader adds these.
            alike = all(one.feature_names == features for one in namesakes)
            _fill_per_feature(constraint, name, features, statistics if alike and statistics else {})
        expanded[name] = constraint
    _keep_means_apart([table for table in tables if table.name in expanded], expanded)
    return expanded


def _fill_per_feature(
    constraint: ParameterConstraints, name: str, features: Sequence[str], known: Mapping[str, FeatureStatistics]
) -> None:
    """Set one value per feature in a table's constraint."""
    given = per_feature(constraint.pooling_factors, len(features), name, "pooling_factors")
    constraint.pooling_factors = [
        known[feature].pooling_factor if feature in known else factor
        for feature, factor in zip(features, given, strict=True)
    ]
    check_per_feature(constraint.pooling_factors, name, f"pooling factors of {list(features)}")
    for what in ("num_poolings", "batch_sizes"):
        if values := getattr(constraint, what):
            setattr(constraint, what, per_feature(values, len(features), name, what))


def _module_traits(
    tables: Iterable[ShardableTable],
    constraints: Mapping[str, ParameterConstraints],
    statistics: Mapping[str, FeatureStatistics],
    ranks: int,
) -> dict[str, ModuleTraits]:
    """Return the traits of every module, by its path."""
    known: dict[str, dict[str, FeatureStatistics]] = {}
    outputs: dict[str, list[torch.dtype]] = {}
    for table in tables:
        counted = {name: statistics[name] for name in table.feature_names if name in statistics}
        known.setdefault(table.path, {}).update(counted)
        given = constraints.get(table.name)
        params = table.owner.fused_params(None if given is None else given.output_dtype)
        outputs.setdefault(table.path, []).append(output_type(params))
    return {
        path: ModuleTraits(
            varied_batches=bool(in_smaller_batches(features)),
            weighted_batches=any(one.weighted for one in features.values()),
            whole_on_all_ranks=len(outputs[path]) >= 2 * ranks and len({*outputs[path]}) == 1,
        )
        for path, features in known.items()
    }


def _keep_means_apart(tables: Sequence[ShardableTable], constraints: PlanningConstraints) -> None:
    """Leave out types that break mean pooling in a module, in place; PlannerError if none is left for a table."""
    modules: dict[str, list[ShardableTable]] = {}
    for table in tables:
        modules.setdefault(table.path, []).append(table)
    for members in modules.values():
        fqns = {table.name: table.fqn for table in members}
        types = {table.name: constraints[table.name].sharding_types for table in members}
        if None in types.values():
            continue  # of another device
        means = [table.name for table in members if is_mean(table.config)]
        never_in_rows = [name for name, kinds in types.items() if LATE_MEANS.isdisjoint(kinds)]
        narrowed = without_mixed_means(types, means)
        if never_in_rows:
            why = f"{MIXED_MEAN}, and table {fqns[never_in_rows[0]]!r} may be neither"
        else:
            why = f"{MIXED_MEAN} (sharding_types=['row_wise'] in its constraint puts all tables of the module in rows)"
        for name, kept in narrowed.items():
            if not kept:
                raise refused(
                    f"no sharding type is left for table {fqns[name]!r} of {types[name]}: {MIXED_MEAN}. Allow "
                    "whole tables in ParameterConstraints.sharding_types of the module's mean-pooled tables, or those "
                    "two types for all of its tables."
                )
            constraints[name].sharding_types = kept
            constraints.left_out[fqns[name]].update((kind, why) for kind in types[name] or () if kind not in kept)


def without_mixed_means(types: Mapping[str, Collection[str]], means: Collection[str]) -> dict[str, list[str]]:
    """Return types of a module's tables that are compatible in any combination, see ``MIXED_MEAN``.

    If a mean-pooled table may only be in blocks of rows, all tables are; otherwise no mean-pooled table is. A list may
    be empty.

    Args:
        types: allowed types of each table by itself.
        means: tables with mean pooling.
    """
    kept = {name: list(kinds) for name, kinds in types.items()}
    if len(types) == 1:
        return kept
    if any(LATE_MEANS.issuperset(types[name]) for name in means):
        return {name: [kind for kind in kinds if kind in LATE_MEANS] for name, kinds in kept.items()}
    return kept | {name: [kind for kind in kept[name] if kind not in LATE_MEANS] for name in means}


def _usable_kernels(
    table: ShardableTable, constraint: ParameterConstraints, compute_device: str, has_ssd: bool
) -> list[str] | None:
    """Return the compute kernels that sharder, device and constraint allow a table.

    Unknown kernels are used if they are named or the sharder offers no others. None stands for TorchRec's own choice,
    since TorchRec's statistics list all constrained tables.

    Raises:
        PlannerError: there are none, because of the sharder or the constraint.
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


def _usable_types(left_out: Mapping[str, Mapping[str, str]], named: Sequence[str] | None) -> list[str]:
    """Return the types that all tables of one name may use, sorted.

    Args:
        left_out: types and reasons by table.
        named: types in their constraint, else those of the planner.

    Raises:
        PlannerError: none is left; gives all reasons.
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
        "Allow another one in the planner's sharding_types and the table's ParameterConstraints, or another kernel in "
        "its compute_kernels."
    )
