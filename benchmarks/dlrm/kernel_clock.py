# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""How long the fused lookup kernels of a sharded model really take while it trains."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn

from dreamshard_planner.observing.hooks import Hooks, kernels_in, lookups_of
from dreamshard_planner.observing.recorder import DeviceClock, Step, StepRecorder

KERNELS = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
"""The second of data-parallel tables."""


class KernelClock:
    """Times the fused lookup kernels of one rank in a training model: forward, and backward with the optimizer.

    Args:
        model: sharded.
        device: of its kernels.
        processor_time: count the seconds that the CPU's thread computes, instead of those that pass.
    """

    def __init__(self, model: nn.Module, device: torch.device, processor_time: bool = False) -> None:
        self._recorder, self._computed = StepRecorder(DeviceClock(device)), processor_time
        hooks = Hooks(self._recorder)
        for kernel in (kernel for *_, lookup in lookups_of(model) for kernel in kernels_in(lookup)):
            if isinstance(kernel.emb_module, KERNELS):
                hooks.listen_to_kernel("kernels", kernel.emb_module, lambda *_: None)

    def start(self) -> None:
        """Time what is called from now on."""
        self._recorder.current = Step(0)

    def stop(self, steps: int) -> list[float]:
        """Forward and backward ms per step since the start, over the rank's kernels; the device must be idle."""
        step, self._recorder.current = self._recorder.current, None
        sums_ms = {"kernels forward": 0.0, "kernels backward": 0.0}
        for name, start, end, _ in step.intervals:
            if name in sums_ms:
                sums_ms[name] += self._recorder.clock.elapsed_ms(start, end, self._computed)
        return [total_ms / steps for total_ms in sums_ms.values()]
