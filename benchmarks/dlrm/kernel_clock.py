# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How long the fused lookup kernels of a sharded model really take while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn


class KernelClock:
    """Times the fused lookup kernels of one rank in a training model: forward, and backward with the optimizer.

    Args:
        model: sharded.
        device: of its kernels.
        now: seconds, where that is the CPU.
    """

    def __init__(self, model: nn.Module, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._cuda, self._host_now = device.type == "cuda", now
        self._marks: list[tuple[int, Any, Any]] = []
        self.on = False
        # Sharded modules keep their lookups in a plain list, out of reach of modules().
        lookups = [lookup for module in model.modules() for lookup in getattr(module, "_lookups", ())]
        for kernel in (module for lookup in lookups for module in lookup.modules()):
            if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
                starts: list[Any] = []
                kernel.register_forward_pre_hook(lambda *_, starts=starts: starts.append(self._now()))
                kernel.register_forward_hook(lambda *args, starts=starts: self._after_forward(starts.pop(), args[-1]))

    def _now(self) -> Any:
        if not self._cuda:
            return self._host_now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _after_forward(self, start: Any, output: Tensor) -> None:
        if self.on:
            self._marks.append((0, start, self._now()))
            starts: list[Any] = []
            output.grad_fn.register_prehook(lambda *_: starts.append(self._now()))
            output.grad_fn.register_hook(lambda *_: self._marks.append((1, starts.pop(), self._now())))

    def per_step_ms(self, steps: int) -> list[float]:
        """Forward and backward ms per step since the last call, over the rank's kernels; the device must be idle."""
        sums_ms = [0.0, 0.0]
        for stage, start, end in self._marks:
            sums_ms[stage] += start.elapsed_time(end) if self._cuda else 1e3 * (end - start)
        self._marks.clear()
        return [total_ms / steps for total_ms in sums_ms]
