# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The errors a user can meet. Infeasible plans raise TorchRec's own ``PlannerError`` instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DreamShardError(Exception):
    """Root of the package's own errors."""


class CheckpointError(DreamShardError):
    """A checkpoint is missing, damaged, foreign or newer than this package; names the file."""


class DatasetError(DreamShardError):
    """A cost dataset is missing, damaged or of other hardware; names the file."""


class CalibrationRefused(DreamShardError):
    """A calibration left everything as it was, and says why; ``checks`` holds the errors that it found."""

    def __init__(self, reason: str, checks: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(reason)
        self.checks = checks


class ObservationError(DreamShardError, ValueError):
    """Observed training steps are missing, damaged, of other hardware or of another version; names the file."""


class PlanError(DreamShardError, ValueError):
    """A plan file is missing, damaged, foreign or newer than this package; names the file and the entry."""


class FileError(DreamShardError, OSError):
    """A file cannot be written, or another process is writing to it; names the file."""


class StatisticsError(DreamShardError, ValueError):
    """Table statistics hold an impossible value or name a feature that the model lacks."""


class MissingLibraryError(DreamShardError, ImportError):
    """torch, FBGEMM or TorchRec is not installed; says how it is."""


class TaskError(DreamShardError, ValueError):
    """A placement task is malformed: no devices, a table without rows, and the like."""


class InputWarning(UserWarning):
    """An input that can be planned but is probably a mistake; names the table."""
