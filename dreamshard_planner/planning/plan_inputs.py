# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What plans are made from: in plain values for a file, and as one digest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology

from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.problem import MEMORY_KINDS
from dreamshard_planner.planning.settings import PlannerSettings
from dreamshard_planner.plans.plan_file import PlanInputs, TopologyInputs
from dreamshard_planner.problem.reader import OptionReader
from dreamshard_planner.search_space.options import fqn_of
from dreamshard_planner.support.fingerprint import canonical, digest


@dataclass(frozen=True, kw_only=True)
class MadeFrom:
    """All that the plans of one planner and one model are made from."""

    search_space: Sequence[ShardingOption]
    reader: OptionReader
    topology: Topology
    batch_size: int
    constraints: Mapping[str, ParameterConstraints] | None
    """As they were given."""
    checkpoint: Checkpoint
    settings: PlannerSettings
    reservation: str
    """Name of its class."""

    def inputs(self) -> PlanInputs:
        """For a file."""
        settings, tables = self.settings, {fqn_of(option): option for option in self.search_space}
        return PlanInputs(
            batch_size=self.batch_size,
            topology=topology_inputs(self.topology),
            tables={fqn: self.reader.declared(tables[fqn]) for fqn in sorted(tables)},
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
                "storage_reservation": self.reservation,
                "seed": settings.seed,
                "search_seconds": settings.search_seconds,
                "refine_seconds": settings.measuring_seconds,
                **({} if settings.sharding_groups is None else {"sharding_groups": plain(settings.sharding_groups)}),
            },
            features={name: known for name, known in (settings.statistics or {}).items() if known.ids is None},
        )

    def digest(self, reserved: Topology, timeout_seconds: float | None, parts: Iterable[object]) -> str:
        """Of all of it, in hexadecimal, the same in every process.

        Args:
            reserved: what the storage reservation left.
            timeout_seconds: TorchRec's, of planning.
            parts: of the planner, whose types count.
        """
        settings = self.settings
        tables = [
            {
                "option": (option.fqn, option.sharding_type, option.compute_kernel, option.cache_params),
                "shards": [(list(shard.size), list(shard.offset), shard.storage) for shard in option.shards],
                "table": self.reader.table(option, self.topology),
            }
            for option in self.search_space
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
                "search": (settings.search, settings.search_seconds, settings.measuring_seconds, timeout_seconds),
                "parts": [type(part) for part in parts],
            }
        )


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
        bandwidths={
            "HBM": float(topology.hbm_mem_bw),
            "DDR": float(topology.ddr_mem_bw),
            "HBM to DDR": float(topology.hbm_to_ddr_mem_bw),
            "SSD": float(topology.ssd_mem_bw),
            "within hosts": float(topology.comms_bandwidths.intra_host_bw),
            "between hosts": float(topology.comms_bandwidths.inter_host_bw),
        },
    )


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
