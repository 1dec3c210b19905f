# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What this environment can do: what is installed, which devices there are, which costs a plan would be made with."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

FBGEMM_PACKAGES = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly")
"""All bring one module, fbgemm_gpu."""
TORCHREC = ((1, 6), (1, 9))
"""Releases that are tested."""


@dataclass(frozen=True)
class Finding:
    """One line of a diagnosis."""

    subject: str
    found: str
    verdict: str = "ok"
    """``ok``; ``note`` where something is to be known; ``missing`` where nothing can be planned without it."""
    advice: str = ""


def diagnose() -> list[Finding]:
    """All findings; never raises for what is missing."""
    findings = [_python(), _dreamshard(), _library("torch"), _fbgemm(), _torchrec()]
    if any(finding.verdict == "missing" for finding in findings):
        return findings
    findings += [_cpu(), *_cuda()]
    return [*findings, *(_checkpoint(device) for device in ("cpu", "cuda"))]


def _python() -> Finding:
    return Finding("Python", sys.version.split()[0])


def _dreamshard() -> Finding:
    from dreamshard_planner import __version__

    return Finding("dreamshard_planner", __version__)


def installed(package: str) -> str | None:
    """Version of a package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _library(package: str, module: str | None = None, install: str | None = None) -> Finding:
    try:
        import_module(module or package)
    except Exception as error:  # whatever a half installed library does
        return Finding(
            package,
            f"{installed(package) or 'none'}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "missing",
            f"pip install {install or package}",
        )
    return Finding(package, installed(package) or "of unknown version")


def _fbgemm() -> Finding:
    found = {package: installed(package) for package in FBGEMM_PACKAGES if installed(package)}
    name = " and ".join(f"{package} {release}" for package, release in found.items()) or "none"
    if len(found) > 1:
        return Finding(
            "FBGEMM", name, "note", "these share one module, and the one installed last is used: uninstall the other"
        )
    finding = _library(next(iter(found), "fbgemm-gpu"), "fbgemm_gpu", "fbgemm-gpu, or fbgemm-gpu-cpu without a GPU")
    return Finding("FBGEMM", name if finding.verdict == "ok" else finding.found, finding.verdict, finding.advice)


def _torchrec() -> Finding:
    finding = _library("torchrec", "torchrec.distributed.planner", "--no-deps torchrec")
    if finding.verdict == "missing":
        return finding
    (low, high), release = TORCHREC, tuple(map(int, finding.found.split("+")[0].split(".")[:2]))
    if low <= release <= high:
        return Finding("torchrec", finding.found)
    tested = f"{'.'.join(map(str, low))} to {'.'.join(map(str, high))}"
    return Finding("torchrec", finding.found, "note", f"tested are {tested}")


def _cpu() -> Finding:
    from dreamshard_planner.measure.hardware import describe_hardware

    hardware = describe_hardware("cpu", 1)
    return Finding("CPU", f"{hardware['name']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 1e9:.0f} GB")


def _cuda() -> list[Finding]:
    """Cards, and each thing that keeps CUDA from working."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        found = [Finding(f"GPU {i}", f"{c.name}, {c.total_memory / 1e9:.0f} GB") for i, c in enumerate(cards)]
    else:
        why = (
            "this torch is built without CUDA: pip install a CUDA build of torch"
            if torch.version.cuda is None
            else f"torch is built for CUDA {torch.version.cuda} and sees no card: is there one, with a driver?"
        )
        found = [Finding("CUDA", "none", "note", f"{why}. Planning for GPUs works without one")]
    if installed("fbgemm-gpu-cpu"):
        found.append(Finding("CUDA kernels", "none: fbgemm-gpu-cpu", "note", "training on GPUs needs fbgemm-gpu"))
    if not dist.is_nccl_available():
        found.append(Finding("NCCL", "none", "note", "ranks on GPUs exchange with NCCL; CUDA builds of torch have it"))
    return found


def _checkpoint(device: str) -> Finding:
    """What ``checkpoint="auto"`` would take there, and why."""
    from dreamshard_planner.caveats import checkpoint_notes
    from dreamshard_planner.checkpoint import resolve
    from dreamshard_planner.devices import Machine
    from dreamshard_planner.errors import CheckpointError

    subject = f"costs on {device}"
    try:
        checkpoint = resolve("auto", device)
    except CheckpointError as error:
        return Finding(subject, str(error), "missing", "dreamshard train makes one")
    if checkpoint.cost is None:
        return Finding(
            subject,
            f"{checkpoint.name}: bandwidths, and a policy trained on them",
            "note",
            f"nothing was measured on such a device: on one, dreamshard train --device {device} --out FILE",
        )
    notes = checkpoint_notes(checkpoint, Machine(ranks_per_host=1, device=device).topology())
    found = f"{checkpoint.name}: network, measured on {checkpoint.metadata['hardware_name']}"
    return Finding(subject, found, "note" if notes else "ok", "; ".join(notes))
