# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which in-backward optimizers the replicas of a data-parallel table can follow exactly, and how.

FBGEMM's fused kernels update the rows that a batch read. A replica's gradient is as large as its table, and zero in all
other rows, so a rule that leaves a row of zero gradient as it is does to the whole table what the kernel does.

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
"""What FBGEMM's kernels take where nobody says. PyTorch's optimizers of the same names have other defaults."""
BOUNDS_CHECK: BoundsCheckMode = _KERNEL["bounds_check_mode"].default
"""What becomes of ids that a table has no rows for, where nobody says."""


@dataclass(frozen=True)
class ReplicaRule:
    """An optimizer of replicas that equals FBGEMM's fused one."""

    state: Callable[[Tensor], Tensor] | None
    """Makes the state ("momentum1") of a table of these weights [R, C]; None: it has none."""
    update: Callable[[Tensor, Tensor, Any, float, float], None]
    """Of weights [R, C], in place, by gradient [R, C], what ``state`` made or None, learning rate and eps."""


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
"""By FBGEMM's name of the optimizer, in lower case. With what changes rows that no lookup read (weight decay, momentum)
a kernel and a replica differ; so they do where the gradient is rounded (half precision)."""

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
"""Arguments of the fused kernel that say where it keeps float32 rows, not what becomes of them."""


def in_backward_arguments(parameter: Tensor, fused_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments of a table's fused kernel, as TorchRec puts them together: those of ``apply_optimizer_in_backward``
    before the sharder's. Without an ``"optimizer"`` where none was given."""
    arguments = {**(fused_params or {}), **compat.optimizer_arguments(parameter)}
    if compat.optimizer_classes(parameter) or arguments.get("optimizer") is not None:
        arguments["optimizer"] = compat.optimizer_name(parameter, fused_params)
    return arguments


DENSE_KERNELS = (
    "the plan gives them dense kernels, which drop the in-backward optimizer, so the tables are not trained. Call "
    "apply_optimizer_in_backward before construct_module_sharding_plan, or give compute_kernel='fused'"
)
"""Warning of tables that are cut but have a dense kernel, as TorchRec gives those without an in-backward optimizer."""


def replicas_follow(parameter: Tensor, fused_params: Mapping[str, Any] | None, module: nn.Module) -> bool:
    """Whether replicas of an unsharded table can be trained by the in-backward optimizer that it was given."""
    return why_not_replicas(in_backward_arguments(parameter, fused_params), parameter.dtype, module) is None


def replica_rule(arguments: Mapping[str, Any]) -> ReplicaRule | None:
    """The rule of a fused kernel's optimizer; None where there is none for replicas."""
    optimizer = arguments.get("optimizer")
    return REPLICA_RULES.get(getattr(optimizer, "name", str(optimizer)).lower())


def why_not_replicas(arguments: Mapping[str, Any], dtype: torch.dtype, module: nn.Module | None = None) -> str | None:
    """Why replicas of a table would not be trained as it is by a fused kernel of these arguments; None where they are.

    Args:
        arguments: of :func:`in_backward_arguments`, or a sharded table's ``fused_params``.
        dtype: of its weights.
        module: of the table, unsharded; None where it is known to be a collection of TorchRec's.
    """
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
