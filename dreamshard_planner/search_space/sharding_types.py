# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Which sharding types may be proposed for a table: what TorchRec gets wrong, and what changes the training.

Read in torchrec 1.6.1 to 1.9.2; the tests show each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection

TW, CW, TWCW = ShardingType.TABLE_WISE.value, ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value
RW, TWRW, GRID = ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value
DP = ShardingType.DATA_PARALLEL.value

SHARDING_TYPES = (TW, CW, TWCW, RW, TWRW, GRID, DP)
"""All that there are."""

ELEMENTWISE_OPTIMIZERS = frozenset({"sgd", "exact_sgd", "exact_adagrad", "adam"})
"""FBGEMM's names of the in-backward optimizers whose state has the shape of the weights: a column slice updates its
columns as the whole table would. Others keep a state, or a norm, per row, and every slice then has one of its own."""

ROW_BLOCKS = frozenset({RW, TWRW})
"""Types for which TorchRec pools mean tables as sums, and divides the module's whole output afterwards."""


@dataclass(frozen=True)
class Situation:
    """What legality depends on."""

    module: Any
    config: Any
    """``EmbeddingBagConfig`` or ``EmbeddingConfig``; None where the module has none."""
    compute_device: str
    optimizer: str
    """Of :func:`optimizer_name`."""


@dataclass(frozen=True)
class Combination:
    """A combination that TorchRec's planner proposes, and why ours does not."""

    sharding_types: frozenset[str]
    where: str
    """In words, for the documentation."""
    holds: Callable[[Situation], bool]
    reason: str


def _is_sequence(situation: Situation) -> bool:
    return any(isinstance(child, EmbeddingCollection) for child in situation.module.modules())


def is_mean(config: Any) -> bool:
    """Whether a table's config asks for mean pooling."""
    return getattr(config, "pooling", None) is PoolingType.MEAN


def is_weighted(module: nn.Module) -> bool:
    """Also where it only wraps such a module: feature processors give the lookups weights."""
    return any(child.is_weighted() for child in module.modules() if callable(getattr(child, "is_weighted", None)))


BROKEN = (
    Combination(
        frozenset({GRID}),
        "mean pooling",
        lambda s: is_mean(s.config),
        "TorchRec returns sums where mean pooling is asked for",
    ),
    Combination(
        ROW_BLOCKS,
        "mean pooling of weighted lookups",
        lambda s: is_mean(s.config) and is_weighted(s.module),
        "TorchRec divides weighted means by the sum of the weights, and those of whole tables by the number of lookups",
    ),
    Combination(
        frozenset({DP}),
        "EmbeddingCollection on CPUs",
        lambda s: s.compute_device == "cpu" and _is_sequence(s),
        "TorchRec's dense kernel for CPU cannot do without pooling, and crashes",
    ),
)
"""What TorchRec accepts and then computes wrongly or crashes on: never proposed, not even where a constraint asks."""

MIXED_MEAN = (
    "TorchRec divides the output of every table of the module that is not row_wise or table_row_wise once more, where "
    "one that is has mean pooling"
)
"""Broken as well, but of a module's tables together: see :func:`without_mixed_means`."""

INEXACT = (
    Combination(
        frozenset({DP}),
        "everywhere",
        lambda s: True,
        "it takes the in-backward optimizer away: the table's gradients wait for an optimizer of the script's own",
    ),
    Combination(
        frozenset({CW, TWCW, GRID}),
        "optimizers that are not element-wise (row-wise Adagrad, LAMB, ...)",
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


def without_mixed_means(types: Mapping[str, Collection[str]], means: Collection[str]) -> dict[str, list[str]]:
    """The types that the tables of one module may be given whatever the others are: a mean-pooled table in blocks of
    rows leaves no other type to any table of its module, see :data:`MIXED_MEAN`.

    Args:
        types: what each table may be by itself.
        means: the tables with mean pooling.

    Returns:
        By table; blocks of rows where some mean-pooled table may be nothing else, no such blocks of mean-pooled tables
        elsewhere. A list may be empty.
    """
    kept = {name: list(kinds) for name, kinds in types.items()}
    if len(types) == 1:
        return kept
    if any(set(types[name]) <= ROW_BLOCKS for name in means):
        return {name: [kind for kind in kinds if kind in ROW_BLOCKS] for name, kinds in kept.items()}
    return kept | {name: [kind for kind in kept[name] if kind not in ROW_BLOCKS] for name in means}


def _reason(combinations: tuple[Combination, ...], sharding_type: str, situation: Situation) -> str | None:
    for combination in combinations:
        if sharding_type in combination.sharding_types and combination.holds(situation):
            return combination.reason
    return None


def optimizer_name(parameter: torch.Tensor, fused_params: dict[str, Any] | None) -> str:
    """FBGEMM's name, in lower case, of a table's in-backward optimizer: set on the parameter
    (``apply_optimizer_in_backward``) or in the sharder's fused parameters; by default FBGEMM's SGD. The name of its
    class, where TorchRec knows no such kernel."""
    optimizer = (fused_params or {}).get("optimizer")
    classes, arguments = (getattr(parameter, f"_optimizer_{what}", None) for what in ("classes", "kwargs"))
    if classes:
        # As TorchRec: an argument of this name has precedence over the class.
        optimizer = (arguments or [{}])[0].get("optimizer")
        if optimizer is None:
            try:
                optimizer = optimizer_type_to_emb_opt_type(classes[0])
            except ValueError:
                return classes[0].__name__.lower()
    return "exact_sgd" if optimizer is None else getattr(optimizer, "name", str(optimizer)).lower()
