# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Fused FBGEMM kernels of groups of shards, as TorchRec builds them, and their times.

Building a kernel takes longer than running it: weights are allocated and zeroed, indices drawn. An :class:`Arena` does
both once. Its weights are one buffer, and every table of every kernel is a window of it. Windows of a kernel overlap if
its tables are larger than the arena together: kernels touch only the rows that they look up, a small share of a table.
Indices are drawn once per table and batch size.

Times are those of interleaved repeats in shuffled order, after a warm-up; every sample is kept.

Cache state. Before every run a kernel's tables move to windows of the arena that no recent run has touched, so the
forward pass reads cold rows. Indices, offsets and the output gradient are as warm as a previous layer leaves them. On
CUDA the L2 cache is overwritten before either pass. On the CPU the backward pass finds what its own forward pass left:
emptying the caches takes longer than most kernels.

Clock. On the CPU the processor time of one thread counts, which others on the machine do not add to; kernels of several
threads take the wall clock.

Allocator. Outputs and gradients lie in memory that an earlier run has freed, as under CUDA's caching allocator. glibc's
malloc returns blocks of over 32 MiB to the system; a kernel that faults them in again may take three times as long.

Shapes: L lookups of a kernel, F features, B batch, O outputs (vectors x dim), T tables, N elements, M moves, K reuse
bins, R distinct rows; of samples N kernels, R repeats, 2 (forward, backward).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode, SplitState
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from dreamshard_planner.errors import TaskError
from dreamshard_planner.measure.hardware import check_kernels
from dreamshard_planner.workload.reuse import BIN_UPPER, NUM_REUSE_BINS, TOP_COUNT
from dreamshard_planner.workload.tables import Workload

GROUP_FIELDS = ("batch_size", "weight_bytes", "pooled", "weighted", "optimizer", "memory")
"""Fields in which all shards of a fused kernel agree."""

_OPTIMIZER = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "other": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
"""Measured optimizers; unknown ones are costed like row-wise Adagrad."""
_PRECISION: dict[float, SparseType] = {4: SparseType.FP32, 2: SparseType.FP16}
_ALIGN = 64  # elements: every window starts on a cache line of its own
_LEARNING_RATE = 1e-3  # small: thousands of updates of one buffer must not overflow
_ARENA_BYTES = 2 << 30
_INPUT_BYTES = 1 << 30  # kept, before all are drawn anew
_MOVES = 32  # drawn at once
_INPUT_FIELDS = attrgetter(
    "name", "rows", "batch_size", "num_features", "pooling_factor", "distinct_rows", "reuse_histogram"
)


class Arena:
    """Weights, gradients and indices that measured kernels share.

    Args:
        device: where kernels run.
        size_bytes: of the weight buffer, one for each weight precision in use. Must exceed the last-level cache many
            times, or runs find warm rows. Optimizer states take as much again. Default: 2 GiB on a CPU, a sixth of a
            GPU's memory.
        seed: of the random windows.
    """

    def __init__(self, device: torch.device | str, size_bytes: int | None = None, seed: int = 0) -> None:
        self.device = torch.device(device)
        if size_bytes is None:
            on_cuda = self.device.type == "cuda"
            size_bytes = torch.cuda.get_device_properties(self.device).total_memory // 6 if on_cuda else _ARENA_BYTES
        self.size_bytes = size_bytes
        self._generator = torch.Generator().manual_seed(seed)
        self._weights: dict[torch.dtype, Tensor] = {}
        self._states_N = self._noise_N = torch.zeros(0, device=self.device)
        self._inputs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._input_bytes = 0

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the weight buffer [N] of one precision."""
        if dtype not in self._weights:
            # A repeated pattern touches every page without gigabytes of random numbers.
            pattern = torch.empty(1 << 20, device=self.device, dtype=torch.float32)
            pattern.uniform_(-0.05, 0.05, generator=torch.Generator(self.device).manual_seed(0))
            count = -(-self.size_bytes // (dtype.itemsize * pattern.numel()))
            self._weights[dtype] = pattern.to(dtype).repeat(count)
        return self._weights[dtype]

    def states(self, elements: int) -> Tensor:
        """Return a buffer [N] of at least ``elements`` optimizer states."""
        if self._states_N.numel() < elements:
            self._states_N = torch.full((elements,), 0.01, device=self.device)
        return self._states_N

    def noise(self, elements: int) -> Tensor:
        """Return fixed random numbers [elements] in [-0.5, 0.5), for gradients and per-sample weights."""
        if self._noise_N.numel() < elements:
            noise_N = torch.empty(elements + elements // 2, device=self.device)
            self._noise_N = noise_N.uniform_(-0.5, 0.5, generator=torch.Generator(self.device).manual_seed(1))
        return self._noise_N[:elements]

    def inputs(self, workload: Workload, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return a workload's indices [L] and lengths [F * B], drawn on the device once, folded into ``rows``."""
        key = (*_INPUT_FIELDS(workload), rows, seed)
        if key not in self._inputs:
            if self._input_bytes > _INPUT_BYTES:
                self._inputs, self._input_bytes = {}, 0
            digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
            generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little"))
            indices_L, lengths_FB = draw_inputs(workload, generator)
            self._inputs[key] = indices_L % rows, lengths_FB
            self._input_bytes += indices_L.nbytes + lengths_FB.nbytes
        return self._inputs[key]

    def windows(self, sizes: Sequence[int], capacity: int) -> list[int]:
        """Return random starts for windows of ``sizes`` elements in a buffer of ``capacity``,
        one after the other if all fit, else anywhere."""
        padded = list(map(_aligned, sizes))
        total = sum(padded)
        share_T = torch.rand(len(sizes), generator=self._generator, dtype=torch.float64).tolist()
        if total <= capacity:
            start = int(share_T[0] * ((capacity - total) // _ALIGN + 1)) * _ALIGN
            return list(accumulate(padded[:-1], initial=start))
        return [
            int(share * ((capacity - size) // _ALIGN + 1)) * _ALIGN for share, size in zip(share_T, sizes, strict=True)
        ]


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def draw_inputs(workload: Workload, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw indices [L] and lengths [F * B] by a workload's histogram and pooling factor, on the generator's device.

    Lookups spread evenly over features, and at random over samples. A workload with lookups gets at least one.
    """
    features, batch = workload.num_features, workload.batch_size
    lookups = max(1, round(workload.lookups)) if workload.lookups > 0 else 0
    lengths, indices = [], []
    for feature in range(features):
        count = lookups // features + (feature < lookups % features)
        sample_L = torch.randint(batch, (count,), generator=generator, device=generator.device)
        lengths.append(torch.bincount(sample_L, minlength=batch))
        if count:
            distinct = min(count, max(1, round(workload.distinct_rows / features)))
            histogram = workload.reuse_histogram
            indices.append(draw_indices(histogram, workload.rows, count, generator, distinct))
    indices_L = torch.cat(indices) if indices else torch.zeros(0, dtype=torch.int64, device=generator.device)
    return indices_L.long(), torch.cat(lengths)


def draw_indices(
    histogram: Sequence[float], rows: int, lookups: int, generator: torch.Generator, distinct_rows: float
) -> Tensor:
    """Draw indices, int64 [lookups], of a table with so many rows, on the generator's device. They realise a histogram
    [K] of distinct rows as far as integers allow."""
    device = generator.device
    if lookups <= 0:
        return torch.empty(0, dtype=torch.int64, device=device)
    share_K = torch.as_tensor(histogram, dtype=torch.float64, device=device).clamp_min(0)
    distinct = max(1, min(round(distinct_rows), rows, lookups))
    if not share_K.any():
        share_K[0] = 1.0
    edge_K = (share_K.cumsum(0) / share_K.sum() * distinct).round()
    edge_K[-1] = distinct
    per_bin_K = edge_K.diff(prepend=edge_K.new_zeros(1)).clamp_min(0).long()
    lower_K = torch.tensor((1, *(edge + 1 for edge in BIN_UPPER)), device=device)
    upper_K = torch.tensor((*BIN_UPPER, TOP_COUNT), device=device)
    bin_R = torch.repeat_interleave(torch.arange(NUM_REUSE_BINS, device=device), per_bin_K)
    low_R, high_R = lower_K[bin_R].double(), upper_K[bin_R].double()
    uniform_R = torch.rand(distinct, generator=generator, dtype=torch.float64, device=device)
    count_R = (low_R * ((high_R + 1) / low_R) ** uniform_R).floor().clamp(low_R, high_R)
    count_R = _fit_total(count_R, low_R, high_R, lookups)
    if distinct <= rows // 4:  # rejection is cheap, and a permutation of all rows is not
        row_R = torch.randint(rows, (2 * distinct,), generator=generator, device=device).unique()
        row_R = row_R[torch.randperm(len(row_R), generator=generator, device=device)][:distinct]
        while len(row_R) < distinct:
            more = torch.randint(rows, (distinct,), generator=generator, device=device)
            row_R = torch.cat([row_R, more]).unique()[:distinct]
    else:
        row_R = torch.randperm(rows, generator=generator, device=device)[:distinct]
    index_N = torch.repeat_interleave(row_R[torch.randperm(distinct, generator=generator, device=device)], count_R)
    return index_N[torch.randperm(lookups, generator=generator, device=device)]


def _fit_total(count_R: Tensor, low_R: Tensor, high_R: Tensor, total: int) -> Tensor:
    """Change counts until they sum to ``total`` >= R, within their bins if possible; int64 [R]."""
    count_R, low_R, high_R = count_R.long(), low_R.long(), high_R.long()
    while (missing := total - int(count_R.sum())) != 0:
        room_R = (high_R - count_R if missing > 0 else count_R - low_R).clamp_min(0)
        if not room_R.any():  # all bins are full
            room_R = torch.full_like(count_R, missing) if missing > 0 else count_R - 1
        moved_R = (room_R * min(1.0, abs(missing) / int(room_R.sum()))).long()
        if not moved_R.any():
            moved_R[room_R.nonzero()[-abs(missing) :, 0]] = 1  # of the rows that are read most
        count_R += moved_R if missing > 0 else -moved_R
    return count_R


class _WindowedTBE(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's fused module on an arena's buffers, without weights and states of its own."""

    def _apply_split(self, split: SplitState, prefix: str, dtype: torch.dtype, **kwargs: Any) -> None:
        # Sizes of zero allocate nothing; use_window() sets the real buffers.
        super()._apply_split(split._replace(dev_size=0, host_size=0), prefix, dtype, **kwargs)

    def use_window(self, prefix: str, buffer_N: Tensor, starts: list[int], offsets_F: Tensor) -> None:
        """Begin each table's weights (or states) at its start in the buffer; ``offsets_F`` has starts by feature."""
        on_host = self.use_cpu
        name = f"{prefix}_host" if on_host else f"{prefix}_dev"
        if getattr(self, name).data_ptr() != buffer_N.data_ptr():
            delattr(self, name)
            setattr(self, name, torch.nn.Parameter(buffer_N) if on_host else buffer_N)
        setattr(self, f"{prefix}_physical_offsets", starts)
        setattr(self, f"{prefix}_offsets", offsets_F)


class FusedKernel:
    """A fused kernel of a group of shards: forward, and backward with the fused optimizer.

    Args:
        workloads: at least one, equal in :data:`GROUP_FIELDS`; sequences also in dim.
        arena: shared buffers, on the device where to run.
        seed: of indices and lengths; a table has the same ones in every kernel.

    Raises:
        TaskError: the workloads cannot share a kernel, or no kernel for them exists; names the table.
    """

    def __init__(self, workloads: Sequence[Workload], arena: Arena, seed: int = 0) -> None:
        check_group(workloads)
        first, self.arena, self.device = workloads[0], arena, arena.device
        on_cpu = self.device.type == "cpu"
        precision, self._has_states = _PRECISION[first.weight_bytes], first.optimizer != "sgd"
        self._weights_N = arena.weights(precision.as_dtype())
        # States lie where the weights do: no more weights than fp32 states fit there.
        self._capacity = self._weights_N.nbytes // (4 if self._has_states else self._weights_N.itemsize)
        held = [min(w.rows, self._capacity // w.dim) for w in workloads]
        self._sizes = [rows * w.dim for rows, w in zip(held, workloads, strict=True)]
        inputs = [arena.inputs(w, rows, seed) for w, rows in zip(workloads, held, strict=True)]
        self.indices_L = torch.cat([indices for indices, _ in inputs])
        lengths_FB = torch.cat([lengths for _, lengths in inputs])
        self.offsets_FB = torch.nn.functional.pad(lengths_FB.cumsum(0), (1, 0))
        lookups = self.indices_L.numel()
        self.sample_weights_L = arena.noise(lookups) if first.weighted else None
        location = EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        self.module = _WindowedTBE(
            [(rows, w.dim, location, compute) for rows, w in zip(held, workloads, strict=True)],
            feature_table_map=[t for t, w in enumerate(workloads) for _ in range(w.num_features)],
            weights_precision=precision,
            output_dtype=SparseType.FP32,
            optimizer=_OPTIMIZER[first.optimizer],
            pooling_mode=PoolingMode.SUM if first.pooled else PoolingMode.NONE,
            learning_rate=_LEARNING_RATE,
            device=self.device,
        )
        if first.pooled:
            shape = (first.batch_size, sum(w.num_features * w.dim for w in workloads))
        else:
            shape = (lookups, first.dim)
        self.grad_O = arena.noise(shape[0] * shape[1]).view(shape)
        self._output_O: Tensor | None = None
        self._moves: list[tuple[list[int], Tensor]] = []
        """First elements of the windows by table, and by feature on the device."""
        self.move()

    def move(self) -> None:
        """Move the tables to random windows of the arena, so that the next run finds cold rows."""
        if not self._moves:
            # A copy to a GPU waits for its queue, so that many moves are drawn at once.
            starts_MT = [self.arena.windows(self._sizes, self._capacity) for _ in range(_MOVES)]
            offsets = [[starts[table] for table in self.module.feature_table_map] for starts in starts_MT]
            offsets_MF = torch.tensor(offsets, dtype=torch.int64).to(self.device)
            self._moves = list(zip(starts_MT, offsets_MF.unbind(), strict=True))
        starts = self._moves.pop()
        self.module.use_window("weights", self._weights_N, *starts)
        if self._has_states:
            self.module.use_window("momentum1", self.arena.states(self._capacity), *starts)

    def forward(self) -> Tensor:
        """Run the forward pass, and return its output: [B, sum of F * dim] pooled, [L, dim] for sequences."""
        self._output_O = self.module(self.indices_L, self.offsets_FB, self.sample_weights_L)
        return self._output_O

    def backward(self) -> None:
        """Run the backward pass with the optimizer; each needs its own forward pass."""
        if self._output_O is None:
            raise RuntimeError("backward() needs a forward() before it")
        self._output_O.backward(self.grad_O)
        self._output_O = None


def check_group(workloads: Sequence[Workload]) -> None:
    """Raise TaskError, naming the table, unless one measured kernel can compute ``workloads`` together."""
    if not workloads:
        raise TaskError("a fused kernel needs at least one table")
    first = workloads[0]
    fields = GROUP_FIELDS if first.pooled else (*GROUP_FIELDS, "dim")
    for workload in workloads:
        for name in fields:
            ours, others = getattr(workload, name), getattr(first, name)
            if ours != others:
                raise TaskError(
                    f"table {workload.name!r} cannot share a fused kernel with {first.name!r}: "
                    f"{name} is {ours!r}, not {others!r}; put it into a group of its own"
                )
        is_known = workload.optimizer in _OPTIMIZER and workload.weight_bytes in _PRECISION
        weighs_sequences = workload.weighted and not workload.pooled
        if workload.dim % 4 or not is_known or workload.memory != "device" or weighs_sequences:
            raise TaskError(
                f"table {workload.name!r}: measured kernels have dims of multiples of 4, weights of 2 or 4 bytes in "
                f"device memory, an optimizer of {', '.join(_OPTIMIZER)}, and weighted lookups only with pooling, got "
                f"{workload}"
            )


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
