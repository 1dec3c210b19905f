# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The job of a plan file, to explain or plan again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import NoneType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import dtype_to_data_type

from dreamshard_planner.devices import GPUS, Machine, gpu_of
from dreamshard_planner.errors import PlanError
from dreamshard_planner.offline.jobs import Job, OfflineModel, TableSpec
from dreamshard_planner.planning.plan_inputs import topology_arguments
from dreamshard_planner.planning.ranks import ShardingGroups
from dreamshard_planner.planning.settings import SAVED, SAVED_IF_GIVEN, PlannerSettings
from dreamshard_planner.plans.plan_file import SavedPlan, TableInputs
from dreamshard_planner.search_space.placement_rules import PlacementRules
from dreamshard_planner.support.formatting import brief
from dreamshard_planner.workload.statistics import TableStatistics
from dreamshard_planner.workload.tables import NO_OPTIMIZER

IN_WORDS = ("stats",)
"""Cache parameters that a file describes in words, unused offline."""


def job_of(saved: SavedPlan, statistics: TableStatistics | None = None) -> Job:
    """Return the job of a plan, without dense layers; the reservation leaves tables the same memory.

    Args:
        saved: the plan.
        statistics: take precedence over those of its file.

    Raises:
        PlanError: its ranks are not spread over hosts evenly, a setting is unknown, or it has quantized tables.
    """
    inputs = saved.inputs
    if served := next((name for name, table in inputs.tables.items() if table.optimizer == NO_OPTIMIZER), None):
        raise PlanError(
            f"{saved.name}: table {served!r} is quantized, and lists of tables, which this file would be read as, hold "
            "tables that are trained: ask the planner of the model itself (planner.explain, planner.report)"
        )
    tables = {path: [_spec(saved, path, name) for name in of_module] for path, of_module in saved.sharding.items()}
    model = OfflineModel.of_modules(
        tables,
        {name: _constraint(saved, name, changed) for name, changed in inputs.constraints.items()},
        TableStatistics(inputs.features) if inputs.features else None,
        saved.name,
    )
    return Job(
        model=model.with_statistics(statistics),
        machine=_machine(saved),
        batch_size=inputs.batch_size,
        reserve=_reserve(saved),
        settings=_settings(saved),
    )


def as_in_file(plan: SavedPlan, saved: SavedPlan, same_machine: bool = True, same_tables: bool = True) -> SavedPlan:
    """Return a plan for a plan file's job with the file's own constraints, topology and reservation.

    The job lacks :data:`IN_WORDS`, the last bits of bandwidths, and the reservation: it reserves the same share.

    Args:
        plan: the new one.
        saved: the plan in the file.
        same_machine: whether the new plan is for the file's machine.
        same_tables: whether it is for the file's tables.
    """
    inputs, known = plan.inputs, saved.inputs
    settings = {**inputs.settings, "storage_reservation": known.settings.get("storage_reservation")}
    topology = known.topology if same_machine else inputs.topology
    constraints = known.constraints if same_tables else inputs.constraints
    return replace(plan, inputs=replace(inputs, topology=topology, constraints=constraints, settings=settings))


def _spec(saved: SavedPlan, path: str, name: str) -> TableSpec:
    table: TableInputs = saved.inputs.tables[f"{path}.{name}".removeprefix(".")]
    return TableSpec(
        name=name,
        num_embeddings=table.rows,
        embedding_dim=table.dim,
        feature_names=tuple(dict.fromkeys(table.features)),
        pooling=table.pooling,
        data_type=_data_type(saved, table.data_type),
        weighted=table.weighted and table.pooling != "none",
        optimizer=table.optimizer,
    )


def _data_type(saved: SavedPlan, name: str) -> Any:
    """Return TorchRec's name of a dtype."""
    try:
        return dtype_to_data_type(getattr(torch, name)).name.lower()
    except Exception as error:  # TorchRec's, of no class of its own
        raise PlanError(f"{saved.name}: TorchRec has no tables of {name}") from error


def _machine(saved: SavedPlan) -> Machine:
    """Return the machine with all ranks, in 2D parallelism of all sharding groups."""
    topology = saved.inputs.topology
    if topology.all_ranks % topology.on_host:
        raise PlanError(f"{saved.name}: {topology.all_ranks} ranks do not fill hosts of {topology.on_host}")
    gpu, between = next(map(gpu_of, topology.cards), None), topology.bandwidths["between hosts"] * 1e3
    is_usual = between == (gpu and GPUS[gpu].network_bytes_per_s)
    ranks = sorted((rank, place) for place in range(topology.world_size) for rank in topology.replicas(place))
    return Machine(
        ranks_per_host=topology.on_host,
        hosts=topology.all_ranks // topology.on_host,
        device=topology.compute_device,
        # Another GPU brings its own network, but for one that somebody gave.
        inter_bytes_per_s=None if is_usual or topology.collective_bandwidths else between,
        rank_memory_bytes={
            kind: tuple(sizes[place] for _, place in ranks)
            for kind, sizes in topology.memory_bytes.items()
            if len(set(sizes)) > 1
        },
        more=topology_arguments(topology),
    )


def _reserve(saved: SavedPlan) -> float | None:
    """Return the largest share of a rank's own memory that the reservation took."""
    own = saved.inputs.topology.own_memory
    limits = [entry.limit_bytes for entry in saved.predicted.memory if entry.kind == own]
    sizes = saved.inputs.topology.memory_bytes[own]
    if not limits:
        return None
    return 1 - min((left / size for left, size in zip(limits[0], sizes, strict=True) if size), default=1.0)


def _settings(saved: SavedPlan) -> dict[str, Any]:
    """Return the planner's arguments that a file has; PlanError for a value that the planner does not take."""
    told, rules = saved.inputs.settings, saved.inputs.placement_rules
    found = {name: told[name] for name in (*SAVED, *SAVED_IF_GIVEN) if name in told}
    try:
        if (groups := told.get("sharding_groups")) is not None:
            found["sharding_groups"] = ShardingGroups(**groups)
        if rules:
            found["placement_rules"] = PlacementRules(**rules)
        PlannerSettings(**found)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{saved.name}: settings: {brief(error)}") from error
    return found


def _constraint(saved: SavedPlan, table: str, changed: Mapping[str, Any]) -> ParameterConstraints:
    """Restore a table's constraint, without :data:`IN_WORDS`."""
    known = {field.name for field in fields(ParameterConstraints)}
    try:
        return _restored(ParameterConstraints, {name: value for name, value in changed.items() if name in known})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{saved.name}: constraints of {table!r} {brief(changed)} cannot be: {brief(error)}") from error


def _restored(kind: Any, value: Any) -> Any:
    """Restore a value of a type, or None, from :func:`~dreamshard_planner.planning.plan_inputs.plain`."""
    if value is None:
        return None
    if get_origin(kind) is Union:
        kind = next(given for given in get_args(kind) if given is not NoneType)
    hints = get_type_hints(kind) if isinstance(kind, type) else {}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind[value]
    if is_dataclass(kind):
        make: Any = kind
        return make(**{name: _restored(hints[name], part) for name, part in value.items() if name not in IN_WORDS})
    if hasattr(kind, "_fields"):  # of a named tuple
        return kind(*map(_restored, hints.values(), value))
    return tuple(map(tuple, value)) if get_origin(kind) is tuple else value
