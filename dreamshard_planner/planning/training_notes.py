# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a plan changes in the training of its tables, and what its cost leaves out of it."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torchrec.distributed.planner.types import ShardingOption, Topology

from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.kernels import DENSE
from dreamshard_planner.search_space.options import fqn_of, type_of
from dreamshard_planner.search_space.replica_rules import DENSE_KERNELS
from dreamshard_planner.search_space.sharding_types import inexact

MAX_NAMED = 5


def training_notes(plan: Sequence[ShardingOption], reader: OptionReader, compute_device: str) -> list[str]:
    """A sentence per sharding type and reason: which tables train differently than whole ones, and why."""
    changed: dict[tuple[str, str], list[str]] = {}
    for option in plan:
        reason = inexact(option.sharding_type, reader.facts(option, compute_device))
        if reason is not None:
            changed.setdefault((option.sharding_type, reason), []).append(fqn_of(option))
    return [
        f"{_names(tables)}: {kind} trains differently than a whole table, {reason}"
        for (kind, reason), tables in sorted(changed.items())
    ]


def costed_optimizers(
    plan: Sequence[ShardingOption], reader: OptionReader, topology: Topology, unknown: Container[str]
) -> tuple[str, ...]:
    """A sentence on tables whose optimizer is ``unknown`` to the costs, where there are some."""
    optimizers = {fqn_of(option): reader.table(option, topology).optimizer for option in plan}
    others = {name: optimizer for name, optimizer in optimizers.items() if optimizer in unknown}
    if not others:
        return ()
    return (
        f"{_names([*others])}: costed as with row-wise Adagrad, since no kernels of their optimizer are known"
        + ("; dreamshard calibrate measures Adagrad's" if "adagrad" in others.values() else ""),
    )


def lost_optimizers(plan: Sequence[ShardingOption], reader: OptionReader, compute_device: str) -> tuple[str, ...]:
    """Return a warning for each way in which the plan takes an in-backward optimizer away from tables."""
    trained = [option for option in plan if reader.in_backward(option)]
    replicated = [
        fqn_of(option)
        for option in trained
        if type_of(option).is_replicated and not reader.facts(option, compute_device).replicas_follow
    ]
    cut = (option for option in trained if not type_of(option).is_replicated)
    dense = [fqn_of(option) for option in cut if option.compute_kernel == DENSE]
    warnings = []
    if replicated:
        warnings.append(
            f"{_names(replicated)}: the plan is data_parallel, which takes the in-backward optimizer away. They are "
            "trained only by an optimizer of the script's own, over "
            "in_backward_optimizer_filter(model.named_parameters()), unless attach_optimizers(model) can give it back; "
            "or name other types in their ParameterConstraints.sharding_types"
        )
    if dense:
        warnings.append(f"{_names(dense)}: {DENSE_KERNELS}")
    return tuple(warnings)


def _names(tables: Sequence[str]) -> str:
    named = ", ".join(sorted(tables)[:MAX_NAMED])
    return named if len(tables) <= MAX_NAMED else f"{named} and {len(tables) - MAX_NAMED} more tables"
