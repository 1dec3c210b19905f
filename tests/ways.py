# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Ways in which scripts train a model of one linear layer over embeddings: pipelines, schedules, accumulation.

Shape letters: B batch (a rank's share).
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchrec.distributed.comm_ops import set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass(frozen=True)
class Training:
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    """In the backward pass of tables."""
    arguments: dict[str, Any] = field(default_factory=lambda: {"lr": 0.2})
    way: str = "combined"
    divides: bool = True
    """Gradients are averaged over ranks, not summed."""
    torchrecs_class: bool = False
    """With TorchRec's ``DistributedModelParallel`` and ``attach_optimizers``."""
    dedup: bool = False
    half: bool = False


@dataclass
class Batch(Pipelineable):
    sparse: KeyedJaggedTensor
    label_B: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return type(self)(self.sparse.to(device), self.label_B.to(device))

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)

    def pin_memory(self) -> Self:
        return self


class TopLayer(nn.Module):
    """A linear layer with weights that do not depend on the plan; loss and logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.top = nn.Linear(width, 1)
        with torch.no_grad():
            self.top.weight.uniform_(-1, 1, generator=torch.Generator().manual_seed(5))
            self.top.bias.zero_()

    def loss_and_logits(self, pooled: list[Tensor], label_B: Tensor) -> tuple[Tensor, Tensor]:
        logit_B = self.top(torch.cat(pooled, dim=1).tanh()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logit_B, label_B), logit_B.detach()


def train(training: Training, model: DistributedModelParallel, given: Iterable[Batch]) -> list[float]:
    """Train as a script might, and return the losses of this rank's shares."""
    set_gradient_division(training.divides)
    try:
        return _train(training.way, model, given)
    finally:
        set_gradient_division(True)


def _train(way: str, model: DistributedModelParallel, given: Iterable[Batch]) -> list[float]:
    fused = model.fused_optimizer
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    both, losses = CombinedOptimizer([fused, dense]), []
    if way == "pipeline":
        pipeline, left = TrainPipelineSparseDist(model, both, next(model.parameters()).device), iter(given)
        hook = model.register_forward_hook(lambda _module, _inputs, output: losses.append(output[0].item()))
        try:
            while True:
                pipeline.progress(left)
        except StopIteration:
            pipeline.detach()
            hook.remove()
            return losses
    stage = WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)
    optimizers: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
        "dense": lambda: [dense],
        "warm-up": lambda: [WarmupOptimizer(both, [stage], lr=0.1)],
        "clipping": lambda: [fused, GradientClippingOptimizer(dense, 0.05, GradientClipping.NORM)],
        # Fused kernels leave no gradients, so that it finds nothing to decay in tables.
        "everything": lambda: [torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.5)],
        # Nothing may change the dense layer between a forward and its backward.
        "ahead": lambda: [fused],
    }
    used, waiting = optimizers.get(way, lambda: [both])(), deque[Tensor]()
    for step, batch in enumerate(given):
        if way == "schedule":
            for group in both.param_groups:
                group["lr"] = 0.2 / (1 + step)
        if way not in ("accumulation", "ahead", "twice") or (way == "accumulation" and step % 2 == 0):
            for optimizer in used:
                optimizer.zero_grad()
        loss, _ = model(batch)
        losses.append(loss.item())
        waiting.append(loss)
        # ``ahead``: each forward before the backward of the one before it, as of embeddings in TorchRec's
        # TrainPipelineSemiSync. ``twice``: forwards of two batches before their backwards.
        if (way == "twice" and step % 2 == 0) or (way == "ahead" and step == 0):
            continue
        if way in ("ahead", "twice"):
            for optimizer in used:
                optimizer.zero_grad()
        while len(waiting) > (way == "ahead"):
            waiting.popleft().backward()
        if way != "accumulation" or step % 2:
            for optimizer in used:
                optimizer.step()
    return losses


def local(values: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, value in values.items():
        parts = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        if parts:
            found[name] = parts[0].detach().cpu().clone()
    return found


def saved_state(model: DistributedModelParallel) -> dict[str, Any]:
    """Return the states of a model and its fused optimizer, as scripts save them."""
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def states_of(model: DistributedModelParallel) -> dict[str, Any]:
    states = model.fused_optimizer.state_dict()["state"]
    return {f"{key} {name}": value for key, of in states.items() for name, value in of.items()}
