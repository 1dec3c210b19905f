# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which shards of a rank TorchRec fuses into one kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption

from dreamshard_planner.workload.tables import Table

KEY_VALUE_MEMORY = {
    "key_value": "ssd",
    "ssd_virtual_table": "ssd",
    "dram_virtual_table": "uvm",
    "dram_ssd_virtual_table": "ssd",
}
"""Where key-value stores keep their rows; hits of the caches before them are not counted on. TorchRec uses them only
where a constraint names them."""
KERNEL_MEMORY = {
    "fused": "device",
    "fused_uvm": "uvm",
    "fused_uvm_caching": "uvm_caching",
    "dense": "device",
    **KEY_VALUE_MEMORY,
}
"""Where FBGEMM's training kernels keep their weights. For others, those of inference among them, there is no cost."""


def group_key(option: ShardingOption, table: Table, config: Any, fused_params: dict[str, Any]) -> Hashable:
    """What must agree for TorchRec to fuse two shards of a rank into one kernel
    (``torchrec.distributed.embedding_sharding.group_tables``, once per module and sharding type)."""
    tensor, cache = option.tensor, option.cache_params
    key_value = option.compute_kernel in KEY_VALUE_MEMORY
    return (
        option.path,
        option.dependency,
        option.sharding_type,
        option.compute_kernel if key_value or option.compute_kernel == "dense" else "fused",
        str(tensor.dtype),
        str(getattr(config, "data_type", None)),
        str(getattr(config, "pooling", None)),
        table.weighted,
        getattr(option, "has_feature_processor", False),
        table.optimizer,
        repr(getattr(tensor, "_optimizer_classes", None)),
        repr(getattr(tensor, "_optimizer_kwargs", None)),
        table.pooled,
        option.name if fused_params.get("use_one_tbe_per_table") else None,
        option.output_dtype,
        option.stochastic_rounding,
        option.bounds_check_mode,
        option.enforce_hbm,
        repr(cache and replace(cache, load_factor=None, stats=None)),
        repr(getattr(option, "key_value_params", None)) if key_value else None,
        option.shards[0].size[1] if table.prefetched or key_value else None,
    )


def known_kernels(fqn: str, kernels: Sequence[str]) -> list[str]:
    """Those among some compute kernels of a table whose cost is known.

    Raises:
        PlannerError: none is.
    """
    known = [kernel for kernel in kernels if kernel in KERNEL_MEMORY]
    if not known:
        raise PlannerError(
            f"table {fqn!r} may only use compute kernels {sorted(set(kernels))}, whose cost "
            f"DreamShardPlanner does not know; allow one of {sorted(KERNEL_MEMORY)} in its "
            "ParameterConstraints.compute_kernels.",
            PlannerErrorType.STRICT_CONSTRAINTS,
        )
    return known
