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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch

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


@dataclass(frozen=True)
class Here:
    """What a checkpoint has to match."""

    device: str
    """``cpu`` or ``cuda``."""
    name: str | None
    """Of the processor, or of the card that is planned for; None for no card."""
    threads: int
    """Of a rank, on CPUs."""

    @classmethod
    def of(cls, device: str, threads: int | None = None, card: str | None = None) -> Here:
        """This process, with its intra-op threads and its card, or processor, unless others are given."""
        if card is not None:
            name: str | None = card
        elif device == "cuda":
            found = driver.read_card()
            name = None if found is None else found.name
        else:
            name = str(describe_hardware(device, 1)["name"])
        return cls(device, name, threads or torch.get_num_threads())

    def best(self, described: Mapping[Path, Mapping[str, Any]]) -> Path | None:
        """The file measured on such hardware: of several the one with threads nearest to these, then the newest.

        Args:
            described: each file's metadata.
        """
        hardware = {path: metadata.get("hardware", {}) for path, metadata in described.items()}
        matching = [
            path
            for path, of in hardware.items()
            if self.name is not None and (of.get("device"), of.get("name")) == (self.device, self.name)
        ]

        def fit(path: Path) -> tuple[float, int, str]:
            threads = hardware[path].get("threads", 1) if self.device == "cpu" else self.threads
            return -abs(math.log(threads / self.threads)), path.stat().st_mtime_ns, path.name

        return max(matching, key=fit, default=None)
