# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fixtures that launch distributed tests: two gloo ranks anywhere, NCCL on all GPUs of a node that has several."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from ranks import gpu_ranks, run_on_ranks


def _launch(backend: str, least: int) -> Callable[..., list[Any]]:
    ranks = gpu_ranks() if backend == "nccl" else 2
    if ranks < least:
        pytest.skip(f"NCCL ranks need a GPU each and at least two; this machine has {ranks}")
    return partial(run_on_ranks, world_size=ranks, backend=backend)


BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=BACKENDS)
def launch(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``launch(function, *args)`` runs ``function(Rank, *args)`` on all ranks; ``world_size=`` asks for fewer."""
    return _launch(request.param, 2)


@pytest.fixture(scope="module", params=BACKENDS)
def launch_any(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Launch on two gloo ranks, or on all GPUs, also a single one."""
    return _launch(request.param, 1)
