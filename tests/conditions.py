# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The tests as other machines would run them: python tests/conditions.py [CONDITION ...] [-- ARGUMENTS OF PYTEST]

Without a condition, under each in turn; ``--list`` names them. Exits with 1 where tests failed under any.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Condition:
    """Differences from this machine."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables that are set, or removed where None."""
    one_core: bool = False
    busy: bool = False
    """True if other processes want every core twice."""


def conditions(folder: Path) -> dict[str, Condition]:
    """Return the conditions by name.

    Args:
        folder: an empty one, in which homes are made.
    """
    cpu = {"DREAMSHARD_CPU_NAME": "Abacus 9000 (family 1 model 1)"}
    locale = {"LC_ALL": "C", "LANG": None, "LANGUAGE": None}
    # What ATen, MKL, oneDNN and numpy would do on a machine without AVX: their last bits differ.
    instructions = {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    }
    narrow, zone = {"COLUMNS": "60", "LINES": "10"}, {"TZ": "<+14>-14"}
    kept, unwritable = _home_with_checkpoints(folder / "kept"), _home_that_cannot_be_made(folder / "file")
    public_ci = {"CI": "true", "GITHUB_ACTIONS": "true", "FORCE_COLOR": "1"}
    return {
        "another-machine": Condition({**cpu, **locale, **instructions, **narrow, **zone, **unwritable, **public_ci}),
        "kept-checkpoints": Condition(kept),
        "threads-unset": Condition({"OMP_NUM_THREADS": None}),
        "4-threads": Condition({"OMP_NUM_THREADS": "4"}),
        "one-core": Condition(one_core=True),
        "busy-machine": Condition(busy=True),
    }


def _home(path: Path) -> dict[str, str | None]:
    variables: dict[str, str | None] = {"HOME": str(path), "DREAMSHARD_HOME": None, "MPLCONFIGDIR": None}
    return variables | {f"XDG_{kind}_HOME": None for kind in ("DATA", "CACHE", "CONFIG", "STATE")}


def _home_with_checkpoints(path: Path) -> dict[str, str | None]:
    """Make a home whose checkpoint cannot be read."""
    checkpoints = path / ".local" / "share" / "dreamshard_planner" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "damaged.safetensors").write_bytes(b"no checkpoint")
    return _home(path)


def _home_that_cannot_be_made(file: Path) -> dict[str, str | None]:
    """Name a home under a file, since root may write into every folder."""
    file.write_bytes(b"")
    return _home(file / "home")


@contextmanager
def _load(busy: bool) -> Iterator[None]:
    """Run two idle loops on each core."""
    count = 2 * len(os.sched_getaffinity(0)) if busy else 0
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def run(condition: Condition, arguments: list[str]) -> int:
    """Return the exit status of pytest."""
    changed = {**os.environ, **condition.environment}
    environment = {name: value for name, value in changed.items() if value is not None}
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    if condition.one_core:
        command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
    with _load(condition.busy):
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(words: list[str]) -> int:
    """The command; returns the exit status."""
    at = words.index("--") if "--" in words else len(words)
    names, arguments = words[:at], words[at + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        known = conditions(Path(folder))
        if unknown := set(names) - set(known):
            print("conditions:", *known, sep="\n  ")
            return 2 * (unknown != {"--list"})
        ended = {}
        for name in names or known:
            print(f"== {name}", flush=True)
            started = time.monotonic()
            ended[name] = run(known[name], arguments), time.monotonic() - started
    for name, (status, seconds) in ended.items():
        print(f"{name:20} {'FAILED' if status else 'passed'} in {seconds:.0f} s")
    return int(any(status for status, _ in ended.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
