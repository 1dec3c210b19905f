# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Time fused kernels: warm-up, then interleaved repeats in shuffled order; every sample is kept.

Cache state. Before every run a kernel's tables move to windows of the arena that no recent run has touched, so the
forward pass reads cold rows. Indices, offsets and the output gradient are as warm as a previous layer leaves them. On
CUDA the L2 cache is overwritten before either pass. On the CPU the backward pass finds what its own forward pass left:
emptying the caches takes longer than most kernels.

Clock. On the CPU the processor time of one thread counts, which others on the machine do not add to; kernels of several
threads take the wall clock.

Allocator. Outputs and gradients lie in memory that an earlier run has freed, as under CUDA's caching allocator. glibc's
malloc returns blocks of over 32 MiB to the system; a kernel that faults them in again may take three times as long.

Shapes: N kernels, R repeats, 2 (forward, backward).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dreamshard_planner.errors import TaskError
from dreamshard_planner.measure.hardware import check_kernels
from dreamshard_planner.measure.kernels import FusedKernel

_FLUSH_BYTES, _MAX_FLUSHES = 512 << 20, 16
"""Bytes written before each pass on CUDA, many times any L2, and how often at most: the host queues the pass
meanwhile."""


class Samples(NamedTuple):
    """Timed runs of kernels."""

    samples_ms: Tensor
    """Times [N, R, 2] float64."""
    reference_ms: Tensor
    """Times [N, R, 2] float64 of the reference kernel, run right before each of them."""
    launch_bound_N: Tensor
    """Share of the passes, reference included, during which a GPU may have waited for the host."""


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_MALLOC = {
    _M_MMAP_MAX: (0, int(os.environ.get("MALLOC_MMAP_MAX_") or 65536)),
    _M_TRIM_THRESHOLD: ((1 << 31) - 1, int(os.environ.get("MALLOC_TRIM_THRESHOLD_") or 64 << 20)),
}
"""Settings that keep all memory, and those that this process was started with, else glibc's after a process has freed
large blocks."""


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Keep memory that this process frees until the end, if malloc is glibc's."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    try:
        for option, (kept, _) in _MALLOC.items():
            libc.mallopt(option, kept)
        yield
    finally:
        for option, (_, usual) in _MALLOC.items():
            libc.mallopt(option, usual)
        libc.malloc_trim(0)  # the heap of a long collection would grow around live blocks


@freed_memory_kept()
@torch.enable_grad()  # whatever the caller's state
def time_groups(
    kernels: Sequence[FusedKernel],
    reference: FusedKernel,
    repeats: int,
    warmup: int = 1,
    generator: torch.Generator | None = None,
) -> Samples:
    """Time each kernel ``repeats`` times: ``forward()``, then ``backward()`` with the fused optimizer.

    Every round runs all kernels once, in an order of its own, so that a slow spell of the machine hits them alike.

    Args:
        kernels: all on one device.
        reference: a kernel to run right before each of the others; its times tell how fast the machine was then.
        repeats: timed rounds, at least 1.
        warmup: untimed rounds before.
        generator: of the order. Default: seeded with 0.

    Raises DreamShardError if there is nothing to time, or FBGEMM runs its reference kernels in this process.
    """
    if repeats < 1 or not kernels:
        raise TaskError(f"nothing to time: {len(kernels)} kernels, {repeats} repeats")
    check_kernels(reference.device)
    generator = generator or torch.Generator().manual_seed(0)
    for kernel in [*kernels, reference] * warmup:
        kernel.move()
        kernel.forward()  # FBGEMM's first run on CUDA waits for the device
        kernel.backward()
    runs = _CudaRuns(reference.device) if reference.device.type == "cuda" else _CpuRuns()
    marks: list[list[Any]] = [[] for _ in kernels]
    for _ in range(repeats):
        for position in torch.randperm(len(kernels), generator=generator).tolist():
            marks[position].append((runs(reference), runs(kernels[position])))
    return runs.samples(marks)


def core_use_ns() -> np.ndarray:
    """Return nanoseconds [2] that threads of this process have computed, and waited for a core; 0 if not counted."""
    used_ns = np.zeros(2, dtype=np.int64)
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended
            used_ns += np.array(path.read_text().split()[:2], dtype=np.int64)
    return used_ns


class _CpuRuns:
    """Timed runs on the CPU."""

    def __init__(self) -> None:
        self._now = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns

    def __call__(self, kernel: FusedKernel) -> tuple[int, int, int]:
        kernel.move()
        start = self._now()
        kernel.forward()
        middle = self._now()
        kernel.backward()
        return start, middle, self._now()

    def samples(self, marks: list[list[Any]]) -> Samples:
        """Return times of these runs of the reference and of kernels, [N, R, 2]."""
        reference_ms, kernel_ms = (torch.tensor(marks, dtype=torch.int64).diff(dim=-1).double() / 1e6).unbind(2)
        return Samples(kernel_ms, reference_ms, torch.zeros(len(marks)))


_CudaPass = tuple[torch.cuda.Event, torch.cuda.Event, bool]
"""Start and end of a forward or backward pass, and whether it is launch-bound: the device was at its start before the
host had queued all of it."""


class _CudaRuns:
    """Timed runs between device events, queued without waiting.

    A launch-bound pass tells the host's speed. The run is done again behind more flushes, which later runs keep. A run
    that is launch-bound behind most of them waits for the host by itself, and counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush_N = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._flushes = 1

    def __call__(self, kernel: FusedKernel) -> tuple[_CudaPass, _CudaPass]:
        while True:
            kernel.move()
            passes = self._run(kernel.forward), self._run(kernel.backward)
            if self._flushes >= _MAX_FLUSHES or not any(launch_bound for *_, launch_bound in passes):
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
        return start, end, launch_bound

    def samples(self, marks: list[list[Any]]) -> Samples:
        """See :meth:`_CpuRuns.samples`."""
        torch.cuda.synchronize()
        start, end, launch_bound = np.moveaxis(np.array(marks, dtype=object), -1, 0)  # each [N, R, 2, 2]
        elapsed_ms = np.vectorize(lambda start, end: start.elapsed_time(end), otypes=[np.float64])(start, end)
        reference_ms, kernel_ms = torch.from_numpy(elapsed_ms).unbind(2)
        return Samples(kernel_ms, reference_ms, torch.from_numpy(launch_bound.astype(np.float32)).mean((1, 2, 3)))
