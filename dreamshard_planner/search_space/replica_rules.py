# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""In-backward optimizers that replicas of a data-parallel table can follow exactly.

FBGEMM's fused kernels update the rows that a batch read. A replica's gradient is zero in all other rows, so a rule that
leaves rows of zero gradient unchanged equals the kernel.

Shapes: R rows, C columns of a table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from dreamshard_planner.torchrec_components import compat

_KERNEL = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters
FUSED_DEFAULTS = {name: float(_KERNEL[name].default) for name in ("learning_rate", "eps")}
"""Defaults of FBGEMM's kernels; PyTorch's optimizers of the same names have others."""
BOUNDS_CHECK: BoundsCheckMode = _KERNEL["bounds_check_mode"].default
"""Default treatment of ids beyond a table's rows."""


@dataclass(frozen=True)
class ReplicaRule:
    """An optimizer of replicas that equals FBGEMM's fused one."""

    state: Callable[[Tensor], Tensor] | None
    """Makes the state ("momentum1") for weights [R, C]; None without state."""
    update: Callable[[Tensor, Tensor, Any, float, float], None]
    """Updates weights [R, C] in place, by gradient [R, C], state or None, learning rate and eps."""


def _sgd(weight_RC: Tensor, gradient_RC: Tensor, state: None, learning_rate: float, eps: float) -> None:
    weight_RC.add_(gradient_RC, alpha=-learning_rate)


def _adagrad(weight_RC: Tensor, gradient_RC: Tensor, sum_RC: Tensor, learning_rate: float, eps: float) -> None:
    sum_RC.addcmul_(gradient_RC, gradient_RC)
    weight_RC.addcdiv_(gradient_RC, sum_RC.sqrt().add_(eps), value=-learning_rate)


def _rowwise_adagrad(weight_RC: Tensor, gradient_RC: Tensor, sum_R: Tensor, learning_rate: float, eps: float) -> None:
    sum_R.add_(torch.linalg.vector_norm(gradient_RC, dim=1).square_(), alpha=1 / gradient_RC.shape[1])
    weight_RC.addcdiv_(gradient_RC, sum_R.sqrt().add_(eps).unsqueeze(1), value=-learning_rate)


_SGD = ReplicaRule(None, _sgd)
REPLICA_RULES = {
    "sgd": _SGD,
    "exact_sgd": _SGD,
    "exact_adagrad": ReplicaRule(torch.zeros_like, _adagrad),
    "exact_rowwise_adagrad": ReplicaRule(lambda weight: weight.new_zeros(len(weight)), _rowwise_adagrad),
}
"""Rules by FBGEMM's name of the optimizer, in lower case. Weight decay and momentum, which change rows without lookups,
and rounded gradients (half precision) have none."""

READ = frozenset({"optimizer", "learning_rate", "lr", "eps"})
UNCHANGING = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "cache_sets",
        "enforce_hbm",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "stochastic_rounding",
        "uvm_host_mapped",
    }
)
"""Arguments of the fused kernel that do not change float32 results."""


def in_backward_arguments(parameter: Tensor, fused_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a table's fused kernel, without ``"optimizer"`` if none was given:
    ``apply_optimizer_in_backward`` overrides the sharder's."""
    arguments = {**(fused_params or {}), **compat.optimizer_arguments(parameter)}
    if compat.optimizer_classes(parameter) or arguments.get("optimizer") is not None:
        arguments["optimizer"] = compat.optimizer_name(parameter, fused_params)
    return arguments


DENSE_KERNELS = (
    "the plan gives them dense kernels, which drop the in-backward optimizer, so the tables are not trained. Call "
    "apply_optimizer_in_backward before construct_module_sharding_plan, or give compute_kernel='fused'"
)
"""Warning of cut tables with a dense kernel, which TorchRec gives tables without an in-backward optimizer."""


def replica_rule(arguments: Mapping[str, Any]) -> ReplicaRule | None:
    """Return the rule of a fused kernel's optimizer, or None."""
    optimizer = arguments.get("optimizer")
    return REPLICA_RULES.get(getattr(optimizer, "name", str(optimizer)).lower())


def why_not_replicas(arguments: Mapping[str, Any], dtype: torch.dtype, module: nn.Module | None = None) -> str | None:
    """Return why replicas would not train as a fused kernel with these arguments does, or None if they do. The
    module is that of an unsharded table, None for a collection of TorchRec's."""
    if module is not None and not any(
        isinstance(child, EmbeddingBagCollection | EmbeddingCollection) for child in module.modules()
    ):
        return f"{type(module).__name__} is no EmbeddingBagCollection or EmbeddingCollection"
    if arguments.get("optimizer") is None:
        return "it was given no in-backward optimizer"
    rule = replica_rule(arguments)
    if rule is None:
        return f"no rule for replicas equals {getattr(arguments['optimizer'], 'name', arguments['optimizer'])}"
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        return f"its weights are {name}, to which each replica's gradient is rounded before ranks average it"
    if rule.state is not None and not arguments.get("eps", 1.0) > 0:
        return "with eps=0 a row that nobody read would become not a number"
    others = {name: value for name, value in arguments.items() if name not in READ | UNCHANGING}
    changed = sorted(name for name, value in others.items() if not _is_default(name, value))
    return f"it sets {', '.join(changed)}" if changed else None


def _is_default(name: str, value: Any) -> bool:
    default = _KERNEL[name].default if name in _KERNEL else None
    return type(value) in (bool, int, float, type(None), type(default)) and value == default
