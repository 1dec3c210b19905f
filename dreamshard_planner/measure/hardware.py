# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Describe the hardware and libraries of a measurement."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dreamshard_planner.environment import FBGEMM, TORCHREC, installed, torch_library
from dreamshard_planner.errors import DreamShardError

CPU_NAME_VARIABLE = "DREAMSHARD_CPU_NAME"
"""Environment variable that names this machine's CPU, if the system hides or varies it, or to plan as on another."""
CGROUP = Path("/sys/fs/cgroup")
REFERENCE = "reference"
"""Instruction set of FBGEMM in a process that uses none, although the CPU has AVX2."""
_INSTRUCTION_SETS = ("none", "avx2", "avx512", "avx512_ymm", "avx512_vnni", "avx512_vnni_ymm")  # FBGEMM's order


def describe_hardware(device: torch.device | str, threads: int) -> dict[str, str | int]:
    """Return device, host and library versions for JSON; ``threads`` are the kernels' intra-op threads."""
    device, cpu, memory_bytes = torch.device(device), _cpu_name(), _physical_bytes()
    name, known = cpu, instruction_set() if device.type == "cpu" else ""
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        name, memory_bytes = card.name, card.total_memory
    return {
        "device": device.type,
        "name": name,
        "threads": threads,
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "memory_bytes": memory_bytes,
        **({"instruction_set": known} if known else {}),
        **library_versions(),
    }


@lru_cache(maxsize=1)
def instruction_set() -> str:
    """Return the instruction set of FBGEMM's CPU kernels in this process; empty if FBGEMM does not tell."""
    import fbgemm_gpu

    for name in ("fbgemm.so", "fbgemm_gpu_py.so"):  # FBGEMM's own library, or the one that contains it
        try:
            number = ctypes.CDLL(str(Path(fbgemm_gpu.__path__[0]) / name))._ZN6fbgemm20fbgemmInstructionSetEv()
        except (OSError, AttributeError):
            continue
        cpu = Path("/proc/cpuinfo")
        if number == 0 and cpu.exists() and " avx2 " in cpu.read_text():
            return REFERENCE
        return _INSTRUCTION_SETS[number] if number < len(_INSTRUCTION_SETS) else f"FBGEMM's number {number}"
    return ""


def reference_kernels() -> str:
    """Explain how to get the fast CPU kernels if this process runs FBGEMM's reference kernels; else return ""."""
    if instruction_set() != REFERENCE:
        return ""
    libc10 = torch_library("libc10.so") or "/path/to/torch/lib/libc10.so"
    return (
        f"FBGEMM runs its slow reference kernels, although the CPU has AVX2: libtorch of torch "
        f"{torch.__version__} hides the CPU from it. Start Python with LD_PRELOAD={libc10}"
    )


def check_kernels(device: torch.device | str) -> None:
    """Raise DreamShardError if kernels to be timed are FBGEMM's reference kernels."""
    if torch.device(device).type == "cpu" and (slow := reference_kernels()):
        raise DreamShardError(f"nothing was measured: {slow}")


def library_versions() -> dict[str, str]:
    """Return versions of Python and of the libraries that compute embeddings, by name."""
    return {
        "torch": torch.__version__,
        "fbgemm": installed(*FBGEMM.packages) or "unknown",
        "torchrec": installed(*TORCHREC.packages) or "unknown",
        "python": platform.python_version(),
    }


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def total_bytes() -> int:
    """Return the memory of this host that this process's cgroup may use."""
    (allowed,) = _limit("memory.max") or ["max"]
    return _physical_bytes() if allowed == "max" else min(_physical_bytes(), int(allowed))


def usable_cores() -> float:
    """Return the cores of this host that this process's cgroup may use, a container's ``--cpus``."""
    cores, (quota, period) = float(os.cpu_count() or 1), _limit("cpu.max") or ["max", "1"]
    return cores if quota == "max" else min(cores, int(quota) / int(period))


def _limit(name: str) -> list[str]:
    """Return the fields of a limit of the cgroup, nothing without cgroups of version 2."""
    path = CGROUP / name
    return path.read_text().split() if path.exists() else []


def hardware_name(hardware: Mapping[str, Any]) -> str:
    """Return processor and threads for people."""
    return f"{hardware.get('name', hardware.get('device', '?'))}, {hardware.get('threads', '?')} thread(s)"


def _cpu_name() -> str:
    """Return the user's name of the CPU, else its model name with numbers, since clouds hide parts of the name."""
    if given := os.environ.get(CPU_NAME_VARIABLE):
        return given
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']} model {fields['model']})" if "cpu family" in fields else name
