# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which shards of a rank TorchRec fuses into one kernel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torchrec.distributed.planner.types import ShardingOption

from dreamshard_planner.search_space.kernels import KERNELS, fuses_as
from dreamshard_planner.workload.tables import Table


def group_key(option: ShardingOption, table: Table, config: Any, fused_params: dict[str, Any]) -> Hashable:
    """What must agree for TorchRec to fuse two shards of a rank into one kernel
    (``torchrec.distributed.embedding_sharding.group_tables``, once per module and sharding type)."""
    tensor, cache = option.tensor, option.cache_params
    key_value = KERNELS[option.compute_kernel].store
    return (
        option.path,
        option.dependency,
        option.sharding_type,
        fuses_as(option.compute_kernel),
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
