# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A user's own checkpoints: the folder that ``checkpoint="auto"`` prefers over those that ship.

The folder is ``DREAMSHARD_HOME/checkpoints`` if that variable is set, else ``checkpoints`` in the user's data folder
for this package (``~/.local/share/dreamshard_planner`` on Linux). A file's metadata, not its name, tell its hardware.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs

from dreamshard_planner import driver
from dreamshard_planner.errors import FileError
from dreamshard_planner.measure.hardware import describe_hardware
from dreamshard_planner.support.files import brief

VARIABLE = "DREAMSHARD_HOME"


def home() -> Path:
    """Return the user's folder for this package, which may be missing."""
    given = os.path.expanduser(os.environ.get(VARIABLE, ""))
    return Path(given or platformdirs.user_data_path("dreamshard_planner", appauthor=False))


def folder() -> Path:
    """Return the folder of checkpoints, which may be missing."""
    return home() / "checkpoints"


def runs_folder(hardware: Mapping[str, Any], ranks: int) -> Path:
    """Return the folder of trainings observed on some hardware by as many ranks, which may be missing.

    Args:
        hardware: as :func:`~dreamshard_planner.measure.hardware.describe_hardware` returns it.
        ranks: of a training.
    """
    return home() / "runs" / slug(f"{observed_name(hardware)} {ranks} ranks")


def observed_name(hardware: Mapping[str, Any]) -> str:
    """Return a name of hardware and libraries on which observed costs hold."""
    threads = f"{hardware.get('threads', 1)} threads" if hardware["device"] == "cpu" else ""
    releases = [f"{name} {'.'.join(str(hardware.get(name)).split('.')[:2])}" for name in ("torch", "fbgemm")]
    return slug(" ".join([str(hardware["device"]), str(hardware["name"]), threads, *releases]))


def files() -> list[Path]:
    """Return all checkpoints in order of names; raises OSError if the folder cannot be read."""
    try:
        names = sorted(os.listdir(folder()))
    except FileNotFoundError:
        return []
    return [folder() / name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def slug(text: str) -> str:
    """Return a text for file names: lower case, with dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def new_file(hardware: Mapping[str, Any], how: str = "") -> Path:
    """Return the path for a checkpoint measured on some hardware, and make the folder.

    Args:
        hardware: as :func:`~dreamshard_planner.measure.hardware.describe_hardware` returns it.
        how: ``calibrated`` or ``learned`` for a corrected checkpoint, which must not replace its origin.

    Raises:
        FileError: the folder cannot be made; or device or name are missing.
    """
    device, name = hardware.get("device"), hardware.get("name")
    if not (device and name):
        raise FileError(
            f"no name for a checkpoint of hardware that is not told ({brief(dict(hardware))}): say where to"
        )
    parts = [device, name, f"{hardware.get('threads', 1)} threads" if device == "cpu" else "", how]
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{folder()}: the folder of your checkpoints cannot be made: {error.strerror}; set {VARIABLE}"
        ) from error
    return folder() / f"{slug(' '.join(parts))}.safetensors"


def hardware_here(device: str) -> str | None:
    """Return the name of this machine's processor (``cpu``) or card (``cuda``), if there is one."""
    if device == "cuda":
        found = driver.read_card()
        return None if found is None else found.name
    return str(describe_hardware(device, 1)["name"])


def nearest(described: Mapping[Path, Mapping[str, Any]], name: str | None, threads: int) -> Path | None:
    """Return the file measured on the named hardware; of several, the one with the nearest threads, then the newest.

    Args:
        described: metadata of files of one kind of device.
        name: processor or card that is planned for; None for no card.
        threads: of a rank; they count on CPUs.
    """
    hardware = {path: metadata["hardware"] for path, metadata in described.items()}

    def fit(path: Path) -> tuple[float, int, str]:
        measured = hardware[path].get("threads", 1) if hardware[path]["device"] == "cpu" else threads
        return -abs(math.log(measured / threads)), path.stat().st_mtime_ns, path.name

    return max((path for path, of in hardware.items() if name and of.get("name") == name), key=fit, default=None)
