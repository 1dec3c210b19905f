# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What plans are made from, settings and the options of a model: in plain values for a file, and as one digest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from torchrec.distributed.planner.constants import BWD_COMPUTE_MULTIPLIER, WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    GeneralizedCommsBandwidth,
    ShardingOption,
    StorageReservation,
    Topology,
)

from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.devices import UNKNOWN_CARD, cards_of
from dreamshard_planner.errors import PlanError
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.settings import PlannerSettings
from dreamshard_planner.plans.plan_file import BANDWIDTHS, GroupsInputs, PlanInputs, TopologyInputs
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.effort import DEFAULT_EFFORT
from dreamshard_planner.search_space.options import fqn_of
from dreamshard_planner.support.fingerprint import canonical, digest


def plan_inputs(
    settings: PlannerSettings,
    ranks: PlannedRanks,
    search_space: Sequence[ShardingOption],
    reader: OptionReader,
    reservation: StorageReservation,
) -> PlanInputs:
    """Return what plans of a model are made from, for a file.

    Args:
        settings: of the planner.
        ranks: that are planned for.
        search_space: all options of all tables.
        reader: of options.
        reservation: of memory.
    """
    tables, checkpoint = {fqn_of(option): option for option in search_space}, ranks.checkpoint
    names = {option.name for option in search_space}
    given = {name: one for name, one in (settings.constraints or {}).items() if name in names}
    groups = None
    if settings.sharding_groups is not None and ranks.all_ranks is not None and ranks.groups > 1:
        host_ranks = min(ranks.all_ranks.local_world_size, ranks.all_ranks.world_size)
        groups = GroupsInputs(ranks.groups, host_ranks, settings.sharding_groups.use_inter_host_allreduce)
    return PlanInputs(
        batch_size=settings.batch_size,
        topology=topology_inputs(ranks.topology, ranks.all_ranks, groups),
        tables={fqn: reader.declared(tables[fqn]) for fqn in sorted(tables)},
        constraints={name: _changed(given[name]) for name in sorted(given)},
        placement_rules={} if settings.placement_rules is None else settings.placement_rules.to_dict(),
        statistics=None if settings.statistics is None else digest(settings.statistics),
        settings={
            "cost_source": settings.cost_source,
            "checkpoint": f"{checkpoint.name} {checkpoint.digest()[:12]}",
            "sharding_types": plain(settings.sharding_types),
            "exact_training": settings.exact_training,
            "optimizers_attached": settings.optimizers_attached,
            "storage_reservation": type(reservation).__name__,
            "seed": settings.seed,
            "search_seconds": settings.search_seconds,
            **({} if settings.sharding_groups is None else {"sharding_groups": plain(settings.sharding_groups)}),
            **({} if settings.least_gain is None else {"least_gain": settings.least_gain}),
            **({} if settings.effort == DEFAULT_EFFORT else {"effort": settings.effort}),
        },
        features={name: known for name, known in (settings.statistics or {}).items() if known.ids is None},
    )


def context_digest(
    inputs: PlanInputs, search_space: Sequence[ShardingOption], left: Topology, parts: Iterable[object]
) -> str:
    """Return the digest of all that plans of a model are made from, in hexadecimal, the same in every process.

    Args:
        inputs: of :func:`plan_inputs`.
        search_space: all options of all tables.
        left: what the storage reservation left.
        parts: all else that plans depend on; of components their types.
    """
    options = [
        [
            (option.fqn, option.sharding_type, option.compute_kernel, option.cache_params),
            [(list(shard.size), list(shard.offset), shard.storage) for shard in option.shards],
        ]
        for option in search_space
    ]
    left_bytes = [device.storage for device in left.devices]
    # TorchRec enumerates kernels in the order of a set.
    return digest([inputs, left_bytes, sorted(map(canonical, options)), list(parts)])


MULTIPLIERS = {
    "bwd_compute_multiplier": BWD_COMPUTE_MULTIPLIER,
    "weighted_feature_bwd_compute_multiplier": WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
    "uneven_sharding_perf_multiplier": 1.0,
}
"""Factors of TorchRec's estimates and their defaults, by argument of its ``Topology``."""


def topology_inputs(
    topology: Topology, all_ranks: Topology | None = None, groups: GroupsInputs | None = None
) -> TopologyInputs:
    """Return all of a topology that a plan or its cost depends on. Plan files, the check for stale plans, and digests
    read topologies here alone; :func:`topology_arguments` is the way back.

    Args:
        topology: of one sharding group.
        all_ranks: the topology of all sharding groups, if there are several.
        groups: the sharding groups, if there are several.
    """
    world, links = all_ranks or topology, topology.comms_bandwidths
    return TopologyInputs(
        compute_device=topology.compute_device,
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        memory_bytes={
            kind: tuple(int(getattr(device.storage, kind.lower())) for device in topology.devices)
            for kind in MEMORY_KINDS
        },
        bandwidths={name: float(attrgetter(place)(topology)) for name, place in BANDWIDTHS.items()},
        groups=groups,
        pod_size=max(1, world.intra_group_size // world.local_world_size),
        multipliers={
            name: value for name, default in MULTIPLIERS.items() if (value := float(getattr(topology, name))) != default
        },
        collective_bandwidths={} if type(links) is BasicCommsBandwidths else _collective_bandwidths(topology),
        cards=tuple(card for card in cards_of(topology) if card != UNKNOWN_CARD),
    )


def topology_arguments(inputs: TopologyInputs) -> dict[str, Any]:
    """Return arguments of :func:`~dreamshard_planner.devices.make_topology`: all but ranks, cards and memory."""
    arguments: dict[str, Any] = {BANDWIDTHS[name].rpartition(".")[2]: rate for name, rate in inputs.bandwidths.items()}
    if inputs.pod_size > 1:
        arguments["pod_size"] = inputs.pod_size
    if inputs.collective_bandwidths:
        arguments["generalized_comms_bandwidths"] = SavedBandwidths(inputs)
    return arguments | inputs.multipliers


class SavedBandwidths(GeneralizedCommsBandwidth):
    """The bandwidths of collectives that a plan's file tells."""

    def __init__(self, inputs: TopologyInputs) -> None:
        self._known = inputs

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Return bytes per millisecond; PlanError if the file has none of this collective."""
        name = _collective(collective_type, world_size, local_world_size)
        if name not in self._known.collective_bandwidths:
            raise PlanError(
                f"the plan's file has no bandwidth of {name}: its own are of {self._known}. Plan in Python, with the "
                "GeneralizedCommsBandwidth of these ranks in the topology"
            )
        return self._known.collective_bandwidths[name]

    @property
    def intra_host_bw(self) -> float:
        """Bytes per millisecond within hosts."""
        return self._known.bandwidths["within hosts"]

    @property
    def inter_host_bw(self) -> float:
        """Bytes per millisecond between hosts."""
        return self._known.bandwidths["between hosts"]


def _collective_bandwidths(topology: Topology) -> dict[str, float]:
    """Return the bandwidths that TorchRec's estimator asks for: over all ranks, within and between pods."""
    world, host, pod = topology.world_size, topology.local_world_size, topology.intra_group_size
    groups = {(world, host), (world, pod), (pod, min(pod, host)), (pod, pod), (max(1, world // pod), 1)}
    return {
        _collective(kind, ranks, on_host): float(topology.comms_bandwidths.get_bw(on_host, ranks, kind))
        for kind in CollectiveType
        for ranks, on_host in sorted(groups)
    }


def _collective(kind: CollectiveType, ranks: int, on_host: int) -> str:
    return f"{kind.value} of {ranks} ranks, {on_host} on a host"


def plain(value: Any) -> Any:
    """The value as JSON has it: dataclasses by what is not default, enums by name, all else as canonical text."""
    if value is None or isinstance(value, str | bool | int | float) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return _changed(value)
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, Sequence):
        return [plain(part) for part in value]
    return canonical(value)


def _changed(value: Any) -> dict[str, Any]:
    """Attributes of a dataclass that are not at their default."""
    return {
        field.name: plain(given) for field in fields(value) if (given := getattr(value, field.name)) != _default(field)
    }


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
