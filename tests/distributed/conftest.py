# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fixtures that launch distributed tests: two gloo ranks anywhere, NCCL on all GPUs of a node that has several."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ranks import gpu_ranks, run_on_ranks


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def launch(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``launch(function, *args)`` runs ``function(Rank, *args)`` on all ranks; ``world_size=`` asks for fewer."""
    if request.param == "gloo":
        return partial(run_on_ranks, world_size=2, backend="gloo")
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip(f"NCCL ranks need a GPU each and at least two; this machine has {gpus}")
    return partial(run_on_ranks, world_size=gpus, backend="nccl")


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def launch_any(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Launch on two gloo ranks, or on all GPUs, also a single one."""
    if request.param == "gloo":
        return partial(run_on_ranks, world_size=2, backend="gloo")
    return partial(run_on_ranks, world_size=gpu_ranks(), backend="nccl")
