# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Processes that are stopped, and what they were given to write on."""

import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 600
"""After which whatever is waited for hangs."""

_CONTEXT = multiprocessing.get_context("forkserver")


def start(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A process of its own, which need not import the package again."""
    process = _CONTEXT.Process(target=_interruptible, args=(function, *arguments))
    process.start()
    return process


def _interruptible(function: Callable[..., Any], *arguments: Any) -> None:
    """Call it where SIGINT counts: what a shell starts in the background ignores it, and so would this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)


def wait_for(condition: Callable[[], bool], *processes: BaseProcess) -> None:
    """Until it holds; fails where a process ends before, or nothing happens."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert all(process.is_alive() for process in processes), [process.exitcode for process in processes]
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.002)


def ended(*processes: BaseProcess) -> list[int]:
    for process in processes:
        process.join(PATIENCE_SECONDS)
    hanging = [process for process in processes if process.is_alive()]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {len(processes)} processes hang"
    return [process.exitcode for process in processes]


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """No file of this process grows further, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def dreamshard(arguments: Sequence[str], stderr: Path, file_bytes: int | None = None) -> None:
    """The command in this process, which is one of :func:`start`.

    Args:
        stderr: file for what it says.
        file_bytes: no file may grow beyond, as on a disk that fills up while the command runs.
    """
    from dreamshard_planner import cli
    from dreamshard_planner.measure import kernels
    from dreamshard_planner.support import files

    kernels._ARENA_BYTES = 1 << 26  # filling more takes longer than what is measured in it
    sys.stderr = stderr.open("w", buffering=1)
    if file_bytes is not None:
        files.MIN_FREE_BYTES = 1  # there was room when it began
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    sys.argv = ["dreamshard", *arguments]
    cli.main()
