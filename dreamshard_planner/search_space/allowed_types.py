# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Sharding types and compute kernels that a table may have, and reasons against all others: the sharder, the user, the
topology, placement rules, TorchRec's defects, or exact training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseQuantEmbeddingSharder
from torchrec.distributed.planner.enumerators import GUARDED_COMPUTE_KERNELS, GUARDED_SHARDING_TYPES_FOR_FP_MODULES
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.planner.utils import sharder_name

from dreamshard_planner.search_space.modules import ShardableTable, exchange_codecs, is_mean, output_type
from dreamshard_planner.search_space.options import refused
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.replica_rules import replicas_follow
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
from dreamshard_planner.support.formatting import nearest
from dreamshard_planner.torchrec_components.compat import grid_takes_varied_batches, optimizer_name

NOT_OFFERED = "the sharder does not offer it"
NO_SUCH_TYPE = "there is no such type"
UNEVEN_OUTPUTS = (
    "ranks without such a table would send float32 and others the table's output_dtype, which TorchRec cannot exchange "
    "(leave output_dtype out, quantize the exchange by the sharder's qcomm_codecs_registry, or name the type in the "
    "table's constraint)"
)
"""Reason against types that leave some rank without the table, if it puts out another type than float32."""


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
        owner, params = table.owner, table.owner.fused_params(constraint.output_dtype)
        attached = self.optimizers_attached
        return TableFacts(
            compute_device=self.topology.compute_device,
            optimizer=optimizer_name(table.parameter, params),
            weight_bytes=table.parameter.dtype.itemsize,
            is_mean=is_mean(table.config),
            is_weighted=bool(constraint.is_weighted) or owner.weighted_batches or owner.is_weighted,
            is_sequence=owner.is_sequence,
            bag_mode=table.owner.module.mode if isinstance(table.owner.module, nn.EmbeddingBag) else None,
            attached=attached,
            replicas_follow=attached and replicas_follow(table.parameter, params, table.owner.module),
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
        exchanges = self.topology.world_size > 1 and not exchange_codecs(sharder)
        output = output_type(table.owner.fused_params(constraint.output_dtype))
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


def usable_kernels(table: ShardableTable, constraint: ParameterConstraints, topology: Topology) -> list[str] | None:
    """Return the compute kernels that sharder, device and constraint allow a table; PlannerError if there are none.

    Unknown kernels are used if they are named or the sharder offers no others. None stands for TorchRec's own
    choice, since TorchRec's statistics list all constrained tables.
    """
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
        if unasked and unasked == told - {kernel.value for kernel in GUARDED_COMPUTE_KERNELS}:
            return None
        return sorted(unasked or fitting)
    has_ssd = any(device.storage.ssd > 0 for device in topology.devices)
    usable = {kernel for kernel in named if has_ssd or kernel != KEY_VALUE}
    if not usable & fitting:
        why = "" if has_ssd or KEY_VALUE not in named else ", and 'key_value' needs SSDs: give Topology an ssd_cap"
        raise refused(
            f"table {table.fqn!r} may only use compute kernels {sorted(set(named))}, and {type(sharder).__name__} "
            f"offers {sorted(offered)} on {compute_device}{why}. Allow another one in its "
            "ParameterConstraints.compute_kernels."
        )
    return sorted(usable)


def usable_types(left_out: Mapping[str, Mapping[str, str]], named: Sequence[str] | None) -> list[str]:
    """Return the types that all tables of one name may use, sorted, given reasons by table and the types that their
    constraint or the planner names; PlannerError gives all reasons if none is left."""
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


def keep_means_apart(
    tables: Sequence[ShardableTable],
    constraints: Mapping[str, ParameterConstraints],
    left_out: Mapping[str, dict[str, str]],
) -> None:
    """Leave out types that break mean pooling in a module, in place, see ``MIXED_MEAN``: all tables are in blocks of
    rows if a mean-pooled table may not be otherwise; if not, no mean-pooled table is. PlannerError if no type is
    left for a table."""
    modules: dict[str, list[ShardableTable]] = {}
    for table in tables:
        modules.setdefault(table.owner.path, []).append(table)
    for members in modules.values():
        types = {table.name: constraints[table.name].sharding_types or [] for table in members}
        means = [table for table in members if is_mean(table.config)]
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
