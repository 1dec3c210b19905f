# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""A user's own checkpoints: the folder that ``checkpoint="auto"`` looks into before it takes what ships.

``DREAMSHARD_HOME/checkpoints``, where that variable is set; else ``checkpoints`` in the user's data folder for this
package (``~/.local/share/dreamshard_planner`` on Linux). What a file is called helps people alone: which hardware it is
for is what its metadata say.
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


def folder() -> Path:
    """Where the checkpoints are; need not be there."""
    home = os.path.expanduser(os.environ.get(VARIABLE, ""))
    return Path(home or platformdirs.user_data_path("dreamshard_planner", appauthor=False)) / "checkpoints"


def files() -> list[Path]:
    """All checkpoints, by name; none where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        names = sorted(os.listdir(folder()))
    except FileNotFoundError:
        return []
    return [folder() / name for name in names if name.endswith(".safetensors") and not name.startswith(".")]


def slug(text: str) -> str:
    """As in file names: lower case, with dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def new_file(hardware: Mapping[str, Any], how: str = "") -> Path:
    """Where to keep a checkpoint that was measured on this hardware; the folder is made.

    Args:
        hardware: as :func:`~dreamshard_planner.measure.hardware.describe_hardware` has it.
        how: ``calibrated`` or ``learned``, where another one was corrected for the hardware; such a file has a name of
            its own, so that it does not replace what it was made from.

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
    """Return the name of this machine's processor (``cpu``), or of its card (``cuda``); None where there is none."""
    if device == "cuda":
        found = driver.read_card()
        return None if found is None else found.name
    return str(describe_hardware(device, 1)["name"])


def nearest(described: Mapping[Path, Mapping[str, Any]], name: str | None, threads: int) -> Path | None:
    """Return the file measured on the named hardware: of several the one with the nearest threads, then the newest.

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
