# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Settings of the tests of benchmarks."""

import pytest

from dreamshard_planner.measure import kernels


@pytest.fixture(autouse=True)
def _small_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filling more memory takes longer than what is measured in it here."""
    monkeypatch.setattr(kernels, "_ARENA_BYTES", 1 << 26)
