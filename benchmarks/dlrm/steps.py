# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""One training step in TorchRec's pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dreamshard_planner import DistributedModelParallel


def training_step(
    model: DistributedModelParallel, device: torch.device, pipelined: bool = True
) -> Callable[[Iterator[Any]], Any]:
    """Return a function that trains one step on the next batch; Adagrad trains the dense layers.

    Without ``pipelined`` a forward pass waits for its lookups, so that their exchange can be observed.
    """
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    pipeline = TrainPipelineSparseDist if pipelined else TrainPipelineBase
    return pipeline(model, optimizer, device).progress
