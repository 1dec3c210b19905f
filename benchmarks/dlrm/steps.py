# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Training steps of many models side by side, a few of one after a few of another."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm.options import Config, Node
from dreamshard_planner import DreamShardPlanner, Observation, observe
from dreamshard_planner.measure.collect import REFERENCE_SETS
from dreamshard_planner.measure.kernels import Arena, FusedKernel
from dreamshard_planner.measure.timing import Samples, processor_time, time_groups
from dreamshard_planner.observing.hooks import DeviceClock, Hooks, Step, StepRecorder, kernels_in, lookups_of
from dreamshard_planner.observing.observation import rank_file

WARMUP_STEPS = 3
OBSERVED_STEPS = 50
KERNELS = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
"""The second of data-parallel tables."""


@dataclass(frozen=True)
class Trained:
    """Measurements of one rank, by planner."""

    blocks: dict[str, list[list[tuple[float, float, float]]]]
    """Milliseconds per step of each model's blocks: all of it, and forward and backward of its kernels."""
    losses: dict[str, list[list[float]]]
    """Losses of each model, by step."""
    reference_ms: float
    """Milliseconds of the reference set, median over the rounds."""


def train_side_by_side(build: Callable[[str], Trainee], config: Config, node: Node) -> Trained:
    """Build all models and train them, block by block in an order that is shuffled anew each round.

    Args:
        build: a model of a planner.
        config: how many models, blocks and steps, and how long.
        node: this rank.
    """
    order = random.Random(config.seed)
    arena = Arena(node.device, 2 << 30, seed=config.seed)
    reference = FusedKernel(REFERENCE_SETS[node.device.type], node.device, config.seed, arena)
    models = list(itertools.product(config.names, range(config.copies)))
    trainees = {(name, index): build(name) for name, index in order.sample(models, len(models))}
    reference_ms: list[float] = []

    def time_machine() -> None:
        reference_ms.append(float(time_reference(reference, config).median_ms.sum()))

    take_turns(trainees, config, node, order, time_machine)
    by_planner = {name: [trainees[name, index] for index in range(config.copies)] for name in config.names}
    losses = {name: [torch.stack(trainee.losses).tolist() for trainee in mine] for name, mine in by_planner.items()}
    if config.observe:
        seen = {name: trainees[name, 0].observed(OBSERVED_STEPS) for name in config.names}
        Observation.merge(seen).save(rank_file(Path(config.observe), node.rank))
    return Trained(
        {name: [trainee.blocks for trainee in mine] for name, mine in by_planner.items()},
        losses,
        float(np.median(reference_ms)),
    )


def take_turns(
    trainees: Mapping[Any, Trainee],
    config: Config,
    node: Node,
    order: random.Random,
    before_round: Callable[[], object] = lambda: None,
) -> None:
    """Train models that are there, a block of each in every round."""
    for trainee in trainees.values():
        trainee.train(WARMUP_STEPS, timed=False)
    deadline = time.monotonic() + (config.train_seconds or math.inf)
    for count in range(config.rounds):
        if count and any(node.gather(time.monotonic() > deadline)):
            break
        before_round()
        for name in order.sample(sorted(trainees), len(trainees)):
            trainees[name].train(config.block)


def time_reference(kernel: FusedKernel, config: Config) -> Samples:
    """The set that every collection times beside its sets: how fast the machine is just now."""
    with processor_time() if config.processor_time else nullcontext():
        return time_groups([kernel], repeats=3)[0]


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


class Trainee:
    """One planner's model in TorchRec's train pipeline."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        node: Node,
        processor_time: bool = False,
        planner: DreamShardPlanner | None = None,
        pipelined: bool = True,
    ) -> None:
        """``processor_time``: of kernels on a CPU; ``planner`` predicts what is observed, by whatever plan the model is
        sharded; without ``pipelined`` its forward pass waits for lookups, so that what they take can be observed."""
        self.node, self.model, self._planner = node, model, planner
        self.clock = KernelClock(model, node.device, processor_time)
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        dense_optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.01))
        optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
        pipeline = TrainPipelineSparseDist if pipelined else TrainPipelineBase
        self._pipeline = pipeline(model, optimizer, node.device)
        self._batches: Iterator[Batch] = itertools.cycle(batches)
        self.losses: list[Tensor] = []
        self.blocks: list[tuple[float, float, float]] = []
        self.computed_ms: list[float] = []
        """Per step of each block, by all threads of this process."""

    def observed(self, steps: int) -> Observation:
        """Train and return an observation of this many steps on this rank."""
        with observe(self.model, self._planner, every=max(1, steps // 4)) as seen:
            self.train(steps + 1, timed=False)
        return seen.observation()

    def train(self, steps: int, timed: bool = True) -> tuple[float, float]:
        """Train some steps; if timed, keep the milliseconds per step: all, and the kernels' forward and backward.

        Returns:
            Milliseconds per step that passed, and that this process computed.
        """
        self.node.synchronize()
        dist.barrier()
        if timed:
            self.clock.start()
        start, computed = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.losses.append(self._pipeline.progress(self._batches)[0])
        self.node.synchronize()
        step_ms, computed_ms = (
            1e3 * seconds / steps for seconds in (time.perf_counter() - start, time.process_time() - computed)
        )
        if timed:
            self.blocks.append((step_ms, *self.clock.stop(steps)))
            self.computed_ms.append(computed_ms)
        return step_ms, computed_ms
