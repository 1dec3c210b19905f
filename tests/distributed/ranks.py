# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Run a function on several ranks, each a process of its own with one thread, and collect what they return."""

import gc
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec.distributed import comm

from tests.faults import PATIENCE_SECONDS
from tests.torchrun import assert_no_process_group

TIMEOUT_SECONDS = PATIENCE_SECONDS


@dataclass(frozen=True)
class Rank:
    rank: int
    world_size: int
    device: torch.device


def gpu_ranks() -> int:
    """One for each GPU; skips where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("NCCL ranks need a GPU each; this machine has none")
    return torch.cuda.device_count()


def run_on_ranks(function: Callable[..., Any], *args: Any, world_size: int, backend: str = "gloo") -> list[Any]:
    """``function(Rank, *args)`` on every rank of a process group; returns their results in rank order.

    Args:
        function: importable by name; it, its arguments and its results must pickle.
        backend: ``gloo`` on CPU, ``nccl`` with one GPU per rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: some rank failed; holds its traceback.
        TimeoutError: the ranks took longer than ``TIMEOUT_SECONDS``; they have been ended.
    """
    # The store listens on a port that the system chose before any rank starts: no race for a free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank_main,
            (world_size, store.port, backend, folder, function, args),
            nprocs=world_size,
            join=False,
            start_method="spawn" if backend == "nccl" else "forkserver",  # asking for GPUs rules forks out
        )
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} on {world_size} ranks took over {TIMEOUT_SECONDS} s")
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(world_size)]


def _rank_main(
    rank: int, world_size: int, port: int, backend: str, folder: str, function: Callable[..., Any], args: tuple
) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in local.items()})
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    timeout = timedelta(seconds=TIMEOUT_SECONDS // 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    result = function(Rank(rank, world_size, device), *args)
    comm._INTRA_PG = comm._CROSS_PG = None  # TorchRec keeps the groups of hosts for ever
    gc.collect()  # models are cyclic, and hold the group
    dist.destroy_process_group()
    if backend == "gloo":  # else its threads can abort this process at its exit, rarely
        assert_no_process_group()
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
