# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which sharding types may be proposed for a table: what TorchRec gets wrong, and what changes the training.

Read in torchrec 1.6.1 to 1.9.2; the tests show each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection

TW, CW, TWCW = ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value
RW, TWRW, GRID = ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value
DP = ShardingType.DATA_PARALLEL.value

SHARDING_TYPES = (TW, CW, TWCW, RW, TWRW, GRID, DP)
"""All that there are."""

ELEMENTWISE_OPTIMIZERS = frozenset({"sgd", "exact_sgd", "adagrad", "exact_adagrad", "adam"})
"""In-backward optimizers whose state has the shape of the weights: a column slice updates its columns as the whole
table would. Others keep a state, or a norm, per row, and every slice then has one of its own."""


@dataclass(frozen=True)
class Situation:
    """What legality depends on."""

    module: Any
    config: Any
    """``EmbeddingBagConfig`` or ``EmbeddingConfig``; None where the module has none."""
    compute_device: str
    optimizer: str
    """Lower-case name of the in-backward optimizer."""


@dataclass(frozen=True)
class Combination:
    """A combination that TorchRec's planner proposes, and why ours does not."""

    sharding_types: frozenset[str]
    holds: Callable[[Situation], bool]
    reason: str


def _is_sequence(situation: Situation) -> bool:
    return any(isinstance(child, EmbeddingCollection) for child in situation.module.modules())


BROKEN = (
    Combination(
        frozenset({GRID}),
        lambda s: getattr(s.config, "pooling", None) is PoolingType.MEAN,
        "TorchRec returns sums where mean pooling is asked for",
    ),
    Combination(
        frozenset({DP}),
        lambda s: s.compute_device == "cpu" and _is_sequence(s),
        "TorchRec's dense kernel for CPU cannot do without pooling, and crashes",
    ),
)
"""What TorchRec accepts and then computes wrongly or crashes on: never proposed, not even where a constraint asks."""

INEXACT = (
    Combination(
        frozenset({DP}),
        lambda s: True,
        "it takes the in-backward optimizer away: the table's gradients wait for an optimizer of the script's own",
    ),
    Combination(
        frozenset({CW, TWCW, GRID}),
        lambda s: s.optimizer not in ELEMENTWISE_OPTIMIZERS,
        "every column slice keeps a row-wise optimizer state of its own",
    ),
)
"""What trains differently than a whole table: proposed where a table's constraint names the type, which is consent, or
with ``exact_training=False``."""


def broken(sharding_type: str, situation: Situation) -> str | None:
    """Why the type must not be used there; None where it may."""
    return _reason(BROKEN, sharding_type, situation)


def inexact(sharding_type: str, situation: Situation) -> str | None:
    """What the type changes in the training of the table; None where that is nothing."""
    return _reason(INEXACT, sharding_type, situation)


def _reason(combinations: tuple[Combination, ...], sharding_type: str, situation: Situation) -> str | None:
    for combination in combinations:
        if sharding_type in combination.sharding_types and combination.holds(situation):
            return combination.reason
    return None


def optimizer_name(parameter: torch.Tensor, fused_params: dict[str, Any] | None) -> str:
    """Lower-case name of a table's in-backward optimizer: set on the parameter (``apply_optimizer_in_backward``) or in
    the sharder's fused parameters; FBGEMM's default is SGD."""
    classes = getattr(parameter, "_optimizer_classes", None)
    if classes:
        return classes[0].__name__.lower()
    optimizer = (fused_params or {}).get("optimizer")
    return "sgd" if optimizer is None else getattr(optimizer, "name", str(optimizer)).lower()
