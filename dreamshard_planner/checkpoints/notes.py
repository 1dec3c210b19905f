# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Notes on the origin of predicted costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dreamshard_planner.measure.hardware import REFERENCE, describe_hardware, reference_kernels

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

    from dreamshard_planner.checkpoints.checkpoint import Checkpoint

FEW_SETS = 1_000
"""Fewest sets to fit a network from nothing: 1,680 leave errors of 5 to 7 %. Starting from another processor's, 300
suffice."""
FEW_TASKS = 20
"""Fewest validation tasks of a real training; ``--quick`` has four."""


def checkpoint_notes(checkpoint: Checkpoint, topology: Topology, uses_network: bool = True) -> tuple[str, ...]:
    """Return notes on a plan for a topology with a checkpoint; ``uses_network`` if its costs were used, not only its
    policy."""
    metadata, notes = checkpoint.metadata, [checkpoint.why] if checkpoint.why else []
    tasks = metadata.get("validation", {}).get("tasks")
    if tasks is not None and tasks < FEW_TASKS:
        notes.append(f"{checkpoint.name} was made with --quick, to try the flow: its policy is of no use for planning")
    if topology.compute_device == "cpu" and (slow := reference_kernels()):
        notes.append(slow)
    if uses_network and (checkpoint.cost is not None or "learned" in metadata):
        sets = metadata.get("dataset", {}).get("sets")
        if sets is not None and sets < FEW_SETS and not metadata.get("started_from"):
            notes.append(
                f"the cost network of {checkpoint.name} was fitted to {sets:,} measured sets, too few to rely on "
                f"(fewer than {FEW_SETS:,})"
            )
        notes.append(_from_where(checkpoint, topology.compute_device))
        notes += _other_libraries(metadata, topology.compute_device)
        notes += _exchanged_elsewhere(metadata) if topology.world_size > 1 else []
    return tuple(notes)


def _from_where(checkpoint: Checkpoint, compute_device: str) -> str:
    """Return the note on hardware and checks."""
    measured, calibration = (checkpoint.metadata.get(section, {}) for section in ("hardware", "calibration"))
    device, name = measured.get("device"), measured.get("name")
    if device is not None and device != compute_device:
        return (
            f"these costs were measured on {device} ({name}) and say little of {compute_device}, which the plan is for"
        )
    here = describe_hardware("cpu", 1)["name"] if device == "cpu" else name
    if name not in (None, here):
        return (
            f"these costs were measured on {name}, and this machine is {here}; if it is to train, dreamshard calibrate "
            "fits them to it"
        )
    if learned := checkpoint.metadata.get("learned"):
        return f"costs were {learned['said']}"
    if "checked" in calibration:
        return f"costs were checked on {name} with {calibration['checked']}"
    return "costs were not yet checked on the machine that trains; dreamshard doctor --measure does so there in seconds"


def _other_libraries(metadata: Mapping[str, Any], compute_device: str) -> list[str]:
    """Return a note if kernels were measured with other releases or instructions than this process has."""
    measured = metadata.get("hardware", {})
    if measured.get("device") != compute_device:
        return []
    here = describe_hardware("cpu", 1)
    fields = ["torch", "fbgemm"]
    if compute_device == "cpu" and here.get("instruction_set") != REFERENCE:  # which has a note of its own
        fields.append("instruction_set")
    differing = [
        name
        for name in fields
        if {name} <= measured.keys() & here.keys() and _release(measured[name]) != _release(here[name])
    ]
    if not differing:
        return []
    there, this = (", ".join(f"{name.replace('_', ' ')} {of[name]}" for name in differing) for of in (measured, here))
    return [f"costs were measured with {there}; this environment has {this}"]


def _release(version: object) -> str:
    """Return major and minor of a version; other text unchanged."""
    return ".".join(str(version).split(".")[:2])


def _exchanged_elsewhere(metadata: Mapping[str, Any]) -> list[str]:
    """Return a note if exchanges were measured on other hardware than kernels."""
    kernels, exchanges = (
        (part or {}).get("hardware", {}).get("name") for part in (metadata, metadata.get("collectives"))
    )
    if None in (kernels, exchanges) or kernels == exchanges:
        return []
    return [
        f"exchanges were measured on {exchanges}, and kernels on {kernels}; "
        "python -m dreamshard_planner.measure.collectives measures those between ranks here"
    ]
