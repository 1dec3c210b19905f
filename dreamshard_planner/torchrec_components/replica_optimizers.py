# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""In-backward optimizers of data-parallel tables, which TorchRec drops.

TorchRec's dense kernel keeps all tables of a group in one flat parameter, whose gradient ``DistributedDataParallel``
averages. The hook of that communication updates the tables. A script therefore finds them as a fused kernel leaves
them: updated once, without a gradient. Before the forward, ids are checked as a fused kernel checks them.

Shapes: R rows, C columns of a table.
"""

from __future__ import annotations

import inspect
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbedding, BatchedDenseEmbeddingBag
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.modules.embedding_configs import data_type_to_dtype
from torchrec.optim.fused import FusedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dreamshard_planner.errors import DreamShardError
from dreamshard_planner.search_space.replica_rules import (
    BOUNDS_CHECK,
    DENSE_KERNELS,
    FUSED_DEFAULTS,
    replica_rule,
    why_not_replicas,
)
from dreamshard_planner.torchrec_components import compat

_SEVERAL_LOOKUPS = (
    "looked up twice before one backward. Replicas update once, by the sum of gradients; fused kernels update after "
    "each lookup. To train as fused kernels do, leave data_parallel out by sharding_types of the planner"
)
_FORWARD = inspect.signature(DenseTableBatchedEmbeddingBagsCodegen.forward)


def attach_optimizers(model: nn.Module) -> tuple[str, ...]:
    """Train every data-parallel table by its in-backward optimizer, as a fused kernel would.

    Call it after sharding (TorchRec's ``DistributedModelParallel``) and before the first backward. Call it also before
    anything reads ``model.fused_optimizer`` or ``in_backward_optimizer_filter(model.named_parameters())``. The backward
    then updates the tables with the learning rate of ``model.fused_optimizer``, which their states join. A second call
    changes nothing. This package's ``DistributedModelParallel`` calls it itself.

    Returns:
        The tables' parameters, by the model's names.

    Warns:
        UserWarning: replicas cannot follow a table's optimizer, so the script must train it; or a table that is cut has
            a dense kernel, which drops the optimizer. Names table and reason.
    """
    attached: list[str] = []
    refused: dict[str, str] = {}
    dense: list[str] = []
    for path, module in get_unwrapped_module(model).named_modules():
        if isinstance(module, ShardedEmbeddingBagCollection | ShardedEmbeddingCollection):
            for _, lookup in compat.lookups_of(module):
                if isinstance(lookup, DistributedDataParallel):
                    attached += [f"{path}.{name}".lstrip(".") for name in _attach(module, lookup, refused)]
                else:
                    dense += [f"{path}.{name}".lstrip(".") for name in _without_optimizer(lookup)]
    if dense:
        warnings.warn(f"{', '.join(sorted(dense))}: {DENSE_KERNELS}", stacklevel=2)
    if refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(refused.items()))
        warnings.warn(
            "data_parallel tables whose in-backward optimizer their replicas cannot follow are left to an optimizer of "
            f"the script's own: {reasons}",
            stacklevel=2,
        )
    return tuple(attached)


def _without_optimizer(lookup: nn.Module) -> list[str]:
    """Return the tables of a lookup whose dense kernels drop their in-backward optimizer."""
    return [
        table.name
        for kernel in lookup.modules()
        if isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag)
        and "optimizer" in (kernel.config.fused_params or {})
        for table in kernel.config.embedding_tables
    ]


def _attach(
    module: ShardedEmbeddingBagCollection | ShardedEmbeddingCollection,
    replicas: DistributedDataParallel,
    refused: dict[str, str],
) -> list[str]:
    """Give the groups of one lookup optimizers, and return their parameters' names; ``refused`` gets reasons."""
    prefix = "embedding_bags" if isinstance(module, ShardedEmbeddingBagCollection) else "embeddings"
    optimizers: list[ReplicaOptimizer] = []
    ranks = compat.ranks_of_module(module)
    for kernel in replicas.module.modules():
        if not isinstance(kernel, BatchedDenseEmbedding | BatchedDenseEmbeddingBag):
            continue
        given = kernel.config.fused_params or {}
        parameters = {
            name: module.get_parameter(name)
            for name in (f"{prefix}.{table.name}.weight" for table in kernel.config.embedding_tables)
        }
        if "optimizer" not in given or any(map(compat.in_backward_optimizers, parameters.values())):
            continue
        if reason := why_not_replicas(given, data_type_to_dtype(kernel.config.data_type)):
            refused.update(dict.fromkeys(parameters, reason))
        else:
            optimizers.append(ReplicaOptimizer(kernel.emb_module, parameters, given, replicas, ranks))
            _check_bounds(kernel, given)
    if optimizers:
        compat.add_fused_optimizers(module, optimizers)
        by_weights = {optimizer.weights: optimizer for optimizer in optimizers}
        replicas.register_comm_hook((replicas.process_group, by_weights), _average_and_update)
        replicas.register_forward_pre_hook(partial(_before_forward, optimizers))
    return [name for optimizer in optimizers for name in optimizer.params]


class ReplicaOptimizer(FusedOptimizer):
    """Updates this rank's replicas of one group of tables by their averaged gradient, as FBGEMM's kernel does.

    States, names and learning rate are those of TorchRec's ``EmbeddingFusedOptimizer``. The rate of the parameter
    group takes effect with :meth:`step` or :meth:`zero_grad`. ``parameters`` are the tables in the weights of
    FBGEMM's dense kernel, in order, by name; ``arguments`` those of the fused kernel that it replaces; ``ranks`` the
    ranks of a sharded table.
    """

    def __init__(
        self,
        kernel: DenseTableBatchedEmbeddingBagsCodegen,
        parameters: Mapping[str, nn.Parameter],
        arguments: Mapping[str, Any],
        replicas: DistributedDataParallel,
        ranks: int,
    ) -> None:
        self.weights: nn.Parameter = kernel.weights
        self._ranks = ranks
        self._ddp = weakref.ref(replicas)
        self.ddp_averages = False
        """True after a forward until the next update: DDP averages one gradient after each forward."""
        # Weakly, both: tensors that reach themselves are never freed, and must not keep the process group.
        self.weights.register_post_accumulate_grad_hook(partial(_update_again, weakref.ref(self)))
        rule = replica_rule(arguments)
        if rule is None:
            raise ValueError(f"no rule for replicas of {arguments}")
        self._update = rule.update
        self._eps = float(arguments.get("eps", FUSED_DEFAULTS["eps"]))
        self._learning_rate = float(arguments.get("learning_rate", FUSED_DEFAULTS["learning_rate"]))
        # Tables of one width lie in memory like one: dozens of small ones take as many passes as one does.
        tables = kernel.split_embedding_weights()
        widths = [(dim, list(alike)) for dim, alike in groupby(tables, key=lambda weight_RC: weight_RC.shape[1])]
        sizes = [sum(weight_RC.numel() for weight_RC in alike) for _, alike in widths]
        # Not detached: a forward may come before the update by an earlier one's gradient, as in TorchRec's
        # TrainPipelineSemiSync, and autograd would refuse its backward. Fused kernels update behind autograd as well.
        parts = kernel.weights.data.split(sizes)
        self._stacks = [part.view(-1, dim) for part, (dim, _) in zip(parts, widths, strict=True)]
        self._states: Sequence[Tensor | None] = [None] * len(self._stacks)
        state: dict[nn.Parameter, dict[str, Tensor]] = {parameter: {} for parameter in parameters.values()}
        self.lookups = 0
        """Lookups that the backward passed since the last update."""
        if rule.state is not None:
            kernel.register_forward_hook(partial(_watch_lookup, weakref.ref(self)))
            self._states = momenta = [rule.state(stack_RC) for stack_RC in self._stacks]
            rows = [[len(weight_RC) for weight_RC in alike] for _, alike in widths]
            of_tables = chain.from_iterable(momentum.split(each) for momentum, each in zip(momenta, rows, strict=True))
            for (name, parameter), momentum in zip(parameters.items(), of_tables, strict=True):
                state[parameter][f"{name.split('.')[-2]}.momentum1"] = momentum
        super().__init__(parameters, state, [{"params": list(parameters.values()), "lr": self._learning_rate}])
        for parameter in parameters.values():
            compat.set_in_backward_optimizers(parameter, [self])

    @torch.no_grad()
    def update(self, gradient: Tensor) -> None:
        """Update all tables by the gradient of the flat weights, averaged over all ranks."""
        self.lookups = 0
        # TorchRec's exchanges divide the gradients of sharded tables by their ranks, unless a script wants the sum.
        if not get_gradient_division():
            gradient = self._ranks * gradient
        gradients = gradient.split([stack_RC.numel() for stack_RC in self._stacks])
        for stack_RC, part, state in zip(self._stacks, gradients, self._states, strict=True):
            self._update(stack_RC, part.view_as(stack_RC), state, self._learning_rate, self._eps)

    def update_again(self) -> None:
        """Average and apply the gradient of a second backward without a forward in between, which DDP ignores."""
        gradient, replicas = self.weights.grad, self._ddp()
        if not self.ddp_averages and gradient is not None and replicas is not None:
            dist.all_reduce(gradient, group=replicas.process_group)
            self.update(gradient.div_(replicas.process_group.size()))
            self.weights.grad = None

    def step(self, closure: Any = None) -> None:
        """Take over the learning rate; the backward updated the tables."""
        self._learning_rate = self.param_groups[0]["lr"]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Take over the learning rate."""
        self.step()


def _update_again(optimizer: weakref.ref[ReplicaOptimizer], _: Tensor) -> None:
    if (alive := optimizer()) is not None:
        alive.update_again()


def _watch_lookup(optimizer: weakref.ref[ReplicaOptimizer], _: nn.Module, _inputs: Any, pooled: Tensor) -> None:
    """Warn of a backward through several lookups, of which replicas see the sum alone; runs after a lookup."""

    def count(_: Tensor) -> None:
        if (alive := optimizer()) is not None:
            alive.lookups += 1
            if alive.lookups == 2:
                warnings.warn(f"{', '.join(alive.params)}: {_SEVERAL_LOOKUPS}", stacklevel=2)

    if pooled.requires_grad:
        pooled.register_hook(count)


def _average_and_update(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types
    """Average a bucket of gradients over the ranks, then update its replicas; DDP's hook."""
    process_group, by_weights = state
    gradients = [(by_weights.get(p), g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]

    def update(averaged: torch.futures.Future[Tensor]) -> Tensor:
        for optimizer, gradient in gradients:
            if optimizer is not None:
                optimizer.update(gradient)
        return averaged.value()

    # DDP sets the gradients by a callback that it queues after this hook: a callback of a callback comes later.
    compat.after_backward(partial(compat.after_backward, partial(_clear, by_weights.values())))
    return allreduce_hook(process_group, bucket).then(update)


def _clear(optimizers: Iterable[ReplicaOptimizer]) -> None:
    for optimizer in optimizers:
        optimizer.weights.grad = None
        optimizer.ddp_averages = False


def _before_forward(
    optimizers: Sequence[ReplicaOptimizer], replicas: DistributedDataParallel, inputs: tuple[Any, ...]
) -> None:
    """Refuse batches that TorchRec's replicas cannot look up; runs before the forward of a lookup."""
    if any(isinstance(features, KeyedJaggedTensor) and features.variable_stride_per_key() for features in inputs):
        tables = ", ".join(name.split(".")[-2] for optimizer in optimizers for name in optimizer.params)
        raise DreamShardError(
            f"data-parallel tables {tables}: TorchRec's replicas take no batches whose size varies by feature. Leave "
            "data_parallel out, by sharding_types of the planner or batch_sizes of the tables' constraints"
        )
    if torch.is_grad_enabled():
        for optimizer in optimizers:
            optimizer.ddp_averages = True


def _check_bounds(kernel: BatchedDenseEmbedding | BatchedDenseEmbeddingBag, arguments: Mapping[str, Any]) -> None:
    """Let a dense kernel check ids and offsets as a fused kernel does, on copies of the script's batch."""
    asked = arguments.get("bounds_check_mode", BOUNDS_CHECK)
    mode = BoundsCheckMode(int(os.environ.get("FBGEMM_TBE_BOUNDS_CHECK_MODE", asked.value)))
    if mode is BoundsCheckMode.NONE:
        return
    number = BoundsCheckMode[mode.name.removeprefix("V2_")].value
    module, device = kernel.emb_module, kernel.emb_module.weights.device
    rows_F = torch.tensor(
        [module.embedding_specs[table][0] for table in compat.table_of_feature(kernel)], device=device
    )
    warned = torch.zeros(1, dtype=torch.int64, device=device)

    def checked(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(_FORWARD.bind(module, *args, **kwargs).arguments)
        del given["self"]
        for name in ("indices", "offsets"):
            given[name] = given[name].to(torch.int64, copy=True)
        torch.ops.fbgemm.bounds_check_indices(rows_F, given["indices"], given["offsets"], number, warned)
        return (), given

    module.register_forward_pre_hook(checked, with_kwargs=True)
