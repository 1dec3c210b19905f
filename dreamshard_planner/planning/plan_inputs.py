# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""All inputs of a model's plans as plain values, for a file and for one digest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
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
from dreamshard_planner.devices import UNKNOWN_CARD, cards_of, cores_of
from dreamshard_planner.errors import PlanError
from dreamshard_planner.planning.ranks import PlannedRanks
from dreamshard_planner.planning.settings import SAVED, SAVED_IF_GIVEN, PlannerSettings
from dreamshard_planner.plans.plan_file import BANDWIDTHS, GroupsInputs, PlanInputs, TopologyInputs
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import fqn_of
from dreamshard_planner.support.reproducible import canonical, digest
from dreamshard_planner.workload.lookups import FeatureStatistics
from dreamshard_planner.workload.statistics import TableStatistics

LEAST_MEANT, MOST_MEANT = 1e4, 2.4e10
"""Bytes per millisecond between which bandwidths are meant so: 10 MB/s and 24 TB/s."""


def plan_inputs(
    settings: PlannerSettings,
    ranks: PlannedRanks,
    search_space: Sequence[ShardingOption],
    reader: OptionReader,
    reservation: StorageReservation,
) -> PlanInputs:
    """Return the inputs of a model's plans, for a file; ``search_space`` has all options of all tables."""
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
        statistics=None if settings.statistics is None else digest(statistics_for_file(settings.statistics)),
        settings={
            "checkpoint": f"{checkpoint.name} {checkpoint.digest()[:12]}",
            "storage_reservation": type(reservation).__name__,
            "search_seconds": settings.search_seconds,
            **{name: plain(getattr(settings, name)) for name in SAVED},
            **{
                name: plain(given)
                for name in ("sharding_groups", *SAVED_IF_GIVEN)
                if (given := getattr(settings, name)) != getattr(PlannerSettings, name)
            },
        },
        features=dict(statistics_for_file(settings.statistics or {})),
    )


def statistics_for_file(statistics: Mapping[str, FeatureStatistics]) -> TableStatistics:
    """Return the statistics that costs read, all but hot ids, of which a feature may have tens of thousands."""
    return TableStatistics({name: replace(known, hot=None) for name, known in statistics.items()})


MULTIPLIERS = {
    "bwd_compute_multiplier": BWD_COMPUTE_MULTIPLIER,
    "weighted_feature_bwd_compute_multiplier": WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
    "uneven_sharding_perf_multiplier": 1.0,
}
"""Defaults of the factors in TorchRec's estimates, by argument of its ``Topology``."""


def topology_inputs(
    topology: Topology, all_ranks: Topology | None = None, groups: GroupsInputs | None = None
) -> TopologyInputs:
    """Return everything of a topology that a plan or its cost depends on; :func:`topology_arguments` is the way back.

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
        cores=cores_of(topology),
    )


def doubtful_bandwidths(topology: Topology) -> Iterator[str]:
    """Tell which bandwidths of a topology are hardly meant, such as those in bytes per second."""
    for place in BANDWIDTHS.values():
        rate = float(attrgetter(place)(topology))
        if not LEAST_MEANT <= rate <= MOST_MEANT:
            yield (
                f"the topology's {place.rpartition('.')[2]} is {rate:g} bytes per millisecond, TorchRec's unit: give "
                "bytes per second / 1000"
            )


def topology_arguments(inputs: TopologyInputs) -> dict[str, Any]:
    """Return the arguments of :func:`~dreamshard_planner.devices.make_topology`, with the least memory of any rank."""
    return {
        "cards": inputs.cards or (UNKNOWN_CARD,),
        "cores": inputs.cores,
        "pod_size": inputs.pod_size if inputs.pod_size > 1 else None,
        "generalized_comms_bandwidths": SavedBandwidths(inputs) if inputs.collective_bandwidths else None,
        **{f"{kind.lower()}_cap": min(sizes) for kind, sizes in inputs.memory_bytes.items()},
        **{BANDWIDTHS[name].rpartition(".")[2]: rate for name, rate in inputs.bandwidths.items()},
        **inputs.multipliers,
    }


class SavedBandwidths(GeneralizedCommsBandwidth):
    """Bandwidths of collectives from a plan's file."""

    def __init__(self, inputs: TopologyInputs) -> None:
        self._known = inputs

    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Return bytes per millisecond; raise PlanError if the file has none for this collective."""
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
    """Return a value for JSON: dataclasses without defaults, enums by name, other objects as canonical text."""
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
    """Return the attributes of a dataclass that are not at their default."""
    return {
        field.name: plain(given) for field in fields(value) if (given := getattr(value, field.name)) != _default(field)
    }


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
