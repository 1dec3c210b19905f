# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a plan is made from, in plain values for a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any

from torchrec.distributed.planner.types import ParameterConstraints, Topology

from dreamshard_planner.canonical import canonical
from dreamshard_planner.cost.model import MEMORY_KINDS
from dreamshard_planner.plan_file import TopologyInputs


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


def constraint_inputs(constraints: Mapping[str, ParameterConstraints] | None) -> dict[str, dict[str, Any]]:
    """What constraints say other than TorchRec's defaults, by table."""
    return {name: _changed(constraint) for name, constraint in sorted((constraints or {}).items())}


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


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default
