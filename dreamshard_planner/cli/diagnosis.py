# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Findings on this environment: libraries, devices, and the costs that plans would use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from dreamshard_planner import __version__
from dreamshard_planner.environment import (
    LIBRARIES,
    TORCHREC,
    Library,
    how_to_install,
    installed,
    of_child,
    torch_library,
    untried,
)

PREVENTS_PLANNING = ("missing", "broken")
"""Verdicts on libraries and checkpoints that are not there, or do not load."""


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    subject: str
    found: str
    verdict: str = "ok"
    """``ok``, ``note``, or one of ``PREVENTS_PLANNING``."""
    advice: str = ""


def diagnose() -> list[Finding]:
    """Return all findings; never raises for what is missing."""
    own = [Finding("Python", sys.version.split()[0]), Finding("dreamshard_planner", __version__)]
    findings = [*own, *map(_library, LIBRARIES)]
    if any(finding.verdict in PREVENTS_PLANNING for finding in findings):
        return findings
    costs = map(_costs, ("cpu", "cuda"))
    return [*findings, *_cpu(), *_cuda(), *_topologies(), _own_checkpoints(), *costs]


def _library(library: Library) -> Finding:
    """Tell whether a library loads, and was tested with this package."""
    releases = library.releases()
    found = releases[library.name] if list(releases) == [library.name] else library.described()
    try:
        import_module("torchrec.distributed.planner" if library is TORCHREC else library.module)
    except Exception as error:  # whatever a half installed library does
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        verdict = "broken" if found else "missing"
        return Finding(library.name, f"{found or 'none'}: {why}", verdict, how_to_install(library))
    if len(releases) > 1:
        share = f"these share the module {library.module}, and the one installed last is used: uninstall the other"
        return Finding(library.name, found, "note", share)
    remark = untried(library)
    return Finding(library.name, found or "of unknown version", "note" if remark else "ok", remark)


_INSTRUCTION_SET = """
from dreamshard_planner.measure import hardware
print(hardware.instruction_set(), hardware.reference_kernels())
"""


def _cpu() -> Iterator[Finding]:
    """Describe the processor, and FBGEMM in a Python that imports torch as users do; here libc10 was loaded first."""
    from dreamshard_planner.measure.hardware import describe_hardware, instruction_set, reference_kernels

    hardware = describe_hardware("cpu", 1)
    memory = f"{int(hardware['memory_bytes']) / 1e9:.0f} GB"
    yield Finding("CPU", f"{hardware['name']}, {hardware['cores']} cores, {memory}")
    found, slow = instruction_set(), reference_kernels()
    if (libtorch := torch_library("libtorch.so")) and b"cpuinfo_initialize" in libtorch.read_bytes():
        command = [sys.executable, "-P", "-W", "ignore", "-c", _INSTRUCTION_SET]
        said = subprocess.run(command, capture_output=True, text=True, check=True, env=of_child()).stdout
        found, _, slow = said.strip().partition(" ")
    if slow:
        advice = f"in training: {slow}. dreamshard's own commands use the fast kernels"
        yield Finding("FBGEMM on CPU", "reference kernels", "note", advice)
    else:
        yield Finding("FBGEMM on CPU", f"instruction set {found or 'unknown'}")


def _cuda() -> Iterator[Finding]:
    """Tell the cards, and each thing that keeps CUDA from working."""
    import torch
    import torch.distributed as dist

    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{card.name}, {card.total_memory / 1e9:.0f} GB")
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA: pip install a CUDA build of torch"
            if torch.version.cuda is None
            else f"torch is built for CUDA {torch.version.cuda} and sees no card, or no driver for one"
        )
        yield Finding("CUDA", "none", "note", f"{why}. Planning for GPUs works without one")
    if installed("fbgemm-gpu-cpu"):
        yield Finding("CUDA kernels", "none: fbgemm-gpu-cpu", "note", "training on GPUs needs fbgemm-gpu")
    if not dist.is_nccl_available():
        yield Finding("NCCL", "none", "note", "ranks on GPUs exchange with NCCL; CUDA builds of torch have it")


def _topologies() -> Iterator[Finding]:
    """Describe the default topologies of ranks on this host: a rank per GPU, and one rank on CPUs."""
    import torch

    from dreamshard_planner import devices
    from dreamshard_planner.planning.ranks import RankHardware, hardware_in_words, read_topology

    sizes = {"cpu": 1} if devices.read_card() is None else {"cpu": 1, "cuda": max(1, torch.cuda.device_count())}
    for device, size in sizes.items():
        ranks = [RankHardware.here(device)] * size
        yield Finding(f"topology on {device}", hardware_in_words(read_topology(device, ranks, size), ranks))


def _own_checkpoints() -> Finding:
    """Tell the user's own checkpoints."""
    from dreamshard_planner.checkpoints import choice

    subject = "your checkpoints"
    try:
        names = ", ".join(path.name for path in choice.files())
    except OSError as error:
        advice = f"set {choice.VARIABLE} to another folder"
        return Finding(subject, f"{choice.folder()}: {error.strerror}", "note", advice)
    return Finding(subject, f"{names or 'none'}, in {choice.folder()}")


def _costs(device: str) -> Finding:
    """Tell the checkpoint that ``"auto"`` takes for a device, and why."""
    from dreamshard_planner.checkpoints.checkpoint import Checkpoint
    from dreamshard_planner.checkpoints.choice import SHIPPED, checkpoint_notes, confidence, resolve
    from dreamshard_planner.devices import Machine
    from dreamshard_planner.errors import CheckpointError

    subject = f"costs on {device}"
    try:
        checkpoint = resolve("auto", device)
    except CheckpointError as error:
        return Finding(subject, str(error), "missing")
    if not checkpoint.has_costs:
        how = f"to measure a network for another one, run dreamshard train --device {device} on it"
        paths = sorted(SHIPPED.glob("nvidia-*.safetensors"))
        measured = [Checkpoint.load(path).measured_on.split(",")[0] for path in paths]
        named = f"plans for {', '.join(measured)} use a network measured on that card" if device == "cuda" else ""
        advice = "; ".join(filter(None, (checkpoint.why, named, how)))
        return Finding(subject, f"{checkpoint.name}: bandwidths, for cards without a network", "note", advice)
    topology = Machine(ranks_per_host=1, device=device).topology()
    notes = checkpoint_notes(checkpoint, topology)
    found = f"{checkpoint.name}: {'network' if checkpoint.cost else 'bandwidths'}, {confidence(checkpoint, topology)}"
    doubtful = "another" in found or set(notes) - {checkpoint.why}
    return Finding(subject, found, "note" if doubtful else "ok", "; ".join(notes))
