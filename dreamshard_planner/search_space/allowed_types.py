# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which sharding types a table may not take, and why: who left each out, the sharder, the user, the topology, placement
rules, TorchRec's defects, or exact training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchrec.distributed.planner.enumerators import GUARDED_SHARDING_TYPES_FOR_FP_MODULES
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.planner.utils import sharder_name

from dreamshard_planner.search_space.modules import ShardableTable
from dreamshard_planner.search_space.placement_rules import LegalRanks
from dreamshard_planner.search_space.sharding_types import SHARDING_TYPES, broken, inexact
from dreamshard_planner.support.formatting import nearest

NOT_OFFERED = "the sharder does not offer it"
NO_SUCH_TYPE = "there is no such type"


@dataclass(frozen=True)
class AllowedTypes:
    """What a planner allows of every table that it plans."""

    compute_device: str
    """Of the topology."""
    sharding_types: Sequence[str] | None = None
    """TorchRec's names of the types to use; None for all."""
    exact_training: bool = True
    """Whether types that change how a table is trained are left out, unless its constraint names them, or neither its
    sharder nor its constraint's kernels leave another."""
    optimizers_attached: bool = False
    """To the replicas of data-parallel tables, some of which then train exactly."""
    in_groups: bool = False
    """Whether the ranks form several sharding groups (2D parallelism)."""
    has_ssd: bool = True
    """Whether the topology has SSDs; TorchRec leaves ``key_value`` out where not."""
    legal: LegalRanks | None = None
    """Where tables may lie; None for anywhere."""
    impossible: Mapping[str, str] = field(default_factory=dict)
    """Sharding types that the topology leaves no place for, and why."""

    def left_out(
        self,
        table: ShardableTable,
        constraint: ParameterConstraints,
        varied_batches: bool = False,
        weighted_batches: bool = False,
    ) -> dict[str, str]:
        """The sharding types that a table may not take by the compute kernels of its constraint, and why.

        Args:
            table: of the model.
            constraint: its own.
            varied_batches: whether statistics know that batches of its module's features differ in size.
            weighted_batches: whether statistics know that these carry weights of lookups.
        """
        supported = table.sharder.sharding_types(self.compute_device)
        named = constraint.sharding_types or None
        facts = table.facts(
            self.compute_device,
            constraint.output_dtype,
            attached=self.optimizers_attached,
            in_groups=self.in_groups,
            varied_batches=bool(constraint.batch_sizes) or varied_batches,
            weighted_batches=bool(constraint.is_weighted) or weighted_batches,
        )
        ruled_out = {**self.impossible, **(self.legal.left_out(table.fqn) if self.legal else {})}
        processed = "FeatureProcessedEmbeddingBagCollection" in sharder_name(type(table.module))

        def reason(kind: str) -> str | None:
            if kind not in supported:
                return NOT_OFFERED if kind in SHARDING_TYPES else NO_SUCH_TYPE + nearest(kind, SHARDING_TYPES)
            if kind not in SHARDING_TYPES:
                return "nobody knows what it does"
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
                return "TorchRec wants it named"
            if processed and kind in GUARDED_SHARDING_TYPES_FOR_FP_MODULES:
                return "TorchRec wants it named for feature processors"
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
        """Whether the table's sharder has the type, by kernels that its constraint allows."""
        if kind not in table.sharder.sharding_types(self.compute_device):
            return False
        kernels, named = table.sharder.compute_kernels(kind, self.compute_device), constraint.compute_kernels
        return not named or not set(kernels).isdisjoint(named)


def reasons_in_words(left_out: Mapping[str, str]) -> str:
    """Types with the reason that they share, as "column_wise, row_wise: the sharder does not offer it"."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in sorted(left_out.items()):
        kinds.setdefault(reason, []).append(kind)
    return "; ".join(f"{', '.join(of_one)}: {reason}" for reason, of_one in kinds.items())
