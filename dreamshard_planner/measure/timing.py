# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Time fused kernels: warm-up, interleaved repeats in shuffled order, every sample kept; on the CPU, a run during
which the system gave the core to somebody else for more than a hundredth of it is no sample, and done again.

Cache state. Before every run a kernel's tables move to windows of the arena that no recent run has touched, so
the forward pass reads cold rows. Indices, offsets and the output gradient are as warm as a previous layer leaves
them. On the CPU the backward pass finds what its own forward pass left in the caches (emptying them costs more than
most kernels take); on CUDA the L2 cache is overwritten before either pass.

State of the allocator. Outputs and gradients lie in memory that an earlier run has freed, as under CUDA's caching
allocator, jemalloc or tcmalloc. glibc's malloc hands blocks of over 32 MiB back to the system unless the heap
happens to have room for them; then every run faults all their pages in again, and a kernel may take three times as
long as in the next process.

Shape letters: R repeats, 2 (forward, backward).
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dreamshard_planner.errors import TaskError
from dreamshard_planner.measure.hardware import check_kernels
from dreamshard_planner.measure.kernels import FusedKernel

_FLUSH_BYTES, _MAX_FLUSHES = 512 << 20, 16
"""Written before each timed pass on CUDA: many times any L2. While the device writes, the host queues the pass; where
that takes longer, the device writes as often as it has to, up to the second figure."""


_ATTEMPTS, _STOLEN_SHARE, _LONG_MS = 3, 0.01, 250.0
"""Runs by the wall clock at most, to get one during which others had the core for no more than this share of it: on a
busy core they always do. Runs longer than the last figure are kept: a time slice of a few ms matters little there."""


@dataclass(frozen=True, slots=True)
class Samples:
    """All timed runs of one kernel."""

    samples_ms: Tensor
    """[R, 2] float64: forward and backward of each round, in the order of the rounds."""

    reference_ms: Tensor | None = None
    """[R, 2] float64: the reference kernel, run right before each of them."""

    launch_bound: float = 0.0
    """Share of the passes, of the kernel and its reference, during which a GPU may have waited for the host: these took
    as long as it takes to launch them."""

    @property
    def median_ms(self) -> Tensor:
        """[2] medians over the rounds."""
        return self.samples_ms.quantile(0.5, dim=0)

    @property
    def spread(self) -> Tensor:
        """[2] mean absolute deviation from the median, as a share of the median."""
        return (self.samples_ms - self.median_ms).abs().mean(0) / self.median_ms


@contextmanager
def pinned(threads: int, cores: Iterable[int] | None = None) -> Iterator[None]:
    """Run kernels with ``threads`` intra-op threads, on ``cores`` only where given; restored afterwards.

    Threads that the kernels start inside inherit the cores; where the system has no affinities, none are set.
    """
    if threads < 1:
        raise TaskError(f"kernels need at least one thread, got {threads}")
    threads_before, affinities = torch.get_num_threads(), {}
    torch.set_num_threads(threads)
    try:
        if cores is not None and hasattr(os, "sched_setaffinity"):
            wanted = set(cores)
            for task in Path("/proc/self/task").iterdir():
                affinities[int(task.name)] = os.sched_getaffinity(int(task.name))
                os.sched_setaffinity(int(task.name), wanted)
        yield
    finally:
        torch.set_num_threads(threads_before)
        for task_id, before in affinities.items():
            with suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(task_id, before)


def rank_cores(local_rank: int, local_world_size: int) -> list[int] | None:
    """Cores for one of the ranks that share this host, so that none gets in another's way; None where there are
    fewer cores than ranks, or no affinities."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[local_rank::local_world_size] if len(cores) >= local_world_size else None


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_KEEP_ALL = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: (1 << 31) - 1}
_USUAL = {
    _M_MMAP_MAX: int(os.environ.get("MALLOC_MMAP_MAX_") or 65536),
    _M_TRIM_THRESHOLD: int(os.environ.get("MALLOC_TRIM_THRESHOLD_") or 64 << 20),
}
"""What this process was started with, else glibc's default, and what its trim threshold adapts to as a process frees
large blocks."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Where malloc is glibc's: what this process frees, in any thread, goes back to the system at the end only."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    if libc is None or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    try:
        for option, value in _KEEP_ALL.items():
            libc.mallopt(option, value)
        yield
    finally:
        for option, value in _USUAL.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)  # the heap of a long collection would grow around what lives on


@freed_memory_kept()
@torch.enable_grad()  # whatever the caller does: a search that measures has no use for gradients of its own
def time_groups(
    kernels: Sequence[FusedKernel],
    repeats: int,
    warmup: int = 1,
    generator: torch.Generator | None = None,
    reference: FusedKernel | None = None,
) -> list[Samples]:
    """Time each kernel ``repeats`` times.

    Every round runs all kernels once, in an order of its own, so that a slow spell of the machine hits them alike.
    The backward pass is timed as ``output.backward(gradient)``: fused optimizer included.

    Args:
        kernels: all on one device.
        repeats: timed rounds, at least 1.
        warmup: untimed rounds before.
        generator: of the order. Default: seeded with 0.
        reference: a kernel to run right before each of the others, whose times tell how fast the machine was then.

    Raises:
        DreamShardError: FBGEMM runs its reference kernels in this process.
    """
    if repeats < 1 or not kernels:
        raise TaskError(f"nothing to time: {len(kernels)} kernels, {repeats} repeats")
    check_kernels(kernels[0].device)
    generator = generator or torch.Generator().manual_seed(0)
    runs = _CudaRuns(kernels[0].device) if kernels[0].device.type == "cuda" else _CpuRuns()
    for kernel in [*kernels, *([reference] if reference else [])] * warmup:
        runs.warm_up(kernel)
    marks: list[list[Any]] = [[] for _ in kernels]
    reference_marks: list[list[Any]] = [[] for _ in kernels]
    for _ in range(repeats):
        for position in torch.randperm(len(kernels), generator=generator).tolist():
            if reference:
                reference_marks[position].append(runs(reference))
            marks[position].append(runs(kernels[position]))
    return [
        Samples(
            runs.elapsed_ms(rounds),
            runs.elapsed_ms(reference_rounds) if reference else None,
            runs.launch_bound(rounds + reference_rounds),
        )
        for rounds, reference_rounds in zip(marks, reference_marks, strict=True)
    ]


@dataclass
class Clock:
    """What kernels on the CPU are timed by, and of all their runs, how long they took, and for how long of that others
    had the core; of several threads, interrupted runs count in full."""

    by_thread: bool = False
    run_ns: int = 0
    others_ns: float = 0.0

    @property
    def others_share(self) -> float:
        return self.others_ns / max(1, self.run_ns)


_CLOCK: ContextVar[Clock | None] = ContextVar("_CLOCK", default=None)


@contextmanager
def processor_time(by_thread: bool = True) -> Iterator[Clock]:
    """Inside, kernels on the CPU are timed by the seconds that their thread computes, not by the wall clock: for
    machines that others compute on as well. Only with one intra-op thread; what others do to caches and memory is still
    in the times. What it yields counts how long others had the core, also where the wall clock is to count."""
    token = _CLOCK.set(clock := Clock(by_thread))
    try:
        yield clock
    finally:
        _CLOCK.reset(token)


class _CpuRuns:
    """Runs with the host clock, or with that of the thread (:func:`processor_time`). By the host clock, a run during
    which others had the core tells nothing of its kernel, and is done again."""

    def __init__(self) -> None:
        self._clock, self._threads = _CLOCK.get() or Clock(), torch.get_num_threads()
        if self._clock.by_thread and self._threads > 1:
            raise TaskError(f"processor time is that of one thread, but {self._threads} compute")
        self._now = time.thread_time_ns if self._clock.by_thread else time.perf_counter_ns

    def warm_up(self, kernel: FusedKernel) -> None:
        """A run that counts for nothing."""
        self._run(kernel)

    def __call__(self, kernel: FusedKernel) -> tuple[int, int, int]:
        for _ in range(_ATTEMPTS):
            begin_ns, before = time.perf_counter_ns(), _usage()
            marks = self._run(kernel)
            run_ns = time.perf_counter_ns() - begin_ns
            stolen_ns = self._stolen_ns(run_ns, before, _usage())
            long = run_ns > _LONG_MS * 1e6
            if self._clock.by_thread or long or stolen_ns <= _STOLEN_SHARE * run_ns:
                break
        self._clock.run_ns += run_ns
        self._clock.others_ns += min(stolen_ns, run_ns)
        return marks

    def _stolen_ns(self, run_ns: int, before: tuple[int, int], after: tuple[int, int]) -> float:
        """For how long others had the core; of several threads only known where nobody had."""
        if before[0] == after[0]:
            return 0.0
        return run_ns - (after[1] - before[1]) if self._threads == 1 else math.inf

    def _run(self, kernel: FusedKernel) -> tuple[int, int, int]:
        kernel.move()
        start = self._now()
        kernel.forward()
        middle = self._now()
        kernel.backward()
        return start, middle, self._now()

    def elapsed_ms(self, rounds: list[tuple[int, int, int]]) -> Tensor:
        return torch.tensor(rounds, dtype=torch.int64).diff(dim=1).double() / 1e6

    def launch_bound(self, rounds: list[tuple[int, int, int]]) -> float:
        """Launching is part of computing here."""
        return 0.0


def _usage() -> tuple[int, int]:
    """How often the system has taken a core from this process so far, to let somebody else compute; and for how many
    nanoseconds this thread has computed."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw, time.thread_time_ns()


@dataclass(frozen=True, slots=True)
class _CudaPass:
    """A forward or backward pass between two events."""

    start: torch.cuda.Event
    end: torch.cuda.Event
    launch_bound: bool
    """Whether the device was at its start before the host had queued all of it."""


class _CudaRuns:
    """Runs with device events, queued without waiting; one synchronise when times are read.

    A launch-bound pass tells how fast the host is. The run is done again behind more flushes, which stay for the runs
    to come; what is launch-bound behind most of them waits for the host by itself, and is kept as it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush_N = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flushes = 1

    def warm_up(self, kernel: FusedKernel) -> None:
        """A run that counts for nothing: FBGEMM's first one reads a counter from the device, and waits for it."""
        kernel.move()
        kernel.forward()
        kernel.backward()

    def __call__(self, kernel: FusedKernel) -> tuple[_CudaPass, _CudaPass]:
        while True:
            kernel.move()
            passes = self._run(kernel.forward), self._run(kernel.backward)
            if self._flushes >= _MAX_FLUSHES or not any(timed.launch_bound for timed in passes):
                return passes
            self._flushes *= 2

    def _run(self, run: Callable[[], object]) -> _CudaPass:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(self._flushes):
            self._flush_N.zero_()
        start.record()
        run()
        launch_bound = start.query()
        end.record()
        return _CudaPass(start, end, launch_bound)

    def elapsed_ms(self, rounds: list[tuple[_CudaPass, _CudaPass]]) -> Tensor:
        torch.cuda.synchronize()
        times = [[timed.start.elapsed_time(timed.end) for timed in passes] for passes in rounds]
        return torch.tensor(times, dtype=torch.float64)

    def launch_bound(self, rounds: list[tuple[_CudaPass, _CudaPass]]) -> float:
        """Share of the passes."""
        return sum(timed.launch_bound for passes in rounds for timed in passes) / (2 * len(rounds))
