# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What plans are made from: what a planner was given and the options of a model; in plain values for a file, and as one
digest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from enum import Enum
from numbers import Integral
from operator import attrgetter
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, StorageReservation, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.planning.settings import PlannerSettings
from dreamshard_planner.plans.plan_file import BANDWIDTHS, GroupsInputs, PlanInputs, TopologyInputs
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search.effort import DEFAULT_EFFORT
from dreamshard_planner.search_space.options import fqn_of
from dreamshard_planner.support.fingerprint import canonical, digest


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What a planner was given, whatever module it plans."""

    topology: Topology
    batch_size: int
    """Local."""
    given_batch_size: int | None
    """None where it is TorchRec's default."""
    constraints: dict[str, ParameterConstraints] | None
    checkpoint: Checkpoint
    settings: PlannerSettings
    timeout_seconds: float | None
    """TorchRec's, of planning."""
    sync_ms_per_byte: float = 0.0
    """Of averaging the replicas of other sharding groups."""
    all_ranks: Topology | None = None
    """Of all sharding groups; None where there is one."""

    def __post_init__(self) -> None:
        given = self.given_batch_size
        if given is not None and (isinstance(given, bool) or not isinstance(given, Integral) or given < 1):
            raise ValueError(f"batch_size must be a whole number above 0, got {given!r}")

    @property
    def seconds(self) -> float | None:
        """Cap on the search: the shorter of ours and TorchRec's; None for none."""
        caps = (self.settings.search_seconds, self.timeout_seconds)
        return min(filter(None, caps), default=None)

    @property
    def in_groups(self) -> bool:
        """Whether the ranks form several sharding groups (2D parallelism)."""
        return self._groups is not None

    @property
    def _groups(self) -> GroupsInputs | None:
        groups = self.settings.sharding_groups
        if groups is None or self.all_ranks is None or (count := groups.replicas(self.all_ranks)) == 1:
            return None
        host_ranks = min(self.all_ranks.local_world_size, self.all_ranks.world_size)
        return GroupsInputs(count, host_ranks, groups.use_inter_host_allreduce)

    def inputs(
        self, search_space: Sequence[ShardingOption], reader: OptionReader, reservation: StorageReservation
    ) -> PlanInputs:
        """What plans of a model are made from, for a file.

        Args:
            search_space: all options of all tables.
            reader: of options.
            reservation: of memory.
        """
        settings, tables = self.settings, {fqn_of(option): option for option in search_space}
        return PlanInputs(
            batch_size=self.batch_size,
            topology=replace(topology_inputs(self.topology), groups=self._groups),
            tables={fqn: reader.declared(tables[fqn]) for fqn in sorted(tables)},
            constraints={name: _changed(one) for name, one in sorted((self.constraints or {}).items())},
            placement_rules={} if settings.placement_rules is None else settings.placement_rules.to_dict(),
            statistics=None if settings.statistics is None else digest(settings.statistics),
            settings={
                "cost_source": settings.cost_source,
                "checkpoint": f"{self.checkpoint.name} {self.checkpoint.digest()[:12]}",
                "recipe": self.checkpoint.recipe,
                "sharding_types": plain(settings.allowed_types),
                "exact_training": settings.exact_training,
                "optimizers_attached": settings.optimizers_attached,
                "storage_reservation": type(reservation).__name__,
                "seed": settings.seed,
                "search_seconds": settings.search_seconds,
                "refine_seconds": settings.measuring_seconds,
                **({} if settings.sharding_groups is None else {"sharding_groups": plain(settings.sharding_groups)}),
                **({} if settings.least_gain is None else {"least_gain": settings.least_gain}),
                **_effort(settings),
            },
            features={name: known for name, known in (settings.statistics or {}).items() if known.ids is None},
        )

    def digest(
        self,
        search_space: Sequence[ShardingOption],
        reader: OptionReader | None,
        reserved: Topology,
        parts: Iterable[object],
    ) -> str:
        """Of all that plans of a model are made from, in hexadecimal, the same in every process.

        Args:
            search_space: all options of all tables.
            reader: of options; None where no model was read.
            reserved: what the storage reservation left.
            parts: of the planner, whose types count.
        """
        settings = self.settings
        reader = reader or OptionReader(self.constraints, settings.statistics)
        tables = [
            {
                "option": (option.fqn, option.sharding_type, option.compute_kernel, option.cache_params),
                "shards": [(list(shard.size), list(shard.offset), shard.storage) for shard in option.shards],
                "table": reader.table(option, self.topology),
            }
            for option in search_space
        ]
        return digest(
            {
                "topology": self.topology,
                "reserved": [device.storage for device in reserved.devices],
                "batch_size": self.batch_size,
                "tables": sorted(map(canonical, tables)),  # TorchRec enumerates kernels in the order of a set
                "constraints": self.constraints,
                "placement rules": settings.placement_rules,
                "cost source": (settings.cost_source, settings.allowed_types),
                "training": (settings.exact_training, settings.optimizers_attached, settings.sharding_groups),
                "statistics": settings.statistics,
                "checkpoint": self.checkpoint.digest(),
                "recipe": self.checkpoint.recipe,
                "seed": settings.seed,
                "search": (settings.search, settings.search_seconds, settings.measuring_seconds, self.timeout_seconds),
                "least gain": settings.least_gain,
                "parts": [type(part) for part in parts],
                **_effort(settings),
            }
        )


def _effort(settings: PlannerSettings) -> dict[str, str]:
    """Return the effort, unless it is the default."""
    return {} if settings.effort == DEFAULT_EFFORT else {"effort": str(settings.effort)}


def topology_inputs(topology: Topology) -> TopologyInputs:
    """The ranks of a topology."""
    return TopologyInputs(
        compute_device=topology.compute_device,
        world_size=topology.world_size,
        local_world_size=topology.local_world_size,
        memory_bytes={
            kind: tuple(int(getattr(device.storage, kind.lower())) for device in topology.devices)
            for kind in MEMORY_KINDS
        },
        bandwidths={name: float(attrgetter(place)(topology)) for name, place in BANDWIDTHS.items()},
    )


def bandwidth_arguments(bandwidths: Mapping[str, float]) -> dict[str, float]:
    """Of a plan's file, as TorchRec's ``Topology`` is given them."""
    return {BANDWIDTHS[name].rpartition(".")[2]: value for name, value in bandwidths.items()}


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
