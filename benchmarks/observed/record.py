# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Rows of models in a file, so that what was interrupted goes on."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """A JSON line of each model; on stderr as well, or on it alone."""

    path: Path | None
    settings: dict[str, Any]
    """Of all rows: others are another record's."""

    def rows(self) -> list[dict[str, Any]]:
        """Those that are there.

        Raises:
            ValueError: they are of other settings.
        """
        if self.path is None or not self.path.exists():
            return []
        rows = [json.loads(line) for line in self.path.read_text().splitlines()]
        settings = json.loads(json.dumps(self.settings))
        if any(row["settings"] != settings for row in rows):
            raise ValueError(f"{self.path} has rows of other settings: give another file")
        return rows

    def add(self, row: dict[str, Any]) -> None:
        """Another one."""
        line = json.dumps({**row, "settings": self.settings})
        print(line, file=sys.stderr, flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(line + "\n")
